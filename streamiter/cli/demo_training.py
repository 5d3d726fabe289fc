"""The flights in the demo's topic: written once, and recognised again."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from datetime import date
from pathlib import Path
from typing import Any, Final
from urllib.parse import quote

import msgspec
import numpy as np
from rich.console import Group, RenderableType
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from streamiter.cli.figures import watched
from streamiter.errors import ConfigurationError, TopicNotFound
from streamiter.flow.flow import Flow
from streamiter.learn import Examples, SparseRows, train_online
from streamiter.learn.flights import (
    FlightEvents,
    Labels,
    delayed_labels,
    event_features,
    event_model,
    is_late_event,
    labelled_examples,
    learning_rate,
)
from streamiter.models import ModelSnapshot
from streamiter.runtime.running import stopping_on_signals
from streamiter.runtime.statistics import JobStatistics
from streamiter.topics import Headers, OutgoingBatch, ReadRequest, Topic, topic

__all__ = [
    "MODEL",
    "UPDATES_BYTES",
    "Contents",
    "DemoTopics",
    "TrainingProgress",
    "flights_in_topic",
    "start_over",
    "train",
    "write_flights",
]


DATABASE: Final = "streamiter.db"

# A header of the first record of the events tells what they are, so that they can be used again.
_HEADER: Final = "streamiter_demo"

# The demo's own transactions; a run that was killed leaves one open, and the next takes its id over.
_TRANSACTIONAL_ID: Final = "streamiter demo"
# Many times what writing takes on a slow disk.
_WRITING_TIMEOUT_S: Final = 600.0

# What is kept of the updates: about 15,000, more than two runs of the demo with mini-batches of 100. With smaller
# ones there are up to 327,346, over a gigabyte.
UPDATES_BYTES: Final = 64 << 20


class Contents(msgspec.Struct, frozen=True):
    """What events were asked for: ``flights`` None is all."""

    labels: Labels
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
        """Those in ``directory``, which need not be there yet."""
        database = directory / DATABASE
        url = f"sqlite:///{quote(str(database))}?topic="
        return cls(database, topic(f"{url}flights"), topic(f"{url}model-updates"), topic(f"{url}validation"))

    def check_directory(self) -> None:
        """Raise ``ConfigurationError`` where the directory cannot be, without making it."""
        directory = self.database.parent
        there = next(folder for folder in (directory, *directory.parents) if folder.exists())
        if not there.is_dir():
            raise ConfigurationError(f"--directory {directory}: it cannot be made: {there} is a file")

    async def create(self) -> None:
        """Make the directory, the file and the topics, as far as they are not there."""
        try:
            self.database.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigurationError(
                f"--directory {self.database.parent}: it cannot be made: {error.strerror}"
            ) from error
        await self.flights.create()
        await self.updates.create(settings={"retention_bytes": str(UPDATES_BYTES)})
        await self.validation.create()


class _EventsHeader(msgspec.Struct, frozen=True):
    """What the header says: what was asked for, and how many events and flights there are."""

    contents: Contents
    events: int
    flights: int


async def flights_in_topic(topics: DemoTopics, wanted: Contents) -> tuple[int, int] | None:
    """How many events and flights there are, or None where other ones (or none) are there, to be written anew.

    Raises ``ConfigurationError`` where the topic holds what the demo has not written.
    """
    found = await _found(topics)
    return (found.events, found.flights) if found is not None and found.contents == wanted else None


async def start_over(topics: DemoTopics) -> bool:
    """Delete the demo's topics, if it has written there before; the events last, as they are what tells."""
    found = await _found(topics)
    if found is not None:
        for each in (topics.updates, topics.validation, topics.flights):
            await _delete(each)
    return found is not None


async def write_flights(
    topics: DemoTopics, wanted: Contents, events: FlightEvents, on_written: Callable[[int], None]
) -> None:
    """Write the events, all or none, in place of other ones of the demo.

    ``on_written(count)`` is told how many so far.
    """
    if await _found(topics) is not None:
        await _delete(topics.flights)
    await topics.create()
    header = msgspec.json.encode(_EventsHeader(wanted, len(events), events.flights))
    transactions = await topics.flights.open_transactions(_TRANSACTIONAL_ID, timeout_s=_WRITING_TIMEOUT_S)
    try:
        await transactions.begin()
        written = 0
        for batch in events.batches():
            await transactions.write(topics.flights, batch if written else _with_header(batch, header))
            written += len(batch)
            on_written(written)
        await transactions.commit()
    finally:
        await transactions.close()


def _with_header(batch: OutgoingBatch, header: bytes) -> OutgoingBatch:
    headers = [((_HEADER, header),), *[()] * (len(batch) - 1)]
    return OutgoingBatch(
        batch.values, headers=headers, timestamps_ms=batch.timestamps_ms, partition=batch.partition
    )


async def _delete(one: Topic) -> None:
    try:
        await one.delete()
    except TopicNotFound:
        return


async def _found(topics: DemoTopics) -> _EventsHeader | None:
    """What the demo has written there; None for nothing at all."""
    if not topics.database.exists():
        return None
    try:
        description = await topics.flights.describe()
    except TopicNotFound:
        return None
    records = sum(end - start for start, end in description.offsets.values())
    if not records:
        return None
    header = dict(await _first_headers(topics.flights)).get(_HEADER)
    if header is None:
        raise _not_ours(topics.flights, "records without its mark")
    found = msgspec.json.decode(header, type=_EventsHeader)
    if found.events != records:
        raise _not_ours(topics.flights, f"{records:,} records instead of its {found.events:,}")
    return found


async def _first_headers(flights: Topic) -> Headers:
    reader = await flights.open_reader(ReadRequest(start="earliest", stop="latest", max_records=1))
    try:
        batch = await reader.read()
        return () if batch is None else batch.headers[0]
    finally:
        await reader.close()


def _not_ours(flights: Topic, given: str) -> ConfigurationError:
    return ConfigurationError(
        f"{flights.url}: expected a topic that the demo has written, given {given}; use another --directory"
    )


MODEL: Final = "late-flights"

# Labels between two reports of how good the predictions are: about two days of flights.
_REPORT_EVERY: Final = 2_000


@dataclass
class TrainingProgress:
    """What has been reached, counted by the learner itself.

    The demo's training: a flow from the events to the published model, and what can be seen of it on the way.
    """

    events_in_all: int
    events: int = 0
    predicted: int = 0
    learned_from: int = 0
    late: int = 0
    updates: int = 0
    reached: str = ""
    """The time in the data of the last prediction."""
    metrics: dict[str, float] = field(default_factory=dict)

    def asked(self, questions: Sequence[dict[str, Any]]) -> None:
        """Predictions have been made for these events."""
        self.predicted += len(questions)
        self.events += len(questions)
        self.reached = questions[-1]["time"]

    def answered(self, late: float) -> None:
        """A label has come."""
        self.events += 1
        self.late += late > 0

    def published(self, model: ModelSnapshot) -> None:
        """A model is on its way to the topic."""
        self.updates += 1
        self.learned_from = model.records or 0

    def render(self, statistics: JobStatistics) -> RenderableType:
        """A bar and the figures, in a width of 40 and more."""
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


async def train(
    topics: DemoTopics, labels: Labels, mini_batch: int, progress: TrainingProgress
) -> JobStatistics:
    """Train on the events in the topic, until its present end or Ctrl-C; with live figures on a terminal."""
    await topics.create()
    job = await _training_flow(topics, labels, mini_batch, progress).start()
    with stopping_on_signals(job) as stops:
        async with watched(job, progress.render, stops=stops):
            return await job.wait()


def _training_flow(topics: DemoTopics, labels: Labels, mini_batch: int, progress: TrainingProgress) -> Flow:
    flow = Flow("demo")
    features = event_features()
    events = flow.source(topics.flights, stop="latest")

    def asked(questions: Sequence[dict[str, Any]]) -> SparseRows:
        progress.asked(questions)
        return features.rows(questions)

    def answered(answer: dict[str, Any]) -> float:
        late = is_late_event(answer)
        progress.answered(late)
        return late

    def examples(mini_batch: Sequence[dict[str, Any]]) -> Examples:
        progress.asked(mini_batch)
        examples = labelled_examples(mini_batch, features)
        progress.late += int(np.sum(examples.targets))
        return examples

    rate = learning_rate(mini_batch, labels)
    delayed = replace(delayed_labels(features), features=asked, target_of=answered)
    training = train_online(
        events,
        lambda: event_model(rate),
        extract=examples if labels == "immediate" else None,
        labels=delayed if labels == "delayed" else None,
        mini_batch=mini_batch,
        # One worker in one process has nothing to gain from working ahead with an older model.
        mode="synchronous",
        report_every=_REPORT_EVERY,
    )

    def published(model: ModelSnapshot) -> ModelSnapshot:
        progress.published(model)
        return _in_single_precision(model)

    def validated(metrics: dict[str, float]) -> dict[str, Any]:
        progress.metrics = metrics
        return {"time": progress.reached, **metrics}

    training.models.map(published).publish_model(topics.updates, model=MODEL, format="safetensors")
    training.validation.map(validated).sink(topics.validation)
    return flow


def _in_single_precision(model: ModelSnapshot) -> ModelSnapshot:
    """Half the bytes; predictions change in the seventh digit."""
    parameters = model.parameters | {"weights": model.parameters["weights"].astype(np.float32)}
    return msgspec.structs.replace(model, parameters=parameters)
