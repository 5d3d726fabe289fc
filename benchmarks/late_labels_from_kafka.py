"""Learn from the flights of the demo in Kafka, whose labels come hours later: ``train_online``, and loops by hand."""

from __future__ import annotations

import heapq
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from importlib.util import find_spec
from operator import itemgetter
from pathlib import Path
from typing import Any, Final, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import orjson

from benchmarks import kafka
from benchmarks.measuring import Contender, Figure, Stopwatch, Target, Trial, alternate, run_to_end
from benchmarks.session import Session
from streamiter import Flow
from streamiter.errors import ConfigurationError
from streamiter.flow.stream import Stream
from streamiter.learn import OnlineTraining, train_online
from streamiter.learn.flights import FIELDS, FlightEvents, delayed_labels, is_late_event
from streamiter.learn.losses import PROBABILITY_FLOOR
from streamiter.service import read_settings
from streamiter.service.learning import ServiceLearning, decoder_for
from streamiter.service.settings.tables import ServiceSettings
from streamiter.topics import Decoder, Json, JsonColumns, OutgoingBatch
from streamiter.topics.topic import Topic

__all__ = ["late_labels_from_kafka"]

Floats = npt.NDArray[np.float64]
Truths = npt.NDArray[np.bool_]
Event = dict[str, Any]

EVENTS: Final = "events/s"
LOSS: Final = "log loss"
DICTS: Final = "train_online, dicts"
COLUMNS: Final = "train_online, columns"
SERVICE: Final = "the service's training"
SHAPES: Final = "train_online, dicts, with shapes"
RIVER: Final = "by hand: confluent-kafka, orjson, river"
VW: Final = "by hand: confluent-kafka, orjson, Vowpal Wabbit"
SHARE: Final = "by hand: confluent-kafka, orjson, the share of late flights alone"

# All flights of the year, as in the demo: with fewer the tenth of a second that a flow takes to start would count.
_FLIGHTS: Final = 336_776
_TIMES_RIVER: Final = 15.0
# As in the service of the demo. All labels come within this time, or never.
_WITHIN_H: Final = 36
_WITHIN_MS: Final = _WITHIN_H * 3_600_000
_VERSION_EVERY_S: Final = 1.0
_TEXTS: Final = ("carrier", "origin", "dest")
_NUMBERS: Final = tuple(name for name in FIELDS if name not in _TEXTS)


class Settled(NamedTuple):
    """The labels in the order in which they were learned, and the probability of True that each question got."""

    labels: Truths
    predictions: Floats

    def agrees_with(self, other: Settled) -> bool:
        """Return whether both learned the same labels in the same order, and none is far worse, the share included."""
        return np.array_equal(self.labels, other.labels) and abs(self.loss - other.loss) < 0.1

    @property
    def loss(self) -> float:
        """The mean log loss."""
        right = np.where(self.labels, self.predictions, 1.0 - self.predictions)
        return -float(np.log(np.clip(right, PROBABILITY_FLOOR, 1.0)).mean())


def late_labels_from_kafka(session: Session) -> Iterator[Figure]:
    """A model learns from 200,000 departures of the demo in Kafka, and from their arrivals, which are their answers."""
    try:
        events = FlightEvents("delayed", session.size(_FLIGHTS, 5_000))
    except ConfigurationError as error:
        _say(f"left out: {error}")
        return
    flights = _written(session, "flights", events.batches())
    whole = _written(session, "whole-flights", _with_all_fields(events.batches()))
    count, labels, within = len(events), replace(delayed_labels(), within_s=_WITHIN_MS / 1_000), f"{_WITHIN_H}h"
    of_columns = replace(labels, is_answer=itemgetter("answer"), target_of=itemgetter("late"))
    # One decoder for all rounds: it decodes its first 100,000 records without compiled code.
    columns = JsonColumns(
        {"flight": "str", "answer": "bool", "late": "bool"}
        | {name: "str" if name in _TEXTS else "int64" for name in FIELDS}
    )

    service = _service(within)

    def flow(topic: Topic, decode: Decoder | None, train: Callable[[Stream], OnlineTraining]) -> Contender:
        return lambda: _flow(session, topic, count, decode, train)

    contenders: dict[str, Contender] = {
        DICTS: flow(flights, Json(), lambda read: train_online(read, labels=labels, shapes=False)),
        COLUMNS: flow(whole, columns, lambda read: train_online(read, labels=of_columns, shapes=False)),
        SERVICE: lambda: flow(flights, decoder_for(service, flights), ServiceLearning(service).train)(),
        SHAPES: flow(flights, Json(), lambda read: train_online(read, labels=labels)),
    }
    peers: tuple[tuple[str, str, Callable[[], _Learner]], ...] = (
        (RIVER, "river", _River),
        (VW, "vowpalwabbit", _VowpalWabbit),
        (SHARE, "confluent_kafka", _Share),
    )
    for name, package, make in peers if kafka.has_confluent() else ():
        if find_spec(package) is None:
            _say(f"{package} is left out, because it is not installed")
        else:
            contenders[name] = kafka.with_rare_collections(_by_hand(session, flights, count, make))
    for name in (DICTS, COLUMNS, SHAPES):
        contenders[name]()  # Compiles what is not compiled yet.
    series = alternate(contenders, repeat=session.repeat, agree=Settled.agrees_with)
    for other in (RIVER, VW):
        if other in contenders:
            yield series.figure(other, EVENTS)
            for name in (DICTS, COLUMNS, SERVICE, SHAPES):
                target = Target("ratio", at_least=_TIMES_RIVER) if other == RIVER and name != SHAPES else None
                yield series.figure(name, EVENTS, compared_with=other, target=target)
    if RIVER in contenders:
        # No learner in such a loop can be faster.
        yield series.figure(SHARE, EVENTS, compared_with=RIVER)
    for name in contenders:
        yield series.figure(name, LOSS)


def _written(session: Session, label: str, batches: Iterable[OutgoingBatch]) -> Topic:
    """Write events to a new topic; the time stamps of the records are the times of the events."""
    topic = kafka.new_topic(session, label)

    async def write() -> None:
        writer = await topic.open_writer()
        try:
            for batch in batches:
                await writer.write(batch)
        finally:
            await writer.close()

    kafka.run(write())
    return topic


def _with_all_fields(batches: Iterable[OutgoingBatch]) -> Iterator[OutgoingBatch]:
    """Yield the events with the same fields in each, as columns need: an answer repeats those of its question."""
    asked: dict[str, Event] = {}
    for batch in batches:
        values = []
        for value in batch.values:
            event = orjson.loads(value or b"")
            if is_answer := event["event"] == "arrival":
                event = asked.pop(event["flight"]) | {"late": is_late_event(event)}
            else:
                event = asked[event["flight"]] = {name: event[name] for name in ("flight", *FIELDS)} | {"late": False}
            values.append(orjson.dumps({"answer": is_answer} | event))
        yield OutgoingBatch(values, timestamps_ms=batch.timestamps_ms, partition=batch.partition)


# ---- by hand


class _Learner(Protocol):
    """Predicts questions and learns their labels; each question has the form that the learner keeps."""

    def ask(self, event: Event) -> tuple[Any, float]: ...

    def learn(self, question: Any, *, label: bool) -> None: ...

    def version(self) -> bytes: ...


class _River:
    def __init__(self) -> None:
        from river import compose, linear_model, preprocessing

        numbers = compose.Select(*_NUMBERS) | preprocessing.StandardScaler()
        texts = compose.Select(*_TEXTS) | preprocessing.OneHotEncoder()
        self._linear = linear_model.LogisticRegression()
        self._model: Any = (numbers + texts) | self._linear

    def ask(self, event: Event) -> tuple[Event, float]:
        return event, self._model.predict_proba_one(event)[True]

    def learn(self, question: Event, *, label: bool) -> None:
        self._model.learn_one(question, label)

    def version(self) -> bytes:
        return orjson.dumps({"weights": dict(self._linear.weights), "intercept": self._linear.intercept})


class _VowpalWabbit:
    """Each question is parsed once, as an example that gets its label later."""

    def __init__(self) -> None:
        from vowpalwabbit import Workspace

        self._workspace = Workspace("--quiet --loss_function logistic --link logistic")

    def ask(self, event: Event) -> tuple[Any, float]:
        # An example without a label would have no weight when it is learned.
        example = self._workspace.example(
            f"1 | carrier={event['carrier']} origin={event['origin']} dest={event['dest']} month:{event['month']} "
            f"hour:{event['hour']} weekday:{event['weekday']} distance:{event['distance']}"
        )
        return example, self._workspace.predict(example)

    def learn(self, question: Any, *, label: bool) -> None:
        question.set_label_string("1" if label else "-1")
        self._workspace.learn(question)
        self._workspace.finish_example(question)

    def version(self) -> bytes:
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "model"
            self._workspace.save(str(file))
            return file.read_bytes()


class _Share:
    """Predicts the share of late flights so far: what the loop takes without a learner."""

    def __init__(self) -> None:
        self._labels, self._late = 2, 1

    def ask(self, event: Event) -> tuple[None, float]:
        return None, self._late / self._labels

    def learn(self, question: None, *, label: bool) -> None:
        self._labels += 1
        self._late += label

    def version(self) -> bytes:
        return orjson.dumps({"share": self._late / self._labels})


def _by_hand(session: Session, flights: Topic, count: int, make: Callable[[], _Learner]) -> Contender:
    """Return the loop by hand: a dict of the questions that wait, a heap of the ends of their waits."""

    def run() -> Trial:
        updates = kafka.new_topic(session, "updates")
        learner = make()
        waiting: dict[str, tuple[Any, float]] = {}
        due: list[tuple[int, str]] = []
        labels: list[bool] = []
        predictions: list[float] = []
        seen, published_s = 0, 0.0
        with (
            Stopwatch() as watch,
            kafka.confluent_clients(session.kafka, flights, partitions=1, linger_s=0.005) as (consumer, producer),
        ):
            while seen < count:
                messages = consumer.consume(min(kafka.CONSUMED_TOGETHER, count - seen), timeout=1.0)
                seen += len(messages)
                for message in messages:
                    event, at = orjson.loads(message.value()), message.timestamp()[1]
                    key = event["flight"]
                    while due and due[0][0] <= at:
                        waiting.pop(heapq.heappop(due)[1], None)
                    if event["event"] == "departure":
                        waiting[key] = learner.ask(event)
                        heapq.heappush(due, (at + _WITHIN_MS, key))
                    elif (asked := waiting.pop(key, None)) is not None:
                        question, prediction = asked
                        label = event["delay"] > 15
                        learner.learn(question, label=label)
                        labels.append(label)
                        predictions.append(prediction)
                if (now_s := time.monotonic()) - published_s > _VERSION_EVERY_S or seen == count:
                    published_s = now_s
                    producer.produce(updates.name, learner.version(), b"late-flights")
                    producer.poll(0)
        return _trial(watch, count, np.array(labels), np.array(predictions))

    return run


# ---- in a flow


def _flow(
    session: Session, topic: Topic, count: int, decode: Decoder | None, train: Callable[[Stream], OnlineTraining]
) -> Trial:
    updates = kafka.new_topic(session, "updates")
    flow = Flow("late labels")
    training = train(flow.source(topic, decode=decode, stop="latest"))
    training.models.publish_model(updates, model="late-flights")
    predicted = training.predictions.collect()
    with Stopwatch() as watch:
        run_to_end(flow)
    predictions, targets = (np.concatenate([part[name] for part in predicted.items]) for name in _REPORTED)
    return _trial(watch, count, targets == 1.0, predictions)


_REPORTED: Final = ("predictions", "targets")


def _service(within: str) -> ServiceSettings:
    """Return the settings of the service that ``streamiter demo --serve`` writes."""
    label = {"event": "arrival", "key": "flight", "value": "delay > 15", "time": "time", "within": within}
    features = {name: "category" if name in _TEXTS else "number" for name in FIELDS}
    tables: dict[str, Any] = {
        "service": {"name": "late-flights"},
        "input": {"topic": "memory://flights"},
        "learn": {"kind": "classification", "label": label, "features": features},
        "publish": {"topic": "memory://model-updates", "every": f"{_VERSION_EVERY_S:g}s"},
    }
    return read_settings(tables)


def _trial(watch: Stopwatch, count: int, labels: Truths, predictions: Floats) -> Trial:
    settled = Settled(labels, predictions)
    return Trial({**watch.rates(count, "events"), LOSS: settled.loss}, settled)


def _say(line: str) -> None:
    print(f"  {line}", file=sys.stderr, flush=True)
