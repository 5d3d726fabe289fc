"""Running a job in an event loop of its own, until it ends or a signal stops it."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import os
import signal
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Any, Final, Literal, TypeVar

from streamiter.errors import ConfigurationError, JobFailed, ProducerFenced, TransactionExpired
from streamiter.runtime.job import Job, StopMode
from streamiter.runtime.statistics import JobStatistics

__all__ = [
    "Interruption",
    "OnInterrupt",
    "check_on_interrupt",
    "run_in_own_loop",
    "run_jobs",
    "signal_handlers",
    "stopping_on_signals",
]

_log = logging.getLogger("streamiter.job")

OnInterrupt = Literal["suspend", "drain"]
"""How the first SIGTERM or Ctrl-C stops a job; the second one aborts it."""

T = TypeVar("T")

# New objects before a garbage collection, instead of Python's 700: two batches of 8192 dicts with a list each.
# Most batches then come and go between two collections, where they would go through ten or more; measured, a
# flow of dicts is twice as fast, and a collection of that many objects takes 2 ms.
_OBJECTS_PER_COLLECTION: Final = 50_000


class Interruption:
    """The handler of Ctrl-C and SIGTERM in a program: the first signal ends the program in order, the next one at once.

    The first one raises KeyboardInterrupt. In :func:`run_in_own_loop` it cancels the coroutine first, so that files are
    closed and what is under way is stored, as ``asyncio.Runner`` does for Ctrl-C alone. The next one ends the process
    with ``exit_code``, whatever holds it up: a server that does not answer, a thread that reads.
    """

    def __init__(self, exit_code: int) -> None:
        self._exit_code = exit_code
        self._is_ending = False
        self._running: tuple[asyncio.AbstractEventLoop, asyncio.Task[Any]] | None = None

    def __call__(self, *_: object) -> None:
        """Handle a signal; called by Python in the main thread."""
        if self._is_ending:
            os._exit(self._exit_code)
        self._is_ending = True
        if self._running is None:
            raise KeyboardInterrupt
        loop, task = self._running
        loop.call_soon_threadsafe(task.cancel)

    def run(self, runner: asyncio.Runner, main: Coroutine[Any, Any, T]) -> T:
        """Run ``main`` with ``runner``. Raises KeyboardInterrupt where a signal has cancelled it."""
        with contextlib.closing(self._cancellable(main)) as cancellable:
            try:
                return runner.run(cancellable)
            except asyncio.CancelledError:
                if self._is_ending:
                    raise KeyboardInterrupt from None
                raise

    async def _cancellable(self, main: Coroutine[Any, Any, T]) -> T:
        task = asyncio.current_task()
        assert task is not None
        self._running = asyncio.get_running_loop(), task
        try:
            return await main
        finally:
            self._running = None


def run_in_own_loop(main: Coroutine[Any, Any, T]) -> T:
    """Run ``main`` to its end on uvloop (on asyncio's own loop where there is none, as on Windows).

    Ctrl-C cancels it, and so does SIGTERM where its handler is an :class:`Interruption`; KeyboardInterrupt is raised
    then.
    """
    # Closed where a signal comes before it has begun; Python would tell of a coroutine that was never awaited.
    with (
        contextlib.closing(main),
        _rare_collections(),
        asyncio.Runner(loop_factory=_fast_event_loop) as runner,
    ):
        handler = signal.getsignal(signal.SIGTERM)
        if isinstance(handler, Interruption) and threading.current_thread() is threading.main_thread():
            return handler.run(runner, main)
        return runner.run(main)


@contextlib.contextmanager
def _rare_collections() -> Iterator[None]:
    """Collect garbage less often, unless the program has chosen a rarer time itself, or none."""
    before = gc.get_threshold()
    if before[0]:
        gc.set_threshold(max(before[0], _OBJECTS_PER_COLLECTION), *before[1:])
    try:
        yield
    finally:
        gc.set_threshold(*before)


def _fast_event_loop() -> asyncio.AbstractEventLoop:
    try:
        import uvloop
    except ImportError:
        return asyncio.new_event_loop()
    return uvloop.new_event_loop()


def check_on_interrupt(flow: str, mode: object, *, shares: bool) -> None:
    """Refuse what is no way to stop, or none for a worker that shares its loops; a signal would come too late."""
    if mode not in ("suspend", "drain"):
        raise ConfigurationError(
            f'flow {flow!r}: on_interrupt expected "suspend" or "drain", given {mode!r}; choose one of these, '
            "a second Ctrl-C aborts in any case"
        )
    if mode == "drain" and shares:
        raise ConfigurationError(
            f'flow {flow!r}: expected on_interrupt="suspend" of a worker, given "drain"; a loop that workers share '
            "does not end when the inputs of one of them do"
        )


WhileRunning = Callable[[Job, Sequence[StopMode]], AbstractAsyncContextManager[None]]
"""What is entered while a job runs: it is given the job and what signals have asked for, which grows."""


@contextlib.asynccontextmanager
async def _unwatched(job: Job, stops: Sequence[StopMode]) -> AsyncIterator[None]:
    yield


async def run_jobs(
    start: Callable[..., Awaitable[Job]],
    options: Mapping[str, Any],
    *,
    first: OnInterrupt = "suspend",
    while_running: WhileRunning = _unwatched,
) -> JobStatistics:
    """Run the job that ``start(**options)`` gives, until it ends or a signal stops it, as ``first`` says.

    Where a transaction was open for too long, because a server or the machine stood still, nobody has taken over and
    nothing of it was seen: the next job goes on from the last checkpoint. Two in a row without one in between are no
    accident.
    """
    options = dict(options)
    failed_in_vain = False
    while True:
        job = await start(**options)
        with stopping_on_signals(job, first=first) as stops:
            try:
                async with while_running(job, stops):
                    return await job.wait()
            except JobFailed as error:
                checkpoints = job.statistics().checkpoints
                if stops or checkpoints is None or not _was_too_slow(error):
                    raise
                in_vain = not checkpoints.taken
                if in_vain and failed_in_vain:
                    raise
                failed_in_vain = in_vain
                if not in_vain:  # What that checkpoint has of these steps is not to be left behind again.
                    options.pop("changed_steps", None)
                _log.warning("%s; going on from the last checkpoint", error)
        options["restore"] = "last"


def _was_too_slow(error: BaseException | None) -> bool:
    """Whether its transaction was open for too long, and that is all: where another run has taken over since, an error
    that says so comes first.
    """
    while error is not None and not isinstance(error, ProducerFenced):
        error = error.__cause__
    return isinstance(error, TransactionExpired)


@contextlib.contextmanager
def stopping_on_signals(job: Job, *, first: StopMode = "suspend") -> Iterator[Sequence[StopMode]]:
    """While the job runs, SIGTERM and Ctrl-C suspend it, or stop it as ``first`` says; a second signal aborts it.

    Gives the list of what signals have asked for, which grows. A third signal raises KeyboardInterrupt where the
    program is: a step that does not give the event loop back keeps the job from being stopped.
    """
    loop = asyncio.get_running_loop()
    modes: list[StopMode] = []
    stopping: list[asyncio.Task[None]] = []

    async def stop(mode: StopMode) -> None:
        with contextlib.suppress(Exception):  # job.wait() raises it where it is handled.
            await job.stop(mode)

    def start_stopping(mode: StopMode) -> None:
        stopping.append(loop.create_task(stop(mode)))

    def on_signal(*_: object) -> None:
        if len(modes) == 2:
            raise KeyboardInterrupt
        modes.append("abort" if modes else first)
        loop.call_soon_threadsafe(start_stopping, modes[-1])

    with signal_handlers(on_signal, signal.SIGINT, signal.SIGTERM):
        try:
            yield modes
        finally:
            for task in stopping:
                task.cancel()


@contextlib.contextmanager
def signal_handlers(handler: Callable[..., None], *numbers: signal.Signals) -> Iterator[None]:
    """Have ``handler`` called for these signals, and give them back to the handlers that they had.

    A signal that is ignored stays so: a shell has SIGINT ignored in what a script puts into the background, which
    Ctrl-C is not meant for. Outside the main thread, where Python does not handle signals, this does nothing.
    """
    before: dict[signal.Signals, Any] = {}
    if threading.current_thread() is threading.main_thread():
        # None is a handler that is not Python's, and cannot be given back.
        before = {
            number: given
            for number in numbers
            if (given := signal.getsignal(number)) not in (signal.SIG_IGN, None)
        }
    try:
        for number in before:
            signal.signal(number, handler)
        yield
    finally:
        for number, given in before.items():
            signal.signal(number, given)
