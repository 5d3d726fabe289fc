"""No silent stall: the messages of the watchdog, and their times."""

import asyncio
from typing import Any

import pytest
from flow.small_flows import Fed
from runtime.probe import Valve

from streamiter import Flow, Operator, connect
from streamiter.engine.plan.job_settings import ChannelLimits
from streamiter.operators import Output
from streamiter.testing import VirtualClock


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name == "streamiter.job"]


async def test_a_stalled_step_is_reported_once_and_so_is_its_recovery(caplog: pytest.LogCaptureFixture) -> None:
    """A consumer was stuck for twenty days without a line in the log."""
    clock, opened, fed = VirtualClock(), asyncio.Event(), Fed()
    flow = Flow("f")
    flow.from_source(lambda: fed, name="in").process(lambda: Valve(opened), name="write")
    job = await flow.start(clock=clock, stall_after_s=60, channel_limits=ChannelLimits(records=1))
    for number in range(5):
        fed.give(number)
    await clock.advance(59)
    assert warnings(caplog) == []
    await clock.advance(20)
    assert warnings(caplog) == [
        "no progress for 60 s although there is input: in[0] waits for room in in[0] → write[0]; "
        "write[0] is at work on a batch"
    ]
    await clock.advance(600)
    assert len(warnings(caplog)) == 1
    opened.set()
    await clock.advance(60)
    assert warnings(caplog)[1:] == ["progress again after a stall: in[0], write[0]"]
    await clock.advance(600)
    assert len(warnings(caplog)) == 2
    await job.stop("abort")


async def test_a_step_that_hangs_on_its_only_batch_is_reported(caplog: pytest.LogCaptureFixture) -> None:
    """All channels were empty, so a stuck step looked idle."""
    clock, fed = VirtualClock(), Fed()
    flow = Flow("f")
    flow.from_source(lambda: fed, name="in").process(lambda: Valve(asyncio.Event()), name="write")
    job = await flow.start(clock=clock)
    fed.give(1)
    await clock.advance(100)
    assert warnings(caplog) == ["no progress for 60 s although there is input: write[0] is at work on a batch"]
    await job.stop("abort")


class Waits(Operator):
    """Always wants the model."""

    def wanted_inputs(self) -> tuple[str, ...]:
        return ("model",)

    def process_model(self, record: Any, out: Output) -> None: ...

    def process_data(self, record: Any, out: Output) -> None: ...


async def test_a_step_that_waits_for_another_input_is_held_not_stalled(caplog: pytest.LogCaptureFixture) -> None:
    """A worker without a model was reported as a worker that is stuck."""
    clock, data = VirtualClock(), Fed()
    flow = Flow("f")
    model = flow.from_source(Fed, name="model")
    connect(model=model, data=flow.from_source(lambda: data, name="data")).process(Waits, name="train")
    job = await flow.start(clock=clock)
    data.give(1, 2)
    await clock.advance(100)
    [message] = warnings(caplog)
    assert message.endswith("input: train[0] is held: it has input that it does not want now")
    await job.stop("abort")


async def test_a_job_without_input_is_not_stalled(caplog: pytest.LogCaptureFixture) -> None:
    """A quiet night was reported as an incident."""
    clock, fed = VirtualClock(), Fed()
    flow = Flow("f")
    flow.from_source(lambda: fed).map(str)
    job = await flow.start(clock=clock)
    fed.give(1)
    await clock.advance(3600)
    assert warnings(caplog) == []
    await job.stop("drain")


async def test_the_warning_of_a_checkpoint_that_cannot_align_names_the_channel(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """One channel waited with its barrier, and the log did not name the channel without one."""
    clock, opened, fed = VirtualClock(), asyncio.Event(), Fed()
    flow = Flow("f")
    source = flow.from_source(lambda: fed, name="in")
    source.process(lambda: Valve(opened), name="slow").union(source).map(str, name="both")
    job = await flow.start(clock=clock)
    fed.give(1)
    await clock.advance(1)
    snapshot = asyncio.create_task(job.snapshot())
    await clock.advance(100)
    [message] = warnings(caplog)
    assert "slow[0] is at work on a batch; both[0] waits for the checkpoint barrier of slow[0] → both[0]" in message
    opened.set()
    await snapshot
    await job.stop("abort")


class Awaits(Operator):
    """Waits for this time with each record."""

    def __init__(self, clock: VirtualClock, seconds: float) -> None:
        self._clock = clock
        self._seconds = seconds

    async def process(self, record: Any, out: Output) -> None:
        await self._clock.sleep(self._seconds)


class Quick(Operator):
    """Handles each record at once: its task is busy, but never stuck."""

    async def process(self, record: Any, out: Output) -> None: ...


async def busily(clock: VirtualClock, seconds: int, fed: Fed) -> None:
    """Let time pass while a source emits a record every second."""
    for number in range(seconds):
        fed.give(number)
        await clock.advance(1)


async def test_a_stuck_step_next_to_a_busy_one_is_reported_and_an_idle_one_is_not(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """One of three branches waited on a dead connection for a week, while the job as a whole continued."""
    clock, opened, lively, stuck = VirtualClock(), asyncio.Event(), Fed(), Fed()
    flow = Flow("f")
    flow.from_source(lambda: lively, name="lively").process(Quick, name="quick")
    flow.from_source(lambda: stuck, name="in").process(lambda: Valve(opened), name="write")
    flow.from_source(Fed, name="silent").process(Quick, name="idle")
    job = await flow.start(clock=clock)
    stuck.give(1)
    await busily(clock, 200, lively)
    assert warnings(caplog) == ["no progress for 60 s although there is input: write[0] is at work on a batch"]
    opened.set()
    await busily(clock, 200, lively)
    assert warnings(caplog)[1:] == ["progress again after a stall: write[0]"]
    await job.stop("abort")


async def test_a_held_step_next_to_a_busy_one_is_reported_later(caplog: pytest.LogCaptureFixture) -> None:
    """A partition waited for a slower one until the epoch was complete, and the log had two lines for each epoch."""
    clock, lively, data = VirtualClock(), Fed(), Fed()
    flow = Flow("f")
    flow.from_source(lambda: lively, name="lively").process(Quick, name="quick")
    model = flow.from_source(Fed, name="model")
    connect(model=model, data=flow.from_source(lambda: data, name="data")).process(Waits, name="train")
    job = await flow.start(clock=clock, stall_after_s=4, channel_limits=ChannelLimits(records=1))
    for number in range(4):
        data.give(number)
    await busily(clock, 39, lively)
    assert warnings(caplog) == []
    await busily(clock, 20, lively)
    assert warnings(caplog) == [
        "no progress for 39 s although there is input: data[0] waits for room in data[0] → train[0]; "
        "train[0] is held: it has input that it does not want now"
    ]
    await job.stop("abort")


async def test_each_of_two_stalls_is_reported_when_it_starts(caplog: pytest.LogCaptureFixture) -> None:
    """The second stall was not reported, because the job was already known to be stalled."""
    clock, first, second = VirtualClock(), Fed(), Fed()
    flow = Flow("f")
    for number, fed in enumerate((first, second)):
        source = flow.from_source(lambda fed=fed: fed, name=f"in {number}")
        source.process(lambda: Valve(asyncio.Event()), name=f"write {number}")
    job = await flow.start(clock=clock)
    first.give(1)
    await clock.advance(200)
    second.give(1)
    await clock.advance(200)
    assert warnings(caplog) == [
        f"no progress for 60 s although there is input: write {number}[0] is at work on a batch" for number in (0, 1)
    ]
    await job.stop("abort")


async def test_a_step_that_is_slow_with_each_record_is_not_stalled_nor_are_steps_that_wait_for_it(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A web service answered records one by one, so a channel took minutes, and a warning was logged for nothing."""
    clock, fed = VirtualClock(), Fed()
    flow = Flow("f")
    source = flow.from_source(lambda: fed, name="in")
    source.process(Quick, name="quick")
    slow = source.process(lambda: Awaits(clock, 20), name="ask")
    job = await flow.start(clock=clock, channel_limits=ChannelLimits(records=1))
    for _ in range(4):
        fed.give(*range(20))
    await clock.advance(1200)
    assert 55 <= job.statistics().step(slow.name).records_in <= 65
    assert warnings(caplog) == []
    await job.stop("abort")


async def test_a_step_with_wanted_inputs_makes_progress_with_each_record(caplog: pytest.LogCaptureFixture) -> None:
    """A step with ``wanted_inputs``, which handles its batches record by record, was reported as stalled."""

    class Chooses(Awaits):
        def wanted_inputs(self) -> None: ...

    clock, fed = VirtualClock(), Fed()
    flow = Flow("f")
    flow.from_source(lambda: fed, name="in").process(lambda: Chooses(clock, 20), name="ask")
    job = await flow.start(clock=clock)
    fed.give(*range(20))
    await clock.advance(600)
    assert warnings(caplog) == []
    await job.stop("abort")


async def test_time_in_which_no_step_could_run_is_no_stall(caplog: pytest.LogCaptureFixture) -> None:
    """A laptop slept, or a step blocked the event loop, and other steps without a turn were reported as stalled."""

    class Late(VirtualClock):
        async def sleep(self, delay_s: float) -> None:
            await super().sleep(delay_s + 300)

    clock, opened, fed = Late(), asyncio.Event(), Fed()
    flow = Flow("f")
    flow.from_source(lambda: fed, name="in").process(lambda: Valve(opened), name="write")
    job = await flow.start(clock=clock)
    fed.give(1)
    await clock.advance(700)
    opened.set()
    await clock.advance(700)
    assert warnings(caplog) == []
    await job.stop("abort")
