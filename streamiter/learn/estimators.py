"""The common parts of all ``fit`` methods: reading arrays or a topic, running a flow, showing its progress.

A ``fit`` builds a flow and runs it to its end with :func:`run_offline`. Progress is shown on stderr: as a bar on a
terminal, as lines elsewhere. The first Ctrl-C ends the training after the current round and keeps the model; a second
Ctrl-C aborts the training.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import signal
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Protocol

import numpy as np

from streamiter.engine.graph.statistics import JobStatistics
from streamiter.engine.job.job import Job, StopMode
from streamiter.engine.job.running import run_in_own_loop, signal_handlers, stopping_on_signals
from streamiter.engine.plan.job_settings import ChannelLimits
from streamiter.errors import ConfigurationError, GraphError, ModelError, shortened
from streamiter.flow.flow import Flow
from streamiter.flow.graph_checks import check_count
from streamiter.flow.stream import Stream
from streamiter.iteration.progress import EndReason
from streamiter.learn.rows import BadRows, Examples, Extract, as_examples
from streamiter.topics.topic import Decoder, StopPosition, Topic
from streamiter.topics.urls import shown_url
from streamiter.values.helpers.clock import is_in_event_loop
from streamiter.values.records import Batch, Columns
from streamiter.values.sparse_rows import SparseRows

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID


def check_fit(owner: str, data: object, parallelism: int, *, decode: object, extract: object, **arrays: object) -> None:
    """Check the arguments of a ``fit`` on a topic or on arrays.

    Raises ModelError for a text, which is most likely the name of a file, and for ``arrays`` that are given with a
    topic, whose records contain them; GraphError for options of topics that are given with arrays.
    """
    check_count(parallelism, "parallelism", step=owner)
    if isinstance(data, Topic):
        for what, given in arrays.items():
            if given is not None:
                raise ModelError(
                    f"{owner}: expected {what.replace('_', ' ')} in the records of topic {data.name!r}, given an "
                    "array; write extract= to take them from the records"
                )
        return
    for option, given in (("decode", decode), ("extract", extract)):
        if given is not None:
            raise GraphError(
                f"{owner}({option}=): expected this option with a topic only, given it with an array; leave it out"
            )
    if isinstance(data, str):
        shown = shown_url(data) if ":" in data else data
        raise ModelError(
            f"{owner}: expected arrays or a topic, given the text {shortened(shown)}; to read a file, pass "
            f'topic("{shown if ":" in data else f"file:{data}"}")'
        )


def read_topic(flow: Flow, topic: Topic, decode: Decoder | None, *, parallelism: int = 1) -> Stream:
    """Return the stream of the records that are in the topic when the flow starts."""
    # A file ends by itself; finding its end first would read the file twice.
    stop: StopPosition = None if getattr(topic, "bounded", False) else "latest"
    return flow.source(topic, decode=decode, stop=stop, parallelism=parallelism)


def examples_in_topic(topic: Topic, decode: Decoder | None, extract: Extract | None, *, owner: str) -> list[Examples]:
    """Return all examples that are in the topic now, batch by batch, in memory.

    Raises KeyboardInterrupt on Ctrl-C, JobFailed for records that are not examples.
    """
    flow = Flow(owner)
    records = read_topic(flow, topic, decode)
    examples = records.map_batch(lambda batch: [examples_of(owner, batch, extract)], name="examples").collect()
    run_offline(flow, title=owner, progress=False, first_stop="abort")
    return examples.items


def examples_of(owner: str, batch: Batch, extract: Extract | None, width: int | None = None) -> Examples:
    """Return the examples of records, by ``extract`` or, without it, of records of libsvm and dummy files."""
    if extract is None:
        return labelled(owner, batch, width)
    return as_examples(f"{owner}(extract=)", extract(batch))


def labelled(owner: str, batch: Batch, width: int | None = None) -> Examples:
    """Return the examples of records such as those of libsvm and dummy files: with label, indices and values.

    ``Columns`` with label and features are accepted, too. Without a width, rows are as wide as the widest row. Raises
    ConfigurationError if none of several records has these fields, BadRows if only some of them lack the fields.
    """
    if isinstance(batch, Columns) and {"label", "features"} <= set(batch.names):
        return Examples(batch["features"], batch["label"])
    fields = {"label", "indices", "values"}
    bad = [row for row, record in enumerate(batch) if not (isinstance(record, dict) and fields <= record.keys())]
    if bad:
        what = (
            f"{owner}: expected records with label, indices and values, given {str(batch[bad[0]])[:80]}; "
            "write extract= to make Examples of them"
        )
        if len(bad) == len(batch) > 1:
            raise ConfigurationError(what)
        raise BadRows(bad, what)
    named = [(record["indices"], record["values"]) for record in batch]
    rows = SparseRows.from_rows(named, sys.maxsize if width is None else width)
    if width is None:
        rows = SparseRows(rows.indptr, rows.indices, rows.values, int(rows.indices.max(initial=-1)) + 1)
    return Examples(rows, np.array([record["label"] for record in batch]))


# Users see that the training runs; reading a job's statistics takes a tenth of a millisecond.
_BAR_REFRESH_S: Final = 0.1

# The log of one hour has about 700 lines. A short training shows its last line only.
_LINE_EVERY_S: Final = 5.0


class RoundsDisplay(Protocol):
    """Shows the progress of a training."""

    refresh_s: float
    """Seconds between two calls of :meth:`show`."""

    def show(self, rounds_done: int, note: str) -> None:
        """Show the number of finished rounds, and a note such as the loss."""


@contextlib.contextmanager
def displayed_rounds(
    title: str, rounds: int | None, *, wanted: bool | None = None, noun: str = "round"
) -> Iterator[RoundsDisplay | None]:
    """Yield the display for the rounds of a training: a bar on a terminal, lines elsewhere; None to show nothing.

    ``wanted=None`` shows progress on a terminal only. ``rounds`` is the largest number of rounds, None if it is not
    known; ``noun`` is the word for a round.
    """
    is_terminal = sys.stderr.isatty()
    if not (is_terminal if wanted is None else wanted):
        yield None
    elif is_terminal:
        with _bar(title, rounds, noun) as bar:
            yield bar
    else:
        yield _ProgressLines(title, rounds, noun)


class _ProgressLines:
    """Prints a line whenever it differs from the line before."""

    refresh_s = _LINE_EVERY_S

    def __init__(self, title: str, rounds: int | None, noun: str) -> None:
        self._title = title
        self._noun = noun
        self._of_rounds = "" if rounds is None else f" of {rounds}"
        self._last = ""

    def show(self, rounds_done: int, note: str) -> None:
        line = f"{self._title}: {self._noun} {rounds_done}{self._of_rounds}" + (f", {note}" if note else "")
        if line != self._last:
            self._last = line
            print(line, file=sys.stderr, flush=True)  # noqa: T201 (progress is meant to be printed)


class _Bar:
    """A bar that grows; if the number of rounds is not known, a part of the bar moves to and fro."""

    refresh_s = _BAR_REFRESH_S

    def __init__(self, progress: Progress, bar: TaskID) -> None:
        self._progress = progress
        self._bar = bar

    def show(self, rounds_done: int, note: str) -> None:
        self._progress.update(self._bar, completed=rounds_done, note=note)
        self._progress.refresh()


@contextlib.contextmanager
def _bar(title: str, rounds: int | None, noun: str) -> Iterator[_Bar]:
    # The import of rich takes longer than the import of all learners, and only a terminal needs it.
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

    of_rounds = "" if rounds is None else f" of {rounds}"
    columns = [
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        TextColumn(f"{noun} {{task.completed}}{of_rounds}"),
        TimeElapsedColumn() if rounds is None else TimeRemainingColumn(elapsed_when_finished=True),
        TextColumn("{task.fields[note]}", markup=False),
    ]
    progress = Progress(
        *columns,
        console=Console(stderr=True),
        auto_refresh=False,
        # Text that the program prints meanwhile appears above the bar; if stdout is a file or a pipe, the text goes
        # there.
        redirect_stdout=sys.stdout.isatty(),
    )
    with progress:
        yield _Bar(progress, progress.add_task(title, total=rounds, note=""))


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

    ``rounds`` is the largest number of rounds, None if it is not known. ``first_round`` is the epoch of the first
    round, for iterations whose first epochs only prepare. ``progress`` says whether to show the rounds on stderr; None
    shows them on a terminal only. ``describe()`` returns a note on the last round, such as its loss; it is called in
    the job's event loop, between two steps.

    The first Ctrl-C (or SIGTERM) ends the iteration after the current round, and the flow emits the model of that
    round; if progress is shown, a line names the round. A second signal aborts the flow with KeyboardInterrupt. With
    ``first_stop="abort"`` the first signal aborts the flow: for flows whose partial result is useless.

    A flow without an iteration needs ``done()``, which returns the number of rounds, and ``noun``, the word for a
    round. ``channel_limits`` are the limits of its channels: with short channels the flow stops soon after Ctrl-C.

    The function also works inside a running event loop, such as the loop of a notebook; this loop waits meanwhile.
    Raises JobFailed if a step failed.
    """
    with displayed_rounds(title, rounds, wanted=progress, noun=noun) as display:
        of_loop = functools.partial(rounds_done, first=first_round, most=rounds)

        def count(statistics: JobStatistics) -> int:
            return of_loop(statistics) if done is None else done()

        run = _OfflineRun(flow, count, display, describe or (lambda: ""), first_stop, channel_limits)
        statistics = run.in_thread() if is_in_event_loop() else run_in_own_loop(run.until_end())
    if statistics.state == "aborted":
        raise KeyboardInterrupt
    if display is not None and was_interrupted(statistics) and (made := count(statistics)):
        line = f"{title}: interrupted; the model of round {made} is kept"
        print(line, file=sys.stderr, flush=True)  # noqa: T201 (progress is meant to be printed)
    return statistics


def was_interrupted(statistics: JobStatistics) -> bool:
    """Whether Ctrl-C ended the (first) iteration before its own end."""
    return bool(statistics.loops) and statistics.loops[0].end_reason == EndReason.DRAINED.value


def rounds_done(statistics: JobStatistics, *, first: int = 0, most: int | None = None) -> int:
    """Return how many rounds the (first) iteration has made; ``first`` is the epoch of its first round."""
    # An epoch is complete when the feedback of the epoch before it has returned, and its own callbacks begin.
    done = max(0, statistics.loops[0].epoch_complete - first) if statistics.loops else 0
    # Feedback that still circulates after the last round does not count.
    return done if most is None else min(done, most)


@dataclass
class _OfflineRun:
    """One run of one flow, with its display and its signals."""

    flow: Flow
    rounds_done: Callable[[JobStatistics], int]
    display: RoundsDisplay | None
    describe: Callable[[], str]
    first_stop: StopMode
    channel_limits: ChannelLimits | None
    _is_stopping_in_thread: bool = False
    _started: tuple[Job, asyncio.AbstractEventLoop] | None = None

    async def until_end(self) -> JobStatistics:
        """Start the job, wait for its end and return its statistics; the job may have failed or been stopped."""
        job = await self.flow.start(channel_limits=self.channel_limits)
        self._started = job, asyncio.get_running_loop()
        with stopping_on_signals(job.stop_on_signal, first=self.first_stop) as stops:
            if self.display is None:
                return await job.wait()
            showing = asyncio.create_task(self._show_for_ever(self.display, job, stops), name="progress")
            try:
                return await job.wait()
            finally:
                showing.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await showing
                self._show(self.display, job, is_stopping=False)

    async def _show_for_ever(self, display: RoundsDisplay, job: Job, stops: object) -> None:
        while True:
            self._show(display, job, is_stopping=bool(stops) or self._is_stopping_in_thread)
            await asyncio.sleep(display.refresh_s)

    def _show(self, display: RoundsDisplay, job: Job, *, is_stopping: bool) -> None:
        described = self.describe()
        notes = [described, _STOPPING] if is_stopping else [described]
        display.show(self.rounds_done(job.statistics()), ", ".join(filter(None, notes)))

    def in_thread(self) -> JobStatistics:
        """Run the job in another thread: an event loop cannot run inside another event loop."""
        with ThreadPoolExecutor(1, thread_name_prefix=self.flow.name) as executor:
            running = executor.submit(lambda: run_in_own_loop(self.until_end()))
            with self._stopping_on_signals():
                return running.result()

    @contextlib.contextmanager
    def _stopping_on_signals(self) -> Iterator[None]:
        """Stop the job on signals. Only the main thread receives signals, and the main thread waits here."""
        modes: list[StopMode] = [self.first_stop, "abort"]

        def stop(*_: object) -> None:
            if self._started is not None:
                self._is_stopping_in_thread = True
                job, loop = self._started
                asyncio.run_coroutine_threadsafe(job.stop(modes[0]), loop)
                del modes[:-1]

        heard = [signal.SIGINT]
        # A service that runs this in its event loop has its own handler for SIGTERM, which is called later.
        if signal.getsignal(signal.SIGTERM) == signal.SIG_DFL:
            heard.append(signal.SIGTERM)
        with signal_handlers(stop, *heard):
            yield
