"""Shards whose processes are killed."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from parameter_server.ray.other_process import RemoteChannels, gradient, train
from parameter_server.ray.processes import call_until_error, kill
from support.waiting import PATIENCE_S

from streamiter.errors import RolledBack, ShardLost
from streamiter.parameter_server import ASP, BSP, SSP, Client, psf
from streamiter.parameter_server.server import ParameterServer
from streamiter.parameter_server.snapshots import SnapshotEvery

pytestmark = pytest.mark.usefixtures("ray_cluster")

COLUMNS = 50_000  # 400 kB, which go through the object store
ITERATIONS = 8


async def test_all_shards_roll_back_to_one_snapshot_and_no_add_counts_twice() -> None:
    """A shard was restored to an older moment than the others, and half of the parameters lost updates."""
    import ray

    async with trained(BSP()) as server:
        here = server.client(worker=0)
        await here.join()
        there = ray.remote(RemoteChannels).options(num_cpus=0).remote(server.address())
        await there.join.remote(1)
        elsewhere = there.train.remote(1, ITERATIONS, COLUMNS)
        went_back = [*await train(here, ITERATIONS, COLUMNS, killing(server, here, {5: 1})), *await elsewhere]
        assert len(went_back) == 2  # both workers, once
        assert all(clock in (2, 4) for clock in went_back)


async def test_workers_far_apart_roll_back_each_to_its_own_barrier() -> None:
    """Under ASP a fast worker's adds were in the snapshot, and were added again after its rollback."""
    async with trained(ASP()) as server:
        fast, slow = server.client(worker=0), server.client(worker=1)
        await slow.join()
        ahead = asyncio.create_task(train(fast, ITERATIONS, COLUMNS, killing(server, fast, {4: 0, 6: 1})))
        went_back_slow = await train(slow, ITERATIONS, COLUMNS)
        went_back_fast = await ahead
        assert len(went_back_fast) == 2
        assert all(clock % 2 == 0 for clock in went_back_fast + went_back_slow)


async def past_an_idle_worker(server: ParameterServer, consistency: Any, iterations: int) -> tuple[Client, Client]:
    """Return a busy worker after this many iterations, and an idle worker."""
    await server.create_matrix("w", rows=2, columns=4, consistency=consistency, init=[1.0, 2.0, 3.0, 4.0])
    busy, idle = server.client(worker=0), server.client(worker=1)
    await idle.join()
    async with asyncio.timeout(PATIENCE_S):
        for iteration in range(iterations):
            assert (await busy.get("w", row=0))[0] == 1.0 + iteration
            await busy.add("w", row=0, values=1.0)
            await busy.clock("w")
    return busy, idle


async def test_under_ssp_an_idle_worker_stops_no_other_at_a_snapshot() -> None:
    """Worker 0 stopped at clock 2, as under BSP."""
    async with ParameterServer(shards=1, on="ray", snapshots=SnapshotEvery(clocks=2, of="w")) as server:
        await past_an_idle_worker(server, SSP(staleness=10), iterations=11)


async def test_under_asp_an_idle_worker_stops_no_other_and_a_loss_without_a_snapshot_resets_all_shards() -> None:
    """Worker 0 stopped at clock 2, as under BSP, and a loss before the first snapshot ended the training.

    The error named neither the shard's process nor its matrices.
    """
    async with ParameterServer(shards=2, on="ray", snapshots=SnapshotEvery(clocks=2, of="w")) as server:
        busy, idle = await past_an_idle_worker(server, ASP(), iterations=4)
        await kill(server, 1)
        for client in (busy, idle):
            with pytest.raises(RolledBack) as back:
                await call_until_error(client)
            assert back.value.clocks == {"w": 0}
        assert re.fullmatch(
            r"parameter server: expected all shards to run, given the loss of shard 1 \(process \d+ on node [\d.]+ "
            r"\(\w{8}\) has ended\) with blocks of 'w'; there is no snapshot yet, so all shards went back to their "
            r"initial values: resume from its clocks: w 0",
            str(back.value),
        )
        assert (await idle.get("w", rows=[0, 1])).tolist() == [[1.0, 2.0, 3.0, 4.0]] * 2
        async with asyncio.timeout(PATIENCE_S):
            for _ in range(2):
                for client in (busy, idle):
                    await client.add("w", row=0, values=1.0)
                    await client.clock("w")
            while server._hosting.latest_snapshot != 1:  # type: ignore[attr-defined]
                await busy.aggregate(psf.Sum("w", row=0))
        assert (await busy.get("w", row=0)).tolist() == [5.0, 6.0, 7.0, 8.0]


async def test_a_snapshot_lost_with_its_node_is_an_error_and_no_training_restarts_silently() -> None:
    """A lost snapshot was reported as no snapshot, and the training silently restarted from its initial values.

    With one shard, no other shard knew the workers, and the first one to call again ran ahead of the others.
    A worker that left at that moment still counted, so no later snapshot became complete.
    """
    import ray

    async with ParameterServer(shards=1, on="ray", snapshots=SnapshotEvery(clocks=1, of="w")) as server:
        await server.create_matrix("w", rows=1, columns=COLUMNS)
        client, idle = server.client(worker=0), server.client(worker=1)
        await idle.join()
        await client.add("w", row=0, values=1.0)
        await kill(server, 0)
        with pytest.raises(RolledBack, match="all shards went back to their initial values"):
            await call_until_error(client)
        assert server.statistics().matrix("w").clocks == {"0": 0, "1": 0}  # the idle worker has not called since
        with pytest.raises(RolledBack):
            await idle.leave()
        await idle.leave()
        async with asyncio.timeout(PATIENCE_S):
            assert (await client.add_get("w", row=0, values=1.0))[0] == 1.0
            await client.clock("w")
            while server._hosting.latest_snapshot is None:  # type: ignore[attr-defined]
                await client.aggregate(psf.Sum("w", row=0))
        kept = server._hosting._supervisor.kept  # type: ignore[attr-defined]
        kept.replace(replace(kept.latest, states=(ray.remote(gone).remote(),)))
        await kill(server, 0)
        with pytest.raises(
            ShardLost, match=r"the loss of shard 0 .*'w'; snapshot 1 could not be restored \(OSError: gone"
        ):
            await call_until_error(client)


def gone() -> None:
    """Fail like an object that Ray's store has lost."""
    raise OSError("gone")


@asynccontextmanager
async def trained(consistency: Any) -> AsyncIterator[ParameterServer]:
    """Yield a server, and check at the end that its parameters are the sum of all adds of two workers, once each."""
    async with ParameterServer(shards=2, on="ray", snapshots=SnapshotEvery(clocks=2, of="w")) as server:
        await server.create_matrix("w", rows=1, columns=COLUMNS, consistency=consistency)
        yield server
        expected = sum(gradient(worker, iteration, COLUMNS) for worker in (0, 1) for iteration in range(ITERATIONS))
        found = await server.aggregate(psf.Pull("w", row=0))
        np.testing.assert_array_equal(found, expected)


def killing(server: ParameterServer, client: Any, victims: dict[int, int]) -> Callable[[int], Awaitable[None]]:
    """Return a hook that kills a shard when a worker first starts an iteration of ``victims`` after a snapshot."""

    async def before(iteration: int) -> None:
        if (victim := victims.pop(iteration, None)) is not None:
            async with asyncio.timeout(PATIENCE_S):
                while server._hosting.latest_snapshot is None:
                    await client.aggregate(psf.Sum("w", row=0))
            await kill(server, victim)

    return before
