"""Flows that are stopped at any point and resume with another parallelism."""

import asyncio
import contextlib
import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import orjson
import pytest
from iteration.iteration_support import SMALL, ended, run_shuffled
from processes.linked_jobs import abort, piped_jobs
from runtime.checkpointed_sums import written
from support.waiting import PATIENCE_S

from streamiter import Checkpoints, Flow, Stream
from streamiter.engine.job.job import Job
from streamiter.engine.plan.job_settings import JobOptions
from streamiter.engine.storage.store import MemoryStore
from streamiter.errors import CheckpointError
from streamiter.topics import MemoryBroker, OutgoingBatch, ReadRequest, Topic
from streamiter.topics.memory import MemoryReader, MemoryTopic

RARELY_S = 100.0
_OF_EVERY_RUN = {(1, 4), (3, 2), (3, 3)}
PAIRS = [
    pytest.param(before, after, marks=() if (before, after) in _OF_EVERY_RUN else pytest.mark.soak)
    for before in (1, 2, 3, 4)
    for after in (1, 2, 3, 4)
]
"""The numbers of subtasks before and after the change: more, fewer, no multiple, and the same.

Most tests return to the first number afterwards, and `make soak` tries all pairs.
"""

NUMBERS = 100
"""The number of records in each topic, in order from 0."""
PARTITIONS = 3

MakeFlow = Callable[[MemoryBroker, int], Flow]


async def write(topic: Topic, values: Sequence[Any], *, partitions: int = 1) -> None:
    """Write the values one after the other, in turn to the partitions."""
    writer = await topic.open_writer()
    for partition in range(partitions):
        share = [orjson.dumps(value) for value in values[partition::partitions]]
        await writer.write(OutgoingBatch(share, partition=partition))
    await writer.close()


class SmallBatches(MemoryTopic):
    """A topic that is read two records at a time, so that a job can be stopped at many points."""

    def __init__(self, broker: MemoryBroker, name: str) -> None:
        super().__init__(broker.topic(name)._store, name)

    async def open_reader(self, request: ReadRequest) -> MemoryReader:
        return await super().open_reader(replace(request, max_records=2))


def numbers(flow: Flow, broker: MemoryBroker, name: str = "in", *, parallelism: int | None = None) -> Stream:
    """Return a source of the numbers of a topic, a few at a time."""
    return flow.source(SmallBatches(broker, name), stop="latest", name=name, parallelism=parallelism)


async def new_broker() -> MemoryBroker:
    """Return a broker with the topics ``in``, ``in2`` and ``in3`` of numbers, and an empty topic ``out``."""
    broker = MemoryBroker()
    for name in ("in", "in2", "in3"):
        await broker.topic(name).create(partitions=PARTITIONS)
        await write(broker.topic(name), range(NUMBERS), partitions=PARTITIONS)
    await broker.topic("out").create()
    return broker


class Stops:
    """Runs a flow with several parallelisms in turn; each run resumes where the last one was stopped."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self._seed = seed
        self._runs = 0
        self._jobs: list[Any] = []
        self._store = MemoryStore()

    async def start(self, flow: Flow, *, processes: int = 1, **options: Any) -> Job:
        """Start the jobs of this many processes (of fewer, if not all have a subtask) from the last checkpoint."""
        self._runs += 1
        self._jobs = piped_jobs(
            flow,
            processes,
            self._seed + self._runs,
            lambda _: JobOptions(
                checkpoints=Checkpoints(self._store.another(), interval_s=RARELY_S),
                channel_limits=SMALL,
                state=flow.state,
                **options,
            ),
        )
        started = await asyncio.gather(*(job.start() for job in self._jobs), return_exceptions=True)
        if started[0] is not None:  # The others were told of the error.
            raise started[0]
        return self._jobs[0]

    async def suspend(self, job: Job) -> None:
        """Suspend the job."""
        await asyncio.wait_for(job.stop("suspend"), PATIENCE_S)
        await ended(*self._jobs)

    async def crash(self, job: Job) -> None:
        """Let the job continue a little after a checkpoint, and stop it at once, in or before the next checkpoint."""
        with contextlib.suppress(CheckpointError):  # The job has ended.
            await asyncio.wait_for(job.checkpoint(), PATIENCE_S)
            await self._let_pass(30)
        taking = asyncio.ensure_future(job.checkpoint())
        await self._let_pass(20)
        await asyncio.wait_for(asyncio.gather(*map(abort, self._jobs)), PATIENCE_S)
        await asyncio.gather(taking, return_exceptions=True)

    async def _let_pass(self, turns: int) -> None:
        for _ in range(self.random.randrange(turns)):
            await asyncio.sleep(0)

    async def run(self, make_flow: Callable[[int], Flow], parallelisms: Sequence[int], *, turns: int) -> None:
        """Stop all runs except the last after some turns of the event loop."""
        await self._start_next(make_flow(parallelisms[0]))
        for before, after in pairwise(parallelisms):
            await self._stop_soon(turns)
            await self._start_with_other_parallelism(make_flow, before, after)
        await ended(*self._jobs)

    async def _start_next(self, flow: Flow) -> None:
        """Start in one, two or three processes: in another number than the last run, if the parallelism allows it."""
        await self.start(flow, processes=1 + (self._seed + 2 * self._runs) % 3)

    async def _start_with_other_parallelism(self, make_flow: Callable[[int], Flow], before: int, after: int) -> None:
        """Start with the parallelism ``after``; if the checkpoint does not allow it yet, follow the error's advice."""
        while True:
            try:
                return await self._start_next(make_flow(after))
            except CheckpointError as error:
                if "take another checkpoint" not in str(error):
                    raise
            await self._start_next(make_flow(before))
            await self._stop_soon(turns=30)

    async def _stop_soon(self, turns: int) -> None:
        await self._let_pass(turns)
        await self.random.choice((self.suspend, self.crash))(self._jobs[0])


def outputs(make_flow: MakeFlow, parallelisms: Sequence[int], *, turns: int, seed: int) -> list[Any]:
    """Return the committed outputs at the end, of runs in one to three processes.

    The order of the event loop and the numbers of processes depend on the seed.
    """

    async def main() -> list[Any]:
        broker = await new_broker()
        await Stops(seed).run(lambda parallelism: make_flow(broker, parallelism), parallelisms, turns=turns)
        return await written(broker.topic("out"))

    return run_shuffled(main(), seed)
