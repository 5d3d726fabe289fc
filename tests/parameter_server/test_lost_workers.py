"""Workers that send nothing any more leave, and workers that waited for them continue."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from support.waiting import PATIENCE_S

from streamiter.errors import WorkerHasLeft
from streamiter.parameter_server import BSP, SSP, Client, ParameterServer
from streamiter.testing import VirtualClock


async def test_a_silent_worker_leaves_and_the_others_continue() -> None:
    """A worker that hung stopped the training of all others forever."""
    clock = VirtualClock()
    async with ParameterServer(clock=clock, heartbeat_timeout_s=10.0) as server:
        await server.create_matrix("w", rows=1, columns=2, consistency=BSP())
        lively, silent = server.client(0), server.client(1)
        await lively.add("w", row=0, values=1.0)
        await lively.clock("w")
        reading = asyncio.ensure_future(lively.get("w", row=0))
        await clock.advance(9.0)
        assert not reading.done()
        silent.heartbeat()
        await clock.advance(9.0)
        assert not reading.done()
        await clock.advance(2.0)
        assert (await asyncio.wait_for(reading, PATIENCE_S)).tolist() == [1.0, 1.0]
        assert server.workers == [0]
        with pytest.raises(WorkerHasLeft, match=r"worker 1: .* nothing was heard of it for 10 s"):
            await silent.get("w", row=0)


async def test_a_worker_that_waits_for_others_is_not_taken_for_dead() -> None:
    """A fast worker was removed because it sent nothing while it waited for a slow one."""
    clock = VirtualClock()
    async with ParameterServer(clock=clock, heartbeat_timeout_s=10.0) as server:
        await server.create_matrix("w", rows=1, columns=2, consistency=BSP())
        fast, slow = server.client(0), server.client(1)
        await fast.clock("w")
        reading = asyncio.ensure_future(fast.get("w", row=0))
        for _ in range(5):
            await clock.advance(9.0)
            slow.heartbeat()
        assert server.workers == [0, 1]
        await slow.clock("w")
        await reading
        await clock.advance(9.0)
        assert server.workers == [0, 1]


CALLS_WITHOUT_A_REQUEST: dict[str, Callable[[Client], Awaitable[Any]]] = {
    "a get that the cache answers": lambda client: client.get("w", row=0),
    "a matrix that is there": lambda client: client.create_matrix("w", rows=1, columns=2, consistency=SSP(staleness=1)),
}


@pytest.mark.parametrize("call", CALLS_WITHOUT_A_REQUEST)
async def test_a_worker_whose_calls_need_no_shard_is_not_silent(call: str) -> None:
    """A worker that read the same row all the time was taken for dead, because its cache answered."""
    clock = VirtualClock()
    async with ParameterServer(clock=clock, heartbeat_timeout_s=10.0) as server:
        await server.create_matrix("w", rows=1, columns=2, consistency=SSP(staleness=1))
        client = server.client(0, cache_bytes=1_000)
        await client.get("w", row=0)
        for _ in range(5):
            await clock.advance(6.0)
            await CALLS_WITHOUT_A_REQUEST[call](client)
        assert server.workers == [0]
        assert server.statistics().matrix("w").gets == 1
