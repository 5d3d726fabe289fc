"""The training of the demo: the topics of flights, and the flow that learns from them and publishes a model.

The events are written once; their first record has a header by which a later run recognizes them.
"""

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

DATABASE: Final = "streamiter.db"

# A header of the first event describes all events, so that another run can use them again.
_HEADER: Final = "streamiter_demo"

# The transactions of the demo; a killed run leaves one open, and the next run takes over its id.
_TRANSACTIONAL_ID: Final = "streamiter demo"
# Many times the time to write on a slow disk.
_WRITING_TIMEOUT_S: Final = 600.0

# The size of the kept updates: about 15,000, more than two runs of the demo with mini-batches of 100. Smaller
# mini-batches make up to 327,346 updates, over a gigabyte.
UPDATES_BYTES: Final = 64 << 20


class Contents(msgspec.Struct, frozen=True):
    """The events that a run uses; ``flights`` None: all flights."""

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


class _EventsHeader(msgspec.Struct, frozen=True):
    """The content of the header: the wanted events, and the number of events and flights."""

    contents: Contents
    events: int
    flights: int


async def flights_in_topic(topics: DemoTopics, wanted: Contents) -> tuple[int, int] | None:
    """Return the number of events and flights in the topic; None if it has no events or other ones.

    Raises ``ConfigurationError`` if the topic holds records that the demo has not written.
    """
    found = await _found(topics)
    return (found.events, found.flights) if found is not None and found.contents == wanted else None


async def start_over(topics: DemoTopics) -> bool:
    """Delete the topics of the demo if it has written events; events last, because they show that it has."""
    found = await _found(topics)
    if found is not None:
        for each in (topics.updates, topics.validation, topics.flights):
            await _delete(each)
    return found is not None


async def write_flights(
    topics: DemoTopics, wanted: Contents, events: FlightEvents, on_written: Callable[[int], None]
) -> None:
    """Write all events or none, and delete other events of the demo.

    ``on_written(count)`` is called with the number of events written so far.
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
    """Return the header of the events in the topic; None if there are none."""
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

# The number of labels between two reports of the validation: about two days of flights.
_REPORT_EVERY: Final = 2_000


@dataclass
class TrainingProgress:
    """The progress of the training, counted by the functions of the flow."""

    events_in_all: int
    """The number of events in the topic."""
    events: int = 0
    """The number of events so far."""
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
    metrics: dict[str, float] = field(default_factory=dict)
    """The last report of the validation."""

    def asked(self, questions: Sequence[dict[str, Any]]) -> None:
        """Count the events of predictions."""
        self.predicted += len(questions)
        self.events += len(questions)
        self.reached = questions[-1]["time"]

    def answered(self, late: float) -> None:
        """Count a label."""
        self.events += 1
        self.late += late > 0

    def published(self, model: ModelSnapshot) -> None:
        """Count an update of the model."""
        self.updates += 1
        self.learned_from = model.records or 0

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


async def train(
    topics: DemoTopics, labels: Labels, mini_batch: int, progress: TrainingProgress
) -> JobStatistics:
    """Train on the events in the topic until its current end or Ctrl-C, with live figures on a terminal."""
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
        # A single worker does not gain from working ahead with an older model.
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
    """Return the model in half the bytes; predictions change in the seventh digit."""
    parameters = model.parameters | {"weights": model.parameters["weights"].astype(np.float32)}
    return msgspec.structs.replace(model, parameters=parameters)
