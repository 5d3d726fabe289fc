"""The row cache compared with a brute-force cache: which rows it returns and keeps."""

from __future__ import annotations

from math import inf
from random import Random
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from support.examples import random_examples

from streamiter.parameter_server.consistency import ASP, BSP, SSP, Consistency
from streamiter.parameter_server.matrix import Matrix, MatrixPartitioning
from streamiter.parameter_server.rows import MatrixAccess, RowCache

_WIDTHS = {"a": 2, "b": 5, "full": 10, "too wide": 11}
_ROWS = range(2)
_LIMIT_BYTES = 80  # two rows of "a" and two of "b" have 112


class _BruteForce:
    """A list of all cached rows, the least recently used row first."""

    def __init__(self) -> None:
        self.cached: list[tuple[tuple[str, int], int, list[float]]] = []

    def find(self, key: tuple[str, int], oldest: int) -> list[float] | None:
        found = [entry for entry in self.cached if entry[0] == key]
        if found:
            self.cached.remove(found[0])
        if not found or found[0][1] < oldest:
            return None
        self.cached.append(found[0])
        return list(found[0][2])

    def put(self, key: tuple[str, int], values: list[float], clock: int) -> None:
        if 8 * len(values) > _LIMIT_BYTES or any(entry[0] == key and entry[1] > clock for entry in self.cached):
            return
        self.cached = [entry for entry in self.cached if entry[0] != key]
        self.cached.append((key, clock, list(values)))
        while self.size_bytes() > _LIMIT_BYTES:
            self.cached.pop(0)

    def own_add(self, key: tuple[str, int], columns: list[int], value: float) -> None:
        for entry in self.cached:
            if entry[0] == key:
                for column in columns:
                    entry[2][column] += value

    def invalidate(self, matrix: str) -> None:
        self.cached = [entry for entry in self.cached if entry[0][0] != matrix]

    def size_bytes(self) -> int:
        return sum(8 * len(values) for _, _, values in self.cached)


_COMMON = ["read", "find", "add"]
_RARE = ["clock", "invalidate", "clear", "add while reading", "invalidate while reading"]

_Steps = list[tuple[str, tuple[str, int], list[int] | None, int]]


def _steps_and_staleness(random: Random) -> tuple[_Steps, int]:
    """Return steps, each with a row, its columns and the age of the values read, and a staleness."""
    keys = [(matrix, row) for matrix in sorted(_WIDTHS) for row in _ROWS]
    weights = [1 if matrix in ("full", "too wide") else 6 for matrix, _ in keys]
    steps: _Steps = []
    for _ in range(random.randint(10, 40)):
        columns = random.choices((0, 1), k=random.randrange(4)) if random.random() < 0.5 else None
        kind = random.choice(_COMMON if random.random() < 0.65 else _RARE)
        steps.append((kind, *random.choices(keys, weights), columns, random.randint(0, 3)))
    return steps, random.randint(0, 3)


@random_examples(_steps_and_staleness)
def test_the_cache_returns_and_keeps_the_same_rows_as_a_brute_force_cache(example: tuple[_Steps, int]) -> None:
    """The cache returned rows older than the allowed clocks, and training continued with outdated weights.

    One row of a wide matrix emptied the cache of all other rows. A row of exactly the limit was not kept. Two reads
    were answered out of order, and the older reply replaced the newer row.
    """
    steps, staleness = example
    cache, expected, clock = RowCache(_LIMIT_BYTES), _BruteForce(), 0
    for number, (kind, key, named, age) in enumerate(steps):
        width = _WIDTHS[key[0]]
        columns = list(range(width)) if named is None else named
        keys = slice(0, width) if named is None else np.array(named, np.int64)
        if kind == "read":
            values = np.full(width, float(number))
            cache.put(cache.begin(*key), values, clock - age)
            values[:] = -1.0  # the array belongs to the caller: the cache must not read it again
            expected.put(key, [float(number)] * width, clock - age)
        elif kind == "find":
            found = cache.find(*key, clock, staleness)
            _same(found, expected.find(key, clock - staleness))
            if found is not None:
                found[:] = -1.0  # this array belongs to the caller too
        elif kind == "clock":
            clock += 1
        elif kind in {"add", "add while reading"}:
            reading = cache.begin(*key)
            cache.own_add(*key, keys, np.full(len(columns), 0.5))
            expected.own_add(key, columns, 0.5)
            if kind == "add while reading":
                cache.put(reading, np.zeros(width), clock)  # the values may or may not contain the add
        elif kind in {"invalidate", "invalidate while reading"}:
            reading = cache.begin(*key)
            cache.invalidate(key[0])
            expected.invalidate(key[0])
            if kind == "invalidate while reading":
                cache.put(reading, np.zeros(width), clock)
        else:
            cache.clear()
            expected.cached.clear()
        assert cache.size_bytes == expected.size_bytes() <= _LIMIT_BYTES


def _same(found: npt.NDArray[Any] | None, expected: list[float] | None) -> None:
    assert (None if found is None else found.tolist()) == expected


@pytest.mark.parametrize(
    ("consistency", "with_own", "staleness", "own_adds_show"),
    [(BSP(), False, 0, False), (BSP(), True, 0, True), (SSP(staleness=3), False, 3, True), (ASP(), False, inf, True)],
)
def test_each_consistency_has_its_rules_for_cached_rows(
    consistency: Consistency, with_own: bool, staleness: float, own_adds_show: bool
) -> None:
    """Under ASP a read got an outdated cached row; under BSP it got own adds that were not in storage yet."""
    matrix = Matrix("w", rows=1, columns=2, consistency=consistency)
    access = MatrixAccess(matrix, MatrixPartitioning(matrix, 1), 0, with_own=with_own)
    assert (access.staleness, access.own_adds_show) == (staleness, own_adds_show)


def test_some_columns_of_a_cached_row_are_given_in_the_order_they_are_asked_for() -> None:
    """Columns came back in the cached order, or the caller's writes changed the cached row."""
    cache = RowCache(limit_bytes=100)
    cache.put(cache.begin("w", 0), np.array([1, 2, 3]), clock=0)
    found = cache.find("w", 0, 0, 0, np.array([2, 0, 2]))
    assert found is not None
    assert found.tolist() == [3, 1, 3]
    found[:] = 7
    again = cache.find("w", 0, 0, 0)
    assert again is not None
    assert again.tolist() == [1, 2, 3]


@pytest.mark.parametrize("before", [0, 1, 2])
def test_rows_read_before_the_cache_was_emptied_are_not_kept(before: int) -> None:
    """Rows read before a restore came into the cache that the restore had emptied."""
    cache = RowCache(limit_bytes=100)
    for _ in range(before):
        cache.invalidate("w")
    readings = [cache.begin("w", 0)]
    for empty in (lambda: cache.invalidate("w"), cache.clear, lambda: cache.invalidate("w"), cache.clear):
        empty()
        for reading in readings:
            cache.put(reading, np.zeros(1), clock=0)
            assert cache.find("w", 0, 0, 0) is None
        readings.append(cache.begin("w", 0))


def test_a_cache_of_no_bytes_keeps_nothing() -> None:
    """A client that did not ask for a cache kept rows."""
    cache = RowCache(limit_bytes=0)
    assert not cache.is_on
    cache.put(cache.begin("w", 0), np.zeros(1), clock=0)
    assert cache.find("w", 0, 0, 0) is None
