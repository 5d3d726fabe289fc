"""Clients with all of their calls, on shards behind a network that loses messages."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Coroutine
from typing import Any

import numpy as np
import pytest
from parameter_server.transport.lossy_network import EVERYTHING, LossyNetwork, NetworkCarrier

from streamiter.errors import OutOfRange
from streamiter.parameter_server import BSP, SSP, Matrix, psf
from streamiter.parameter_server.client import Client
from streamiter.parameter_server.consistency import Consistency
from streamiter.parameter_server.requests import SessionId
from streamiter.parameter_server.rows import MatrixDirectory
from streamiter.parameter_server.shard import Shard
from streamiter.parameter_server.transport import RemoteLink, ShardSessions
from streamiter.testing.simulated_time import SimulatedTime

_WORKERS = 3
_ITERATIONS = 4
_BOUND_S = 3_000.0
# More turns of the event loop than any call here takes between two messages.
_TURNS = 30


class Cluster:
    """Two shards in simulated time."""

    def __init__(self, seed: int) -> None:
        self.time = SimulatedTime()
        self._network = LossyNetwork(self.time, random.Random(seed), EVERYTHING)
        self.shards = [Shard(0), Shard(1)]
        self._sessions = [ShardSessions(shard) for shard in self.shards]
        self.directory = MatrixDirectory(self.links("server"))

    def links(self, name: str) -> list[RemoteLink]:
        links = []
        for number, sessions in enumerate(self._sessions):
            carrier = NetworkCarrier(self._network, sessions)
            link = RemoteLink(f"shard {number}", SessionId(name), carrier, self.time)
            links.append(link)
        return links

    def client(self, worker: int) -> Client:
        return Client(worker, self.links(f"worker {worker}"), self.directory)

    async def run(self, *coroutines: Coroutine[Any, Any, Any]) -> list[Any]:
        """Return the results of coroutines; simulated time passes whenever all of them wait."""
        tasks = [asyncio.ensure_future(coroutine) for coroutine in coroutines]
        try:
            while True:
                for _ in range(_TURNS):
                    await asyncio.sleep(0)
                if any(task.done() and task.exception() for task in tasks) or all(task.done() for task in tasks):
                    return [task.result() for task in tasks]
                due_s = self.time.next_timer_s
                assert due_s is not None, "calls hang"
                assert due_s < _BOUND_S, "calls hang"
                self.time.pass_until(due_s)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


async def train(client: Client) -> None:
    mine = np.array([client.worker + 9, client.worker])  # One on each shard, the higher column first.
    for iteration in range(_ITERATIONS):
        own = await client.get("w", row=0, columns=mine)
        assert own.tolist() == [iteration, iteration], "of its own adds"
        added = await client.start_add("w", row=0, columns=mine, values=np.ones(2))
        await client.clock("w")
        await added
    await client.barrier(0)
    assert await client.aggregate(psf.Sum("w", row=0)) == 2 * _WORKERS * _ITERATIONS
    await client.barrier(1)
    if client.worker == 0:
        await client.update(psf.Scale("w", row=0, scalar=10.0))
    await client.barrier(2)
    with pytest.raises(OutOfRange):
        await client.get("w", row=0, columns=[12])
    assert (await client.get("w", row=0, columns=mine)).tolist() == [10.0 * _ITERATIONS] * 2
    await client.leave()


@pytest.mark.parametrize("consistency", [BSP(), SSP(staleness=1)], ids=repr)
@pytest.mark.parametrize("seed", range(3))
async def test_every_call_of_a_client_works_as_in_the_process_of_its_shards(
    consistency: Consistency, seed: int
) -> None:
    """A call relied on shards in its own process, and failed with shards in other processes."""
    cluster = Cluster(seed)
    await cluster.run(
        cluster.directory.create(Matrix("w", rows=1, columns=12, consistency=consistency, dtype="float64"))
    )
    clients = [cluster.client(worker) for worker in range(_WORKERS)]
    await cluster.run(*(client.join() for client in clients))
    await cluster.run(*(train(client) for client in clients))
    assert [list(shard.workers) for shard in cluster.shards] == [[], []]
