"""Running a flow that learns offline: progress on stderr, and a Ctrl-C that keeps what was learned."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import signal
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Final

from streamiter.flow.flow import Flow
from streamiter.iteration.progress import EndReason
from streamiter.learn.estimators.progress import RoundsDisplay, displayed_rounds
from streamiter.runtime.job import Job, StopMode
from streamiter.runtime.plan import ChannelLimits
from streamiter.runtime.running import run_in_own_loop, signal_handlers, stopping_on_signals
from streamiter.runtime.statistics import JobStatistics

__all__ = ["rounds_done", "run_offline", "was_interrupted"]

_STOPPING: Final = "stopping after this round; Ctrl-C again aborts"


def run_offline(
    flow: Flow,
    *,
    title: str,
    rounds: int | None = None,
    first_round: int = 0,
    progress: bool | None = None,
    describe: Callable[[], str] | None = None,
    first_stop: StopMode = "drain",
    noun: str = "round",
    done: Callable[[], int] | None = None,
    channel_limits: ChannelLimits | None = None,
) -> JobStatistics:
    """Run a flow to its end, and show how many rounds its (first) iteration has made.

    ``rounds`` is how many it makes at most, None where nobody knows; ``first_round`` is the epoch of the first, where
    those before it only prepare. ``progress`` says whether to show them on stderr: None means on a terminal only.
    ``describe()`` tells more about the last round, such as its loss; it is called in the job's event loop, between
    two steps.

    Ctrl-C (and SIGTERM) ends the iteration with the round under way, and the flow as if that had been the last:
    what comes out is what was learned so far, and where rounds are shown a line says of which it is. A second one
    aborts it with KeyboardInterrupt; with the ``first_stop`` ``"abort"`` the first one does, for flows of which a part
    is worth nothing.

    A flow without an iteration says itself how many ``done()`` there are, and what they are (``noun``).
    ``channel_limits`` are those of its channels: with short ones Ctrl-C has soon passed what was read ahead.

    Works from a running event loop too, such as a notebook's, which waits meanwhile.
    Raises JobFailed if a step failed.

    >>> from streamiter import Flow, IterationBodyResult, iterate_bounded_streams_until_termination
    >>> flow = Flow("halve")
    >>> def body(variables, data):
    ...     halved = variables[0].map(lambda x: x / 2)
    ...     return IterationBodyResult([halved.filter(lambda x: x > 1)], [halved])
    >>> [halved] = iterate_bounded_streams_until_termination([flow.from_items([4.0])], [], body)
    >>> collected = halved.collect()
    >>> run_offline(flow, title="halving").loops[0].ended_in, collected.items
    (2, [2.0, 1.0])
    """
    with displayed_rounds(title, rounds, wanted=progress, noun=noun) as display:
        of_loop = functools.partial(rounds_done, first=first_round, most=rounds)

        def count(statistics: JobStatistics) -> int:
            return of_loop(statistics) if done is None else done()

        run = _OfflineRun(flow, count, display, describe or (lambda: ""), first_stop, channel_limits)
        statistics = run.in_thread() if _is_in_event_loop() else run_in_own_loop(run.until_end())
    if statistics.state == "aborted":
        raise KeyboardInterrupt
    if display is not None and was_interrupted(statistics) and (made := count(statistics)):
        line = f"{title}: interrupted; the model of round {made} is kept"
        print(line, file=sys.stderr, flush=True)  # noqa: T201 (what it is for)
    return statistics


def was_interrupted(statistics: JobStatistics) -> bool:
    """Whether Ctrl-C ended the (first) iteration, before it would have ended by itself."""
    return bool(statistics.loops) and statistics.loops[0].end_reason == EndReason.DRAINED.value


def rounds_done(statistics: JobStatistics, *, first: int = 0, most: int | None = None) -> int:
    """How many rounds the (first) iteration has made, of which the ``first`` began in that epoch."""
    # An epoch is complete when what the one before it led to has come back, and its own callbacks begin.
    done = max(0, statistics.loops[0].epoch_complete - first) if statistics.loops else 0
    # What still goes round after the last of them is none.
    return done if most is None else min(done, most)


def _is_in_event_loop() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


class _OfflineRun:
    """One run of one flow."""

    def __init__(
        self,
        flow: Flow,
        rounds_done: Callable[[JobStatistics], int],
        display: RoundsDisplay | None,
        describe: Callable[[], str],
        first_stop: StopMode,
        channel_limits: ChannelLimits | None,
    ) -> None:
        self._flow = flow
        self._rounds_done = rounds_done
        self._display = display
        self._describe = describe
        self._first_stop = first_stop
        self._channel_limits = channel_limits
        self._is_stopping_in_thread = False
        self._started: tuple[Job, asyncio.AbstractEventLoop] | None = None

    async def until_end(self) -> JobStatistics:
        """Start the job and wait for its end, whichever it is."""
        job = await self._flow.start(channel_limits=self._channel_limits)
        self._started = job, asyncio.get_running_loop()
        with stopping_on_signals(job, first=self._first_stop) as stops:
            if self._display is None:
                return await job.wait()
            showing = asyncio.create_task(self._show_for_ever(self._display, job, stops), name="progress")
            try:
                return await job.wait()
            finally:
                showing.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await showing
                self._show(self._display, job, is_stopping=False)

    async def _show_for_ever(self, display: RoundsDisplay, job: Job, stops: object) -> None:
        while True:
            self._show(display, job, is_stopping=bool(stops) or self._is_stopping_in_thread)
            await asyncio.sleep(display.refresh_s)

    def _show(self, display: RoundsDisplay, job: Job, *, is_stopping: bool) -> None:
        described = self._describe()
        notes = [described, _STOPPING] if is_stopping else [described]
        display.show(self._rounds_done(job.statistics()), ", ".join(filter(None, notes)))

    def in_thread(self) -> JobStatistics:
        """The same in a thread of its own: an event loop cannot run inside another one."""
        with ThreadPoolExecutor(1, thread_name_prefix=self._flow.name) as executor:
            running = executor.submit(lambda: run_in_own_loop(self.until_end()))
            with self._stopping_on_signals():
                return running.result()

    @contextlib.contextmanager
    def _stopping_on_signals(self) -> Iterator[None]:
        """Signals are heard by the main thread only, which waits here."""
        modes: list[StopMode] = [self._first_stop, "abort"]

        def stop(*_: object) -> None:
            if self._started is not None:
                self._is_stopping_in_thread = True
                job, loop = self._started
                asyncio.run_coroutine_threadsafe(job.stop(modes[0]), loop)
                del modes[:-1]

        heard = [signal.SIGINT]
        # A service that runs this in its event loop has a handler of its own for SIGTERM, which comes later.
        if signal.getsignal(signal.SIGTERM) == signal.SIG_DFL:
            heard.append(signal.SIGTERM)
        with signal_handlers(stop, *heard):
            yield
