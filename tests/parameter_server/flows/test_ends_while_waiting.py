"""Jobs that end while workers wait for each other: no job hangs, and each error names its cause."""

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from parameter_server.flows.counting import (
    MATRIX,
    RECORDS,
    Counts,
    Dealt,
    checkpoints,
    count_of_each,
    counting_flow,
    ended,
    handled,
)
from support.waiting import PATIENCE_S, until

from streamiter import Flow, Operator
from streamiter.engine.job.job import Job
from streamiter.engine.storage.store import MemoryStore
from streamiter.errors import JobFailed, OutOfRange, OutOfTurn, UnknownMatrix
from streamiter.operators import Output
from streamiter.operators.source import SourceBatch
from streamiter.parameter_server import ASP, BSP, SSP, ParameterServer
from streamiter.parameter_server.consistency import Consistency
from streamiter.testing import VirtualClock


class WaitsForWorker1(Counts):
    """Stops worker 1 before its second record until the door is open; the others soon wait for it."""

    def __init__(self, door: asyncio.Event, *, fails: bool = False) -> None:
        super().__init__(BSP())
        self._door = door
        self._fails = fails

    async def process(self, record: int, out: Output) -> None:
        if self.client.worker == 1 and self.client.clock_of(MATRIX) == 1:
            await self._door.wait()
            if self._fails:
                raise ValueError("a bad record")
        await super().process(record, out)


def waiting_gets(job: Job) -> int:
    statistics = job.statistics().parameter_servers["parameter server"]
    return sum(matrix.waiting for shard in statistics.shards for matrix in shard.matrices)


async def waiting(door: asyncio.Event, **options: Any) -> tuple[Job, ParameterServer]:
    """Return a job in which two workers wait for the third, and its server."""
    flow, server = counting_flow(lambda: WaitsForWorker1(door, **options), workers=3)
    job = await flow.start()
    await until(lambda: waiting_gets(job) == 2)
    return job, server


async def with_checkpoints(door: asyncio.Event, **options: Any) -> tuple[Job, ParameterServer]:
    """Return the same job with checkpoints, which are taken on request and at the end."""
    flow, server = counting_flow(lambda: WaitsForWorker1(door), workers=3)
    job = await flow.start(checkpoints=checkpoints(MemoryStore(), **options), clock=VirtualClock())
    await until(lambda: waiting_gets(job) == 2)
    return job, server


async def test_a_step_that_fails_ends_the_job_though_others_wait_for_it() -> None:
    """The others waited for a clock that no worker would send, and hid the failure."""
    door = asyncio.Event()
    job, server = await waiting(door, fails=True)
    door.set()
    with pytest.raises(JobFailed, match=r"step 'count' \(counting.py:\d+\) on record \d+: ValueError: a bad record"):
        await ended(job)
    assert server.workers == []


async def test_an_abort_does_not_wait_for_a_clock() -> None:
    """An abort waited for a clock."""
    job, server = await waiting(asyncio.Event())
    async with asyncio.timeout(PATIENCE_S):
        assert (await job.stop("abort")).state == "aborted"
    assert server.workers == []


async def test_a_suspension_lets_workers_reach_the_same_clock() -> None:
    """A barrier stopped one worker a clock before the others, which then waited forever."""
    door = asyncio.Event()
    job, server = await with_checkpoints(door)
    stopping = asyncio.create_task(job.stop("suspend"))
    await asyncio.sleep(0)
    door.set()
    async with asyncio.timeout(PATIENCE_S):
        statistics = await stopping
    assert statistics.state == "suspended"
    records = statistics.step("count").records_in
    assert records % 3 == 0
    assert sum(await count_of_each(server)) == records


class HasNoMoreForWorker1(Dealt):
    """Gives one record to the second subtask and never ends it; the first subtask continues."""

    async def read(self) -> SourceBatch | None:
        if self._step == 2 and self._next % 2 == 1 and self._next > 1:
            await asyncio.Event().wait()
        return await super().read()


async def silent(**options: Any) -> tuple[Job, ParameterServer]:
    """Return a job in which one of two workers waits for the other, which has no input, and its server."""
    server = ParameterServer(shards=2)
    flow = Flow("silent", parallelism=2)
    numbers = flow.from_source(lambda: HasNoMoreForWorker1(RECORDS), name="numbers")
    numbers.process(lambda: Counts(BSP()), name="count", parameter_server=server)
    job = await flow.start(**options)
    await until(lambda: waiting_gets(job) == 1)
    return job, server


async def test_a_suspension_without_checkpoints_does_not_wait_for_a_worker_without_input() -> None:
    """A service did not stop at SIGTERM because one partition was silent at night."""
    job, server = await silent()
    async with asyncio.timeout(PATIENCE_S):
        statistics = await job.stop("suspend")
    assert statistics.state == "suspended"
    assert sum(await count_of_each(server)) == statistics.step("count").records_in
    assert server.workers == []


async def test_a_suspension_with_workers_at_different_clocks_ends_in_time_with_an_error() -> None:
    """A suspension with checkpoints hung because the last checkpoint could not be taken."""
    clock = VirtualClock()
    job, server = await silent(checkpoints=checkpoints(MemoryStore(), alignment_timeout_s=5.0), clock=clock)
    timers = clock.timers
    stopping = asyncio.create_task(job.stop("suspend"))
    await until(lambda: clock.timers > timers)
    await clock.advance(5.0)
    async with asyncio.timeout(PATIENCE_S):
        with pytest.raises(JobFailed, match=r"same clock, given count\[1\] behind the others"):
            await stopping
    assert server.workers == []


@pytest.mark.parametrize("consistency", [ASP(), BSP(), SSP(staleness=1)], ids=repr)
async def test_a_drained_job_has_counted_all_that_was_read(consistency: Consistency) -> None:
    """A drained job lost counts of records because the inputs of its workers ended at different moments."""
    flow, server = counting_flow(consistency=consistency, records=10_000, workers=3)
    job = await flow.start()
    await handled(job, 5)
    async with asyncio.timeout(PATIENCE_S):
        statistics = await job.stop("drain")
    assert statistics.state == "finished"
    assert sum(await count_of_each(server)) == statistics.step("count").records_in


# -- several clocks, or barriers, in one record ----------------------------------------------------------------


class _Slow(Counts):
    """Works for some turns of the event loop before it calls the server."""

    async def process(self, record: int, out: Output) -> None:
        for _ in range(2 + record % 3):
            await asyncio.sleep(0)
        await self.work(record)

    async def work(self, record: int) -> None:
        raise NotImplementedError


class ReadsAfterItsClock(_Slow):
    async def work(self, record: int) -> None:
        await self.client.add(MATRIX, row=0, columns=[record], values=[1.0])
        await self.client.clock(MATRIX)
        await self.client.get(MATRIX, row=0)


class ClocksThreeTimes(_Slow):
    async def work(self, record: int) -> None:
        for part in (0.25, 0.25, 0.5):
            await self.client.get(MATRIX, row=0)
            await self.client.add(MATRIX, row=0, columns=[record], values=[part])
            await self.client.clock(MATRIX)


class MeetsTwice(_Slow):
    async def work(self, record: int) -> None:
        await self.client.barrier()
        await self.client.add(MATRIX, row=0, columns=[record], values=[1.0])
        await self.client.barrier()
        await self.client.clock(MATRIX)


STEPS: list[tuple[type[Counts], Any]] = [
    (step, consistency)
    for step in (ReadsAfterItsClock, ClocksThreeTimes, MeetsTwice)
    for consistency in (BSP(), SSP(staleness=1), ASP())
]


@pytest.mark.parametrize(("step", "consistency"), STEPS, ids=lambda value: getattr(value, "__name__", repr(value)))
async def test_a_step_may_wait_for_others_in_the_middle_of_a_record(
    step: Callable[[Any], Operator], consistency: Any
) -> None:
    """A step was ahead of workers that had stopped for a barrier, and waited for them: no suspension ever ended."""
    for turns in range(0, 45, 4):
        flow, server = counting_flow(lambda: step(consistency))
        job = await flow.start()
        for _ in range(turns):
            await asyncio.sleep(0)
        async with asyncio.timeout(PATIENCE_S):
            statistics = await job.stop("suspend")
        assert sum(await count_of_each(server)) == statistics.step("count").records_in


# -- errors of the server --------------------------------------------------------------------------------------


class Misled(Counts):
    """Runs the test's callback at record 3."""

    def __init__(self, mislead: Callable[[Any], Any]) -> None:
        super().__init__(BSP())
        self._mislead = mislead

    async def process(self, record: int, out: Output) -> None:
        if record == 3:
            await self._mislead(self.client)
        await super().process(record, out)


async def _clocks_twice(client: Any) -> None:
    for _ in range(3):
        await client.clock(MATRIX)


@pytest.mark.parametrize(
    ("mislead", "kind", "said"),
    [
        (lambda client: client.get("weights", row=0), UnknownMatrix, "expected one of 'counts', given 'weights'"),
        (lambda client: client.get(MATRIX, row=0, columns=[RECORDS]), OutOfRange, str(RECORDS)),
        (lambda client: client.add(MATRIX, row=1, values=[0.0] * RECORDS), OutOfRange, "1"),
        (_clocks_twice, OutOfTurn, "out of turn under BSP"),
    ],
)
async def test_an_error_of_the_server_names_the_step_and_the_record(
    mislead: Callable[[Any], Any], kind: type[Exception], said: str
) -> None:
    """An error of the server did not name the step and the record whose call had failed."""
    flow, _ = counting_flow(lambda: Misled(mislead))
    with pytest.raises(JobFailed) as failed:
        await ended(await flow.start())
    assert "step 'count'" in str(failed.value)
    assert "on record 3" in str(failed.value)
    assert isinstance(failed.value.__cause__, kind)
    assert said in str(failed.value)


class LeavesByItself(Counts):
    async def process(self, record: int, out: Output) -> None:
        await super().process(record, out)
        if record == 3:
            await self.client.leave("it has had enough")


async def test_a_client_used_after_leaving_names_the_step() -> None:
    """A step used its client after it had left, and the error did not name the step."""
    flow, _ = counting_flow(lambda: LeavesByItself(ASP()))
    with pytest.raises(JobFailed, match=r"step 'count'.* it has had enough; make a new one"):
        await ended(await flow.start())


async def test_a_server_that_is_closed_during_a_job_ends_the_job() -> None:
    """Workers of a closed server waited forever."""
    job, server = await waiting(asyncio.Event())
    await server.close()
    with pytest.raises(JobFailed, match=r"step 'count'.*closed"):
        await ended(job)
