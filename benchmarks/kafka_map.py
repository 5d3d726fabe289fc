"""Score each event from Kafka to Kafka, compared with hand-written loops on aiokafka and confluent-kafka."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import msgspec
import numpy as np
import orjson

from benchmarks import kafka
from benchmarks.events import FEATURES, TRUE_WEIGHTS, PackedEvent, make_events, packed_features
from benchmarks.measuring import Contender, Figure, Stopwatch, Target, Trial, alternate, run_to_end
from benchmarks.session import Session
from streamiter import Columns, Flow
from streamiter.topics import JsonColumns
from streamiter.topics.topic import Topic

__all__ = ["kafka_map"]

PARTITIONS = 2
EVENTS = "events/s"
BY_HAND = "by hand: orjson, a score at a time"
BY_HAND_NUMPY = "by hand: orjson, numpy scores"
BY_HAND_CONFLUENT = "by hand: confluent-kafka, msgspec schema, numpy scores"
LINGER_S = 0.005

_WEIGHTS: list[float] = TRUE_WEIGHTS.tolist()

Score = Callable[[Sequence[bytes]], list[bytes]]
"""A function from the values that were read to the values to write."""


def kafka_map(session: Session) -> Iterator[Figure]:
    """One million events are decoded, scored, encoded and written, with one output for each."""
    count = session.size(1_000_000, 20_000)
    events = kafka.new_topic(session, "events", partitions=PARTITIONS)
    kafka.fill(session, events, make_events(count), partitions=PARTITIONS)
    contenders: dict[str, Contender] = {
        BY_HAND: lambda: _by_hand(session, events, count, score_values),
        BY_HAND_NUMPY: kafka.with_rare_collections(lambda: _by_hand(session, events, count, score_values_in_numpy)),
        "flow, Json, map(score)": lambda: _flow_of_records(session, events, count),
        "flow, JsonColumns, map_batch(scores)": lambda: _flow_of_columns(session, events, count),
    }
    if kafka.has_confluent():
        contenders[BY_HAND_CONFLUENT] = kafka.with_rare_collections(
            lambda: _by_hand_with_confluent(session, events, count)
        )
    series = alternate(contenders, repeat=session.repeat, agree=_agree)
    yield series.figure(BY_HAND, EVENTS)
    yield series.figure(BY_HAND_NUMPY, EVENTS, compared_with=BY_HAND)
    target = Target("ratio", at_least=0.9)
    yield series.figure("flow, Json, map(score)", EVENTS, compared_with=BY_HAND, target=target)
    columns = "flow, JsonColumns, map_batch(scores)"
    yield series.figure(columns, EVENTS, compared_with=BY_HAND_NUMPY, target=target)
    if BY_HAND_CONFLUENT in contenders:
        yield series.figure(BY_HAND_CONFLUENT, EVENTS, compared_with=BY_HAND)
        yield series.figure(columns, EVENTS, compared_with=BY_HAND_CONFLUENT, target=target)


def score(event: dict[str, Any]) -> dict[str, Any]:
    """Return the prediction of a linear model for one event."""
    total = 0.0
    for weight, value in zip(_WEIGHTS, event["x"], strict=True):
        total += weight * value
    return {"id": event["id"], "score": round(total, 6)}


def scores(events: Columns) -> Columns:
    """Return the predictions for a batch of events."""
    return Columns({"id": events["id"], "score": np.round(events["x"] @ TRUE_WEIGHTS, 6)})


def score_values(values: Sequence[bytes]) -> list[bytes]:
    """Decode, score and encode one event after the other."""
    loads, dumps = orjson.loads, orjson.dumps
    return [dumps(score(loads(value))) for value in values]


def score_values_in_numpy(values: Sequence[bytes]) -> list[bytes]:
    """Decode and encode one event after the other, and score all of them in numpy."""
    events = [orjson.loads(value) for value in values]
    results = np.round(np.array([event["x"] for event in events]) @ TRUE_WEIGHTS, 6).tolist()
    return [orjson.dumps({"id": event["id"], "score": result}) for event, result in zip(events, results, strict=True)]


def _by_hand(session: Session, events: Topic, count: int, work: Score) -> Trial:
    outputs = kafka.new_topic(session, "scores", partitions=PARTITIONS)

    async def copy() -> None:
        async with (
            kafka.consumer(session.kafka, events.name, partitions=PARTITIONS) as consumer,
            kafka.producer(session.kafka) as producer,
        ):
            sender = kafka.BatchSender(producer, outputs.name)
            seen = 0
            while seen < count:
                for partition, records in (await consumer.getmany(timeout_ms=1000)).items():
                    seen += len(records)
                    values = work([record.value for record in records])
                    await sender.send(values, partition=partition.partition)
            await sender.flush()

    with Stopwatch() as watch:
        kafka.run(copy())
    return _trial(session, outputs, count, watch)


def _by_hand_with_confluent(session: Session, events: Topic, count: int) -> Trial:
    outputs = kafka.new_topic(session, "scores", partitions=PARTITIONS)
    decode, seen = msgspec.json.Decoder(PackedEvent).decode, 0
    with (
        Stopwatch() as watch,
        kafka.confluent_clients(session.kafka, events, partitions=PARTITIONS, linger_s=LINGER_S) as (
            consumer,
            producer,
        ),
    ):
        while seen < count:
            messages = consumer.consume(kafka.CONSUMED_TOGETHER, timeout=1.0)
            read = [decode(message.value()) for message in messages]
            if read:
                results = np.round(packed_features(read) @ TRUE_WEIGHTS, 6).tolist()
                scored = [
                    {"value": orjson.dumps({"id": event.id, "score": result})}
                    for event, result in zip(read, results, strict=True)
                ]
                written = producer.produce_batch(outputs.name, scored, messages[0].partition())
                assert written == len(scored), f"expected room for {len(scored)} records, given {written}"
            seen += len(read)
            producer.poll(0)
    return _trial(session, outputs, count, watch)


def _flow_of_records(session: Session, events: Topic, count: int) -> Trial:
    outputs = kafka.new_topic(session, "scores", partitions=PARTITIONS)
    flow = Flow("scores")
    flow.source(events, stop="latest").map(score).sink(outputs)
    with Stopwatch() as watch:
        run_to_end(flow)
    return _trial(session, outputs, count, watch)


def _flow_of_columns(session: Session, events: Topic, count: int) -> Trial:
    outputs = kafka.new_topic(session, "scores", partitions=PARTITIONS)
    decoder = JsonColumns({"id": "int64", "x": ("float64", FEATURES)})
    flow = Flow("scores")
    flow.source(events, decode=decoder, stop="latest").map_batch(scores).sink(outputs)
    with Stopwatch() as watch:
        run_to_end(flow)
    return _trial(session, outputs, count, watch)


def _trial(session: Session, outputs: Topic, count: int, watch: Stopwatch) -> Trial:
    """Return the trial; its result is the number of records that were written, and the sums of ids and scores."""
    written, ids, total = kafka.run(_total(session, outputs, count))
    return Trial(watch.rates(count, "events"), (written, ids, total))


def _agree(first: tuple[int, int, float], other: tuple[int, int, float]) -> bool:
    return first[:2] == other[:2] and math.isclose(first[2], other[2], abs_tol=0.1)


async def _total(session: Session, outputs: Topic, count: int) -> tuple[int, int, float]:
    written = ids = 0
    total = 0.0
    async with kafka.consumer(session.kafka, outputs.name, partitions=PARTITIONS) as consumer:
        while written < count:
            for records in (await consumer.getmany(timeout_ms=1000)).values():
                results = [orjson.loads(record.value) for record in records]
                written += len(results)
                ids += sum(result["id"] for result in results)
                total += sum(result["score"] for result in results)
    return written, ids, total
