"""Requests after a barrier: they are in no snapshot, are not lost, and block no worker that need not wait."""

import asyncio
from typing import Any

import numpy as np
import pytest
from support.waiting import PATIENCE_S

from streamiter.errors import CheckpointError, ParameterServerError, ServerReset, WorkerHasLeft
from streamiter.parameter_server import ASP, BSP, SSP, Client, ParameterServer, psf
from streamiter.parameter_server.consistency import Consistency
from streamiter.parameter_server.psf.function import UpdateFunction
from streamiter.parameter_server.snapshots import thawed
from streamiter.parameter_server.storage.block import Block

COLUMNS = 4
CONSISTENCIES = [ASP(), BSP(), SSP(staleness=1)]


async def server_of_two(consistency: Consistency) -> tuple[ParameterServer, Client, Client]:
    server = ParameterServer(shards=2)
    await server.create_matrix("w", rows=1, columns=COLUMNS, consistency=consistency)
    return server, server.client(0), server.client(1)


async def first_behind_its_barrier(consistency: Consistency) -> tuple[ParameterServer, Client, Client]:
    """Return a server with two clients; checkpoint 1 has begun, and the first client has passed its barrier."""
    server, first, second = await server_of_two(consistency)
    server.checkpoint_begins(1)
    first.pass_barrier(1)
    return server, first, second


async def stored(server: ParameterServer) -> list[float]:
    """Return the values that another server has after it restores the current state."""
    return await stored_in(await server.snapshot())


async def stored_in(state: Any) -> list[float]:
    other = ParameterServer(shards=2)
    await other.restore(state)
    await other.create_matrix("w", rows=1, columns=COLUMNS, consistency=ASP())
    reader = other.client(99)
    row = await reader.get("w", row=0)
    return list(map(float, row))


async def at_barrier(server: ParameterServer, taking: Any) -> list[float]:
    return await stored_in(thawed(await taking, server._plain_data))


@pytest.mark.parametrize("consistency", CONSISTENCIES, ids=repr)
async def test_a_snapshot_contains_the_requests_before_each_barrier_and_none_after(consistency: Consistency) -> None:
    """An add after the barrier was in the snapshot, and was added again when its record was replayed."""
    server, first, second = await server_of_two(consistency)
    await first.add("w", row=0, columns=[0, 3], values=1.0)
    await first.clock("w")
    await second.clock("w")
    server.checkpoint_begins(1)
    first.pass_barrier(1)
    behind = await first.start_add("w", row=0, columns=[0, 3], values=10.0)
    second.pass_barrier(1)
    await behind
    assert await at_barrier(server, server.take_state(1)) == [1.0, 0.0, 0.0, 1.0]
    await first.clock("w")
    await second.clock("w")
    assert (await first.get("w", row=0)).tolist() == [11.0, 0.0, 0.0, 11.0]


async def test_gets_under_asp_continue_after_a_barrier_and_see_own_adds() -> None:
    """Under ASP a fast worker stopped until the slowest worker had its barrier."""
    server, first, second = await first_behind_its_barrier(ASP())
    await asyncio.wait_for(first.add("w", row=0, values=2.0), PATIENCE_S)
    await asyncio.wait_for(first.clock("w"), PATIENCE_S)
    assert (await asyncio.wait_for(first.get("w", row=0), PATIENCE_S)).tolist() == [2.0] * COLUMNS
    assert (await second.get("w", row=0)).tolist() == [0.0] * COLUMNS
    second.pass_barrier(1)
    assert await at_barrier(server, server.take_state(1)) == [0.0] * COLUMNS
    assert (await second.get("w", row=0)).tolist() == [2.0] * COLUMNS


async def test_gets_under_ssp_continue_after_a_barrier_up_to_the_staleness() -> None:
    """Under SSP each checkpoint stopped every worker until the slowest had its barrier, as BSP would."""
    server, first, second = await server_of_two(SSP(staleness=2))
    server.checkpoint_begins(1)
    await first.clock("w")
    first.pass_barrier(1)
    await asyncio.wait_for(first.add("w", row=0, values=1.0), PATIENCE_S)
    await asyncio.wait_for(first.clock("w"), PATIENCE_S)
    assert (await asyncio.wait_for(first.get("w", row=0), PATIENCE_S)).tolist() == [1.0] * COLUMNS
    assert (await asyncio.wait_for(first.add_get("w", row=0, values=1.0), PATIENCE_S)).tolist() == [2.0] * COLUMNS
    await asyncio.wait_for(first.clock("w"), PATIENCE_S)
    reading = asyncio.ensure_future(first.get("w", row=0))
    await second.add("w", row=0, values=10.0)
    assert (await second.get("w", row=0)).tolist() == [10.0] * COLUMNS
    assert not reading.done()
    await second.clock("w")  # this worker is now within the staleness, and before its barrier
    assert (await asyncio.wait_for(reading, PATIENCE_S)).tolist() == [12.0] * COLUMNS
    second.pass_barrier(1)
    assert await at_barrier(server, server.take_state(1)) == [10.0] * COLUMNS
    assert server.statistics().matrix("w").clocks == {"0": 3, "1": 1}


async def test_a_read_under_bsp_does_not_show_an_own_add_that_a_checkpoint_holds() -> None:
    """Whether a worker under BSP read its own add depended on when a checkpoint was taken."""
    server, first, second = await server_of_two(BSP())
    first.pass_barrier(1)
    adding = await first.start_add("w", row=0, values=1.0)
    assert (await first.get("w", row=0)).tolist() == [0.0] * COLUMNS
    second.pass_barrier(1)
    server.checkpoint_begins(1)
    await asyncio.wait_for(_awaited(adding), PATIENCE_S)


async def test_a_snapshot_by_hand_during_a_checkpoint_contains_acknowledged_adds() -> None:
    """A snapshot by hand lacked adds that had returned, until the last worker had passed its barrier."""
    server, first, second = await first_behind_its_barrier(ASP())
    await first.add("w", row=0, values=2.0)
    await first.clock("w")
    state = await server.snapshot()
    assert await stored_in(state) == [2.0] * COLUMNS
    assert state["matrices"]["w"]["clocks"]["progress"] == {0: 1, 1: 0}
    second.pass_barrier(1)
    assert await at_barrier(server, server.take_state(1)) == [0.0] * COLUMNS
    assert (await second.get("w", row=0)).tolist() == [2.0] * COLUMNS


async def test_adds_after_a_barrier_count_though_their_worker_leaves_before_the_others_pass_it() -> None:
    """The last mini-batch of a worker whose input ended just after a barrier was acknowledged and then dropped."""
    server, first, second = await first_behind_its_barrier(ASP())
    await first.add("w", row=0, values=3.0)
    await first.leave()
    second.pass_barrier(1)
    assert await at_barrier(server, server.take_state(1)) == [0.0] * COLUMNS
    assert (await second.get("w", row=0)).tolist() == [3.0] * COLUMNS
    assert server.statistics().matrix("w").clocks == {"1": 0}


@pytest.mark.parametrize("consistency", CONSISTENCIES, ids=repr)
async def test_an_aborted_checkpoint_releases_held_requests(consistency: Consistency) -> None:
    """A worker waited forever for a barrier of an aborted checkpoint."""
    server, first, second = await first_behind_its_barrier(consistency)
    adding = await first.start_add("w", row=0, values=1.0)
    server.checkpoint_abandoned(1)
    await asyncio.wait_for(_awaited(adding), PATIENCE_S)
    await first.clock("w")
    await second.clock("w")
    assert (await second.get("w", row=0)).tolist() == [1.0] * COLUMNS
    server.checkpoint_begins(2)
    first.pass_barrier(2)
    second.pass_barrier(2)
    assert await at_barrier(server, server.take_state(2)) == [1.0] * COLUMNS


async def test_a_held_add_of_a_cancelled_caller_is_applied() -> None:
    """Shards differed forever: one had applied its part before the barrier, another had dropped its part."""
    _, first, second = await first_behind_its_barrier(BSP())
    adding = asyncio.ensure_future(first.add("w", row=0, values=1.0))
    await asyncio.sleep(0)
    adding.cancel()
    with pytest.raises(asyncio.CancelledError):
        await adding
    second.pass_barrier(1)
    await first.clock("w")
    await second.clock("w")
    assert (await first.get("w", row=0)).tolist() == [1.0] * COLUMNS


async def test_a_get_after_a_barrier_that_waits_for_a_clock_fails_when_its_worker_leaves() -> None:
    """The get waited until the checkpoint was complete: forever, if the other worker was idle."""
    server, first, second = await server_of_two(SSP(staleness=0))
    server.checkpoint_begins(1)
    await first.clock("w")
    first.pass_barrier(1)
    reading = asyncio.ensure_future(first.get("w", row=0))
    await asyncio.sleep(0)
    await first.leave()
    with pytest.raises(WorkerHasLeft, match="worker 0"):
        await asyncio.wait_for(reading, PATIENCE_S)
    await second.clock("w")


async def test_a_get_that_is_held_fails_when_its_worker_leaves() -> None:
    """A coroutine waited for the reply to a worker that had left."""
    _, first, second = await first_behind_its_barrier(BSP())
    clocking = asyncio.ensure_future(first.clock("w"))
    await asyncio.sleep(0)
    reading = asyncio.ensure_future(first.get("w", row=0))
    await asyncio.sleep(0)
    await first.leave()
    for call in (clocking, reading):
        with pytest.raises(WorkerHasLeft, match="worker 0"):
            await call
    second.pass_barrier(1)
    assert np.all(await second.get("w", row=0) == 0.0)


class Refusing(UpdateFunction):
    """Fails wherever it runs."""

    matrix = "w"

    def partition_update(self, block: Block, part: Any) -> None:
        raise ValueError("not today")


async def test_an_error_of_an_add_that_was_acknowledged_comes_with_the_workers_next_call() -> None:
    """A function failed after the barrier, and its error was lost."""
    _, first, second = await first_behind_its_barrier(ASP())
    await first.add("w", row=0, values=1.0, update=Refusing())
    second.pass_barrier(1)
    with pytest.raises(ParameterServerError, match=r"Refusing on matrix 'w'.*not today"):
        await first.get("w", row=0)


async def test_held_requests_fail_when_the_server_restores_a_snapshot() -> None:
    """A worker whose clock was held waited forever when a snapshot was restored."""
    server, first, second = await server_of_two(BSP())
    state = await server.snapshot()
    first.pass_barrier(1)
    adding = await first.start_add("w", row=0, values=1.0)
    clocking = asyncio.ensure_future(first.clock("w"))
    await asyncio.sleep(0)
    await server.restore(state)
    for held in (_awaited(adding), clocking):
        with pytest.raises(ServerReset, match="given a snapshot to go back to"):
            await asyncio.wait_for(held, PATIENCE_S)
    for worker in (first, second):
        await worker.clock("w")
    assert (await first.get("w", row=0)).tolist() == [0.0] * COLUMNS


async def test_held_requests_fail_when_the_server_starts_over_but_acknowledged_ones_count() -> None:
    """A clock from before the reset counted after it on the shards, but not in its worker."""
    server, first, second = await server_of_two(ASP())
    first.pass_barrier(1)
    await first.add("w", row=0, values=1.0)
    await first.clock("w")
    filling = asyncio.ensure_future(first.update(psf.Fill("w", row=0, value=9.0)))
    await asyncio.sleep(0)
    await server.reset()
    with pytest.raises(ServerReset, match="started over"):
        await asyncio.wait_for(filling, PATIENCE_S)
    server.checkpoint_begins(1)
    second.pass_barrier(1)
    assert await at_barrier(server, server.take_state(1)) == [0.0] * COLUMNS
    assert (await second.get("w", row=0)).tolist() == [1.0] * COLUMNS
    assert server.statistics().matrix("w").clocks == {"0": 0, "1": 0}


async def test_waiting_for_a_state_fails_when_the_server_is_closed() -> None:
    """A checkpoint never ended, because the server was closed before all workers had passed its barrier."""
    server, _, _ = await first_behind_its_barrier(BSP())
    taking = asyncio.ensure_future(server.take_state(1))
    await asyncio.sleep(0)
    await server.close()
    with pytest.raises(CheckpointError, match="checkpoint 1, given a server that was closed"):
        await asyncio.wait_for(taking, PATIENCE_S)


async def test_a_clock_of_a_cancelled_caller_counts_on_both_sides() -> None:
    """A client was a clock behind its shards, and took cached rows for newer than they were."""
    server, first, second = await first_behind_its_barrier(BSP())
    clocking = asyncio.ensure_future(first.clock("w"))
    await asyncio.sleep(0)
    clocking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await clocking
    second.pass_barrier(1)
    await server.take_state(1)
    assert server.statistics().matrix("w").clocks == {"0": 1, "1": 0}
    assert first.clock_of("w") == 1


async def _awaited(handle: Any) -> Any:
    return await handle
