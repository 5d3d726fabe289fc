"""Checkpoints whose caller no longer waits."""

import asyncio
from pathlib import Path

from job_faults.held_store import HeldStore
from job_faults.sums import Topics, check_committed, sums_flow, write
from support.waiting import until
from topics.topic_case import patiently

from streamiter import Checkpoints
from streamiter.engine.job.job import Job

RARELY_S = 100.0


async def handled(job: Job, count: int) -> None:
    await until(lambda: job.statistics().step("sums").records_in == count)


async def request_and_leave(job: Job, store: HeldStore, *, stop: bool = False) -> None:
    """Request a checkpoint, and stop waiting after the barrier has passed and before the snapshot is stored."""
    asking = asyncio.create_task(job.stop("suspend") if stop else job.checkpoint())
    await patiently(store.saves.wait())
    asking.cancel()
    await asyncio.gather(asking, return_exceptions=True)


async def test_a_checkpoint_continues_without_its_caller(topics: Topics, tmp_path: Path) -> None:
    """Records after the barrier were in no commit, and were lost in a later crash."""
    store = HeldStore(tmp_path)
    job = await sums_flow("sums", topics).start(checkpoints=Checkpoints(store, interval_s=RARELY_S))
    await write(topics.numbers, 0, 10)
    await handled(job, 10)
    await request_and_leave(job, store)
    await write(topics.numbers, 10, 20)
    await handled(job, 20)
    store.may_save.set()
    assert await patiently(job.checkpoint()) == 2
    await check_committed(topics.sums, 20)
    await job.stop("abort")
    flow = sums_flow("sums", topics, stop="latest")
    job = await flow.start(checkpoints=Checkpoints(tmp_path, interval_s=RARELY_S))
    await patiently(job.wait())
    await check_committed(topics.sums, 20)


async def test_a_suspension_continues_without_its_caller(topics: Topics, tmp_path: Path) -> None:
    """The job ended as suspended, although its last checkpoint had been abandoned."""
    store = HeldStore(tmp_path)
    job = await sums_flow("sums", topics).start(checkpoints=Checkpoints(store, interval_s=RARELY_S))
    await write(topics.numbers, 0, 10)
    await handled(job, 10)
    await request_and_leave(job, store, stop=True)
    store.may_save.set()
    statistics = await patiently(job.wait())
    assert statistics.state == "suspended"
    await check_committed(topics.sums, 10)


async def test_an_aborted_job_does_not_wait_for_an_unattended_checkpoint(topics: Topics, tmp_path: Path) -> None:
    """The store was stuck, and the job could not be aborted."""
    store = HeldStore(tmp_path)
    job = await sums_flow("sums", topics).start(checkpoints=Checkpoints(store, interval_s=RARELY_S))
    await write(topics.numbers, 0, 10)
    await handled(job, 10)
    await request_and_leave(job, store)
    await patiently(job.stop("abort"))
    await check_committed(topics.sums, 0)
