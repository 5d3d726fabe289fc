"""A job on a real broker that resumes with another parallelism."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from checkpoints_jobs.parallelism_support import NUMBERS, PARTITIONS, RARELY_S, write, written
from checkpoints_jobs.test_other_parallelism import Count
from support.waiting import PATIENCE_S, until

from streamiter import Checkpoints, Flow
from streamiter.topics import Topic


@pytest.mark.parametrize("parallelisms", [(1, 3, 2)])
async def test_partitions_on_a_broker_change_hands(
    kafka_topic: Callable[..., Topic], topic_prefix: str, parallelisms: tuple[int, ...], tmp_path: Path
) -> None:
    """A partition that another subtask had read was read again from its beginning, and its keys were counted twice."""
    source, out = kafka_topic("in"), kafka_topic("out")
    await source.create(partitions=PARTITIONS)
    await out.create()

    def make_flow(parallelism: int) -> Flow:
        flow = Flow(f"{topic_prefix}counts", parallelism=parallelism)
        read = flow.source(source, name="in")
        read.key_by(lambda x: x % 7).process(Count, name="count").sink(out)
        return flow

    for turn, parallelism in enumerate(parallelisms):
        await write(source, range(turn * NUMBERS, (turn + 1) * NUMBERS), partitions=PARTITIONS)
        job = await make_flow(parallelism).start(checkpoints=Checkpoints(tmp_path, interval_s=RARELY_S))
        await until(lambda job=job: job.statistics().step("count").records_in == NUMBERS)  # type: ignore[misc]
        await asyncio.wait_for(job.stop("suspend"), PATIENCE_S)
    expected: Counter[Any] = Counter(
        ("count", number % 7, number // 7 + 1) for number in range(len(parallelisms) * NUMBERS)
    )
    assert Counter(map(tuple, await written(out))) == expected
