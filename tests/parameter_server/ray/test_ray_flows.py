"""Flows whose server has its shards on Ray."""

from __future__ import annotations

import asyncio

import pytest
from parameter_server.flows.counting import MATRIX, Counts, checkpoints, count_of_each, counting_flow, ended, handled
from parameter_server.ray.processes import kill
from support.waiting import PATIENCE_S, until

from streamiter import Flow
from streamiter.checkpoints.store import MemoryStore
from streamiter.errors import CheckpointError, JobFailed, ShardLost
from streamiter.operators import Output
from streamiter.parameter_server import ASP, BSP, ParameterServer
from streamiter.parameter_server.consistency import Consistency
from streamiter.runtime.job import Job
from streamiter.runtime.plan import ChannelLimits

pytestmark = pytest.mark.usefixtures("ray_cluster")

RECORDS = 600
"""More records than a job counts before it is stopped, even on a busy machine."""

FEW = ChannelLimits(records=2)
"""Records waiting in channels are counted before a job ends, and a call of Ray takes 40 ms on a busy machine."""

LOST = (
    r"step 'count' .*parameter server: expected all shards to run, given the loss of shard 0 \(process \d+ .*; no "
    "snapshots are taken, so all parameters are lost; start the flow again, which resumes from its last checkpoint"
)


async def test_each_record_counts_once_wherever_the_flow_is_cut_off_and_resumes() -> None:
    """Requests after a barrier on one shard were before it on another, or a job waited for a lost shard."""
    async with ParameterServer(shards=2, on="ray") as server:
        for consistency in (BSP(), ASP()):
            await counts_once(server, consistency)


async def counts_once(server: ParameterServer, consistency: Consistency) -> None:
    """Run jobs one after another, in this process and on Ray; all but the last are suspended or lose a shard."""
    store, matrix = MemoryStore(), repr(consistency)

    async def begun(server: ParameterServer) -> Job:
        """Return a job that has counted some records since its last checkpoint."""
        flow, _ = counting_flow(
            server=server, consistency=consistency, matrix=matrix, workers=3, sources=3, records=RECORDS, block=(1, 7)
        )
        job = await flow.start(checkpoints=checkpoints(store), channel_limits=FEW)
        await handled(job, 6)
        return job

    job = await begun(ParameterServer(shards=1))
    await suspended(job)
    job = await begun(server)
    async with asyncio.timeout(PATIENCE_S):
        await job.checkpoint()
    await handled(job, job.statistics().step("count").records_in + 3)
    await kill(server, 0)
    taking = asyncio.create_task(job.checkpoint())
    with pytest.raises(JobFailed, match=LOST) as failed:
        await ended(job)
    with pytest.raises((CheckpointError, JobFailed), match="parameter server: expected all shards to run"):
        await taking
    assert isinstance(failed.value.__cause__, ShardLost)
    assert server.workers == []
    await suspended(await begun(server))
    here = ParameterServer(shards=3)
    await ended(await begun(here))
    assert await count_of_each(here, matrix) == [1.0] * RECORDS


async def suspended(job: Job) -> None:
    async with asyncio.timeout(PATIENCE_S):
        assert (await job.stop("suspend")).state == "suspended"


class WaitsAtADoor(Counts):
    """Stops worker 1 before its second record until the door is open; the others soon wait for it."""

    def __init__(self, door: asyncio.Event) -> None:
        super().__init__(BSP(), columns=RECORDS)
        self._door = door
        self._records = 0

    async def process(self, record: int, out: Output) -> None:
        self._records += 1
        if self.client.worker == 1 and self._records == 2:
            await self._door.wait()
        await super().process(record, out)


def waiting_gets(job: Job) -> int:
    statistics = job.statistics().parameter_servers["parameter server"]
    return sum(matrix.waiting for shard in statistics.shards for matrix in shard.matrices)


async def test_a_job_ends_while_its_workers_wait_for_each_other() -> None:
    """An abort, a drain and the loss of a shard hung, because no worker moved the clock."""
    async with ParameterServer(shards=1, on="ray") as server:

        async def waiting(door: asyncio.Event) -> tuple[Flow, Job]:
            """Return a flow and its job, in which two workers wait for the third."""
            flow, _ = counting_flow(lambda: WaitsAtADoor(door), server=server, workers=3, records=RECORDS)
            job = await flow.start(channel_limits=FEW)
            await until(lambda: waiting_gets(job) == 2)
            return flow, job

        flow, job = await waiting(asyncio.Event())
        picture = flow.draw(job.statistics())
        assert "1 shard on Ray" in picture
        assert "3 workers" in picture
        assert f"{MATRIX}, BSP: minimum clock 1" in picture
        async with asyncio.timeout(PATIENCE_S):
            assert (await job.stop("abort")).state == "aborted"
        assert server.workers == []
        counted = sum(await count_of_each(server))

        door = asyncio.Event()
        _, job = await waiting(door)
        stopping = asyncio.create_task(job.stop("drain"))
        await asyncio.sleep(0)
        door.set()
        async with asyncio.timeout(PATIENCE_S):
            statistics = await stopping
        assert statistics.state == "finished"
        assert sum(await count_of_each(server)) - counted == statistics.step("count").records_in

        _, job = await waiting(asyncio.Event())
        await kill(server, 0)
        with pytest.raises(JobFailed, match=LOST):
            await ended(job)
        assert server.workers == []
