"""Windows and joins that resume with another parallelism have the results of a job that was never stopped."""

from __future__ import annotations

from collections import Counter
from itertools import cycle
from pathlib import Path
from typing import Any

import pytest
from checkpoints_jobs.parallelism_support import NUMBERS, numbers, outputs

from streamiter import Flow, Operator, RocksState, session, sliding, tumbling
from streamiter.flow.keyed_stream import KeyedStream
from streamiter.operators import Context, Output
from streamiter.topics import MemoryBroker

TURNS = 60
KEYS = 5


def keyed(flow: Flow, broker: MemoryBroker, name: str = "in") -> KeyedStream:
    timed = numbers(flow, broker, name).event_time(lambda n: n, unit="ms", check_unit=False, name=f"times of {name}")
    return timed.key_by(lambda n: n % KEYS)


def windows(broker: MemoryBroker, parallelism: int, state: RocksState | None) -> Flow:
    flow = Flow("windows", parallelism=parallelism, state=state)
    stream = keyed(flow, broker)
    for name, window in {"tumbling": tumbling(0.02), "session": session(0.006), "sliding": sliding(0.012)}.items():
        results = stream.window(window, name=name).aggregate("collect")
        results.map(lambda result, name=name: [name, result.start, *result.value]).sink(broker.topic("out"))
    return flow


def joins(broker: MemoryBroker, parallelism: int, state: RocksState | None) -> Flow:
    flow = Flow("joins", parallelism=parallelism, state=state)
    left, right = keyed(flow, broker), keyed(flow, broker, "in2")
    pairs = left.interval_join(right, lower_s=0.001, upper_s=0.005, how="full", name="interval")
    as_of = left.join_table(right, strict=True, name="as of")
    before = left.as_of_window(right, 0.011, name="before").aggregate("count")
    pairs.map(lambda pair: ["interval", *pair]).sink(broker.topic("out"))
    as_of.map(lambda pair: ["as of", *pair]).sink(broker.topic("out"))
    before.map(lambda pair: ["before", *pair]).sink(broker.topic("out"))
    return flow


class Later(Operator):
    """Emits each number 9 ms later."""

    def open(self, context: Context) -> None:
        self._context = context

    def process(self, number: int, out: Output) -> None:
        self._context.set_event_timer(number + 9, number)

    def on_event_timer(self, number: int, out: Output) -> None:
        out.emit([self._context.key, number, self._context.event_time])


def timers(broker: MemoryBroker, parallelism: int, state: RocksState | None) -> Flow:
    flow = Flow("timers", parallelism=parallelism, state=state)
    keyed(flow, broker).process(Later, name="later").sink(broker.topic("out"))
    return flow


def expected_windows() -> Counter[Any]:
    found: Counter[Any] = Counter()
    for key in range(KEYS):
        own = list(range(key, NUMBERS, KEYS))
        for start in {n // 20 * 20 for n in own}:
            found["tumbling", start, *(n for n in own if start <= n < start + 20)] += 1
        found["session", key, *own] += 1
        for n in own:
            found["sliding", n - 11, *(each for each in own if n - 12 < each <= n)] += 1
    return found


def expected_joins() -> Counter[Any]:
    found: Counter[Any] = Counter()
    for n in range(NUMBERS):
        found["interval", n, n + KEYS if n + KEYS < NUMBERS else None] += 1
        if n < KEYS:
            found["interval", None, n] += 1
        found["as of", n, n - KEYS if n >= KEYS else None] += 1
        found["before", n, (n >= KEYS) + (n >= 2 * KEYS)] += 1
    return found


@pytest.mark.parametrize(
    ("before", "after", "kept"),
    [
        *((before, after, "in memory") for before, after in [(1, 3), (3, 1), (2, 3)]),
        *((before, after, "on disk") for before, after in [(1, 3), (3, 1), (2, 2)]),
        *((before, after, "either") for before, after in [(2, 3), (2, 2)]),
    ],
)
@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (windows, expected_windows()),
        (joins, expected_joins()),
        (timers, Counter((n % KEYS, n, n + 9) for n in range(NUMBERS))),
    ],
    ids=["windows", "joins", "timers"],
)
def test_states_move_with_their_keys(
    make: Any, expected: Counter[Any], before: int, after: int, kept: str, tmp_path: Path
) -> None:
    on_disk = RocksState(tmp_path, memory_bytes=16 << 20)
    states = cycle({"in memory": [None], "on disk": [on_disk], "either": [on_disk, None]}[kept])
    got = outputs(
        lambda broker, parallelism: make(broker, parallelism, next(states)),
        [before, after, before],
        turns=TURNS,
        seed=before * 10 + after,
    )
    assert Counter(map(tuple, got)) == expected
