"""Shards that receive a clock, a join or a leave later than other shards."""

import asyncio
from collections.abc import Sequence
from random import Random

import numpy as np
import pytest
from parameter_server.consistency.client_run import LateServer, Stir, stirred, turns

from streamiter.parameter_server.client import Client
from streamiter.parameter_server.consistency import BSP, SSP
from streamiter.parameter_server.matrix import Matrix

SEEDS = range(40)
COLUMNS = 6
CLOCKS = 5


class Iterations:
    """Records the adds and reads of all workers under BSP, by clock."""

    def __init__(self, server: LateServer) -> None:
        self.server = server
        self.added: list[tuple[int, list[int], int]] = []
        self.read: list[tuple[int, list[int], Sequence[int]]] = []

    async def work(self, worker: int, clocks: int, *, first: bool = True) -> None:
        """Iterate as one worker, then leave."""
        random = Random(f"{self.server.random.random()}")
        client = await self.server.client(worker)
        if first:
            await self._wait_for_all_to_join()
        for clock in range(clocks):
            for _ in range(random.randrange(clock > 0, 3)):  # a worker that has just joined is in turn without a get
                await self._get(client, random)
            for _ in range(random.randrange(3)):
                columns, value = self._some(random), random.randrange(1, 100)
                self.added.append((client.clock_of("w"), columns, value))
                await client.add("w", row=0, columns=columns, values=[value] * len(columns))
            await client.clock("w")
        await client.leave()

    _joined = 0

    async def _wait_for_all_to_join(self) -> None:
        self._joined += 1
        while self._joined < 3:
            await asyncio.sleep(0)

    async def _get(self, client: Client, random: Random) -> None:
        columns = self._some(random)
        if random.random() < 0.15:  # the client may cache a whole row and answer later gets from it
            columns = list(range(COLUMNS))
            values = await client.get("w", row=0)
        else:
            values = await client.get("w", row=0, columns=columns)
        self.read.append((client.clock_of("w"), columns, values.tolist()))

    @staticmethod
    def _some(random: Random) -> list[int]:
        if random.random() < 0.7:
            return [random.randrange(2)]  # on the first shard only, so that the others are late
        return random.sample(range(COLUMNS), random.randrange(1, COLUMNS))

    def expected(self, clock: int) -> np.ndarray:  # type: ignore[type-arg]
        values = np.zeros(COLUMNS, np.int64)
        for passed in range(clock):
            for at, columns, value in self.added:
                if at == passed:
                    values[columns] += value
            values = stirred(values)
        return values


@pytest.mark.parametrize("shards", [2, 3])
def test_bsp_reads_the_same_however_late_requests_reach_a_shard(shards: int) -> None:
    """A late shard refused a call in turn, put an add into the wrong iteration or skipped a step, so runs differed."""

    async def main(seed: int) -> None:
        server = LateServer(shards, seed)
        await server.directory.create(
            Matrix("w", rows=1, columns=COLUMNS, dtype="int64", consistency=BSP(), on_clock=Stir("w"))
        )
        iterations = Iterations(server)
        await server.run(
            iterations.work(0, CLOCKS),
            iterations.work(1, server.random.randrange(1, CLOCKS + 1)),
            iterations.work(2, server.random.randrange(1, CLOCKS + 1)),
            iterations.work(3, 2, first=False),
        )
        await server.run(
            iterations.work(4, 1, first=False)
        )  # the shards saw the last workers leave in different orders
        minima = {shard.matrices["w"].model.tracker.get_min_clock() for shard in server.shards}
        assert len(minima) == 1, f"seed {seed}"
        for clock, columns, values in iterations.read:
            assert values == iterations.expected(clock)[columns].tolist(), f"seed {seed}, clock {clock}"

    for seed in SEEDS:
        asyncio.run(main(seed))


@pytest.mark.parametrize("staleness", [0, 1, 3])
def test_ssp_never_reads_older_than_its_bound_on_any_shard(staleness: int) -> None:
    """A shard answered after it had observed a clock elsewhere, but before it had received the adds of that clock."""
    workers, shards = 3, 2

    async def work(server: LateServer, worker: int, ready: list[int]) -> None:
        client = await server.client(worker)
        ready.append(worker)
        while len(ready) < workers:
            await asyncio.sleep(0)
        mine = [worker, workers + worker]  # one column on each shard
        for clock in range(CLOCKS):
            values = await client.get("w", row=0)
            assert (values >= clock - staleness).all(), f"worker {worker} at clock {clock}: {values}"
            assert (values[mine] == clock).all()
            await client.add("w", row=0, columns=mine, values=[1, 1])
            await client.clock("w")
        await client.leave()

    async def main(seed: int) -> None:
        server, ready = LateServer(shards, seed), list[int]()
        await server.directory.create(
            Matrix("w", rows=1, columns=workers * shards, dtype="int64", consistency=SSP(staleness))
        )
        await server.run(*(work(server, worker, ready) for worker in range(workers)))

    for seed in SEEDS:
        asyncio.run(main(seed))


async def test_a_cancelled_first_call_leaves_joining_to_the_next() -> None:
    """A timeout cancelled a client's first call, and every later call was cancelled too."""
    server = LateServer(shards=2, seed=1)
    await server.directory.create(Matrix("w", rows=1, columns=4))
    joining = asyncio.ensure_future(server.client(0))
    await turns()
    joining.cancel()
    with pytest.raises(asyncio.CancelledError):
        await joining
    [client] = server.clients

    async def read() -> None:
        assert (await client.get("w", row=0)).tolist() == [0.0] * 4

    await server.run(read())


async def test_a_worker_whose_leave_is_cancelled_leaves_all_shards() -> None:
    """A program was cancelled while its worker left, and the second shard waited for that worker forever."""
    server = LateServer(shards=2, seed=1)
    await server.directory.create(Matrix("w", rows=1, columns=4, consistency=BSP()))
    clients: dict[int, Client] = {}

    async def begin(worker: int) -> None:
        clients[worker] = await server.client(worker)

    await server.run(begin(0), begin(1))
    leaving = asyncio.ensure_future(clients[1].leave())
    await turns()
    leaving.cancel()

    async def continue_alone() -> None:
        await clients[0].clock("w")
        await clients[0].get("w", row=0)

    await server.run(continue_alone())
    assert [list(shard.workers) for shard in server.shards] == [[0], [0]]
