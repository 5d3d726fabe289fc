"""Tests a restore of a snapshot with workers at different clocks into a server with its own set of workers."""

from __future__ import annotations

import pytest

from streamiter.parameter_server.client import Client
from streamiter.parameter_server.consistency import BSP, SSP, Consistency
from streamiter.parameter_server.server import ParameterServer
from streamiter.values.plain_data import PlainData


async def server_of(consistency: Consistency, *workers: int) -> tuple[ParameterServer, list[Client]]:
    server = ParameterServer(shards=2)
    await server.create_matrix("w", rows=1, columns=2, dtype="int64", consistency=consistency)
    return server, [server.client(worker) for worker in workers]


async def state_in_which_worker_1_is_behind(consistency: Consistency) -> object:
    """Return a state in which both workers have added and only worker 0 has finished its iteration."""
    server, (ahead, behind) = await server_of(consistency, 0, 1)
    async with server:
        await ahead.add("w", row=0, values=[1, 10])
        await behind.add("w", row=0, values=[2, 20])
        await ahead.clock("w")
        plain = PlainData()
        return plain.decode(plain.encode(await server.snapshot()))


@pytest.mark.parametrize("consistency", [BSP(), SSP(0)], ids=repr)
async def test_a_worker_that_was_ahead_still_waits_for_the_other(consistency: Consistency) -> None:
    """The buffered add of the worker ahead was refused, or applied in the next iteration."""
    state = await state_in_which_worker_1_is_behind(consistency)
    server, (ahead, behind) = await server_of(consistency, 0, 1)
    async with server:
        await server.restore(state)  # type: ignore[arg-type]
        reading = await ahead.start_get("w", row=0)
        assert not reading.is_done
        await behind.add("w", row=0, values=[100, 1000])
        assert await behind.clock("w") == 1
        assert (await reading).tolist() == [103, 1030]


@pytest.mark.parametrize("consistency", [BSP(), SSP(0)], ids=repr)
async def test_a_worker_that_does_not_return_blocks_no_other(consistency: Consistency) -> None:
    """A worker that did not return after a restore was still waited for, or its adds were lost."""
    state = await state_in_which_worker_1_is_behind(consistency)
    server, [ahead] = await server_of(consistency, 0)
    async with server:
        await server.restore(state)  # type: ignore[arg-type]
        reading = await ahead.start_get("w", row=0)
        assert reading.is_done
        assert (await reading).tolist() == [3, 30]
        assert await ahead.clock("w") == 2


@pytest.mark.parametrize("consistency", [BSP(), SSP(0)], ids=repr)
async def test_a_worker_that_is_new_after_a_restore_joins_at_the_minimum(consistency: Consistency) -> None:
    """After a restore, a new worker did not start at the minimum clock, or the others did not wait for it."""
    state = await state_in_which_worker_1_is_behind(consistency)
    server, (ahead, behind, new) = await server_of(consistency, 0, 1, 2)
    async with server:
        await server.restore(state)  # type: ignore[arg-type]
        reading = await ahead.start_get("w", row=0)
        await behind.clock("w")
        assert not reading.is_done
        assert new.clock_of("w") == 0
        await new.add("w", row=0, values=[4, 40])
        assert await new.clock("w") == 1
        assert (await reading).tolist() == [7, 70]
