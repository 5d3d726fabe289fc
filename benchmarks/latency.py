"""Measure the latency at 1,000 events a second: from Kafka to Kafka, through a pipeline in its own process.

This process sends the events and receives the answers, so one clock times both. Each figure includes the time
of this process's producer and consumer and of the broker; the line without a pipeline shows that time for one
of the two topics.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

import orjson

from benchmarks import kafka
from benchmarks.events import make_events
from benchmarks.measuring import Contender, Figure, Target, Trial, alternate
from benchmarks.pipelines import MINI_BATCH
from benchmarks.session import Session, running
from streamiter.topics.topic import Topic

__all__ = ["latency", "latency_of_updates"]

RATE_PER_S = 1_000
P50, P99 = "ms p50", "ms p99"
# The time for imports, connections and the interpreter's adaptive code.
_WARM_UP_S = 3.0
# An answer that takes longer counts as lost.
_PATIENCE_S = 30.0
# The time limit of a pipeline, far above the time of a load.
_LIMIT_S = 900.0

Times = dict[int, float]
"""The delays in milliseconds, by the number of the event or update."""


@dataclass(frozen=True)
class Load:
    """The events to send, and the function that times an answer."""

    events: int
    answers: int
    answer_ms: Callable[[dict[str, Any], list[int]], tuple[int, float]]
    """A function from an answer, and the times at which the events were sent (ns), to the answer's number and delay."""


def latency(session: Session) -> Iterator[Figure]:
    """The time from an event in Kafka to its score in Kafka, at least once."""
    seconds = session.size(15, 2)
    events = int(RATE_PER_S * (seconds + _WARM_UP_S))
    load = Load(events, events, _age_of_event)
    contenders: dict[str, Contender] = {
        "score by hand": lambda: _through(session, "score by hand", load),
        "score in a flow": lambda: _through(session, "score in a flow", load),
        "no pipeline": lambda: _through(session, None, load),
    }
    series = alternate(contenders, repeat=session.repeat)
    yield from _figures(series, "no pipeline", None, None)
    yield from _figures(series, "score by hand", None, None)
    yield from _figures(series, "score in a flow", "score by hand", (1.05, 1.05), of="ratio")


def latency_of_updates(session: Session) -> Iterator[Figure]:
    """The time from the last row of a mini-batch to the model update in its topic."""
    seconds = session.size(15, 2)
    events = int(RATE_PER_S * (seconds + _WARM_UP_S))
    load = Load(events - events % MINI_BATCH, events // MINI_BATCH, _age_of_last_row)
    names = ("learn by hand", "learn in a flow")
    contenders: dict[str, Contender] = {name: _contender(session, name, load) for name in names}
    series = alternate(contenders, repeat=session.repeat)
    yield from _figures(series, "learn by hand", None, None)
    yield from _figures(series, "learn in a flow", "learn by hand", (2.0, None))


def _contender(session: Session, name: str, load: Load) -> Contender:
    return lambda: _through(session, name, load)


def _figures(
    series: Any,
    name: str,
    compared_with: str | None,
    bounds: tuple[float | None, float | None] | None,
    of: Literal["figure", "ratio"] = "figure",
) -> Iterator[Figure]:
    for unit, bound in zip((P50, P99), bounds or (None, None), strict=True):
        target = None if bound is None else Target(of, below=bound)
        yield series.figure(name, unit, compared_with=compared_with or "", target=target)


def _age_of_event(answer: dict[str, Any], _sent_ns: list[int]) -> tuple[int, float]:
    return answer["id"], (time.perf_counter_ns() - answer["sent_ns"]) / 1e6


def _age_of_last_row(update: dict[str, Any], sent_ns: list[int]) -> tuple[int, float]:
    version = update["version"]
    return version, (time.perf_counter_ns() - sent_ns[version * MINI_BATCH - 1]) / 1e6


def _through(session: Session, pipeline: str | None, load: Load) -> Trial:
    source, target = kafka.new_topic(session, "events"), kafka.new_topic(session, "answers")
    if pipeline is None:
        target = source
    with _running(pipeline, session, source, target), _undisturbed():
        times = kafka.run(_send_and_receive(session, source, target, load))
    warm_answers = round(load.answers * RATE_PER_S * _WARM_UP_S / load.events)
    measured = sorted(ms for number, ms in times.items() if number > warm_answers)
    percentiles = statistics.quantiles(measured, n=100)
    return Trial({P50: percentiles[49], P99: percentiles[98]}, len(times) - load.answers)


@contextlib.contextmanager
def _running(pipeline: str | None, session: Session, source: Topic, target: Topic) -> Iterator[None]:
    if pipeline is None:
        yield
        return
    command = [sys.executable, "-m", "benchmarks.pipelines", pipeline, session.kafka, source.name, target.name]
    with running(command, limit_s=_LIMIT_S):
        yield


@contextlib.contextmanager
def _undisturbed() -> Iterator[None]:
    """Disable garbage collections in the process that measures."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


async def _send_and_receive(session: Session, source: Topic, target: Topic, load: Load) -> Times:
    sent_ns: list[int] = []
    times: Times = {}
    async with (
        kafka.producer(session.kafka) as producer,
        kafka.consumer(session.kafka, target.name, partitions=1) as consumer,
        asyncio.TaskGroup() as group,
    ):
        group.create_task(_send(producer, source.name, load.events, sent_ns))
        async with asyncio.timeout(load.events / RATE_PER_S + _PATIENCE_S):
            while len(times) < load.answers:
                for records in (await consumer.getmany(timeout_ms=1000)).values():
                    for record in records:
                        number, ms = load.answer_ms(orjson.loads(record.value), sent_ns)
                        times[number] = ms
    return times


async def _send(producer: Any, topic_name: str, count: int, sent_ns: list[int]) -> None:
    """Send one event each millisecond by the clock; an event that is late does not delay later events."""
    loop = asyncio.get_running_loop()
    values = [orjson.loads(value) for value in make_events(count)]
    began_s = loop.time()
    for number, value in enumerate(values):
        if (delay_s := began_s + number / RATE_PER_S - loop.time()) > 0:
            await asyncio.sleep(delay_s)
        sent_ns.append(time.perf_counter_ns())
        value["sent_ns"] = sent_ns[-1]
        await producer.send(topic_name, orjson.dumps(value))
