"""The row cache, compared with a brute-force cache, and the reads of clients that have one."""

import asyncio
from random import Random
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.examples import random_examples

from streamiter.errors import RowsInDifferentBlocks
from streamiter.parameter_server import ASP, BSP, SSP, ParameterServer, psf
from streamiter.parameter_server.calls import Call
from streamiter.parameter_server.client import Client
from streamiter.parameter_server.consistency import Consistency
from streamiter.parameter_server.rows import RowCache

_WORKERS = 3
_CACHE_BYTES = 1 << 16

_steps = st.lists(
    st.tuples(
        st.sampled_from(["add", "fused add", "update", "clock", "get", "get columns", "start get", "finish get"]),
        st.integers(0, _WORKERS - 1),
        st.integers(0, 1),
    ),
    min_size=20,
    max_size=60,
)


class _Workers:
    """Workers that each add ones to their own column only, so that a row shows whose adds it contains."""

    def __init__(self, clients: list[Client], consistency: Consistency) -> None:
        self.clients = clients
        self.consistency = consistency
        self.reads: list[list[float]] = []
        self.begun: list[tuple[int, Call[Any]]] = []

    def clock_of(self, worker: int) -> int:
        return self.clients[worker].clock_of("w")

    @property
    def minimum(self) -> int:
        return min(map(self.clock_of, range(_WORKERS)))

    def may_write(self, worker: int) -> bool:
        return not isinstance(self.consistency, BSP) or self.clock_of(worker) == self.minimum

    def may_read(self, worker: int) -> bool:
        """Return whether a read is answered at once."""
        ahead = self.clock_of(worker) - self.minimum
        if isinstance(self.consistency, SSP):
            return ahead <= self.consistency.staleness
        return ahead == 0 or isinstance(self.consistency, ASP)

    async def do(self, kind: str, worker: int, row: int) -> None:
        client = self.clients[worker]
        if kind == "add" and self.may_write(worker):
            await client.add("w", row=row, columns=[worker], values=[1.0])
        elif kind == "fused add" and not isinstance(self.consistency, BSP):
            await client.add("w", row=row, columns=[worker], values=[1.0], update=self.increment(worker, row))
        elif kind == "update":
            await client.update(self.increment(worker, row))
        elif kind == "clock" and self.may_write(worker):
            await client.clock("w")
        elif kind == "all clock":
            for one in range(_WORKERS):
                if self.may_write(one):
                    await self.clients[one].clock("w")
        elif kind == "get" and self.may_read(worker):
            self.read(worker, row, await client.get("w", row=row))
        elif kind == "get columns" and self.may_read(worker):
            backwards = await client.get("w", row=row, columns=np.arange(_WORKERS)[::-1])
            self.read(worker, row, backwards[::-1])
        elif kind == "start get" and self.may_read(worker):
            self.begun.append((worker, await client.start_get("w", rows=[0, 1])))
        elif kind == "finish get":
            for _, call in self.begun:
                self.reads += (await call).tolist()
            self.begun.clear()

    def increment(self, worker: int, row: int) -> psf.Increment:
        return psf.Increment("w", row=row, delta=np.eye(_WORKERS)[worker])

    def read(self, worker: int, row: int, values: Any) -> None:
        self.reads.append(values.tolist())
        values[:] = -1.0  # the array belongs to the caller


@given(
    consistency=st.sampled_from([ASP(), BSP()]), read_my_writes=st.booleans(), shards=st.integers(1, 2), steps=_steps
)
def test_under_asp_and_bsp_reads_with_a_cache_are_those_without_one(
    consistency: Consistency, read_my_writes: bool, shards: int, steps: list[tuple[str, int, int]]
) -> None:
    """A cache returned another value than a plain read under BSP, so a run could not be repeated."""
    # Changes by update functions of others belong to no clock, so a cached row need not contain them.
    steps = [step for step in steps if isinstance(consistency, ASP) or step[0] != "update"]

    async def reads(cache_bytes: int) -> list[list[float]]:
        async with ParameterServer(shards=shards) as server:
            await server.create_matrix("w", rows=2, columns=_WORKERS, consistency=consistency)
            clients = [
                server.client(worker, cache_bytes=cache_bytes, read_my_writes=read_my_writes)
                for worker in range(_WORKERS)
            ]
            workers = _Workers(clients, consistency)
            for step in steps:
                await workers.do(*step)
            return workers.reads

    assert asyncio.run(reads(_CACHE_BYTES)) == asyncio.run(reads(0))


class _CheckedWorkers(_Workers):
    """Knows the adds of each worker and their clocks."""

    def __init__(self, clients: list[Client], consistency: SSP) -> None:
        super().__init__(clients, consistency)
        self.staleness = consistency.staleness
        self.added: list[tuple[int, int, int]] = []
        """The (worker, row, clock) of each add so far."""

    async def do(self, kind: str, worker: int, row: int) -> None:
        clock = self.clock_of(worker)
        await super().do(kind, worker, row)
        times = {"add": 1, "fused add": 2, "update": 1}.get(kind, 0)
        self.added += [(worker, row, clock)] * times

    def read(self, worker: int, row: int, values: Any) -> None:
        oldest = self.clock_of(worker) - self.staleness
        for other in range(_WORKERS):
            clocks = [clock for who, where, clock in self.added if (who, where) == (other, row)]
            certain = sum(clock < oldest for clock in clocks)
            if other == worker:
                assert values[other] == len(clocks), "a worker reads all of its own writes"
            else:
                assert certain <= values[other] <= len(clocks)
        super().read(worker, row, values)


@given(staleness=st.integers(0, 2), shards=st.integers(1, 2), steps=_steps)
def test_under_ssp_a_cached_read_has_all_that_the_staleness_promises_and_all_own_writes(
    staleness: int, shards: int, steps: list[tuple[str, int, int]]
) -> None:
    """A worker did not see its own step and took it again, or saw too few adds of others and diverged."""

    async def run() -> None:
        async with ParameterServer(shards=shards) as server:
            await server.create_matrix("w", rows=2, columns=_WORKERS, consistency=SSP(staleness))
            clients = [server.client(worker, cache_bytes=_CACHE_BYTES) for worker in range(_WORKERS)]
            workers = _CheckedWorkers(clients, SSP(staleness))
            for step in steps:
                await workers.do(*step)

    asyncio.run(run())


async def test_a_cached_row_is_read_without_the_shards_until_it_is_too_old() -> None:
    """A fast worker asked the shards for each of many reads of one row within its staleness."""
    async with ParameterServer(shards=2) as server:
        await server.create_matrix("w", rows=1, columns=4, consistency=SSP(staleness=2))
        client = server.client(0, cache_bytes=_CACHE_BYTES)
        await client.get("w", row=0)
        asked = server.statistics().matrix("w").gets
        for _ in range(3):
            for _ in range(5):
                await client.get("w", row=0)
                await client.get("w", row=0, columns=[3, 1])
            await client.clock("w")
        assert server.statistics().matrix("w").gets == asked
        await client.get("w", row=0)
        assert server.statistics().matrix("w").gets == asked + 2  # one for each shard


@pytest.mark.parametrize(("consistency", "goes_there"), [(ASP(), 2), (BSP(), 1)], ids=["ASP", "BSP"])
async def test_how_often_a_row_is_fetched_within_a_clock(consistency: Consistency, goes_there: int) -> None:
    """Under ASP a cached row hid the adds of others; under BSP a row was fetched again within a clock."""
    async with ParameterServer() as server:
        await server.create_matrix("w", rows=1, columns=4, consistency=consistency)
        client = server.client(0, cache_bytes=_CACHE_BYTES)
        for _ in range(2):
            await client.get("w", row=0)
        assert server.statistics().matrix("w").gets == goes_there


@pytest.mark.parametrize(
    ("consistency", "read_my_writes", "seen"),
    [(BSP(), False, 0.0), (BSP(), True, 1.0), (SSP(staleness=1), False, 1.0), (ASP(), False, 1.0)],
    ids=["BSP", "BSP reading its own writes", "SSP", "ASP"],
)
async def test_which_own_adds_a_read_shows_within_a_clock(
    consistency: Consistency, read_my_writes: bool, seen: float
) -> None:
    """Under BSP the worker saw half of its own iteration with a cache, and none of it without."""
    async with ParameterServer() as server:
        await server.create_matrix("w", rows=1, columns=2, consistency=consistency)
        client = server.client(0, cache_bytes=_CACHE_BYTES, read_my_writes=read_my_writes)
        await client.get("w", row=0)
        await client.add("w", row=0, columns=[1], values=[1.0])
        assert (await client.get("w", row=0)).tolist() == [0.0, seen]


async def test_a_row_read_while_its_worker_added_to_it_is_not_cached() -> None:
    """The cached row lacked the add, and so did every read of it while it was new enough."""
    async with ParameterServer() as server:
        await server.create_matrix("w", rows=1, columns=2, consistency=SSP(staleness=3))
        client = server.client(0, cache_bytes=_CACHE_BYTES)
        reading = await client.start_get("w", row=0)
        await client.add("w", row=0, values=[1.0, 1.0])
        assert (await reading).tolist() == [0.0, 0.0]
        assert (await client.get("w", row=0)).tolist() == [1.0, 1.0]


async def test_an_add_that_is_refused_is_not_in_the_cached_row() -> None:
    """The worker read a step that no shard had applied, while its cached row was new enough."""
    async with ParameterServer() as server:
        await server.create_matrix("w", rows=2, columns=2, consistency=SSP(staleness=5), block=(1, 2))
        client = server.client(0, cache_bytes=_CACHE_BYTES)
        await client.get("w", row=0)
        with pytest.raises(RowsInDifferentBlocks):
            await client.add("w", row=0, values=[1.0, 1.0], update=psf.Copy("w", 0, 1))
        assert (await client.get("w", row=0)).tolist() == [0.0, 0.0]


async def test_an_add_that_is_cancelled_before_it_is_sent_is_not_in_the_cached_row() -> None:
    """The cached row contained an add that had still waited for room among the calls under way."""
    async with ParameterServer() as server:
        await server.create_matrix("w", rows=1, columns=2, consistency=SSP(staleness=1))
        await server.create_matrix("slow", rows=1, columns=2, consistency=SSP(staleness=0))
        client, _ = server.client(0, cache_bytes=_CACHE_BYTES, max_calls=1), server.client(1)
        await client.get("w", row=0)
        await client.clock("slow")
        waits = asyncio.ensure_future(client.get("slow", row=0))
        await asyncio.sleep(0)
        add = asyncio.ensure_future(client.add("w", row=0, values=[1.0, 1.0]))
        await asyncio.sleep(0)
        add.cancel()
        await asyncio.wait([add])
        waits.cancel()
        await asyncio.wait([waits])
        assert (await client.get("w", row=0)).tolist() == [0.0, 0.0]


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
