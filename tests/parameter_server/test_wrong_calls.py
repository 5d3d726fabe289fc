"""Calls that fail, wait for room or are cancelled: no other call waits for ever. ``refusals.txt`` has wrong calls."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import numpy as np
import pytest
from support.waiting import PATIENCE_S

from streamiter.errors import ParameterServerError, WorkerHasLeft
from streamiter.parameter_server import BSP, SSP, Client, ParameterServer, psf

Call = Callable[[Client], Awaitable[Any]]


def raise_value_error(x: Any) -> Any:
    raise ValueError("not for these")


async def test_the_largest_whole_numbers_are_added_from_any_dtype() -> None:
    """Numbers of uint64 were refused, although 64 bits hold them."""
    async with ParameterServer(shards=2) as server:
        await server.create_matrix("w", rows=1, columns=2, dtype="int64")
        client = server.client(worker=0)
        await client.add("w", row=0, values=np.array([1, (1 << 63) - 1], np.uint64))
        assert (await client.get("w", row=0)).tolist() == [1, (1 << 63) - 1]


async def test_a_clock_does_not_fail_by_numbers_that_another_worker_added() -> None:
    """A numpy warning, raised as an error, ended the job of a worker whose numbers were small."""
    async with ParameterServer(shards=2) as server:
        await server.create_matrix("w", rows=1, columns=2, dtype="float32", consistency=BSP())
        large, small = server.client(worker=0), server.client(worker=1)
        for _ in range(2):
            await large.add("w", row=0, columns=[1], values=[3e38])
        await large.clock("w")
        await small.add("w", row=0, values=1.0)
        with np.errstate(all="raise"):
            assert await small.clock("w") == 1
        assert (await small.get("w", row=0)).tolist() == [1.0, np.inf]


CALLS_OF_A_CLIENT: dict[str, Call] = {
    "get": lambda client: client.get("w", row=0),
    "start_get": lambda client: client.start_get("w", row=0),
    "add": lambda client: client.add("w", row=0, values=1.0),
    "start_add": lambda client: client.start_add("w", row=0, values=1.0),
    "add_get": lambda client: client.add_get("w", row=0, values=1.0),
    "clock": lambda client: client.clock("w"),
    "barrier": lambda client: client.barrier(),
    "update": lambda client: client.update(psf.Fill("w", row=0, value=1)),
    "aggregate": lambda client: client.aggregate(psf.Sum("w", row=0)),
    "create_matrix": lambda client: client.create_matrix("v", rows=1, columns=1),
}


@pytest.mark.parametrize("used_before", [False, True], ids=["unused", "used"])
@pytest.mark.parametrize("call", CALLS_OF_A_CLIENT)
async def test_every_call_of_a_client_that_has_left_raises_an_error(call: str, used_before: bool) -> None:
    """A gradient was added after its worker had left, and counted in a finished iteration."""
    async with ParameterServer(shards=2) as server:
        await server.create_matrix("w", rows=1, columns=4)
        client = server.client(worker=7)
        if used_before:
            await client.get("w", row=0)
        await client.leave()
        with pytest.raises(WorkerHasLeft, match=r"worker 7: expected .* takes part, given .*it has left"):
            await asyncio.wait_for(CALLS_OF_A_CLIENT[call](client), PATIENCE_S)
        with pytest.raises(WorkerHasLeft, match="worker 7"):
            client.heartbeat()
        assert (await server.aggregate(psf.Asum("w", row=0)), server.matrices) == (0.0, ["w"])


async def test_shards_stay_in_step_where_the_function_on_the_clock_fails() -> None:
    """The first shard raised an error, so the second never received the clock, and its gets waited forever."""
    async with ParameterServer(shards=2) as server:
        failing = psf.Map("w", 0, 0, raise_value_error)
        await server.create_matrix("w", rows=1, columns=4, consistency=BSP(), on_clock=failing)
        clients = [server.client(worker=number) for number in range(2)]
        await clients[0].clock("w")
        with pytest.raises(ParameterServerError, match="not for these"):
            await clients[1].clock("w")
        assert [shard.matrices[0].clocks for shard in server.statistics().shards] == [{"0": 1, "1": 1}] * 2
        for client in clients:
            assert (await asyncio.wait_for(client.get("w", row=0), PATIENCE_S)).tolist() == [0.0] * 4


async def test_a_worker_leaves_everywhere_though_a_function_on_the_clock_fails() -> None:
    """A worker remained registered on other shards and matrices, where all others waited for it forever."""
    async with ParameterServer(shards=2) as server:
        failing = psf.Map("v", 0, 0, raise_value_error)
        await server.create_matrix("v", rows=1, columns=4, consistency=BSP(), on_clock=failing)
        await server.create_matrix("w", rows=1, columns=4, consistency=BSP())
        stays, leaves = (server.client(worker=number) for number in range(2))
        await stays.clock("v")
        await stays.clock("w")
        reading = asyncio.ensure_future(stays.get("w", row=0))
        with pytest.raises(ParameterServerError, match="not for these"):
            await leaves.leave()
        assert (await asyncio.wait_for(reading, PATIENCE_S)).tolist() == [0.0] * 4
        assert server.workers == [0]


async def _turns(count: int = 3) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


@asynccontextmanager
async def _busy_client() -> AsyncIterator[tuple[Client, asyncio.Task[object]]]:
    """Yield a client with room for one call, and its one call, which waits for another worker."""
    async with ParameterServer() as server:
        await server.create_matrix("w", rows=1, columns=2)
        await server.create_matrix("slow", rows=1, columns=2, consistency=SSP(0))
        client, _ = server.client(0, max_calls=1), server.client(1)
        await client.clock("slow")
        waits: asyncio.Task[object] = asyncio.ensure_future(client.get("slow", row=0))
        await _turns()
        yield client, waits


async def test_waiting_calls_get_room_in_order() -> None:
    """A busy caller took the room that it had just released, and starved all others."""
    order: list[str] = []
    async with _busy_client() as (client, waits):

        async def call(name: str) -> None:
            await client.get("w", row=0)
            order.append(name)

        calls = [asyncio.ensure_future(call(name)) for name in "abc"]
        await _turns()
        assert order == []
        waits.cancel()
        calls.append(asyncio.ensure_future(call("d")))
        await asyncio.wait_for(asyncio.gather(*calls), PATIENCE_S)
    assert order == ["a", "b", "c", "d"]


async def test_a_call_that_is_cancelled_as_it_gets_room_passes_the_room_on() -> None:
    """Room given to a task in the same turn in which it was cancelled was lost, and finally all calls hung."""
    async with _busy_client() as (client, waits):
        first, second = (asyncio.ensure_future(client.get("w", row=0)) for _ in range(2))
        await _turns()
        waits.cancel()
        await asyncio.sleep(0)
        first.cancel()
        assert (await asyncio.wait_for(second, PATIENCE_S)).tolist() == [0.0, 0.0]
        assert (await asyncio.wait_for(client.get("w", row=0), PATIENCE_S)).tolist() == [0.0, 0.0]


async def test_a_call_that_is_cancelled_before_it_gets_room_adds_none() -> None:
    """Each cancelled call made room for one call more, and a call that had been cancelled was given the room."""
    async with _busy_client() as (client, waits):
        cancelled = asyncio.ensure_future(client.get("w", row=0))
        await _turns()
        cancelled.cancel()
        with pytest.raises(asyncio.CancelledError):
            await cancelled
        gone, last = (asyncio.ensure_future(client.get("w", row=0)) for _ in range(2))
        await _turns()
        assert not gone.done()
        assert not last.done()
        gone.cancel()
        waits.cancel()  # In the turn in which the first in the queue is cancelled.
        assert (await asyncio.wait_for(last, PATIENCE_S)).tolist() == [0.0, 0.0]
        assert gone.cancelled()


async def test_calls_that_wait_for_room_fail_when_the_client_leaves() -> None:
    """A call that waited for room in a client that had left waited forever."""
    async with _busy_client() as (client, waits):
        calls = [waits, *(asyncio.ensure_future(client.get("w", row=0)) for _ in range(3))]
        await _turns()
        await client.leave()
        for call in calls:
            with pytest.raises(WorkerHasLeft):
                await asyncio.wait_for(call, PATIENCE_S)
