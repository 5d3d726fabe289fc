"""Never a silent stall: what the watchdog says, and when."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from flow.fed_source import Fed
from runtime.probe import Valve

from streamiter import Flow, Operator, connect
from streamiter.operators import Output
from streamiter.runtime.plan import ChannelLimits
from streamiter.testing import VirtualClock


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name == "streamiter.job"]


async def test_a_stalled_step_is_reported_once_and_so_is_its_recovery(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A consumer that stood still for twenty days without a line in the log."""
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
    assert warnings(caplog)[1:] == ["progress again after a stall"]
    await clock.advance(600)
    assert len(warnings(caplog)) == 2
    await job.stop("abort")


async def test_a_step_that_hangs_on_its_only_batch_is_reported(caplog: pytest.LogCaptureFixture) -> None:
    """No more input waits, all channels are empty: it looked idle, and was stuck."""
    clock, fed = VirtualClock(), Fed()
    flow = Flow("f")
    flow.from_source(lambda: fed, name="in").process(lambda: Valve(asyncio.Event()), name="write")
    job = await flow.start(clock=clock)
    fed.give(1)
    await clock.advance(100)
    assert warnings(caplog) == [
        "no progress for 60 s although there is input: write[0] is at work on a batch"
    ]
    await job.stop("abort")


async def test_a_step_that_waits_for_another_input_is_held_not_stalled(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A worker without a model is told apart from one that hangs."""

    class Waits(Operator):
        def wanted_inputs(self) -> tuple[str, ...]:
            return ("model",)

        def process_model(self, record: Any, out: Output) -> None: ...

        def process_data(self, record: Any, out: Output) -> None: ...

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
    """A quiet night is not an incident."""
    clock, fed = VirtualClock(), Fed()
    flow = Flow("f")
    flow.from_source(lambda: fed).map(str)
    job = await flow.start(clock=clock)
    fed.give(1)
    await clock.advance(3600)
    assert warnings(caplog) == []
    await job.stop("drain")


async def test_a_checkpoint_that_cannot_align_says_whom_it_waits_for(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """One channel is blocked behind its barrier; the log must name the one that has not brought it."""
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
    assert (
        "slow[0] is at work on a batch; both[0] waits for the checkpoint barrier of slow[0] → both[0]"
        in message
    )
    opened.set()
    await snapshot
    await job.stop("abort")
