"""Shards whose processes are killed."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import numpy as np
import pytest
from parameter_server.ray.other_process import OtherProcess, gradient, train
from parameter_server.ray.processes import kill
from support.waiting import PATIENCE_S

from streamiter.parameter_server import ASP, BSP, psf
from streamiter.parameter_server.recovery import SnapshotEvery
from streamiter.parameter_server.server import ParameterServer

pytestmark = pytest.mark.usefixtures("ray_cluster")

COLUMNS = 50_000  # 400 kB: by way of the object store
ITERATIONS = 10


async def test_all_go_back_to_one_moment_and_nothing_counts_twice() -> None:
    """A shard that comes back from an older moment than the others: updates are lost on one half of the parameters."""
    import ray

    async with trained(BSP()) as server:
        here = server.client(worker=0)
        await here.join()
        there = ray.remote(OtherProcess).options(num_cpus=0).remote(server.address())
        await there.join.remote(1)
        elsewhere = there.train.remote(1, ITERATIONS, COLUMNS)
        went_back = [
            *await train(here, ITERATIONS, COLUMNS, killing(server, here, {5: 1})),
            *await elsewhere,
        ]
        assert len(went_back) == 2  # both workers, once
        assert all(clock in (2, 4) for clock in went_back)


async def test_workers_that_are_far_apart_go_back_each_to_its_own_barrier() -> None:
    """Under ASP the fast worker's adds were in the snapshot, and once more after it had gone back. And two losses."""
    async with trained(ASP()) as server:
        fast, slow = server.client(worker=0), server.client(worker=1)
        await slow.join()
        ahead = asyncio.create_task(train(fast, ITERATIONS, COLUMNS, killing(server, fast, {5: 0, 8: 1})))
        went_back_slow = await train(slow, ITERATIONS, COLUMNS)
        went_back_fast = await ahead
        assert len(went_back_fast) == 2
        assert all(clock % 2 == 0 for clock in went_back_fast + went_back_slow)


@asynccontextmanager
async def trained(consistency: Any) -> AsyncIterator[ParameterServer]:
    """A server, and in the end a look at its parameters: all that two workers have added, once each."""
    async with ParameterServer(shards=2, on="ray", snapshots=SnapshotEvery(clocks=2, of="w")) as server:
        await server.create_matrix("w", rows=1, columns=COLUMNS, consistency=consistency)
        yield server
        expected = sum(
            gradient(worker, iteration, COLUMNS) for worker in (0, 1) for iteration in range(ITERATIONS)
        )
        found = await server.aggregate(psf.Pull("w", row=0))
        np.testing.assert_array_equal(found, expected)


def killing(
    server: ParameterServer, client: Any, victims: dict[int, int]
) -> Callable[[int], Awaitable[None]]:
    """Kills a shard the first time that a worker begins some iteration, once there is a snapshot: iteration → shard."""

    async def before(iteration: int) -> None:
        if (victim := victims.pop(iteration, None)) is not None:
            async with asyncio.timeout(PATIENCE_S):
                while server._hosting.latest_snapshot is None:
                    await client.aggregate(psf.Sum("w", row=0))
            await kill(server, victim)

    return before
