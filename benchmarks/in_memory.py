"""Chain map, filter, key_by and a running sum in memory, compared with the same lambdas in plain Python."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from benchmarks.measuring import Contender, Figure, Stopwatch, Target, Trial, alternate, run_to_end
from benchmarks.session import Session
from streamiter import Flow, Operator

__all__ = ["in_memory"]

KEYS = 100
RECORDS = "records/s"

Sums = list[int]
"""The last running sum of each key."""


def in_memory(session: Session) -> Iterator[Figure]:
    """Two million integers pass map(x + 1), filter(even), key_by(x % 100) and a running sum."""
    count = session.size(2_000_000, 20_000)
    contenders = {
        "plain Python lists": _measured(count, _plain),
        "streamiter, record functions": _measured(count, _record_functions),
        "streamiter, numpy functions": _measured(count, _numpy_functions),
    }
    series = alternate(contenders, repeat=session.repeat)
    plain = "plain Python lists"
    yield series.figure(plain, RECORDS)
    yield series.figure(
        "streamiter, record functions", RECORDS, compared_with=plain, target=Target("ratio", at_least=0.75)
    )
    yield series.figure(
        "streamiter, numpy functions", RECORDS, compared_with=plain, target=Target("figure", at_least=30e6)
    )
    slow = {"asyncio.Queue, one item a slot": _measured(count // 20, _item_queues)}
    yield alternate(slow, repeat=session.repeat).figure(next(iter(slow)), RECORDS, note="for comparison")


def _measured(count: int, work: Callable[[int, Stopwatch], Sums]) -> Contender:
    def run() -> Trial:
        watch = Stopwatch()
        sums = work(count, watch)
        return Trial(watch.rates(count, "records"), sums)

    return run


def _plain(count: int, watch: Stopwatch) -> Sums:
    numbers = list(range(count))
    sums: dict[int, int] = {}
    running: list[int] = []
    increment, is_even, key_of, add = _functions()
    with watch:
        mapped = [increment(number) for number in numbers]
        kept = [number for number in mapped if is_even(number)]
        keys = [key_of(number) for number in kept]
        for key, number in zip(keys, kept, strict=True):
            sums[key] = add(sums[key], number) if key in sums else number
            running.append(sums[key])
    assert len(running) == len(kept)
    return [sums[key] for key in sorted(sums)]


def _functions() -> tuple[Callable[[int], int], Callable[[int], bool], Callable[[int], int], Any]:
    """Return the four lambdas that each contender calls for each record."""
    return (lambda x: x + 1), (lambda x: x % 2 == 0), (lambda x: x % KEYS), (lambda total, x: total + x)


class _Last(Operator):
    """Keeps all batches, which contain the last sum of each key, and emits nothing."""

    def __init__(self, batches: list[Any]) -> None:
        self._batches = batches

    def process_batch(self, batch: Any, out: Any) -> None:
        self._batches.append(batch)


def _record_functions(count: int, watch: Stopwatch) -> Sums:
    numbers = list(range(count))
    increment, is_even, key_of, add = _functions()
    batches: list[list[int]] = []
    flow = Flow("record functions")
    sums = flow.from_items(numbers).map(increment).filter(is_even).key_by(key_of).reduce(add)
    sums.process(lambda: _Last(batches))
    with watch:
        run_to_end(flow)
    return _last_sums(np.concatenate(batches), count)


def _numpy_functions(count: int, watch: Stopwatch) -> Sums:
    numbers = np.arange(count)
    batches: list[Any] = []
    flow = Flow("numpy functions")
    even = flow.from_items(numbers).map_batch(lambda x: x + 1).filter_batch(lambda x: x % 2 == 0)
    even.key_by_batch(lambda x: x % KEYS).reduce(np.add).process(lambda: _Last(batches))
    with watch:
        run_to_end(flow)
    return _last_sums(np.concatenate(batches), count)


def _last_sums(running: np.ndarray[Any, Any], count: int) -> Sums:
    """Return the last running sum of each key; the even numbers have the keys 0, 2, … in turn."""
    kept = np.arange(1, count + 1)
    keys = kept[kept % 2 == 0] % KEYS
    return [int(running[np.flatnonzero(keys == key)[-1]]) for key in np.unique(keys)]


def _item_queues(count: int, watch: Stopwatch) -> Sums:
    async def pipe() -> dict[int, int]:
        increment, is_even, key_of, add = _functions()
        first: asyncio.Queue[int] = asyncio.Queue(1000)
        second: asyncio.Queue[int] = asyncio.Queue(1000)
        sums: dict[int, int] = {}

        async def map_and_filter() -> None:
            for _ in range(count):
                number = increment(await first.get())
                if is_even(number):
                    await second.put(number)

        async def add_up() -> None:
            for _ in range(count // 2):
                number = await second.get()
                key = key_of(number)
                sums[key] = number if key not in sums else add(sums[key], number)

        async with asyncio.TaskGroup() as group:
            group.create_task(map_and_filter())
            group.create_task(add_up())
            for number in range(count):
                await first.put(number)
        return sums

    with watch:
        sums = asyncio.run(pipe())
    return [sums[key] for key in sorted(sums)]
