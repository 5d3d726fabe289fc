"""Run programs of a test as processes, and read their folder of checkpoints."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final, NamedTuple

from crash.places import Place
from support.processes import async_process
from support.waiting import PATIENCE_S

from streamiter.engine.storage.flow_record import unpack_record

__all__ = ["Process", "Program", "Record", "running"]

# A test waits for a process several times, each time for at most PATIENCE_S.
_LIMIT_S: Final = 10 * PATIENCE_S
_POLL_S: Final = 0.001
_MORTAL: Final = Path(__file__).with_name("mortal.py")


class Record(NamedTuple):
    """The owner and the last committed run of a flow, as the store has them."""

    run: str | None
    """The run that owns the flow."""
    committed_run: str | None
    """The run that committed the last checkpoint."""


@dataclass(frozen=True)
class Program:
    """The command to start, and the folder of the flow's checkpoints."""

    script: Path
    folder: Path
    arguments: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)

    def given(self, *arguments: str, **environment: str) -> Program:
        """Return the same program with other arguments, or with more variables in its environment."""
        more = {**self.environment, **environment}
        return replace(self, arguments=arguments or self.arguments, environment=more)

    def record(self) -> Record:
        """Return the present record of the store."""
        try:
            record = unpack_record((self.folder / "record.json").read_bytes())
        except FileNotFoundError:
            return Record(None, None)
        return Record(record.runs[-1].run, None if record.committed is None else record.committed.run)

    def is_writing(self) -> bool:
        """Return whether a snapshot is half written."""
        names = os.listdir(self.folder) if self.folder.is_dir() else []
        return any(name.endswith(".checkpoint.partial") for name in names)


class Process:
    """A running program."""

    def __init__(self, program: Program, process: asyncio.subprocess.Process, before: Record) -> None:
        self.program = program
        self._process = process
        self._before = before
        self._printed = asyncio.ensure_future(process.communicate())

    @property
    def is_over(self) -> bool:
        """Return whether the process has ended."""
        return self._printed.done()

    def has_taken_over(self) -> bool:
        """Return whether its run owns the store."""
        return self.program.record().run not in (None, self._before.run)

    def has_committed(self) -> bool:
        """Return whether its run has committed a checkpoint."""
        run, committed_run = self.program.record()
        return run not in (None, self._before.run) and committed_run == run

    def is_stopped(self) -> bool:
        """Return whether SIGSTOP has stopped the process."""
        stat = Path(f"/proc/{self._process.pid}/stat").read_text(encoding="utf-8")
        return stat.rpartition(")")[2].split()[0] == "T"

    async def until(self, condition: Callable[[], bool], limit_s: float = PATIENCE_S) -> bool:
        """Wait until the condition holds; return False if the process ends or the time passes before."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(limit_s):
                while not self.is_over:
                    if condition():
                        return True
                    await asyncio.sleep(_POLL_S)
        return False

    async def reaches(self, condition: Callable[[], bool], limit_s: float = PATIENCE_S) -> None:
        """Wait until the condition holds; otherwise kill the process and fail with its output."""
        if not await self.until(condition, limit_s):
            reason = "ended" if self.is_over else f"had {limit_s:g} s"
            self.send(signal.SIGKILL)
            code, printed = await self.ends()
            raise AssertionError(
                f"the process {reason} before the condition held; exit code {code}, output:\n{printed}"
            )

    async def lives_for(self, duration_s: float) -> None:
        """Wait for this time, or until the process ends."""
        await asyncio.wait([self._printed], timeout=duration_s)

    def send(self, number: signal.Signals) -> None:
        """Send a signal to the process."""
        with contextlib.suppress(ProcessLookupError):
            self._process.send_signal(number)

    async def suspends(self) -> str:
        """End the process with SIGTERM, and return its output.

        The last run of a flow must not be killed: on a shared broker it may leave a transaction open, and the starts of
        all flows wait for its end, for as long as the transaction may last.
        """
        self.send(signal.SIGTERM)
        code, printed = await self.ends()
        assert code == 0, printed
        return printed

    async def ends(self) -> tuple[int | None, str]:
        """Return the exit code and the output; the code is None if the process does not end."""
        await asyncio.wait([self._printed], timeout=PATIENCE_S)
        code = self._process.returncode if self.is_over else None
        self.send(signal.SIGKILL)
        printed, _ = await self._printed
        return code, printed.decode()


@contextlib.asynccontextmanager
async def running(
    program: Program, place: Place | None = None, number: int = 1, strike: signal.Signals = signal.SIGKILL
) -> AsyncIterator[Process]:
    """Run a process of the program, which sends itself a signal at a place; kill it at the end of the block."""
    command = [str(program.script), *program.arguments]
    if place is not None:
        command = [str(_MORTAL), place.when, place.function, str(number), str(int(strike)), *command]
    before = program.record()
    async with async_process(
        [sys.executable, *command],
        limit_s=_LIMIT_S,
        is_forked=True,
        env={"PATH": os.environ["PATH"], **program.environment},
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    ) as child:
        process = Process(program, child, before)
        try:
            yield process
        finally:
            process.send(signal.SIGKILL)
            await process.ends()
