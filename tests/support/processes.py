"""A process of a test has a time limit, after which it is killed with all its child processes.

Each process is also killed when its test ends. So a read from its pipes, or a wait for its end, cannot hang: after the
limit both end, and the test fails.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from typing import IO, Any, Protocol

from support.fork_server import Forked
from support.waiting import PATIENCE_S

__all__ = ["AsyncForked", "async_process", "forked_run", "kill_session", "process"]


@contextlib.contextmanager
def process(
    command: Sequence[str | os.PathLike[str]],
    *,
    limit_s: float = PATIENCE_S,
    is_sigint_ignored: bool = False,
    is_forked: bool = False,
    text: bool = True,
    **options: Any,
) -> Iterator[subprocess.Popen[Any]]:
    """Start a process in its own session; kill it when the block ends, or after ``limit_s`` seconds.

    With ``is_forked``, a program of Python starts as a fork of a process that has imported streamiter.
    ``options`` are those of ``subprocess.Popen``. Ctrl-C works in the process, even if the tests ignore SIGINT; with
    ``is_sigint_ignored``, the process ignores SIGINT, as a background process of a script does. Raises AssertionError
    if the limit is reached.
    """
    with _sigint_of_children(is_ignored=is_sigint_ignored):
        starts = Forked if is_forked else subprocess.Popen
        started = starts(command, text=text, **(options | {"start_new_session": True}))
    try:
        with _limited(started.pid, limit_s, _call_in_thread):
            yield started
    finally:
        started.wait(PATIENCE_S)
        for pipe in filter(None, (started.stdin, started.stdout, started.stderr)):
            with contextlib.suppress(BrokenPipeError):  # The process has not read all of its input.
                pipe.close()


@contextlib.asynccontextmanager
async def async_process(
    command: Sequence[str | os.PathLike[str]],
    *,
    limit_s: float = PATIENCE_S,
    is_sigint_ignored: bool = False,
    is_forked: bool = False,
    **options: Any,
) -> AsyncIterator[asyncio.subprocess.Process]:
    """Do the same as ``process`` for a test whose event loop must run at the same time.

    ``options`` are those of ``asyncio.create_subprocess_exec``. With ``is_forked`` the process is an ``AsyncForked``,
    which has the methods that tests use.
    """
    started: Any
    with _sigint_of_children(is_ignored=is_sigint_ignored):
        if is_forked:
            started = await AsyncForked.start(Forked(command, **options))
        else:
            started = await asyncio.create_subprocess_exec(*command, **(options | {"start_new_session": True}))
    try:
        with _limited(started.pid, limit_s, asyncio.get_running_loop().call_later):
            yield started
    finally:
        async with asyncio.timeout(PATIENCE_S):
            # wait() would hang if a pipe is full.
            await started.communicate()


def forked_run(
    command: Sequence[str | os.PathLike[str]],
    *,
    given: str = "",
    limit_s: float = PATIENCE_S,
    check: bool = False,
    **options: Any,
) -> subprocess.CompletedProcess[str]:
    """Run a program of Python to its end with pipes, as a fork of a process that has imported streamiter.

    With ``check``, raises AssertionError if the exit code is not 0.
    """
    pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    with process(command, limit_s=limit_s, is_forked=True, **pipes, **options) as started:
        printed, errors = started.communicate(given)
    assert not check or started.returncode == 0, errors
    return subprocess.CompletedProcess([*command], started.returncode, printed, errors)


class AsyncForked:
    """A forked process for an event loop, with the methods of ``asyncio.subprocess.Process`` that tests use."""

    def __init__(
        self, forked: Forked, stdout: asyncio.StreamReader | None, stderr: asyncio.StreamReader | None
    ) -> None:
        self.pid = forked.pid
        self.stdin, self.stdout, self.stderr = forked.stdin, stdout, stderr
        self._forked = forked
        self._end = asyncio.get_running_loop().create_future()
        asyncio.get_running_loop().add_reader(forked.fileno(), self._ended, forked.fileno())

    @classmethod
    async def start(cls, forked: Forked) -> AsyncForked:
        """Return a process, whose pipes the event loop reads."""
        return cls(forked, await _reader(forked.stdout), await _reader(forked.stderr))

    @property
    def returncode(self) -> int | None:
        """Return the exit code, or None while the process runs."""
        return self._forked.returncode if self._end.done() else None

    def send_signal(self, number: int) -> None:
        """Send a signal, unless the process is known to have ended.

        The method of ``Popen`` would look whether it has ended and take the reply, for which the event loop then waits
        in vain: a test that killed a process twice hung.
        """
        if not self._end.done():
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def terminate(self) -> None:
        """Send SIGTERM."""
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """Send SIGKILL."""
        self.send_signal(signal.SIGKILL)

    def _ended(self, descriptor: int) -> None:
        asyncio.get_running_loop().remove_reader(descriptor)
        self._forked.poll()
        self._end.set_result(None)

    async def wait(self) -> int | None:
        """Wait until the process has ended, and return its exit code."""
        await asyncio.shield(self._end)
        return self.returncode

    async def communicate(self) -> tuple[bytes, bytes]:
        """Read the output to its end, and wait until the process has ended."""

        async def read(stream: asyncio.StreamReader | None) -> bytes:
            return b"" if stream is None else await stream.read()

        printed, errors = await asyncio.gather(read(self.stdout), read(self.stderr))
        await self.wait()
        return printed, errors


async def _reader(pipe: IO[bytes] | None) -> asyncio.StreamReader | None:
    if pipe is None:
        return None
    reader = asyncio.StreamReader()
    protocol = asyncio.StreamReaderProtocol(reader)
    await asyncio.get_running_loop().connect_read_pipe(lambda: protocol, pipe)
    return reader


class _Timer(Protocol):
    def cancel(self) -> None: ...


def _call_in_thread(delay_s: float, callback: Callable[[], None]) -> _Timer:
    timer = threading.Timer(delay_s, callback)
    timer.daemon = True
    timer.start()
    return timer


@contextlib.contextmanager
def _limited(pid: int, limit_s: float, call_later: Callable[[float, Callable[[], None]], _Timer]) -> Iterator[None]:
    """Kill a process when the block ends, or after the limit, which also ends reads from its pipes."""
    message = f"expected the process to end within {limit_s:g} s; it was killed"
    is_reached = False

    def reach() -> None:
        nonlocal is_reached
        is_reached = True
        kill_session(pid)

    timer = call_later(limit_s, reach)
    try:
        yield
    except BaseException as error:
        if is_reached:  # The kill caused the error, for example an empty line.
            error.add_note(message)
        raise
    finally:
        timer.cancel()
        kill_session(pid)
    if is_reached:
        raise AssertionError(message)


def kill_session(pid: int) -> None:
    """Kill the leader of a session and its children, except children that have left the session."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)


@contextlib.contextmanager
def _sigint_of_children(*, is_ignored: bool) -> Iterator[None]:
    """Set SIGINT for children: they inherit an ignored signal; a handled signal has its default effect there."""
    before = signal.getsignal(signal.SIGINT)
    if is_ignored == (before is signal.SIG_IGN):
        yield
        return
    signal.signal(signal.SIGINT, signal.SIG_IGN if is_ignored else signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
