"""Abandoned checkpoints: they have no effect, and no task waits for them."""

import asyncio
from pathlib import Path
from typing import Any

import pytest
from runtime.checkpointed_sums import write, written
from support.waiting import PATIENCE_S, until

from streamiter import (
    Checkpoints,
    Flow,
    IterationBodyResult,
    IterationConfig,
    Operator,
    epochs_every,
    iterate_unbounded_streams,
)
from streamiter.engine.job.job import Job
from streamiter.errors import CheckpointError, JobFailed
from streamiter.operators import Output
from streamiter.testing import VirtualClock
from streamiter.topics import MemoryBroker


class Held(Operator):
    """Passes records on while it is open."""

    def __init__(self, door: asyncio.Event) -> None:
        self._door = door

    async def process(self, record: Any, out: Output) -> None:
        await self._door.wait()
        out.emit(record)


async def started(flow: Flow, folder: Path, clock: VirtualClock) -> Job:
    """Start a flow with a checkpoint each five seconds, which waits for its barriers for a second."""
    settings = Checkpoints(folder, interval_s=5.0, alignment_timeout_s=1.0)
    return await flow.start(checkpoints=settings, clock=clock)


async def given_up(job: Job, clock: VirtualClock, count: int) -> None:
    """Let the time of a checkpoint pass, and then that of its barriers."""
    await clock.advance(5.0)
    await clock.advance(1.0)
    await until(lambda: job.statistics().checkpoints.given_up >= count)  # type: ignore[union-attr]


async def committed(job: Job, clock: VirtualClock, number: int) -> None:
    await clock.advance(5.0)
    await until(lambda: (job.statistics().checkpoints.committed or 0) >= number)  # type: ignore[union-attr]


@pytest.fixture
async def broker() -> MemoryBroker:
    broker = MemoryBroker()
    for name in ("in", "slow", "fast"):
        await broker.topic(name).create()
    return broker


async def test_outputs_of_an_abandoned_checkpoint_are_committed_with_the_next(
    broker: MemoryBroker, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A slow step delayed one checkpoint, and records that sinks held for it were never written, or written twice."""
    clock, door = VirtualClock(), asyncio.Event()
    flow = Flow("one slow step")
    numbers = flow.source(broker.topic("in"))
    numbers.process(lambda: Held(door), name="held").sink(broker.topic("slow"))
    numbers.sink(broker.topic("fast"))
    await write(broker.topic("in"), [1, 2])
    job = await started(flow, tmp_path, clock)
    await until(lambda: job.statistics().step("sink fast").records_in == 2)
    await given_up(job, clock, 1)
    assert "checkpoint 1: its barrier has not passed held[0]" in caplog.text
    await write(broker.topic("in"), [3])
    await until(lambda: job.statistics().step("sink fast").records_in == 3)
    assert await written(broker.topic("fast")) == []
    door.set()
    await until(lambda: job.statistics().step("sink slow").records_in == 3)
    await committed(job, clock, 2)
    assert await written(broker.topic("fast")) == [1, 2, 3]
    assert await written(broker.topic("slow")) == [1, 2, 3]
    await job.stop("abort")


async def test_a_checkpoint_that_takes_longer_than_the_interval_is_reported_once(
    broker: MemoryBroker, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Outputs and recovery were delayed by a minute, although the interval was five seconds, and no message said so."""
    clock, door = VirtualClock(), asyncio.Event()
    flow = Flow("slower than the interval")
    flow.source(broker.topic("in")).process(lambda: Held(door), name="held").sink(broker.topic("slow"))
    job = await flow.start(checkpoints=Checkpoints(tmp_path, interval_s=5.0), clock=clock)
    for number in (1, 2):
        await write(broker.topic("in"), [number])
        await until(lambda number=number: job.statistics().step("held").records_in == number)
        await clock.advance(5.0)
        await clock.advance(8.0)
        door.set()
        await until(lambda number=number: (job.statistics().checkpoints.committed or 0) >= number)
        door.clear()
    assert caplog.text.count("a checkpoint took 8.0 s, longer than the interval of 5 s: 8.0 s until") == 1
    await job.stop("abort")


async def test_a_second_checkpoint_does_not_overtake_the_barrier_of_the_first(
    broker: MemoryBroker, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Two barriers in one loop ended each other's logs."""
    clock, door = VirtualClock(), asyncio.Event()
    flow = Flow("still slow")
    flow.source(broker.topic("in")).process(lambda: Held(door), name="held").sink(broker.topic("slow"))
    await write(broker.topic("in"), [1])
    job = await started(flow, tmp_path, clock)
    await until(lambda: job.statistics().step("held").records_in == 1)
    for count in (1, 2):
        await given_up(job, clock, count)
    door.set()
    await until(lambda: job.statistics().step("sink slow").records_in == 1)
    await committed(job, clock, 2)
    assert await written(broker.topic("slow")) == [1]
    await job.stop("abort")


async def test_a_suspension_waits_for_the_barrier_of_an_abandoned_checkpoint(
    broker: MemoryBroker, tmp_path: Path
) -> None:
    """After SIGTERM during a slow minute, the records in the slow step were lost."""
    clock, door = VirtualClock(), asyncio.Event()
    flow = Flow("stopped while slow")
    flow.source(broker.topic("in")).process(lambda: Held(door), name="held").sink(broker.topic("slow"))
    await write(broker.topic("in"), [1])
    job = await started(flow, tmp_path, clock)
    await until(lambda: job.statistics().step("held").records_in == 1)
    await given_up(job, clock, 1)
    stopping = asyncio.create_task(job.stop("suspend"))
    await asyncio.sleep(0)
    door.set()
    assert (await asyncio.wait_for(stopping, PATIENCE_S)).state == "suspended"
    assert await written(broker.topic("slow")) == [1]


@pytest.mark.parametrize("ahead", [0, None], ids=["synchronous", "asynchronous"])
async def test_a_loop_continues_when_its_checkpoint_is_abandoned(
    broker: MemoryBroker, tmp_path: Path, ahead: int | None
) -> None:
    """Heads kept logging feedback for an abandoned checkpoint, and decisions of the loop were delayed forever."""
    clock, door = VirtualClock(), asyncio.Event()
    flow = Flow("loop with a slow step")
    numbers = epochs_every(flow.source(broker.topic("in")), records=1, name="stamp")

    def body(variables: Any, data: Any) -> Any:
        held = data[0].process(lambda: Held(door), name="held")
        merged = variables[0].union(held)
        fed_back = merged.filter(lambda number: number < 100).map(lambda number: number + 100)
        return IterationBodyResult([fed_back], [merged])

    config = IterationConfig(max_epochs_ahead=ahead)
    [seen] = iterate_unbounded_streams([flow.from_items([0], name="initial")], [numbers], body, config)
    seen.sink(broker.topic("slow"))
    await write(broker.topic("in"), [1, 2])
    job = await started(flow, tmp_path, clock)
    await until(lambda: job.statistics().step("held").records_in >= 1)
    await given_up(job, clock, 1)
    door.set()
    await until(lambda: job.statistics().step("sink slow").records_in == 6)
    await committed(job, clock, 2)
    assert sorted(await written(broker.topic("slow"))) == [0, 1, 2, 100, 101, 102]
    await write(broker.topic("in"), [3])
    await until(lambda: job.statistics().step("sink slow").records_in == 8)
    await job.stop("suspend")
    assert sorted(await written(broker.topic("slow"))) == [0, 1, 2, 3, 100, 101, 102, 103]


async def test_a_loop_completes_epochs_while_a_step_before_it_holds_the_abandoned_barrier(
    broker: MemoryBroker, tmp_path: Path
) -> None:
    """Decisions of the loop were kept back until the barrier had passed the slow step, hours later."""
    clock, door = VirtualClock(), asyncio.Event()
    flow = Flow("loop behind a slow step")
    fast = epochs_every(flow.source(broker.topic("fast"), name="read fast"), records=1, name="stamp fast")
    held = epochs_every(flow.source(broker.topic("slow"), name="read slow"), records=1, name="stamp slow")
    slow = held.process(lambda: Held(door), name="held")

    def body(variables: Any, data: Any) -> Any:
        return IterationBodyResult([variables[0].filter(lambda _: False)], [data[0].union(data[1])])

    iterate_unbounded_streams([flow.from_items([], name="initial")], [fast, slow], body)
    door.set()
    await write(broker.topic("slow"), [*range(4)])
    job = await started(flow, tmp_path, clock)
    await until(lambda: job.statistics().step("data 1").records_in == 4)
    door.clear()
    await write(broker.topic("slow"), [4])
    await until(lambda: job.statistics().step("held").records_in == 5)
    await given_up(job, clock, 1)
    await write(broker.topic("fast"), [*range(3)])
    await until(lambda: job.statistics().loops[0].epoch_complete == 2)
    assert not door.is_set()
    await job.stop("abort")


async def test_state_that_is_not_plain_data_ends_the_job_and_names_the_step(
    broker: MemoryBroker, tmp_path: Path
) -> None:
    """Checkpoints failed every ten seconds for a week, with an error in the log only."""

    class Odd(Operator):
        def process(self, record: Any, out: Output) -> None:
            out.emit(record)

        def snapshot(self) -> Any:
            return {"handle": object()}

    flow = Flow("odd state")
    flow.source(broker.topic("in")).process(Odd, name="odd").sink(broker.topic("slow"))
    job = await flow.start(checkpoints=Checkpoints(tmp_path))
    with pytest.raises((JobFailed, CheckpointError)):
        await job.checkpoint()
    with pytest.raises(JobFailed, match=r"step 'odd' .*state of step 'odd'.*handle.*expected plain data"):
        await asyncio.wait_for(job.wait(), PATIENCE_S)
