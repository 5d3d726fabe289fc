"""Learn a linear regression online from Kafka to Kafka, compared with hand-written loops on two clients and numpy."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import orjson

from benchmarks import kafka
from benchmarks.events import FEATURES, TRUE_WEIGHTS, Event, PackedEvent, make_events, packed_features
from benchmarks.measuring import Contender, Figure, Series, Stopwatch, Target, Trial, alternate, run_to_end
from benchmarks.session import Session
from streamiter import (
    Columns,
    Flow,
    IterationBodyResult,
    IterationListener,
    Json,
    Operator,
    Stream,
    connect,
    epochs_every,
    iterate_unbounded_streams,
)
from streamiter.learn import SGD, Examples, LinearRegression, train_online
from streamiter.models import LinearPredictor
from streamiter.topics import JsonColumns
from streamiter.topics.formats import Typed
from streamiter.topics.topic import Topic

__all__ = ["online_learning", "online_learning_for_long"]

PARTITIONS = 2
MINI_BATCH = 1_000
LEARNING_RATE = 0.2
EVENTS = "events/s"
BY_HAND = "by hand: aiokafka, orjson, numpy"
BY_HAND_WITH_SCHEMA = "by hand: msgspec schema, rare garbage collections"
BY_HAND_AT_BEST = "by hand: confluent-kafka, msgspec schema, rare garbage collections"
WITH_SGD = "train_online, JsonColumns"
READY_MADE = "train_online, JsonColumns, ready-made learner"
# The default of librdkafka. All contenders send their updates in as few requests.
LINGER_S = 0.005

Floats = npt.NDArray[np.float64]
Rows = Callable[[Any], tuple[Floats, Floats]]
"""A function from a mini-batch to its features and targets."""


@dataclass(frozen=True)
class Learned:
    """The result of a contender, which must be the same for all contenders."""

    updates: int
    weights: Floats

    def agrees_with(self, other: Learned) -> bool:
        """Return whether both have as many updates, and weights close to each other and to the true weights.

        The weights are not equal to the last bit, because the partitions interleave differently in each run.
        """
        return (
            self.updates == other.updates
            and np.allclose(self.weights, other.weights, atol=0.04)
            and np.allclose(self.weights, TRUE_WEIGHTS, atol=0.05)
        )


def online_learning(session: Session) -> Iterator[Figure]:
    """A model learns 1 M events of 100 bytes from two partitions, 1,000 at a time, and writes each update to Kafka."""
    contenders = _contenders(session, session.size(1_000_000, 20_000))
    series, figures = _compared(session, contenders)
    yield from figures
    for name, other, bound in (("flow, Json", BY_HAND, 0.9), ("flow, Typed", BY_HAND_WITH_SCHEMA, 1.0)):
        yield series.figure(name, EVENTS, compared_with=other, target=Target("ratio", at_least=bound))


def online_learning_for_long(session: Session) -> Iterator[Figure]:
    """The same with 4 M events: ``train_online``, and the best loop by hand."""
    contenders = _contenders(session, session.size(4_000_000, 40_000))
    _, figures = _compared(session, {name: contenders[name] for name in (_best(), WITH_SGD, READY_MADE)})
    yield from figures


def _contenders(session: Session, count: int) -> dict[str, Contender]:
    """Fill a topic with events, and return the ways to learn them."""
    events = kafka.new_topic(session, "events", partitions=PARTITIONS)
    kafka.fill(session, events, make_events(count), partitions=PARTITIONS)

    def by_hand(decode: Callable[[bytes], Any], rows: Rows) -> Contender:
        return lambda: _by_hand(session, events, count, decode, rows)

    def flow(learn: Learn, decoder: Any, rows: Rows) -> Contender:
        return lambda: _flow(session, events, count, learn, decoder, rows)

    columns = JsonColumns({"id": "int64", "x": ("float64", FEATURES), "y": "float64"})
    contenders = {
        BY_HAND: by_hand(orjson.loads, rows_of_dicts),
        BY_HAND_WITH_SCHEMA: kafka.with_rare_collections(by_hand(msgspec.json.Decoder(Event).decode, rows_of_structs)),
        "flow, Json": flow(learn_asynchronously, Json(), rows_of_dicts),
        "flow, JsonColumns": flow(learn_asynchronously, columns, rows_of_columns),
        "flow, Typed": flow(learn_asynchronously, Typed(Event), rows_of_structs),
        "flow, JsonColumns, synchronous epochs": flow(learn_in_epochs, columns, rows_of_columns),
        WITH_SGD: flow(learn_online, columns, rows_of_columns),
        READY_MADE: lambda: _ready_made(session, events, count, columns),
    }
    if kafka.has_confluent():
        contenders[BY_HAND_AT_BEST] = kafka.with_rare_collections(lambda: _by_hand_at_best(session, events, count))
    return contenders


def _best() -> str:
    """Return the name of the best code by hand that can run here."""
    return BY_HAND_AT_BEST if kafka.has_confluent() else BY_HAND_WITH_SCHEMA


def _compared(session: Session, contenders: Mapping[str, Contender]) -> tuple[Series, list[Figure]]:
    """Run the contenders in turn, and compare each with the best code by hand."""
    series = alternate(contenders, repeat=session.repeat, agree=Learned.agrees_with)
    best = _best()
    targets = {
        "flow, JsonColumns": Target("ratio", at_least=1.5),
        WITH_SGD: Target("ratio", at_least=1.5),
        READY_MADE: Target("ratio", at_least=1.1),
    }
    return series, [
        series.figure(name, EVENTS, compared_with="" if name == best else best, target=targets.get(name))
        for name in contenders
    ]


# -- by hand ------------------------------------------------------------------------------------------------


def _by_hand(session: Session, events: Topic, count: int, decode: Callable[[bytes], Any], rows: Rows) -> Trial:
    updates = kafka.new_topic(session, "updates")

    async def learn() -> Floats:
        weights = np.zeros(FEATURES)
        version, seen, pending = 0, 0, []
        async with (
            kafka.consumer(session.kafka, events.name, partitions=PARTITIONS) as consumer,
            kafka.producer(session.kafka, linger_s=LINGER_S) as producer,
        ):
            while seen < count:
                for records in (await consumer.getmany(timeout_ms=1000)).values():
                    seen += len(records)
                    pending += [decode(record.value) for record in records]
                    full = len(pending) - len(pending) % MINI_BATCH
                    for start in range(0, full, MINI_BATCH):
                        features, targets = rows(pending[start : start + MINI_BATCH])
                        weights = weights - LEARNING_RATE * gradient(features, targets, weights)
                        version += 1
                        update = {"version": version, "records": version * MINI_BATCH, "weights": weights}
                        value = orjson.dumps(update, option=orjson.OPT_SERIALIZE_NUMPY)
                        await producer.send(updates.name, value, key=b"regression")
                    del pending[:full]
            await producer.flush()
        return weights

    with Stopwatch() as watch:
        weights = kafka.run(learn())
    return Trial(watch.rates(count, "events"), Learned(kafka.count_records(session, updates), weights))


def _by_hand_at_best(session: Session, events: Topic, count: int) -> Trial:
    updates = kafka.new_topic(session, "updates")
    decode = msgspec.json.Decoder(PackedEvent).decode
    weights = np.zeros(FEATURES)
    version, seen, pending = 0, 0, []
    with (
        Stopwatch() as watch,
        kafka.confluent_clients(session.kafka, events, partitions=PARTITIONS, linger_s=LINGER_S) as (
            consumer,
            producer,
        ),
    ):
        while seen < count:
            messages = consumer.consume(kafka.CONSUMED_TOGETHER, timeout=1.0)
            seen += len(messages)
            # The value of an error is its text, which is not JSON.
            pending += [decode(message.value()) for message in messages]
            full = len(pending) - len(pending) % MINI_BATCH
            for start in range(0, full, MINI_BATCH):
                mini_batch = pending[start : start + MINI_BATCH]
                features = packed_features(mini_batch)
                targets = np.array([event.y for event in mini_batch])
                weights = weights - LEARNING_RATE * gradient(features, targets, weights)
                version += 1
                update = {"version": version, "records": version * MINI_BATCH, "weights": weights}
                value = orjson.dumps(update, option=orjson.OPT_SERIALIZE_NUMPY)
                producer.produce(updates.name, value, b"regression")
            del pending[:full]
            producer.poll(0)
    return Trial(watch.rates(count, "events"), Learned(kafka.count_records(session, updates), weights))


def gradient(features: Floats, targets: Floats, weights: Floats) -> Floats:
    """Return the gradient of half the mean squared error."""
    slope: Floats = features.T @ (features @ weights - targets) / len(targets)
    return slope


def rows_of_dicts(mini_batch: list[dict[str, Any]]) -> tuple[Floats, Floats]:
    """Return the features and targets of dicts, which JSON gives without a schema."""
    return np.array([event["x"] for event in mini_batch]), np.array([event["y"] for event in mini_batch])


def rows_of_structs(mini_batch: list[Event]) -> tuple[Floats, Floats]:
    """Return the features and targets of typed records."""
    return np.array([event.x for event in mini_batch]), np.array([event.y for event in mini_batch])


def rows_of_columns(mini_batch: Columns) -> tuple[Floats, Floats]:
    """Return the features and targets of columns, which are arrays already."""
    return mini_batch["x"], mini_batch["y"]


# -- as flows -----------------------------------------------------------------------------------------------

Learn = Callable[[Stream, Rows], Stream]
"""A function from the stream of events to the stream of models."""


def _flow(session: Session, events: Topic, count: int, learn: Learn, decoder: Any, rows: Rows) -> Trial:
    updates = kafka.new_topic(session, "updates", linger_s=LINGER_S)
    flow = Flow("online learning")
    models = learn(flow.source(events, decode=decoder, stop="latest"), rows)
    last = _Last()
    models.process(lambda: last)
    models.publish_model(updates, model="regression")
    with Stopwatch() as watch:
        statistics = run_to_end(flow)
    read = next(step for task in statistics.tasks for step in task.steps if step.step == events.name)
    assert read.counts.records_in == count, f"expected {count} events to be read, given {read.counts.records_in}"
    return Trial(watch.rates(count, "events"), Learned(kafka.count_records(session, updates), last.weights))


def _ready_made(session: Session, events: Topic, count: int, decoder: Any) -> Trial:
    """Learn with the linear model that ``train_online`` makes, row by row, with a version ten times a second."""
    updates = kafka.new_topic(session, "updates", linger_s=LINGER_S)
    flow = Flow("online learning")
    models = train_online(flow.source(events, decode=decoder, stop="latest"), label="y", shapes=False).models
    last = _Last()
    models.process(lambda: last)
    models.publish_model(updates, model="regression")
    with Stopwatch() as watch:
        run_to_end(flow)
    assert last.model.records == count, f"expected {count} events to be learned, given {last.model.records}"
    units = Columns({"id": np.zeros(FEATURES + 1, np.int64), "x": np.eye(FEATURES + 1, FEATURES)})
    predictions = LinearPredictor(last.model.parameters)(units)
    return Trial(watch.rates(count, "events"), Learned(count // MINI_BATCH, predictions[:-1] - predictions[-1]))


class _Last(Operator):
    """Keeps the last model."""

    model: Any = None

    @property
    def weights(self) -> Floats:
        """Its weights."""
        weights: Floats = self.model if isinstance(self.model, np.ndarray) else self.model.parameters["weights"]
        return weights

    def process(self, model: Any, out: Any) -> None:
        self.model = model


class Train(Operator):
    """Learns from mini-batches; its model returns through the loop, and a newer model replaces an older one."""

    def __init__(self, rows: Rows) -> None:
        self._rows = rows
        self.version = 0
        self.weights: Floats = np.zeros(FEATURES)

    def process_model(self, model: tuple[int, Floats], out: Any) -> None:
        version, weights = model
        if version > self.version:
            self.version, self.weights = version, weights

    def process_examples(self, mini_batch: Any, out: Any) -> None:
        features, targets = self._rows(mini_batch)
        self.weights = self.weights - LEARNING_RATE * gradient(features, targets, self.weights)
        self.version += 1
        out.emit((self.version, self.weights))


def learn_asynchronously(events: Stream, rows: Rows, *, mini_batch: int = MINI_BATCH) -> Stream:
    """Learn in an unbounded iteration around one operator, whose model is fed back."""
    start = events.flow.from_items([(0, np.zeros(FEATURES))])

    def body(variables: list[Stream], data: list[Stream]) -> IterationBodyResult:
        model, examples = variables[0].broadcast(), data[0].batch(mini_batch)
        models = connect(model=model, examples=examples).process(lambda: Train(rows), name="train")
        return IterationBodyResult([models], [models])

    [models] = iterate_unbounded_streams([start], [events], body)
    return models.map(lambda model: model[1])


class TrainInEpochs(Operator, IterationListener):
    """Learns from one mini-batch in an epoch, and makes the step when the epoch is complete."""

    epochs_in_order = True

    def __init__(self, rows: Rows) -> None:
        self._rows = rows
        self.weights: Floats = np.zeros(FEATURES)
        self._step: Floats | None = None

    def process_model(self, weights: Floats, out: Any) -> None:
        self.weights = weights

    def process_examples(self, mini_batch: Any, out: Any) -> None:
        features, targets = self._rows(mini_batch)
        self._step = LEARNING_RATE * gradient(features, targets, self.weights)

    def on_epoch_watermark_incremented(self, epoch_watermark: int, context: Any, out: Any) -> None:
        if self._step is not None:
            self.weights, self._step = self.weights - self._step, None
            out.emit(self.weights)


def learn_in_epochs(events: Stream, rows: Rows) -> Stream:
    """Learn with an epoch for each mini-batch, with callbacks and watermarks and without staleness."""
    start = events.flow.from_items([np.zeros(FEATURES)])

    def body(variables: list[Stream], data: list[Stream]) -> IterationBodyResult:
        model, examples = variables[0].broadcast(), data[0].batch(MINI_BATCH)
        models = connect(model=model, examples=examples).process(lambda: TrainInEpochs(rows), name="train")
        return IterationBodyResult([models], [models])

    [models] = iterate_unbounded_streams([start], [epochs_every(events, records=MINI_BATCH)], body)
    return models


def learn_online(events: Stream, rows: Rows) -> Stream:
    """Learn with ``train_online``, which also evaluates each example before it learns it."""
    return train_online(
        events,
        lambda: LinearRegression(FEATURES, optimizer=SGD(LEARNING_RATE), intercept=False),
        extract=lambda mini_batch: Examples(*rows(mini_batch)),
        mini_batch=MINI_BATCH,
    ).models
