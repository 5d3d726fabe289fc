"""Run a job in an event loop of its own, until the job ends or a signal stops it.

``run_in_own_loop`` runs a coroutine to its end, and ``run_jobs`` is the coroutine of ``Flow.run``: it restarts a job
whose transaction expired. Behind them are the reactions to SIGINT (Ctrl-C) and SIGTERM.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import inspect
import logging
import os
import signal
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import replace
from typing import Any, Final, Literal, Protocol, TypeVar

from streamiter.engine.graph.graph import RunnableFlow
from streamiter.engine.graph.statistics import CheckpointStatistics, JobStatistics
from streamiter.engine.job.follower import JobFollower
from streamiter.engine.job.job import Job, StopMode
from streamiter.engine.plan.job_settings import JobOptions, OwnProcess
from streamiter.errors import JobFailed, ProducerFenced, TransactionExpired
from streamiter.models.update import ModelSnapshot
from streamiter.values.numbers import one_of

_log = logging.getLogger("streamiter.job")

OnInterrupt = Literal["suspend", "drain"]
"""How the first SIGTERM or Ctrl-C stops a job; the second signal aborts it."""

T = TypeVar("T")

# The number of new objects before a garbage collection; Python's default is 700. Two of the largest batches of dicts
# with a list each are fewer objects, so most batches are made and freed between two collections instead of passing ten
# or more. Measured: a flow of dicts is twice as fast, and a collection of that many objects takes 2 ms.
_OBJECTS_PER_COLLECTION: Final = 50_000


class Interruption:
    """The handler of Ctrl-C and SIGTERM in a program: the first signal ends the program in order, the second at once.

    The first signal raises KeyboardInterrupt. In :func:`run_in_own_loop` it first cancels the coroutine, so that files
    are closed and pending records are stored, as ``asyncio.Runner`` does for Ctrl-C only. The second signal ends the
    process with ``exit_code``, even if a server does not answer or a thread is blocked.
    """

    def __init__(self, exit_code: int) -> None:
        self._exit_code = exit_code
        self._is_ending = False
        self._running: tuple[asyncio.AbstractEventLoop, asyncio.Task[object]] | None = None

    def __call__(self, *_: object) -> None:
        """Handle a signal; Python calls this in the main thread."""
        if self._is_ending:
            os._exit(self._exit_code)
        self._is_ending = True
        if self._running is None:
            raise KeyboardInterrupt
        loop, task = self._running
        loop.call_soon_threadsafe(task.cancel)

    def run(self, runner: asyncio.Runner, main: Coroutine[Any, Any, T]) -> T:
        """Run ``main`` with ``runner``. Raises KeyboardInterrupt if a signal has cancelled it."""
        cancellable = self._cancellable(main)
        try:
            return runner.run(cancellable)
        except asyncio.CancelledError:
            if self._is_ending:
                raise KeyboardInterrupt from None
            raise
        finally:
            # One that has begun is a task, which the runner cancels at its end.
            if inspect.getcoroutinestate(cancellable) == inspect.CORO_CREATED:
                cancellable.close()

    async def _cancellable(self, main: Coroutine[Any, Any, T]) -> T:
        task = asyncio.current_task()
        assert task is not None
        self._running = asyncio.get_running_loop(), task
        try:
            return await main
        finally:
            self._running = None


def run_in_own_loop(main: Coroutine[Any, Any, T]) -> T:
    """Run ``main`` to its end on uvloop, or on asyncio's own loop if uvloop is not installed, as on Windows.

    Ctrl-C cancels ``main``, and so does SIGTERM if its handler is an :class:`Interruption`; both raise
    KeyboardInterrupt.
    """
    # A signal may come before ``main`` has begun; Python would then warn of a coroutine that was never awaited.
    with contextlib.closing(main), _rare_collections(), asyncio.Runner(loop_factory=_fast_event_loop) as runner:
        handler = signal.getsignal(signal.SIGTERM)
        if isinstance(handler, Interruption) and threading.current_thread() is threading.main_thread():
            return handler.run(runner, main)
        return runner.run(main)


@contextlib.contextmanager
def _rare_collections() -> Iterator[None]:
    """Collect garbage less often, unless the program has chosen even fewer collections, or none."""
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


def check_on_interrupt(flow: str, mode: object) -> None:
    """Raise ConfigurationError for a mode that does not exist."""
    remedy = "choose one of them, a second Ctrl-C aborts in any case"
    one_of(f"flow {flow!r}, on_interrupt=", mode, "suspend", "drain", remedy=remedy)


class Watched(Protocol):
    """A job, or several processes with one, seen from outside."""

    def statistics(self) -> JobStatistics:
        """Return the statistics now."""


R = TypeVar("R", bound=Watched)

WhileRunning = Callable[[R, Sequence[StopMode]], AbstractAsyncContextManager[None]]
"""Makes the context that is entered while a job runs, of the job and the growing list of the stops it was asked for."""


def without_figures(job: Watched, stops: Sequence[StopMode]) -> AbstractAsyncContextManager[None]:
    """Show nothing while a job runs."""
    return contextlib.nullcontext()


async def run_jobs(
    start: Callable[..., Awaitable[Job]],
    options: Mapping[str, Any],
    *,
    first: OnInterrupt = "suspend",
    while_running: WhileRunning[Job] = without_figures,
) -> JobStatistics:
    """Run the job that ``start(**options)`` returns, until it ends or a signal stops it, as ``first`` says.

    If a transaction was open for longer than its timeout, because a server or the machine did not respond, no other
    run has claimed the flow and no reader has seen the transaction: the next job resumes from the last checkpoint. If
    this happens twice in a row without a checkpoint between, the error is raised.
    """
    options = dict(options)
    too_slow = TooSlow()
    while True:
        job = await start(**options)
        with stopping_on_signals(job.stop_on_signal, first=first) as stops:
            try:
                async with while_running(job, stops):
                    return await job.wait()
            except JobFailed as error:
                checkpoints = job.statistics().checkpoints
                if stops or not too_slow.may_resume(error, checkpoints):
                    raise
                if checkpoints is not None and checkpoints.taken:
                    # The state of these steps in the new checkpoint must not be dropped again.
                    options.pop("changed_steps", None)
        options["restore"] = "last"


def saying_what_is_kept(flow: str, statistics: JobStatistics) -> JobStatistics:
    """Return the statistics of a run; if a signal has stopped the run, and nothing is kept of it, say so in the log."""
    if statistics.state == "suspended" and statistics.checkpoints is None:
        _log.warning(
            "flow %r: a signal has stopped it. What it had read is handled, and no state and no positions are kept, "
            "since it has no checkpoints=: the next run begins where its sources start",
            flow,
        )
    return statistics


class TooSlow:
    """Decides whether a run resumes after a job that failed because its transaction was open for too long."""

    def __init__(self) -> None:
        self._failed_in_vain = False

    def may_resume(self, error: BaseException, checkpoints: CheckpointStatistics | None) -> bool:
        """Return whether the next job resumes from the last checkpoint; not twice in a row without a new one.

        If another run has claimed the flow since, ProducerFenced is before TransactionExpired in the chain of causes.
        """
        fenced = next((cause for cause in causes_of(error) if isinstance(cause, ProducerFenced)), None)
        if checkpoints is None or not isinstance(fenced, TransactionExpired):
            return False
        before, self._failed_in_vain = self._failed_in_vain, not checkpoints.taken
        if before and self._failed_in_vain:
            return False
        _log.warning("%s; resuming from the last checkpoint", error)
        return True


def causes_of(error: BaseException | None) -> Iterator[BaseException]:
    """Return an error, its cause, the cause of this one, and so on."""
    while error is not None:
        yield error
        error = error.__cause__


@contextlib.contextmanager
def stopping_on_signals(
    stop: Callable[[StopMode], Awaitable[object]],
    *,
    first: StopMode = "suspend",
    third: Callable[[], object] | None = None,
) -> Iterator[Sequence[StopMode]]:
    """In this block SIGTERM and Ctrl-C suspend the job, or stop it as ``first`` says; a second signal aborts it.

    ``stop`` stops it, such as ``job.stop_on_signal``. Yields the growing list of the stops that signals have asked for.
    A third signal raises KeyboardInterrupt at the current line of the program, because a step that does not return to
    the event loop prevents any other stop; or the event loop calls ``third``, for steps in other processes.
    """
    loop = asyncio.get_running_loop()
    modes: list[StopMode] = []
    stopping: list[asyncio.Task[None]] = []

    async def stopped(mode: StopMode) -> None:
        with contextlib.suppress(Exception):  # job.wait() raises it, too.
            await stop(mode)

    def start_stopping(mode: StopMode) -> None:
        stopping.append(loop.create_task(stopped(mode)))

    def on_signal(*_: object) -> None:
        if len(modes) == 2:
            if third is None:
                raise KeyboardInterrupt
            loop.call_soon_threadsafe(third)
            return
        modes.append("abort" if modes else first)
        loop.call_soon_threadsafe(start_stopping, modes[-1])

    with signal_handlers(on_signal, signal.SIGINT, signal.SIGTERM):
        try:
            yield modes
        finally:
            for task in stopping:
                task.cancel()


@contextlib.asynccontextmanager
async def running_meanwhile(**coroutines: Coroutine[Any, Any, None]) -> AsyncIterator[None]:
    """Run coroutines in tasks of these names during this block; its end cancels them, and their failure the block."""
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(coroutine, name=name) for name, coroutine in coroutines.items()]
        try:
            yield
        finally:
            for task in tasks:
                task.cancel()


@contextlib.contextmanager
def signal_handlers(
    handler: Callable[..., None], *numbers: signal.Signals, even_ignored: bool = False
) -> Iterator[None]:
    """Call ``handler`` for these signals in this block, and restore their handlers after it.

    A signal that is ignored stays ignored, unless ``even_ignored``: a shell ignores SIGINT in a program that a script
    starts in the background, because Ctrl-C is not meant for it. Outside the main thread Python does not handle
    signals, and this does nothing.
    """
    before: dict[signal.Signals, Any] = {}
    if threading.current_thread() is threading.main_thread():
        # None is returned for a handler that is not Python's and cannot be restored.
        left_alone = (None,) if even_ignored else (signal.SIG_IGN, None)
        before = {number: given for number in numbers if (given := signal.getsignal(number)) not in left_alone}
    try:
        for number in before:
            signal.signal(number, handler)
        yield
    finally:
        for number, given in before.items():
            signal.signal(number, given)


def job_of(flow: RunnableFlow, options: JobOptions, own: OwnProcess | None = None) -> Job:
    """Return a job of the flow that is not started; ``own`` is process 0, if there are several."""
    return Job(flow.name, flow.steps, flow.plain_data, _options_of(flow, options), own)


def follower_of(flow: RunnableFlow, options: JobOptions, own: OwnProcess) -> JobFollower:
    """Return the follower of the flow's job in another process than 0; it is not started."""
    return JobFollower(flow.name, flow.steps, flow.plain_data, _options_of(flow, options), own)


def _options_of(flow: RunnableFlow, options: JobOptions) -> JobOptions:
    flow.plain_data.register(ModelSnapshot)
    return replace(options, state=flow.state)
