"""Subscriptions to rows of shards in other processes, over links that lose, delay, reorder and repeat messages."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable

import numpy as np
import pytest
from parameter_server.transport.lossy_network import EVERYTHING, LossyNetwork, NetworkCarrier, NetworkFaults

from streamiter.errors import ShardLost
from streamiter.parameter_server import ASP, BSP, SSP
from streamiter.parameter_server.client import Client
from streamiter.parameter_server.consistency import Consistency
from streamiter.parameter_server.matrix import Matrix
from streamiter.parameter_server.requests import RowChange, SessionId
from streamiter.parameter_server.rows import MatrixDirectory
from streamiter.parameter_server.shard import Shard
from streamiter.parameter_server.subscriptions import Subscription
from streamiter.parameter_server.transport import RemoteLink, ShardSessions
from streamiter.testing.simulated_time import SimulatedTime

_SHARDS, _WORKERS, _ROWS, _COLUMNS = 2, 2, 3, 6
_BOUND_S = 3_000.0


class _Cluster:
    """Shards, workers, and the network between them, in simulated time that passes while tasks wait."""

    def __init__(self, seed: int, consistency: Consistency, faults: NetworkFaults) -> None:
        self.time = SimulatedTime()
        self.chances = random.Random(seed)
        network = LossyNetwork(self.time, self.chances, faults)
        self.shards = [Shard(number) for number in range(_SHARDS)]
        self.sessions = [ShardSessions(shard) for shard in self.shards]
        self.links = [
            [self._link(f"worker {worker}", network, sessions) for sessions in self.sessions]
            for worker in range(_WORKERS)
        ]
        self.directory = MatrixDirectory(self.links[0])
        self.matrix = Matrix("w", rows=_ROWS, columns=_COLUMNS, consistency=consistency)
        self.clients: list[Client] = []

    def _link(self, client: str, network: LossyNetwork, sessions: ShardSessions) -> RemoteLink:
        carrier = NetworkCarrier(network, sessions)
        return RemoteLink("a shard", SessionId(client), carrier, self.time)

    async def begin(self) -> None:
        await self.directory.create(self.matrix)
        self.clients = [Client(worker, self.links[worker], self.directory) for worker in range(_WORKERS)]
        for client in self.clients:
            await client.join()

    async def pass_until(self, condition: Callable[[], bool]) -> None:
        """Let messages arrive and tasks run until a condition holds."""
        while True:
            for _ in range(10):
                await asyncio.sleep(0)
            if condition():
                return
            due_s = self.time.next_timer_s
            assert due_s is not None, "nothing is under way"
            assert due_s < _BOUND_S, "it takes too long"
            self.time.pass_until(due_s)

    async def run(self, *tasks: asyncio.Task[None]) -> None:
        await self.pass_until(lambda: all(task.done() for task in tasks))
        for task in tasks:
            await task

    def row(self, row: int) -> list[float]:
        blocks = [block for shard in self.shards for block in shard.matrices["w"].blocks.values()]
        blocks.sort(key=lambda block: block.columns.start)
        return [value for block in blocks for value in block.get(row, None).tolist()]


async def _train(client: Client, chances: random.Random) -> None:
    for _ in range(4):
        await client.add("w", row=chances.randrange(_ROWS), values=np.ones(_COLUMNS))
        await client.clock("w")
        await client.get("w", row=0)


async def _follow(subscription: Subscription, seen: dict[int, RowChange]) -> None:
    async for change in subscription:
        seen[change.row] = change


@pytest.mark.parametrize("consistency", [ASP(), BSP(), SSP(staleness=1)], ids=repr)
async def test_subscribers_see_the_last_values_over_a_lossy_network(consistency: Consistency) -> None:
    """A reply with changes was lost, and the shard did not send these changes again."""
    for seed in range(12):
        cluster = _Cluster(seed, consistency, EVERYTHING)
        await cluster.run(asyncio.ensure_future(cluster.begin()))
        seen: list[dict[int, RowChange]] = [{}, {}]
        subscriptions = [client.subscribe("w") for client in cluster.clients]
        followers = [
            asyncio.ensure_future(_follow(subscription, of_worker))
            for subscription, of_worker in zip(subscriptions, seen, strict=True)
        ]
        await cluster.run(*(asyncio.ensure_future(_train(client, cluster.chances)) for client in cluster.clients))

        def all_is_seen(cluster: _Cluster = cluster, seen: list[dict[int, RowChange]] = seen) -> bool:
            return all(
                row in of_worker and of_worker[row].values.tolist() == cluster.row(row)
                for of_worker in seen
                for row in range(_ROWS)
            )

        await cluster.pass_until(all_is_seen)
        for client in cluster.clients:
            await cluster.run(asyncio.ensure_future(client.leave()))
        await cluster.run(*followers)
        await cluster.pass_until(
            lambda cluster=cluster: all(shard.matrices["w"].followed is None for shard in cluster.shards)
        )


async def test_subscribers_get_the_rows_of_a_replaced_shard_again() -> None:
    """The subscriber kept the rows of a lost shard and never got the rows of its successor."""
    cluster = _Cluster(0, ASP(), NetworkFaults())
    await cluster.run(asyncio.ensure_future(cluster.begin()))
    [client, _] = cluster.clients
    changes = client.subscribe("w", rows=[1])
    first = asyncio.ensure_future(anext(changes))
    await cluster.pass_until(first.done)
    waiting = asyncio.ensure_future(anext(changes))

    lost, *_ = cluster.links[0]
    lost.lost(ConnectionResetError("gone"))
    await cluster.pass_until(waiting.done)
    with pytest.raises(ShardLost, match="ConnectionResetError: gone"):
        waiting.result()

    cluster.sessions[0].restart(1)
    [block] = cluster.shards[0].matrices["w"].blocks.values()
    block.put(1, None, np.full(3, 7.0))
    lost.replaced(1, {"w": 0})
    again = asyncio.ensure_future(anext(changes))
    await cluster.pass_until(again.done)
    assert again.result().values.tolist() == [7.0, 7.0, 7.0, 0.0, 0.0, 0.0]
    assert again.result().columns == range(0, 3)
    changes.close()


async def test_after_a_rollback_a_waiting_subscriber_gets_all_rows_again() -> None:
    """Every loop over changes ended with RolledBack, an error that is meant for training code."""
    cluster = _Cluster(0, ASP(), NetworkFaults())
    await cluster.run(asyncio.ensure_future(cluster.begin()))
    changes = cluster.clients[0].subscribe("w", rows=[1])
    first = asyncio.ensure_future(anext(changes))
    await cluster.pass_until(first.done)
    again = asyncio.ensure_future(anext(changes))
    await asyncio.sleep(0)
    for sessions, link in zip(cluster.sessions, cluster.links[0], strict=True):
        sessions.restart(1)
        link.replaced(1, {"w": 0})
    await cluster.pass_until(again.done)
    assert again.result().values.tolist() == [0.0] * _COLUMNS
    changes.close()
