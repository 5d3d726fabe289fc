"""Processes of this machine as the host of a flow."""

from __future__ import annotations

import asyncio
import os
import secrets
import signal
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, final

import msgspec

from streamiter.engine.graph.graph import RunnableFlow
from streamiter.engine.processes.host import LossLimits, ProcessSettings, check_topics
from streamiter.engine.processes.link import Address
from streamiter.engine.processes.silence import ProcessLook, look_at_process
from streamiter.engine.processes.supervisor import Attempt, run_supervised
from streamiter.errors import ConfigurationError
from streamiter.values.numbers import whole_number

if TYPE_CHECKING:
    from streamiter.engine.graph.statistics import JobStatistics
    from streamiter.engine.job.running import OnInterrupt, WhileRunning


@final
@dataclass(frozen=True, slots=True)
class LocalProcesses(LossLimits):
    """Runs a flow in several processes of this machine: ``flow.run(on=LocalProcesses(4))``.

    Each process imports the module of the flow, and has subtask i of each step if i modulo ``processes`` is its number.
    So the flow must be a name at the top level of a module, or of the program itself, and the program must call ``run``
    behind ``if __name__ == "__main__":``. The highest parallelism of a step is the most processes that a flow can use.
    Records that go from one process to another must be plain data.

    The process that calls ``run`` only watches the others. A step that fails ends the run, with the same error as in
    one process. If a process is lost (killed, or stopped for ``silence_s``), all are ended; with ``checkpoints`` they
    start again from the last checkpoint, at most ``losses_max`` times. If the calling process dies, the others end
    themselves.

    >>> LocalProcesses(4, silence_s=30).losses_max
    3
    """

    processes: int
    """The number of processes."""
    flow: str | None = None
    """The flow as ``module:name`` or ``path/to/file.py:name``; the name may be a function without arguments that
    returns the flow. None: it is found among the names of the modules that are imported."""

    def __post_init__(self) -> None:
        whole_number("LocalProcesses: processes", self.processes, 1)
        LossLimits.__post_init__(self)

    async def _run_flow(
        self, flow: RunnableFlow, options: Mapping[str, Any], first: OnInterrupt, while_running: WhileRunning[Attempt]
    ) -> JobStatistics:
        """Run the flow to its end."""
        check_topics(flow, many_machines=False)
        reference = self.flow or reference_to(flow)
        host = _Local(self.processes)
        return await run_supervised(flow, reference, host, options, first, while_running, self)


def reference_to(flow: RunnableFlow) -> str:
    """Return the reference to a flow that is a name of a module. Raises ConfigurationError if it is none."""
    main = sys.modules["__main__"]
    for name, module in [("__main__", main), *sys.modules.items()]:
        for attribute, value in list(getattr(module, "__dict__", {}).items()):
            if value is flow and (importable := _importable(name, module)) is not None:
                return f"{importable}:{attribute}"
    file = getattr(main, "__file__", None)
    program = os.path.basename(file) if file else "module"
    raise ConfigurationError(
        f"flow {flow.name!r}: expected a flow that is a name at the top level of a module, because each process "
        "imports it, given another; make the flow at the top level of a file, or name a function without arguments "
        f'that returns it: on=LocalProcesses(…, flow="{program}:make_flow")'
    )


def _importable(name: str, module: object) -> str | None:
    """Return the name or the file by which another process can import a module; None if it cannot."""
    if name != "__main__":
        return name
    if (spec := getattr(module, "__spec__", None)) is not None:  # started with python -m
        return str(spec.name)
    file = getattr(module, "__file__", None)
    return os.path.abspath(file) if file and file.endswith(".py") and os.path.exists(file) else None


@final
class _Local:
    """The host of one run."""

    def __init__(self, processes: int) -> None:
        self._processes = processes
        self._prefix = f"\0streamiter-{secrets.token_hex(8)}/"

    async def room(self) -> int:
        return self._processes

    def address(self, name: str) -> Address:
        # Only Linux has sockets with a name that is no file: a killed program leaves none behind.
        return self._prefix + name if sys.platform == "linux" else ("127.0.0.1", 0)

    async def start(self, settings: ProcessSettings) -> _LocalProcess:
        settings = msgspec.structs.replace(settings, import_path=tuple(sys.path), arguments=tuple(sys.argv))
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "streamiter.engine.processes",
            stdin=asyncio.subprocess.PIPE,
            start_new_session=True,  # Ctrl-C in the terminal is for the supervisor, also while the process starts.
        )
        assert process.stdin is not None
        process.stdin.write(msgspec.json.encode(settings))
        process.stdin.close()
        return _LocalProcess(process)


@final
class _LocalProcess:
    """A process of this machine."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process

    def kill(self) -> None:
        if self._process.returncode is None:
            self._process.kill()

    async def look(self, process: int, note: int) -> ProcessLook | None:
        return look_at_process(process, note)

    async def ended(self) -> str:
        code = await self._process.wait()
        if code >= 0:
            return f"it has ended with exit code {code}"
        if -code == signal.SIGKILL:
            return "it was killed by signal 9, by a user or because the machine has too little memory"
        return f"it was killed by signal {-code} ({signal.strsignal(-code)})"
