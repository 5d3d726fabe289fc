"""Running a job in an event loop of its own, until it ends or a signal stops it."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import signal
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Any, Final, Literal, TypeVar

from streamiter.errors import ConfigurationError, JobFailed, ProducerFenced, TransactionExpired
from streamiter.runtime.job import Job, StopMode
from streamiter.runtime.statistics import JobStatistics

__all__ = ["OnInterrupt", "check_on_interrupt", "run_in_own_loop", "run_jobs", "stopping_on_signals"]

_log = logging.getLogger("streamiter.job")

OnInterrupt = Literal["suspend", "drain"]
"""How the first SIGTERM or Ctrl-C stops a job; the second one aborts it."""

T = TypeVar("T")

# New objects before a garbage collection, instead of Python's 700: two batches of 8192 dicts with a list each.
# Most batches then come and go between two collections, where they would go through ten or more; measured, a
# flow of dicts is twice as fast, and a collection of that many objects takes 2 ms.
_OBJECTS_PER_COLLECTION: Final = 50_000


def run_in_own_loop(main: Coroutine[Any, Any, T]) -> T:
    """Run ``main`` to its end on uvloop (on asyncio's own loop where there is none, as on Windows)."""
    with _rare_collections(), asyncio.Runner(loop_factory=_fast_event_loop) as runner:
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

    Gives the list of what signals have asked for, which grows.
    """
    loop = asyncio.get_running_loop()
    modes: list[StopMode] = []
    stopping: list[asyncio.Task[None]] = []

    async def stop(mode: StopMode) -> None:
        with contextlib.suppress(Exception):  # job.wait() raises it where it is handled.
            await job.stop(mode)

    def on_signal() -> None:
        modes.append("abort" if modes else first)
        stopping.append(loop.create_task(stop(modes[-1])))

    handled: list[signal.Signals] = []
    with contextlib.suppress(NotImplementedError, ValueError, RuntimeError):  # Not in the main thread.
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, on_signal)
            handled.append(number)
    try:
        yield modes
    finally:
        for number in handled:
            loop.remove_signal_handler(number)
        for task in stopping:
            task.cancel()
