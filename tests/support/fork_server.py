"""A process imports the program once and forks for each command of the tests.

Thus each command runs in its own process, as it does for users, but without the second that Python needs to import
numpy and the program. Tests use ``ForkServer``; run as a program, the module is the process that forks.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

from support.processes import kill_session
from typer.testing import CliRunner

__all__ = ["ForkServer", "fork_server"]

TESTS = Path(__file__).parents[1]

# The program and the modules that its commands import when they run.
_IMPORTED = (
    "asyncio",
    "rich.console",
    "rich.table",
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

# A reply is a process id, then an exit code, which is negative if a signal ended the command.
_REPLY_BYTES = 4


class ForkServer:
    """Runs one command of the program after the other, each in a fork of the process at the socket's other end."""

    def __init__(self, requests: socket.socket) -> None:
        self._requests = requests

    def run(
        self, arguments: Sequence[str], *, cwd: Path, env: Mapping[str, str], given: str, timeout_s: float
    ) -> subprocess.CompletedProcess[str]:
        """Run a command to its end, like ``subprocess.run`` with pipes; after ``timeout_s`` kill it and raise."""
        stdin, to_stdin = os.pipe()
        from_stdout, stdout = os.pipe()
        from_stderr, stderr = os.pipe()
        request = json.dumps({"arguments": arguments, "cwd": str(cwd), "env": dict(env)}) + "\n"
        self._requests.settimeout(timeout_s)
        socket.send_fds(self._requests, [request[:1].encode()], [stdin, stdout, stderr])
        self._requests.sendall(request[1:].encode())
        for descriptor in (stdin, stdout, stderr):
            os.close(descriptor)
        pid = self._reply()
        with ThreadPoolExecutor(3) as threads:
            threads.submit(_write, to_stdin, given)
            printed = threads.submit(_read, from_stdout)
            errors = threads.submit(_read, from_stderr)
            try:
                code = self._reply()
            except TimeoutError:
                kill_session(pid)
                self._reply()
                raise
            finally:
                # A child process of the command may keep the pipes open, and then the reads would not end.
                kill_session(pid)
        return subprocess.CompletedProcess(list(arguments), code, printed.result(), errors.result())

    def _reply(self) -> int:
        reply = self._requests.recv(_REPLY_BYTES, socket.MSG_WAITALL)
        if len(reply) < _REPLY_BYTES:  # An empty reply would mean exit code 0.
            raise AssertionError("the process that forks for commands has ended")
        return int.from_bytes(reply, signed=True)


@contextmanager
def fork_server() -> Iterator[ForkServer]:
    """Start the process that forks; the process ends with the block, or with the process of the tests."""
    ours, its = socket.socketpair()
    with ours, its:
        program = subprocess.Popen(
            [sys.executable, "-m", "support.fork_server", str(its.fileno())],
            cwd=TESTS,
            pass_fds=[its.fileno()],
        )
        its.close()
        try:
            yield ForkServer(ours)
        finally:
            ours.shutdown(socket.SHUT_RDWR)
            program.wait(timeout=20)


def _write(descriptor: int, text: str) -> None:
    try:
        with open(descriptor, "w") as pipe:
            pipe.write(text)
    except BrokenPipeError:  # The command has not read all of its input.
        pass


def _read(descriptor: int) -> str:
    with open(descriptor) as pipe:
        return pipe.read()


def _serve(requests: socket.socket) -> list[str]:
    """Fork for each request, and return the arguments in the fork; the parent ends when the socket is closed."""
    while True:
        message, descriptors, _, _ = socket.recv_fds(requests, 65536, 3)
        while message and not message.endswith(b"\n"):
            message += requests.recv(65536)
        if not message:
            sys.exit()
        if pid := os.fork():
            for descriptor in descriptors:
                os.close(descriptor)
            requests.sendall(pid.to_bytes(_REPLY_BYTES, signed=True))
            _, status = os.waitpid(pid, 0)
            requests.sendall(os.waitstatus_to_exitcode(status).to_bytes(_REPLY_BYTES, signed=True))
            continue
        requests.close()
        os.setsid()  # A kill of the session then ends the command with all its child processes.
        for number, descriptor in enumerate(descriptors):
            os.dup2(descriptor, number)
            os.close(descriptor)
        request = json.loads(message)
        os.chdir(request["cwd"])
        os.environ.clear()
        os.environ.update(request["env"])
        # `python -m streamiter` in that folder has the same path.
        sys.path[0] = request["cwd"]
        return request["arguments"]


if __name__ == "__main__":
    for name in _IMPORTED:
        importlib.import_module(name)
    # Typer imports more modules when it reads the arguments of a command.
    CliRunner().invoke(importlib.import_module("streamiter.cli.app").app, ["topics", "create", "nowhere:"])
    # Without this, the garbage collector of each fork would scan all modules at the fork's end, for 0.1 s.
    gc.collect()
    gc.freeze()
    sys.argv = ["streamiter", *_serve(socket.socket(fileno=int(sys.argv[1])))]
    importlib.import_module("streamiter.cli").main()
