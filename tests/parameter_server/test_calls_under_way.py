"""The limit on a client's calls under way: callers wait in order, a cancelled caller loses no room, and none hangs."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from support.waiting import PATIENCE_S

from streamiter.errors import WorkerHasLeft
from streamiter.parameter_server import SSP, ParameterServer
from streamiter.parameter_server.client import Client


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
