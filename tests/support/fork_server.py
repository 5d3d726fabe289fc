"""A process imports the program once, and forks for each Python program of the tests.

Thus each program runs in its own process, as it does for users, but without the second of processor time that Python
needs to import numpy, Numba and the program. Tests use ``Forked``; run as a program, the module is the process that
forks.
"""

import asyncio
import atexit
import contextlib
import fcntl
import functools
import gc
import importlib
import io
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import termios
import threading
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import typer.main
from support.waiting import PATIENCE_S
from typer.testing import CliRunner

__all__ = ["FORKS_PROCESSES", "Forked", "fork_server"]

FORKS_PROCESSES: Final = {"STREAMITER_FORKS_PROCESSES": "1"}
"""With this in its environment, a forked program starts the processes of a flow as forks, too."""

_TESTS: Final = Path(__file__).parents[1]

# The program and the modules that its commands and the examples import when they run.
_IMPORTED = (
    "asyncio",
    "rich.console",
    "rich.table",
    "streamiter.flow.drawing.charts",
    "streamiter.cli.app",
    "streamiter.cli.demo",
    "streamiter.learn",
    "streamiter.networks",
    "streamiter.parameter_server",
    "streamiter_files",
    "streamiter_kafka",
    "streamiter_sqlite",
    "uvloop",
)

# The server sends a process id, and then the status with which the process has ended.
_REPLY_BYTES: Final = 4
# The start of the server takes two seconds, and much longer on a busy machine.
_START_S: Final = 90.0


class Forked(subprocess.Popen[Any]):
    """A process like one of ``subprocess.Popen``, which is a fork of the server and leads its own session.

    ``args`` is ``[sys.executable, *options, program, *arguments]`` with a script, ``-m module`` or ``-c code``; of the
    options, only ``-W error`` is known. Variables of the environment that Python reads at its start, except PYTHONPATH
    and PYTHONUNBUFFERED, have no effect. A standard input that is a terminal becomes the terminal of the session.
    """

    def __init__(self, args: Sequence[Any], *, server: socket.socket | None = None, **options: Any) -> None:
        self._server = server or _shared_server()
        super().__init__([str(each) for each in args], **options)

    def _execute_child(self, args: list[str], *given: Any) -> None:
        cwd, env, its_stdin, its_stdout, its_stderr = (given[place] for place in (4, 5, 9, 12, 14))
        request = {
            "arguments": args[1:],
            "cwd": str(cwd or Path.cwd()),
            "env": dict(os.environ if env is None else env),
            "is_sigint_ignored": signal.getsignal(signal.SIGINT) is signal.SIG_IGN,
        }
        self._replies, its_replies = socket.socketpair()
        its = [its_stdin, its_stdout, its_stderr]
        descriptors = [number if number != -1 else standard for standard, number in enumerate(its)]
        message = json.dumps(request).encode() + b"\n"
        try:
            with its_replies:
                socket.send_fds(self._server, [message[:1]], [its_replies.fileno(), *descriptors])
                self._server.sendall(message[1:])
            self._replies.settimeout(_START_S)
            self.pid = self._reply()
            self._child_created = True
        except BaseException:
            self._replies.close()
            raise
        finally:
            self._close_pipe_fds(*given[9:15])  # type: ignore[attr-defined]

    def _reply(self) -> int:
        reply = self._replies.recv(_REPLY_BYTES, socket.MSG_WAITALL)
        if len(reply) < _REPLY_BYTES:  # An empty reply would mean exit code 0.
            raise AssertionError("the process that forks for programs has ended")
        return int.from_bytes(reply, signed=True)

    def _try_wait(self, wait_flags: int) -> tuple[int, int]:
        self._replies.settimeout(0.0 if wait_flags else None)
        try:
            status = self._reply()
        except BlockingIOError:
            return 0, 0
        self._replies.close()
        return self.pid, status

    def _internal_poll(self, *_: Any, **__: Any) -> int | None:
        if self.returncode is None:
            pid, status = self._try_wait(os.WNOHANG)
            if pid:
                self._handle_exitstatus(status)  # type: ignore[attr-defined]
        return self.returncode

    def fileno(self) -> int:
        """Return a descriptor that can be read when the process has ended."""
        return self._replies.fileno()


@contextlib.contextmanager
def fork_server() -> Iterator[socket.socket]:
    """Start the process that forks; the process ends with the block, or with the process of the tests."""
    ours, its = socket.socketpair()
    with ours, its:
        environment = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
        program = subprocess.Popen(
            [sys.executable, "-m", "support.fork_server", str(its.fileno())],
            cwd=_TESTS,
            env=environment | {"OPENBLAS_NUM_THREADS": "1"},  # A fork has no threads of its parent.
            pass_fds=[its.fileno()],
            start_new_session=True,
        )
        its.close()
        try:
            yield ours
        finally:
            with contextlib.suppress(OSError):  # It has ended already.
                ours.shutdown(socket.SHUT_RDWR)
            program.wait(timeout=PATIENCE_S)


_AT_EXIT: Final = contextlib.ExitStack()
atexit.register(_AT_EXIT.close)


@functools.cache
def _shared_server() -> socket.socket:
    """Start the server once for all tests of this process; it ends when this process ends."""
    return _AT_EXIT.enter_context(fork_server())


def _serve(requests: socket.socket) -> dict[str, Any]:
    """Fork for each request, and return the request in the fork; the server ends when the socket is closed."""
    woken, waking = socket.socketpair()
    waking.setblocking(False)
    signal.set_wakeup_fd(waking.fileno())
    signal.signal(signal.SIGCHLD, lambda *_: None)  # Without a handler, the end of a fork would wake nothing.
    answers: dict[int, socket.socket] = {}
    while True:
        readable, _, _ = select.select([requests, woken], [], [])
        if woken in readable:
            woken.recv(4096)
            _tell_ends(answers)
        if requests not in readable:
            continue
        message, descriptors, _, _ = socket.recv_fds(requests, 65536, 4)
        while message and not message.endswith(b"\n"):
            message += requests.recv(65536)
        if not message:
            os._exit(0)
        answer = socket.socket(fileno=descriptors[0])
        if pid := os.fork():
            answers[pid] = answer
            for descriptor in descriptors[1:]:
                os.close(descriptor)
            continue
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        os.setsid()  # A kill of the session then ends the program with all its child processes.
        answer.sendall(os.getpid().to_bytes(_REPLY_BYTES, signed=True))
        for each in (requests, woken, waking, answer, *answers.values()):
            each.close()
        _take_streams(descriptors[1:])
        return json.loads(message)  # type: ignore[no-any-return]


def _tell_ends(answers: dict[int, socket.socket]) -> None:
    """Send the status of each fork that has ended."""
    with contextlib.suppress(ChildProcessError):  # No fork is left.
        while (ended := os.waitpid(-1, os.WNOHANG))[0]:
            pid, status = ended
            with answers.pop(pid) as answer, contextlib.suppress(OSError):  # The test has ended.
                answer.sendall(status.to_bytes(_REPLY_BYTES, signed=True))


def _take_streams(descriptors: Sequence[int]) -> None:
    """Make these descriptors the standard streams."""
    for number, descriptor in enumerate(descriptors):
        os.dup2(descriptor, number)
        os.close(descriptor)
    with contextlib.suppress(OSError):
        fcntl.ioctl(0, termios.TIOCSCTTY, 0)


def _fork_processes(server: socket.socket) -> None:
    """Make all processes that this program starts for a flow forks of a server."""
    processes = importlib.import_module("support.processes")

    async def start(*command: str, **options: Any) -> Any:
        return await processes.AsyncForked.start(processes.Forked(command, server=server, **options))

    asyncio.create_subprocess_exec = start


def _run(arguments: list[str], cwd: str, env: dict[str, str], *, is_sigint_ignored: bool) -> None:
    """Run a program as ``python ARGUMENTS`` does."""
    if FORKS_PROCESSES.items() <= env.items():
        ours, its = socket.socketpair()
        if not os.fork():
            ours.close()
            _run(**_serve(its))
            return
        its.close()
        _fork_processes(ours)
        env = dict(env.items() - FORKS_PROCESSES.items())
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(env)
    signal.signal(signal.SIGINT, signal.SIG_IGN if is_sigint_ignored else signal.default_int_handler)
    sys.path[1:1] = filter(None, env.get("PYTHONPATH", "").split(os.pathsep))
    is_unbuffered = bool(env.get("PYTHONUNBUFFERED"))
    sys.stdout = sys.__stdout__ = _writer(1, "strict", is_unbuffered=is_unbuffered, by_line=os.isatty(1))
    sys.stderr = sys.__stderr__ = _writer(2, "backslashreplace", is_unbuffered=is_unbuffered, by_line=True)
    if arguments[:2] == ["-W", "error"]:
        warnings.simplefilter("error")
        del arguments[:2]
    sys.argv = arguments
    if arguments[0] == "-m":
        sys.path[0] = cwd
        sys.argv = arguments[1:]
        runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
    elif arguments[0] == "-c":
        sys.path[0] = ""
        sys.argv = ["-c", *arguments[2:]]
        exec(compile(arguments[1], "<string>", "exec"), {"__name__": "__main__"})
    else:
        sys.path[0] = str(Path(arguments[0]).absolute().parent)
        runpy.run_path(arguments[0], run_name="__main__")


def _writer(descriptor: int, errors: str, *, is_unbuffered: bool, by_line: bool) -> io.TextIOWrapper:
    file = open(descriptor, "wb", buffering=0 if is_unbuffered else -1, closefd=False)  # noqa: SIM115
    return io.TextIOWrapper(file, errors=errors, write_through=is_unbuffered, line_buffering=by_line)


def _prepare() -> None:
    for name in _IMPORTED:
        importlib.import_module(name)
    for name in ("OnlineLearningService", "ServiceReplica"):  # Their modules are imported when they are used.
        getattr(importlib.import_module("streamiter.service"), name)
    app = importlib.import_module("streamiter.cli.app").app
    # For each call of ``app`` Typer makes all commands again: a quarter of the time of a short command.
    typer.main.get_command = functools.cache(typer.main.get_command)  # type: ignore[assignment]
    typer.main.get_command(app)
    # Typer imports more modules when it reads the arguments of a command; a model and a reader load compiled code.
    CliRunner().invoke(app, ["topics", "create", "nowhere:"])
    importlib.import_module("streamiter.learn").AdaptiveLinearModel().learn([[0.0]], [1])
    importlib.import_module("streamiter_kafka.partition").compiled_locate()
    # Without this, the garbage collector of each fork would scan all modules at the fork's end, for 0.1 s.
    gc.collect()
    gc.freeze()


def _end(code: Any) -> None:
    """End the fork as Python does, but without the removal of all modules, which would take 0.1 s."""
    threading._shutdown()  # type: ignore[attr-defined]  # waits for the threads of the program
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code or 0)


if __name__ == "__main__":
    _prepare()
    try:
        _run(**_serve(socket.socket(fileno=int(sys.argv[1]))))
    except SystemExit as end:
        if end.code is not None and not isinstance(end.code, int):
            raise
        _end(end.code)
    _end(0)
