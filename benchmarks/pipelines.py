"""The pipelines whose latency and memory are measured, each in its own process.

    python -m benchmarks.pipelines NAME BROKER SOURCE_TOPIC TARGET_TOPIC [OPTION]

A pipeline runs until it is terminated, unless its docstring says otherwise.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, Final

import numpy as np
import orjson

from benchmarks import kafka
from benchmarks.events import FEATURES
from benchmarks.kafka_map import score
from benchmarks.online_learning import LEARNING_RATE, gradient, learn_asynchronously, rows_of_dicts
from streamiter import Flow, topic

__all__ = ["MINI_BATCH", "PIPELINES", "main"]

MINI_BATCH: Final = 20


def score_and_stamp(event: dict[str, Any]) -> dict[str, Any]:
    """Return the prediction for an event, with the time at which the event was sent."""
    return {**score(event), "sent_ns": event["sent_ns"]}


def score_by_hand(address: str, source: str, target: str) -> None:
    """Score each event as soon as it has arrived, in a loop on aiokafka."""

    async def copy() -> None:
        async with kafka.consumer(address, source, partitions=1) as consumer, kafka.producer(address) as producer:
            while True:
                for records in (await consumer.getmany(timeout_ms=1000)).values():
                    for record in records:
                        answer = score_and_stamp(orjson.loads(record.value))
                        await producer.send(target, orjson.dumps(answer))

    kafka.run(copy())


def score_in_flow(address: str, source: str, target: str) -> None:
    """Score each event in a flow."""
    flow = Flow("scores")
    flow.source(topic(f"kafka://{address}/{source}")).map(score_and_stamp).sink(topic(f"kafka://{address}/{target}"))
    flow.run()


def learn_by_hand(address: str, source: str, target: str) -> None:
    """Publish a model update for each mini-batch, in a loop on aiokafka."""

    async def learn() -> None:
        weights = np.zeros(FEATURES)
        version, pending = 0, []
        async with kafka.consumer(address, source, partitions=1) as consumer, kafka.producer(address) as producer:
            while True:
                for records in (await consumer.getmany(timeout_ms=1000)).values():
                    for record in records:
                        pending.append(orjson.loads(record.value))
                        if len(pending) == MINI_BATCH:
                            weights = weights - LEARNING_RATE * gradient(*rows_of_dicts(pending), weights)
                            version += 1
                            pending.clear()
                            update = {"version": version, "weights": weights}
                            value = orjson.dumps(update, option=orjson.OPT_SERIALIZE_NUMPY)
                            await producer.send(target, value)

    kafka.run(learn())


def learn_in_flow(address: str, source: str, target: str) -> None:
    """Publish a model update for each mini-batch, in an unbounded iteration."""
    flow = Flow("online learning")
    events = flow.source(topic(f"kafka://{address}/{source}"))
    models = learn_asynchronously(events, rows_of_dicts, mini_batch=MINI_BATCH)
    models.publish_model(topic(f"kafka://{address}/{target}"), model="regression")
    flow.run()


def learn_and_print_memory(address: str, source: str, target: str, every: str = "1000000") -> None:
    """Learn until the topic's end; print the resident memory (kB) after each ``every`` events."""
    step = int(every)
    seen = 0

    def count(events: list[Any]) -> list[Any]:
        nonlocal seen
        before, seen = seen, seen + len(events)
        if seen // step > before // step:
            print(_resident_kb(), flush=True)
        return events

    flow = Flow("online learning")
    events = flow.source(topic(f"kafka://{address}/{source}"), stop="latest").map_batch(count)
    learn_asynchronously(events, rows_of_dicts, mini_batch=1000).publish_model(
        topic(f"kafka://{address}/{target}"), model="regression"
    )
    flow.run()


def _resident_kb() -> int:
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) for line in file if line.startswith("VmRSS"))


PIPELINES: Final[Mapping[str, Callable[..., None]]] = MappingProxyType(
    {
        "score by hand": score_by_hand,
        "score in a flow": score_in_flow,
        "learn by hand": learn_by_hand,
        "learn in a flow": learn_in_flow,
        "learn and print memory": learn_and_print_memory,
    }
)


def main(arguments: list[str]) -> None:
    """Run the pipeline that the first argument names, with the other arguments."""
    name, *others = arguments
    PIPELINES[name](*others)


if __name__ == "__main__":
    main(sys.argv[1:])
