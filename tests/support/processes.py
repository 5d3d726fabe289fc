"""Processes of tests: each has a limit, after which it is killed with all that it has started, and each is gone
when its test has ended.

So neither a read from its pipes nor a wait for its end can hang: after the limit both come to an end, and the test
fails.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import threading
from collections.abc import AsyncIterator, Iterator, Sequence
from typing import Any, Final

__all__ = ["LIMIT_S", "async_process", "process"]

LIMIT_S: Final = 90.0
"""Far above what a process of a test takes on a busy machine, and below the time limit of a test (120 s)."""

# The kernel needs a moment to end a process that was killed.
_END_S: Final = 20.0


@contextlib.contextmanager
def process(
    command: Sequence[str | os.PathLike[str]],
    *,
    limit_s: float = LIMIT_S,
    is_sigint_ignored: bool = False,
    text: bool = True,
    **options: Any,
) -> Iterator[subprocess.Popen[Any]]:
    """Start a process, in a session of its own, and kill it when the block ends, or after ``limit_s`` seconds.

    ``options`` are those of ``subprocess.Popen``. Ctrl-C works in it, whether or not it does in the tests, unless
    ``is_sigint_ignored``, as in the background of a script. Raises AssertionError where the limit was reached.
    """
    with _sigint_of_children(is_ignored=is_sigint_ignored):
        started = subprocess.Popen(command, text=text, **(options | {"start_new_session": True}))
    limit = _Limit(started.pid, limit_s)
    timer = threading.Timer(limit_s, limit.reached)
    timer.daemon = True
    timer.start()
    try:
        yield started
    except BaseException as error:
        limit.explain(error)
        raise
    finally:
        timer.cancel()
        _kill_session(started.pid)
        started.wait(_END_S)
        for pipe in filter(None, (started.stdin, started.stdout, started.stderr)):
            with contextlib.suppress(BrokenPipeError):  # It has not read all that was written to it.
                pipe.close()
    limit.check()


@contextlib.asynccontextmanager
async def async_process(
    command: Sequence[str | os.PathLike[str]],
    *,
    limit_s: float = LIMIT_S,
    is_sigint_ignored: bool = False,
    **options: Any,
) -> AsyncIterator[asyncio.subprocess.Process]:
    """The same for a test whose event loop must not stand still meanwhile.

    ``options`` are those of ``asyncio.create_subprocess_exec``.
    """
    with _sigint_of_children(is_ignored=is_sigint_ignored):
        started = await asyncio.create_subprocess_exec(*command, **(options | {"start_new_session": True}))
    limit = _Limit(started.pid, limit_s)
    timer = asyncio.get_running_loop().call_later(limit_s, limit.reached)
    try:
        yield started
    except BaseException as error:
        limit.explain(error)
        raise
    finally:
        timer.cancel()
        _kill_session(started.pid)
        async with asyncio.timeout(_END_S):
            # Not wait(): a pipe that is full holds it up.
            await started.communicate()
    limit.check()


class _Limit:
    """How long a process may run; the kill is what ends reads from its pipes."""

    def __init__(self, pid: int, limit_s: float) -> None:
        self._pid = pid
        self._message = f"expected the process to end within {limit_s:g} s; it was killed"
        self._is_reached = False

    def reached(self) -> None:
        self._is_reached = True
        _kill_session(self._pid)

    def explain(self, error: BaseException) -> None:
        """The test has failed over what the kill has led to, such as an empty line."""
        if self._is_reached:
            error.add_note(self._message)

    def check(self) -> None:
        if self._is_reached:
            raise AssertionError(self._message)


def _kill_session(pid: int) -> None:
    """The process leads its session; what it has started is in it unless it left it."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)


@contextlib.contextmanager
def _sigint_of_children(*, is_ignored: bool) -> Iterator[None]:
    """What is ignored here stays ignored in a child, and what is handled here has its usual effect there."""
    before = signal.getsignal(signal.SIGINT)
    if is_ignored == (before is signal.SIG_IGN):
        yield
        return
    signal.signal(signal.SIGINT, signal.SIG_IGN if is_ignored else signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
