"""Adds that wait for a clock take bounded memory and bounded time."""

from __future__ import annotations

import tracemalloc

import numpy as np
import pytest

from streamiter.parameter_server import BSP, ParameterServer, matrix_shard, requests
from streamiter.parameter_server.requests import AddPart, AddRequest, GetRequest, copied_add, size_of_adds
from streamiter.parameter_server.shard import Shard

COLUMNS = 1_000


@pytest.fixture(autouse=True)
def small_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sum up pending adds above 4 KiB instead of 64 MiB."""
    monkeypatch.setattr(matrix_shard, "_PENDING_BYTES", 4 << 10)


async def test_many_small_adds_of_one_iteration_are_summed_up() -> None:
    """A worker filled the memory with adds of one key, because each counted as its 16 bytes of numbers only."""
    async with ParameterServer() as server:
        await server.create_matrix("w", rows=1, columns=COLUMNS, consistency=BSP())
        client = server.client(worker=0)
        for number in range(1_000):
            await client.add("w", row=0, columns=[number % 3], values=[1.0])
            assert server.statistics().matrix("w").buffered_adds <= 10
        await client.clock("w")
        assert (await client.get("w", row=0, columns=[0, 1, 2, 3])).tolist() == [334.0, 333.0, 333.0, 0.0]


async def test_a_large_add_is_not_summed_up_again_with_each_small_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each add of a few keys after an add of 10 M keys took 40 ms."""
    summed: list[int] = []
    sum_up = requests.summed_adds
    monkeypatch.setattr(requests, "summed_adds", lambda parts: (summed.append(1), sum_up(parts))[1])
    async with ParameterServer() as server:
        await server.create_matrix("w", rows=1, columns=COLUMNS, consistency=BSP())
        client = server.client(worker=0)
        for _ in range(2):
            await client.add("w", row=0, values=1.0)
            for number in range(100):
                await client.add("w", row=0, columns=[number], values=[1.0])
            await client.clock("w")
        assert 2 <= len(summed) <= 20
        assert (await client.get("w", row=0)).tolist() == [4.0] * 100 + [2.0] * (COLUMNS - 100)


def test_the_size_of_an_add_of_one_key_is_its_memory() -> None:
    """The bound counted numbers instead of memory."""
    request = AddRequest("w", 0, -1, (AddPart(0, 0, np.array([3]), np.array([1.0])),))
    tracemalloc.start()
    try:
        before_bytes, _ = tracemalloc.get_traced_memory()
        kept = [copied_add(request) for _ in range(1_000)]
        after_bytes, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    said_bytes = sum(size_of_adds(one.parts) for one in kept)
    assert 0.7 < said_bytes / (after_bytes - before_bytes) < 1.4


async def test_a_read_after_a_barrier_searches_few_of_the_workers_own_adds() -> None:
    """Under ASP, each read of a fast worker that waited for a slow worker's barrier took 170 ms."""
    async with ParameterServer() as server:
        await server.create_matrix("w", rows=2, columns=COLUMNS)
        quick, slow = (server.client(worker=number) for number in range(2))
        server.checkpoint_begins(1)
        quick.pass_barrier(1)
        [shard] = server._links
        assert isinstance(shard, Shard)
        await quick.add("w", row=1, values=1.0)
        for number in range(1_000):
            await quick.add("w", row=0, columns=[number % 3, 999], values=1.0)
            assert len(shard._holding._own_adds(GetRequest("w", 0))) <= 70
            if number % 100 == 7:
                assert (await quick.get("w", row=0, columns=[999])).tolist() == [number + 1.0]
        assert shard._holding.held > 0
        assert (await slow.get("w", row=0)).sum() == 0.0
        slow.pass_barrier(1)
        await server.take_state(1)
        rows = await slow.get("w", rows=[0, 1])
        assert (rows[0, [0, 1, 2, 999]].tolist(), rows[1].sum()) == ([334.0, 333.0, 333.0, 1000.0], COLUMNS)
