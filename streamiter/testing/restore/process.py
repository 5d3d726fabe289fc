"""The fresh process in which a check restores: its owner, and the program that runs in it.

``RestoreProcess`` starts a Python interpreter and sends it requests; ``main`` runs there and answers. Requests and
answers are plain data, sent through a pipe. Functions and classes are sent by their names
(`streamiter.values.helpers.importing`).
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import threading
import traceback
from collections.abc import Sequence
from multiprocessing.connection import Connection, Pipe
from types import TracebackType
from typing import Final

import msgspec

from streamiter.errors import ConfigurationError
from streamiter.testing.restore.driving import Build, BuiltFlow, JobOutcome, RunSettings, run_freely, run_in_steps
from streamiter.values.deferred import PlainValue
from streamiter.values.helpers.importing import resolve
from streamiter.values.plain_data import PlainData

# Longer than the limit of a restored run (PATIENCE_S), so that the run itself reports what is stuck.
_ANSWER_S: Final = 120.0
_CLOSING_S: Final = 5.0
_STDERR: Final = 2
_PROGRAM: Final = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); "
    "from streamiter.testing.restore.process import main; main(int(sys.argv[2]))"
)


class RestoreProcess:
    """A Python interpreter with another PYTHONHASHSEED, in which checks restore.

    Several checks may share one, such as all checks of a test session: it starts with the first check, and ends with
    ``close`` or the ``with`` block. Operators are new in each check; globals of modules stay from earlier checks. Use
    it from one thread at a time.

    >>> from streamiter.testing import RestoreProcess
    >>> with RestoreProcess() as process:
    ...     process.is_running
    False
    """

    def __init__(self) -> None:
        # If that of this process is random, any fixed one differs, and a failure can be repeated.
        self._hash_seed = "1" if os.environ.get("PYTHONHASHSEED") != "1" else "2"
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: Connection

    @property
    def is_running(self) -> bool:
        """Whether it was started and not yet closed."""
        return self._process is not None

    def ask(self, structs: Sequence[type[msgspec.Struct]], described: PlainValue, request: PlainValue) -> PlainValue:
        """Send a request of a check, and return the answer; ``described`` names the structs."""
        process = self._process or self._start()
        # A process that hangs ends, and with it each wait on the pipe.
        deadline = threading.Timer(_ANSWER_S, process.kill)
        deadline.start()
        try:
            self._connection.send_bytes(PlainData().encode((sys.path, described)))
            self._connection.send_bytes(PlainData(structs).encode(request, name="records"))
            answer = self._connection.recv_bytes()
        except (EOFError, OSError) as error:
            self.close()
            raise ConfigurationError(
                "check_restore: expected an answer of the process that restores, given its end; its output on "
                "stderr says why"
            ) from error
        finally:
            deadline.cancel()
        return PlainData().decode(answer)

    def close(self) -> None:
        """End the process; without effect if it has ended."""
        process, self._process = self._process, None
        if process is None:
            return
        self._connection.close()
        try:
            process.wait(_CLOSING_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()

    def __enter__(self) -> RestoreProcess:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _start(self) -> subprocess.Popen[bytes]:
        self._connection, other = Pipe()
        with other:
            self._process = subprocess.Popen(  # noqa: S603 (this interpreter, our own program)
                [sys.executable, "-c", _PROGRAM, json.dumps(sys.path), str(other.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=_STDERR,
                env={**os.environ, "PYTHONHASHSEED": self._hash_seed},
                pass_fds=[other.fileno()],
            )
        return self._process


def main(descriptor: int) -> None:
    """Answer requests from the pipe with this file descriptor until its end."""
    with Connection(descriptor) as connection:
        while True:
            try:
                names, request = connection.recv_bytes(), connection.recv_bytes()
            except EOFError:
                return
            connection.send_bytes(PlainData().encode(_answer(names, request)))


def _answer(names: bytes, request: bytes) -> dict[str, PlainValue]:
    try:
        path, described = PlainData().decode(names)
        sys.path[:] = path
        structs = [resolve(name) for name in described]
        asked = PlainData(structs).decode(request)
        options = RunSettings(asked["seed"], asked["interval_s"], asked["start_ms"])
        run = restored_run(resolve(asked["build"]), structs, options, asked["snapshot"], asked["plan"])
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}", "trace": traceback.format_exc()}
    told = ("outputs", "results", "last_state", "final_states", "violations")
    return {name: getattr(run, name) for name in told}


def restored_run(
    build: Build,
    structs: Sequence[type[msgspec.Struct]],
    options: RunSettings,
    snapshot: bytes,
    plan: Sequence[tuple[str, int]] | None,
) -> JobOutcome:
    """Restore a snapshot, and run to the end: by a plan of reads, or freely if there is none."""
    built = BuiltFlow(build, structs, gated=plan is not None)
    if plan is None:
        return asyncio.run(run_freely(built, options, snapshot=snapshot))
    return asyncio.run(run_in_steps(built, options, plan=plan, snapshot=snapshot))
