"""Statistics, snapshots, functions and subscriptions of a server with shards on Ray."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest
from parameter_server.ray.processes import call_until_error, kill
from support.waiting import PATIENCE_S

from streamiter.errors import ConfigurationError, ParameterServerError, RolledBack, ShardLost
from streamiter.parameter_server import ASP, SSP, psf
from streamiter.parameter_server.client import Client
from streamiter.parameter_server.server import ParameterServer
from streamiter.parameter_server.snapshots import SnapshotEvery

pytestmark = pytest.mark.usefixtures("ray_cluster")


async def test_statistics_and_snapshots_are_of_one_moment_and_a_restore_replaces_a_lost_shard() -> None:
    """Statistics were from before the training, a snapshot held half of an add, and a lambda was sent to a shard.

    Workers waited forever for a lost shard, or continued without half of the parameters.
    """
    async with ParameterServer(shards=2, on="ray", name="prices") as server:
        await server.create_matrix("w", rows=2, columns=6, consistency=ASP())
        clients = [server.client(worker=number) for number in range(3)]
        is_over = asyncio.Event()

        async def work(client: Client) -> None:
            while not is_over.is_set():
                for add in [await client.start_add("w", row=0, values=1.0) for _ in range(3)]:
                    await add
                await client.clock("w")

        async with asyncio.TaskGroup() as group:
            for client in clients:
                group.create_task(work(client))
            states = [await server.snapshot() for _ in range(10)]
            is_over.set()

        values = []
        for state in states:
            async with ParameterServer(shards=2) as other:
                await other.create_matrix("w", rows=2, columns=6, consistency=ASP())
                await other.restore(state)
                row = await other.aggregate(psf.Pull("w", row=0))
            assert (row == row[0]).all()
            clocks = sum(state["matrices"]["w"]["clocks"]["progress"].values())
            assert 3 * clocks <= row[0] <= 3 * clocks + 9  # the adds of each worker since its last clock
            values.append(row[0])
        assert values == sorted(values)
        assert values[-1] > 0

        counted = server.statistics().matrix("w")
        total = float((await server.aggregate(psf.Pull("w", row=0)))[0])
        assert counted.adds == 2 * total  # on each shard
        assert sum(counted.clocks.values()) == total / 3

        with pytest.raises(ConfigurationError, match=r"psf.Map\(function=\).*is a lambda"):
            await clients[0].update(psf.Map("w", 0, 1, lambda x: x))
        with pytest.raises(ConfigurationError, match=r"psf.Map\(function=\).*is a lambda"):
            await server.create_matrix("v", rows=1, columns=4, on_clock=psf.Map("v", 0, 0, lambda x: x))
        # np.unique has fewer values for the second shard.
        init = [psf.Push("v", 0, [1.0, 2.0, 3.0, 3.0]), psf.Map("v", 0, 0, np.unique)]
        with pytest.raises(ParameterServerError, match="expected its function to return an array of shape"):
            await server.create_matrix("v", rows=1, columns=4, init=init)
        await server.create_matrix("v", rows=1, columns=4, init=5.0)
        assert await server.aggregate(psf.Sum("v", row=0)) == 20.0
        await clients[0].update(psf.Map("w", 0, 1, np.sqrt))
        assert (await clients[0].get("w", row=1)).tolist() == pytest.approx([total**0.5] * 6)
        await clients[0].update(psf.Push("w", 1, [4.0] * 6))
        await clients[0].update(psf.CompressUpdate("w", 1, [0.0, 0.5, -1.0, 0.0, 0.0, 1.0], bits=16))
        assert (await server.aggregate(psf.FullPull("w")))[1].tolist() == pytest.approx(
            [4.0, 4.5, 3.0, 4.0, 4.0, 5.0], abs=1e-4
        )
        await clients[0].update(psf.SparsePush("w", 1, [5, 0], [2.0, 3.0]))
        assert (await clients[0].get("w", row=1)).tolist() == [3.0, 0.0, 0.0, 0.0, 0.0, 2.0]

        await kill(server, 0)
        lost = r"prices: expected all shards to run, given the loss of shard 0 \(process \d+ on node [\d.]+ \(\w{8}\) "
        then = r"has ended\) with blocks of 'w', 'v'; no snapshots .* server.restore"
        with pytest.raises(ShardLost, match=lost + then):
            await call_until_error(clients[0])
        server.checkpoint_begins(1)
        with pytest.raises(ShardLost):
            await server.take_state(1)
        server.checkpoint_abandoned(1)  # no request is held
        await server.restore(states[0])
        assert (await clients[0].get("w", row=0)).tolist() == [values[0]] * 6
        assert clients[1].clock_of("w") == states[0]["matrices"]["w"]["clocks"]["progress"][1]


async def test_subscribers_and_workers_missing_from_the_snapshot_continue_after_a_loss() -> None:
    """A subscriber was asked for a clock that it did not have, and a worker was unknown after the rollback."""
    async with ParameterServer(shards=2, on="ray", snapshots=SnapshotEvery(clocks=1, of="w")) as server:
        await server.create_matrix("w", rows=1, columns=4, consistency=SSP(staleness=1))
        first = server.client(worker=0)
        subscription = first.subscribe("w", rows=[0])
        seen = Seen(subscription)
        await iterate(first)
        await seen.until([1.0] * 4)
        async with asyncio.timeout(PATIENCE_S):
            while server._hosting.latest_snapshot is None:  # type: ignore[attr-defined]
                await first.aggregate(psf.Sum("w", row=0))
        late = server.client(worker=1)
        await late.join()
        await first.add("w", row=0, values=10.0)  # this add is lost with the shard

        await kill(server, 1)
        taking = asyncio.create_task(server.snapshot())
        for client in (first, late):
            with pytest.raises(RolledBack, match=r"loss of shard 1 .* all shards went back to snapshot 1: ") as back:
                await call_until_error(client)
            assert back.value.clocks == {"w": 1}
            assert client.clock_of("w") == 1
        async with asyncio.timeout(PATIENCE_S):
            assert (await taking)["matrices"]["w"]["clocks"]["progress"][0] == 1
        for client in (first, late):
            await iterate(client)
        await seen.until([3.0] * 4)

        await late.leave()
        again = server.client(worker=1)
        await again.join()
        assert await first.clock("w") == 2
        await iterate(again)
        await seen.until([4.0] * 4)
        assert (await first.get("w", row=0)).tolist() == [4.0] * 4
        assert await again.clock("w") == 3
    await seen.end()


async def iterate(client: Client) -> None:
    """Run one iteration."""
    await client.add("w", row=0, values=1.0)
    await client.clock("w")


class Seen:
    """Follows a row in a task of its own."""

    def __init__(self, subscription: Any) -> None:
        self._subscription = subscription
        self._row: list[float] = []
        self._has_changed = asyncio.Event()
        self._task = asyncio.create_task(self._follow())

    async def _follow(self) -> None:
        async for change in self._subscription:
            self._row = change.values.tolist()
            self._has_changed.set()

    async def until(self, row: list[float]) -> None:
        """Return when the row has been received with these values."""
        async with asyncio.timeout(PATIENCE_S):
            while self._row != row:
                self._has_changed.clear()
                await self._has_changed.wait()

    async def end(self) -> None:
        """Wait until the subscription has ended, because the server was closed."""
        async with asyncio.timeout(PATIENCE_S):
            await self._task
