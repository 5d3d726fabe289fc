"""Stamped streams in several processes: epochs by time, and silent subtasks."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from iteration.partitions_support import callbacks_in, check, made, tracked, write
from processes.linked_jobs import piped_jobs
from support.waiting import until

from streamiter import Flow, epochs_every
from streamiter.engine.plan.job_settings import JobOptions
from streamiter.testing import VirtualClock


@pytest.mark.parametrize("ways", [{"seconds": 5}, {"records": 2, "idle_timeout": 5}], ids=["seconds", "idle"])
async def test_a_silent_subtask_in_another_process_completes_the_epochs_of_the_others(ways: dict[str, Any]) -> None:
    """The model waited for a partition of another process that had no records."""
    clock, topic, flow = VirtualClock(), await made(2), Flow("stamps")
    seen = tracked(epochs_every(flow.source(topic, parallelism=2), **ways))
    jobs = piped_jobs(flow, 2, 1, JobOptions(clock=clock))
    await asyncio.gather(*(job.start() for job in jobs))
    await write(topic, 0, [1, 2])
    await until(lambda: len(seen.items) >= 2)
    for _ in range(4):
        await clock.advance(2.5)
    await until(lambda: callbacks_in(seen.items, 0) == callbacks_in(seen.items, 1) == [0])
    await jobs[0].stop("drain")
    await asyncio.gather(*(job.wait() for job in jobs))
    check(seen.items, 2)
