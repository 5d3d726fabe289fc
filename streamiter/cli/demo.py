"""The command ``demo``: it writes a year of flights as events, learns from them, and prints a summary.

The events are written once; their first record has a header by which a later run recognizes them. A flow learns from
them and publishes a model.
"""

from __future__ import annotations

import shlex
import shutil
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import date
from functools import partial
from pathlib import Path
from typing import Any, Final
from urllib.parse import quote

import msgspec
import typer
from rich.console import Console, Group, RenderableType
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from streamiter.cli.demo_service import DEMO_QUESTION, MODEL, UPDATES_BYTES, observed, serve_demo
from streamiter.cli.figures import INTERRUPTED, say, watched
from streamiter.engine.graph.statistics import JobState, JobStatistics
from streamiter.engine.job.running import run_in_own_loop, stopping_on_signals
from streamiter.errors import ConfigurationError, TopicNotFound
from streamiter.flow.flow import Flow
from streamiter.learn import train_online
from streamiter.learn.flights import FIELDS, FlightEvents, LabelArrival, delayed_labels, flights_file, is_late_event
from streamiter.models import ModelSnapshot, ServedModel, last_update
from streamiter.service.observing.observations import Observations
from streamiter.topics import Headers, OutgoingBatch, ReadRequest, Topic, topic
from streamiter.values.helpers.clock import Clock
from streamiter.values.helpers.closing import closed_after


def run_demo(
    directory: Path,
    *,
    labels: LabelArrival,
    flights: int | None,
    mini_batch: int,
    fresh: bool,
    as_json: bool,
    clock: Clock,
) -> None:
    """Write the events if they do not exist, learn from them, and print a summary; show a page while it learns."""
    wanted = Contents(labels, flights)
    topics = DemoTopics.in_directory(directory)
    started_s = clock.monotonic_s()
    tell = partial(say, err=as_json)
    try:
        there, is_reused = _prepare(topics, wanted, fresh, tell, clock)
    except KeyboardInterrupt:
        tell("Stopped before the events were complete; nothing of them is kept.")
        return
    tell(
        f"Learning from {there.events:,} events: each flight is predicted when it departs, and learned when it is there"
    )
    progress = TrainingProgress(there.events)
    statistics = run_in_own_loop(train_flights(topics, wanted.labels, mini_batch, progress, tell))
    summary = run_in_own_loop(
        summarize(
            topics,
            wanted,
            progress,
            statistics,
            mini_batch=mini_batch,
            reused_events=is_reused,
            flights=there.flights,
            seconds=clock.monotonic_s() - started_s,
        )
    )
    if as_json:
        typer.echo(msgspec.json.encode(summary).decode())
    else:
        print_summary(summary)
    if statistics.state == "aborted":
        raise typer.Exit(INTERRUPTED)


def _prepare(
    topics: DemoTopics, wanted: Contents, fresh: bool, tell: Callable[[str], None], clock: Clock
) -> tuple[WrittenEvents, bool]:
    """Return the events in the topic, and whether an earlier run wrote them."""
    if fresh and run_in_own_loop(start_over(topics)):
        tell(f"Deleted the topics of earlier runs in {topics.database}")
    there = run_in_own_loop(found_events(topics))
    if there is not None and there.contents == wanted:
        tell(
            f"The {there.events:,} events of {there.flights:,} flights are in {topics.database} already, "
            "and are used again (--fresh writes new ones)"
        )
        return there, True
    topics.check_directory()  # Before reading the flights, which takes seconds.
    return _write(topics, wanted, tell, clock), False


def _write(topics: DemoTopics, wanted: Contents, tell: Callable[[str], None], clock: Clock) -> WrittenEvents:
    started_s = clock.monotonic_s()
    flights_file()  # Raises an error if the flights are not installed.
    count = "all" if wanted.flights is None else f"{wanted.flights:,}"
    tell(
        f"A model will learn which flights will be late. First, {count} flights that left New York in 2013 are written "
        f"as events to {topics.database}, once; then it learns from them, and publishes each version"
    )
    bar = (TextColumn("{task.description}"), BarColumn(24), TextColumn("{task.percentage:3.0f} %"), TimeElapsedColumn())
    console = Console(stderr=True)
    with Progress(*bar, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("Reading the flights", total=None)
        events = FlightEvents(wanted.labels, wanted.flights)
        written = WrittenEvents(wanted, len(events), events.flights)
        progress.update(task, description="Writing events in time order", total=written.events)
        run_in_own_loop(write_flights(topics, written, events, lambda count: progress.update(task, completed=count)))
    arrival = "" if wanted.labels == "immediate" else " (arrival: scheduled departure + delay there + time in the air)"
    tell(
        f"Wrote {written.flights:,} flights of 2013 as {written.events:,} events in time order{arrival} "
        f"to {topics.database} in {clock.monotonic_s() - started_s:.1f} s"
    )
    return written


def serve_flights(directory: Path, *, flights: int | None, rate: int) -> None:
    """Run a service that learns from the flights as if they happened now, until Ctrl-C."""
    DemoTopics.in_directory(directory).check_directory()
    if code := serve_demo(directory, flights, rate):
        raise typer.Exit(code)


_QUESTION_IN_WORDS: Final = "UA from EWR to ORD, a Friday in December at 18:00"

# The model is in a local file: it is ready at once, or something is wrong.
_READY_TIMEOUT_S: Final = 10.0


class Served(msgspec.Struct, frozen=True):
    """The answer of ServedModel."""

    question: str
    late: float
    generation: int
    version: int
    age_s: float


class TrainingCounts(msgspec.Struct, kw_only=True):
    """What a training has counted so far."""

    events: int = 0
    """The number of events."""
    predicted: int = 0
    """The number of predicted flights."""
    learned_from: int = 0
    """The number of flights that the model has learned from."""
    late: int = 0
    """The number of flights that were late."""
    updates: int = 0
    """The number of published updates."""
    reached: str = ""
    """The time of the last prediction in the data."""
    metrics: dict[str, float] = {}
    """The last report of the validation; empty before the first one."""


class DemoSummary(TrainingCounts, kw_only=True):
    """The results of a run."""

    state: JobState
    labels: str
    mini_batch: int
    reused_events: bool
    flights: int
    training_s: float
    events_per_s: float
    updates_per_s: float
    seconds: float
    file: str
    file_bytes: int
    model: str
    topic: str
    follow: str
    served: Served | None

    @property
    def always_on_time(self) -> float:
        """Return the accuracy of predicting that no flight is late."""
        return 1 - self.late / self.learned_from if self.learned_from else 1.0


async def summarize(
    topics: DemoTopics,
    contents: Contents,
    progress: TrainingProgress,
    statistics: JobStatistics,
    *,
    mini_batch: int,
    reused_events: bool,
    flights: int,
    seconds: float,
) -> DemoSummary:
    """Return the results of the run, with a prediction of the published model."""
    training_s = max(statistics.elapsed_s, 1e-9)
    return DemoSummary(
        **{name: getattr(progress, name) for name in TrainingCounts.__struct_fields__},
        state=statistics.state,
        labels=contents.labels,
        mini_batch=mini_batch,
        reused_events=reused_events,
        flights=flights,
        training_s=training_s,
        events_per_s=progress.events / training_s,
        updates_per_s=progress.updates / training_s,
        seconds=seconds,
        file=str(topics.database),
        file_bytes=_size_bytes(topics.database),
        model=MODEL,
        topic=topics.updates.url,
        follow=f"{program()} models tail {shlex.quote(topics.updates.url)} --model {MODEL} --follow",
        served=await _served(topics),
    )


async def _served(topics: DemoTopics) -> Served | None:
    if await last_update(topics.updates, MODEL) is None:
        return None
    async with ServedModel(topics.updates, MODEL) as model:
        await model.ready(timeout_s=_READY_TIMEOUT_S)
        answer = model.predict(DEMO_QUESTION)
    return Served(_QUESTION_IN_WORDS, answer.value, answer.generation, answer.version, answer.age_s)


def _size_bytes(database: Path) -> int:
    """Return the size of the file with its journal."""
    files = (database, database.with_name(f"{database.name}-wal"))
    return sum(file.stat().st_size for file in files if file.exists())


def program() -> str:
    """Return the command that runs this program from here, so that a printed command can be pasted."""
    called = Path(sys.argv[0])
    if called.name == "__main__.py":
        return f"{shlex.quote(sys.executable)} -m streamiter"
    found = shutil.which(called.name)
    if found is not None and Path(found).resolve() == called.resolve():
        return called.name
    return shlex.quote(str(called))


def print_summary(summary: DemoSummary) -> None:
    say(_headline(summary))
    for name, value, remark in _figures(summary):
        say(f"  {name:<18}{value:>9}  {remark}".rstrip(), hanging=31)
    if summary.served is not None:
        typer.echo()
        say(f"A prediction by ServedModel: {_answer(summary.served)}")
        say("Follow the updates, in another terminal while the demo runs again:")
        typer.echo(f"  {summary.follow}")


def _headline(summary: DemoSummary) -> str:
    speed = f"{summary.events:,} events in {summary.training_s:.1f} s, {summary.events_per_s:,.0f} events/s"
    if summary.state == "finished":
        return f"Trained on {speed}"
    where = f" at {summary.reached[:10]} in the data" if summary.reached else ""
    return f"{summary.state.capitalize()}{where}, after {speed}"


def _answer(served: Served) -> str:
    return f"{served.question}: {served.late:.0%} late (version {served.generation}.{served.version})"


def _figures(summary: DemoSummary) -> list[tuple[str, str, str]]:
    """Return the lines of the summary: name, value, remark."""
    when = "at once" if summary.labels == "immediate" else "when they had arrived"
    if summary.state == "finished" and summary.predicted > summary.learned_from:
        when += "; the others were cancelled or diverted"
    return [
        ("flights predicted", f"{summary.predicted:,}", "each before it was learned from"),
        ("learned from", f"{summary.learned_from:,}", when),
        ("model updates", f"{summary.updates:,}", f"{summary.updates_per_s:,.0f}/s, each published"),
        *_metrics(summary),
        (
            "file",
            _size(summary.file_bytes),
            f"{summary.file} (of all updates it keeps the last {UPDATES_BYTES >> 20} MiB)",
        ),
    ]


def _size(size_bytes: int) -> str:
    """Return a size in kB or MB.

    >>> _size(73_728), _size(126_000_000)
    ('74 kB', '126 MB')
    """
    return f"{size_bytes / 1e6:,.0f} MB" if size_bytes >= 1e6 else f"{size_bytes / 1e3:,.0f} kB"


def _metrics(summary: DemoSummary) -> list[tuple[str, str, str]]:
    remarks = {
        "auc": ("AUC", "of all predictions so far"),
        "loss": ("log loss", ""),
        "accuracy": ("accuracy", f"always “on time” has {summary.always_on_time:.4f}"),
    }
    metrics = summary.metrics
    return [(name, f"{metrics[metric]:.4f}", remark) for metric, (name, remark) in remarks.items() if metric in metrics]


DATABASE: Final = "streamiter.db"

# A header of the first event describes all events, so that another run can use them again.
_HEADER: Final = "streamiter_demo"

# The transactions of the demo; a killed run leaves one open, and the next run takes over its id.
_TRANSACTIONAL_ID: Final = "streamiter demo"
# Many times the time to write on a slow disk.
_WRITING_TIMEOUT_S: Final = 600.0


class Contents(msgspec.Struct, frozen=True):
    """The events that a run uses; ``flights`` None: all flights."""

    labels: LabelArrival
    flights: int | None


@dataclass(frozen=True)
class DemoTopics:
    """The topics of the demo, all in one file."""

    database: Path
    flights: Topic
    updates: Topic
    validation: Topic

    @classmethod
    def in_directory(cls, directory: Path) -> DemoTopics:
        """Return the topics in ``directory``, which may not exist yet."""
        database = directory / DATABASE
        url = f"sqlite:///{quote(str(database))}?topic="
        return cls(database, topic(f"{url}flights"), topic(f"{url}model-updates"), topic(f"{url}validation"))

    def check_directory(self) -> None:
        """Raise ``ConfigurationError`` if the directory cannot be created; do not create it."""
        directory = self.database.parent
        there = next(folder for folder in (directory, *directory.parents) if folder.exists())
        if not there.is_dir():
            raise ConfigurationError(f"--directory {directory}: it cannot be made: {there} is a file")

    async def create(self) -> None:
        """Create the directory, the file and the topics if they do not exist."""
        try:
            self.database.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigurationError(
                f"--directory {self.database.parent}: it cannot be made: {error.strerror}"
            ) from error
        await self.flights.create()
        await self.updates.create(settings={"retention_bytes": str(UPDATES_BYTES)})
        await self.validation.create()


class WrittenEvents(msgspec.Struct, frozen=True):
    """The events in the topic, and the content of their header."""

    contents: Contents
    events: int
    flights: int


async def start_over(topics: DemoTopics) -> bool:
    """Delete the topics of the demo if it has written events; events last, because they show that it has."""
    found = await found_events(topics)
    if found is not None:
        for each in (topics.updates, topics.validation, topics.flights):
            await _delete(each)
    return found is not None


async def write_flights(
    topics: DemoTopics, written: WrittenEvents, events: FlightEvents, on_written: Callable[[int], None]
) -> None:
    """Write all events or none, and delete other events of the demo.

    ``on_written(count)`` is called with the number of events written so far.
    """
    if await found_events(topics) is not None:
        await _delete(topics.flights)
    await topics.create()
    header = msgspec.json.encode(written)
    transactions = await topics.flights.open_transactions(_TRANSACTIONAL_ID, timeout_s=_WRITING_TIMEOUT_S)
    async with closed_after(transactions.close):
        await transactions.begin()
        count = 0
        for batch in events.batches():
            await transactions.write(topics.flights, batch if count else _with_header(batch, header))
            count += len(batch)
            on_written(count)
        await transactions.commit()


def _with_header(batch: OutgoingBatch, header: bytes) -> OutgoingBatch:
    headers = [((_HEADER, header),), *[()] * (len(batch) - 1)]
    return OutgoingBatch(batch.values, headers=headers, timestamps_ms=batch.timestamps_ms, partition=batch.partition)


async def _delete(one: Topic) -> None:
    try:
        await one.delete()
    except TopicNotFound:
        return


async def found_events(topics: DemoTopics) -> WrittenEvents | None:
    """Return the events in the topic; None if there are none.

    Raises ``ConfigurationError`` if the topic holds records that the demo has not written.
    """
    if not topics.database.exists():
        return None
    try:
        description = await topics.flights.describe()
    except TopicNotFound:
        return None
    if not description.records:
        return None
    header = dict(await _first_headers(topics.flights)).get(_HEADER)
    if header is None:
        raise _not_ours(topics.flights, "records without its mark")
    found = msgspec.json.decode(header, type=WrittenEvents)
    if found.events != description.records:
        raise _not_ours(topics.flights, f"{description.records:,} records instead of its {found.events:,}")
    return found


async def _first_headers(flights: Topic) -> Headers:
    reader = await flights.open_reader(ReadRequest(start="earliest", stop="latest", max_records=1))
    async with closed_after(reader.close):
        batch = await reader.read()
        return () if batch is None else batch.headers[0]


def _not_ours(flights: Topic, given: str) -> ConfigurationError:
    return ConfigurationError(
        f"{flights.url}: expected a topic that the demo has written, given {given}; use another --directory"
    )


# The number of labels between two reports of the validation: about two days of flights.
_REPORT_EVERY: Final = 2_000


class TrainingProgress(TrainingCounts):
    """The progress of the training, counted by the functions of the flow."""

    events_in_all: int
    """The number of events in the topic."""

    def read(self, events: Sequence[dict[str, Any]]) -> Sequence[dict[str, Any]]:
        """Count events; return them."""
        departures = [event for event in events if event["event"] == "departure"]
        if departures:
            self.predicted += len(departures)
            self.reached = departures[-1]["time"]
        self.late += sum([is_late_event(event) for event in events if "delay" in event])
        self.events += len(events)
        return events

    def published(self, model: ModelSnapshot) -> ModelSnapshot:
        """Count an update of the model; return it."""
        self.updates += 1
        self.learned_from = model.records or 0
        return model

    def render(self, statistics: JobStatistics) -> RenderableType:
        """Return a bar and the figures, at least 40 columns wide."""
        seconds = max(statistics.elapsed_s, 1e-9)
        bar = Table.grid(padding=(0, 1))
        bar.add_row(
            ProgressBar(self.events_in_all, self.events, width=24),
            Text(f"{self.events / self.events_in_all:4.0%}"),
            Text(_date_of(self.reached), style="bold"),
        )
        figures = Table.grid(padding=(0, 2))
        figures.add_row("events", f"{self.events:,}", f"{self.events / seconds:,.0f}/s")
        figures.add_row("updates", f"{self.updates:,}", f"{self.updates / seconds:,.0f}/s")
        figures.add_row("", "all", "last 10,000", style="dim")
        for name, metric in (("AUC", "auc"), ("log loss", "loss"), ("accuracy", "accuracy")):
            figures.add_row(name, _number(self.metrics, metric), _number(self.metrics, f"window_{metric}"))
        for column in figures.columns[1:]:
            column.justify = "right"
        return Group(Text(f"Training, {seconds:.0f} s"), bar, figures)


def _date_of(time: str) -> str:
    return f"{date.fromisoformat(time[:10]):%d %b %Y}" if time else ""


def _number(metrics: dict[str, float], name: str) -> str:
    return f"{metrics[name]:.4f}" if name in metrics else "–"


async def train_flights(
    topics: DemoTopics, labels: LabelArrival, mini_batch: int, progress: TrainingProgress, tell: Callable[[str], None]
) -> JobStatistics:
    """Train on the events in the topic until its current end or Ctrl-C, with a page, and live figures on a terminal."""
    await topics.create()
    async with observed(topics.updates, tell) as observations:
        job = await _training_flow(topics, labels, mini_batch, progress, observations).start()
        observations.job = job
        observations.enter("running")
        with stopping_on_signals(job.stop_on_signal) as stops:
            async with watched(job, progress.render, stops=stops):
                statistics = await job.wait()
        observations.enter(statistics.state)  # Pages that are open end now.
        return statistics


def _training_flow(
    topics: DemoTopics, labels: LabelArrival, mini_batch: int, progress: TrainingProgress, observations: Observations
) -> Flow:
    flow = Flow("demo")
    events = flow.source(topics.flights, stop="latest").map_batch(progress.read)
    is_immediate = labels == "immediate"
    training = train_online(
        events,
        label=is_late_event if is_immediate else None,
        features=FIELDS if is_immediate else None,
        labels=None if is_immediate else delayed_labels(),
        mini_batch=mini_batch,
        # Each version is made of the same events in each run.
        mode="synchronous",
        report_every=_REPORT_EVERY,
    )

    def validated(metrics: dict[str, float]) -> dict[str, object]:
        progress.metrics = metrics
        observations.validated(metrics)
        return {"time": progress.reached, **metrics}

    training.models.map(progress.published).publish_model(topics.updates, model=MODEL, format="safetensors")
    training.validation.map(validated).sink(topics.validation)
    return flow
