"""Flows that benchmarks run in one process and in several: each process makes them, with the same settings."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Mapping
from typing import Any, Final

import msgspec
import orjson

from benchmarks.online_learning import FEATURES, LEARNING_RATE, LINGER_S, MINI_BATCH, rows_of_columns
from benchmarks.windows import SIZE_S, stream
from streamiter import Flow, Stream, topic, tumbling
from streamiter.learn import SGD, Examples, LinearRegression, train_online
from streamiter.operators import Context, Output, Source, SourceBatch
from streamiter.operators.operator import EngineOperator
from streamiter.operators.source import Positions
from streamiter.topics import JsonColumns

__all__ = [
    "Settings",
    "by_user",
    "by_user_decoded",
    "by_user_in_tuples",
    "mapped",
    "of_settings",
    "regression",
    "ticking",
    "windows",
]

_VARIABLE: Final = "STREAMITER_BENCHMARK"

# A pure-Python loop of this many turns takes about 20 µs.
_TURNS: Final = 460

# This many different events are enough that no cache keeps them all.
_EVENTS: Final = 50_000
_BATCH: Final = 1_000
_USERS: Final = 1_000


class Settings(msgspec.Struct, frozen=True):
    """The sizes and places of a benchmark, which all its processes read from the environment."""

    records: int = 0
    """The number of records in all."""
    kafka: str = ""
    """The address of the broker."""
    events: str = ""
    """The topic that is read."""
    updates: str = ""
    """The topic of the models, or a file."""
    parallelism: int = 2
    steps: int = 0
    """The number of steps of an epoch, for networks."""

    def variables(self) -> Mapping[str, str]:
        """Return the environment of a process with these settings."""
        return {_VARIABLE: msgspec.json.encode(self).decode()}


def of_settings() -> Settings:
    """Return the settings of this process."""
    return msgspec.json.decode(os.environ[_VARIABLE], type=Settings)


def mapped() -> Flow:
    """Return a flow with a pure-Python function of some 20 µs for each record; no record changes its subtask."""
    flow = Flow("mapped", parallelism=of_settings().parallelism)
    numbers = _repeated(flow, list(range(_EVENTS))).map(_slow, name="slow")
    numbers.map_batch(lambda batch: [sum(batch)]).reduce_all(lambda one, other: one + other)
    return flow


def _slow(number: int) -> int:
    total = 0
    for turn in range(_TURNS):
        total += number ^ turn
    return total & 0xFF


def by_user() -> Flow:
    """Return a flow that decodes JSON and keeps a running sum for each user; half of the records change process."""
    values = _values()
    flow = Flow("sum by user", parallelism=of_settings().parallelism)
    _sums(_repeated(flow, values).map(orjson.loads))
    return flow


def by_user_decoded() -> Flow:
    """Return the same flow on records that are decoded already."""
    events = [orjson.loads(value) for value in _values()]
    flow = Flow("sum by user", parallelism=of_settings().parallelism)
    _sums(_repeated(flow, events))
    return flow


def by_user_in_tuples() -> Flow:
    """Return the same flow on tuples."""
    events = [tuple(orjson.loads(value).values()) for value in _values()]
    flow = Flow("sum by user", parallelism=of_settings().parallelism)

    def added(sum_so_far: Any, event: Any) -> Any:
        return event[0], sum_so_far[1] + event[1]

    keyed = _repeated(flow, events).key_by(lambda event: event[0])
    keyed.reduce(added, name="sums").map_batch(lambda batch: [len(batch)])
    return flow


def windows() -> Flow:
    """Return a flow that counts tuples (key, time in ms) by key and minute; half of them change process."""
    keys, times = stream(_EVENTS)
    flow = Flow("windows", parallelism=of_settings().parallelism)
    timed = _repeated(flow, list(zip(keys.tolist(), times.tolist(), strict=True))).event_time(
        # The times begin again with the values, so the bound is as long as they are.
        lambda record: record[1],
        unit="ms",
        check_unit=False,
        out_of_orderness_s=_EVENTS / 1000,
    )
    timed.key_by(lambda record: record[0]).window(tumbling(SIZE_S)).aggregate("count", name="counts")
    return flow


def _sums(events: Stream) -> None:
    def added(sum_so_far: Any, event: Any) -> Any:
        return {"user": event["user"], "price": sum_so_far["price"] + event["price"]}

    events.key_by(lambda event: event["user"]).reduce(added, name="sums").map_batch(lambda batch: [len(batch)])


def ticking() -> Flow:
    """Return an endless flow; its last step appends the process and the time of each of its batches to a file."""
    flow = Flow("ticking", parallelism=2)
    flow.from_source(_Ticks, name="ticks").key_by(lambda tick: tick).reduce(max, name="highest").process(
        _Times, name="times"
    )
    return flow


class _Ticks(Source):
    """Emits a number each millisecond."""

    bounded = False

    def open(self, context: Context, positions: Positions | None) -> None:
        self._next = (positions or {}).get("next", 0)

    async def read(self) -> SourceBatch | None:
        await asyncio.sleep(0.001)
        self._next += 1
        return SourceBatch([self._next], {"next": self._next})


class _Times(EngineOperator):
    is_stateless = True

    def open(self, context: Context) -> None:
        self._file = open(of_settings().updates, "a", buffering=1, encoding="utf-8")  # noqa: SIM115 (closed in close)

    def process_batch(self, batch: Any, out: Output) -> None:
        self._file.write(f"{os.getpid()} {time.monotonic()}\n")

    def close(self) -> None:
        self._file.close()


def _repeated(flow: Flow, values: list[Any]) -> Stream:
    return flow.from_source(lambda: _Repeated(values, of_settings().records), name="events")


def _values() -> list[bytes]:
    return [
        orjson.dumps({"user": number * 7 % _USERS, "price": number % 90 / 8, "item": f"item {number:040}", "ok": True})
        for number in range(_EVENTS)
    ]


class _Repeated(Source):
    """Reads some values again and again: this subtask's share of this many records."""

    def __init__(self, values: list[Any], records: int) -> None:
        self._values = values
        self._records = records

    def open(self, context: Context, positions: Positions | None) -> None:
        self._left = len(range(context.subtask_index, self._records, context.parallelism))
        self._next = context.subtask_index * _BATCH

    def read(self) -> SourceBatch | None:
        if not self._left:
            return None
        start = self._next % len(self._values)
        batch = self._values[start : start + min(self._left, _BATCH)]
        self._left -= len(batch)
        self._next += len(batch)
        return SourceBatch(batch, {"left": self._left})


def regression() -> Flow:
    """Return a flow that learns a linear regression from Kafka with a worker for each partition."""
    settings = of_settings()
    flow = Flow(f"regression {settings.events}", parallelism=settings.parallelism)
    columns = JsonColumns({"id": "int64", "x": ("float64", FEATURES), "y": "float64"})
    events = topic(f"kafka://{settings.kafka}/{settings.events}")
    training = train_online(
        flow.source(events, decode=columns, stop="latest", name="events"),
        lambda: LinearRegression(FEATURES, optimizer=SGD(LEARNING_RATE), intercept=False),
        extract=lambda mini_batch: Examples(*rows_of_columns(mini_batch)),
        mini_batch=MINI_BATCH,
        workers=settings.parallelism,
    )
    updates = topic(f"kafka://{settings.kafka}/{settings.updates}", linger_s=LINGER_S)
    training.models.publish_model(updates, model="regression")
    return flow
