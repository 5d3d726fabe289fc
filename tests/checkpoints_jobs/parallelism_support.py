"""Flows that are stopped anywhere and go on with another parallelism."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import orjson
from iteration.iteration_support import SMALL, ended, run_shuffled

from streamiter import Checkpoints, Flow, Operator
from streamiter.checkpoints.memory_store import MemoryStore
from streamiter.operators import Output
from streamiter.operators.context import Context
from streamiter.operators.source import Positions, Source, SourceBatch
from streamiter.runtime.job import Job
from streamiter.topics.memory.reader import MemoryReader
from streamiter.topics.memory.topic import MemoryTopic
from streamiter.topics import MemoryBroker, OutgoingBatch, ReadRequest, Topic

PATIENCE_S = 30.0
RARELY_S = 100.0
PAIRS = [(before, after) for before in (1, 2, 3, 4) for after in (1, 2, 3, 4)]
"""Numbers of subtasks before and after."""

MakeFlow = Callable[[int], Flow]


async def written(topic: Topic) -> list[Any]:
    """What a reader of committed records sees now."""
    reader = await topic.open_reader(ReadRequest(stop="latest"))
    values: list[Any] = []
    while (batch := await reader.read()) is not None:
        values += [orjson.loads(value) for value in batch.values if value is not None]
    await reader.close()
    return values


async def write(topic: Topic, values: Sequence[Any], *, partitions: int = 1) -> None:
    """One value after the other into the partitions in turn."""
    writer = await topic.open_writer()
    for number, value in enumerate(values):
        await writer.write(OutgoingBatch([orjson.dumps(value)], partition=number % partitions))
    await writer.close()


class SmallBatches(MemoryTopic):
    """A topic that is read two records at a time, so that a job can be stopped in many places."""

    def __init__(self, broker: MemoryBroker, name: str) -> None:
        super().__init__(broker.topic(name)._store, name)

    async def open_reader(self, request: ReadRequest) -> MemoryReader:
        return await super().open_reader(replace(request, max_records=2))


class Stops:
    """Runs a flow with one parallelism after the other, stopped after so many turns of the event loop."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.store = MemoryStore()
        self.stopped = 0
        """How often a job was stopped before its end."""

    def checkpoints(self) -> Checkpoints:
        """For the next job."""
        self.store = self.store.another()
        return Checkpoints(self.store, interval_s=RARELY_S)

    async def start(self, flow: Flow, **options: Any) -> Job:
        """Start a job where the last one has left off."""
        return await flow.start(checkpoints=self.checkpoints(), channel_limits=SMALL, **options)

    async def stop(self, job: Job, *, crash: bool) -> bool:
        """Stop it with its state; says whether it had ended before."""
        async with asyncio.timeout(PATIENCE_S):
            if not crash:
                state = (await job.stop("suspend")).state
            else:
                try:
                    await job.checkpoint()
                except Exception:
                    await job.wait()
                    return True
                for _ in range(self.random.randrange(30)):
                    await asyncio.sleep(0)
                state = (await job.stop("abort")).state
        self.stopped += state != "finished"
        return state == "finished"

    async def run(self, make_flow: MakeFlow, parallelisms: Sequence[int], *, turns: int) -> None:
        """Stop in all but the last of them."""
        for parallelism in parallelisms[:-1]:
            job = await self.start(make_flow(parallelism))
            for _ in range(self.random.randrange(turns)):
                await asyncio.sleep(0)
            if await self.stop(job, crash=self.random.random() < 0.5):
                return
        job = await self.start(make_flow(parallelisms[-1]))
        await ended(job)


def in_any_order(main: Any, seed: int) -> None:
    """Run it in an event loop whose order a seed decides."""
    run_shuffled(main, seed)
