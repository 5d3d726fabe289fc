"""Bounded memory, fair turns, and the numbers a job tells of itself."""

from __future__ import annotations

import asyncio
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from flow.fed_source import Fed
from runtime.probe import Life, ProbeSource, Valve, turns

from streamiter import Columns, Flow, Operator, OutputTag, connect
from streamiter.operators import Output
from streamiter.operators.context import Context
from streamiter.operators.source import Positions, Source, SourceBatch
from streamiter.runtime.plan import ChannelLimits
from streamiter.runtime.statistics import JobStatistics
from streamiter.testing import VirtualClock


def peaks(statistics: JobStatistics) -> list[int]:
    return [channel.peak_records for task in statistics.tasks for channel in task.inputs]


@pytest.mark.parametrize("limit", [1, 7, 100])
async def test_a_slow_sink_holds_a_fast_source_back(limit: int) -> None:
    """Without it the records of an hour pile up in memory until the process is killed."""
    life, opened = Life(), asyncio.Event()
    flow = Flow("f")
    flow.from_source(lambda: ProbeSource(life)).map(lambda x: x).process(lambda: Valve(opened))
    job = await flow.start(channel_limits=ChannelLimits(records=limit))
    await turns(1000)
    assert max(peaks(job.statistics())) <= limit
    # Read ahead, in the channel before the valve, in the valve, and one that waits at each place.
    assert life.count("source read") <= 2 * limit + 5
    await job.stop("abort")


async def test_it_holds_in_bytes_too() -> None:
    """Ten images are as much as a million clicks."""

    class Images(Source):
        async def read(self) -> SourceBatch:
            await asyncio.sleep(0)
            return SourceBatch([np.zeros(1000, np.uint8)], {})

    flow = Flow("f")
    flow.from_source(Images).process(lambda: Valve(asyncio.Event()))
    job = await flow.start(channel_limits=ChannelLimits(size_bytes=5000))
    await turns(500)
    statistics = job.statistics()
    assert all(channel.peak_bytes <= 5000 for task in statistics.tasks for channel in task.inputs)
    assert all(channel.records <= 5 for task in statistics.tasks for channel in task.inputs)
    await job.stop("abort")


async def test_a_call_that_emits_much_is_waited_for_before_the_next() -> None:
    """A flat_map of a thousand for one: at most the output of one call waits beside the channel."""
    life = Life()
    flow = Flow("f")
    flow.from_source(lambda: ProbeSource(life)).flat_map(lambda x: [x] * 1000).process(
        lambda: Valve(asyncio.Event())
    )
    job = await flow.start(channel_limits=ChannelLimits(records=10))
    await turns(1000)
    assert job.statistics().step("flat_map").records_in <= 3
    await job.stop("abort")


async def test_a_full_branch_does_not_let_the_other_pile_up() -> None:
    """One of two sinks is slow: both are held to its pace, none grows."""
    life = Life()
    flow = Flow("f")
    source = flow.from_source(lambda: ProbeSource(life))
    source.process(lambda: Valve(asyncio.Event()), name="slow")
    source.process(lambda: Valve(opened()), name="fast").collect()
    job = await flow.start(channel_limits=ChannelLimits(records=4))
    await turns(1000)
    assert max(peaks(job.statistics())) <= 4
    assert job.statistics().step("fast").records_in <= 10
    await job.stop("abort")


def opened() -> asyncio.Event:
    event = asyncio.Event()
    event.set()
    return event


async def test_a_source_that_always_has_something_leaves_others_their_turn() -> None:
    """A file that is read without waiting once took the event loop for as long as its channel had room."""
    reads = 0

    class Busy(Source):
        def read(self) -> SourceBatch:
            nonlocal reads
            reads += 1
            return SourceBatch([reads], {})

    flow = Flow("f")
    flow.from_source(Busy).map(lambda x: x)
    job = await flow.start()
    before = reads
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert reads - before <= 4
    await job.stop("abort")


async def test_a_busy_step_leaves_others_their_turn() -> None:
    """Heartbeats, HTTP and signals live in the same event loop."""
    fed = Fed()
    flow = Flow("f")
    handled: list[int] = []
    flow.from_source(lambda: fed).rebalance().process(lambda: Valve(opened()), name="before").map(
        handled.append
    )
    job = await flow.start()
    for number in range(2000):
        fed.give(number)
    seen: list[int] = []
    while len(handled) < 2000:
        await asyncio.sleep(0)
        seen.append(len(handled))
    assert max(after - before for before, after in pairwise(seen)) <= 200
    await job.stop("abort")


class TestStatistics:
    async def test_count_what_each_step_handled(self) -> None:
        """The numbers from which loss and load are read."""
        side = OutputTag("side")

        class Split(Operator):
            def process(self, record: Any, out: Output) -> None:
                out.emit(record)
                if record % 3 == 0:
                    out.emit(record, tag=side)

        flow = Flow("f", parallelism=2)
        split = flow.from_items(list(range(10)), name="in").process(Split, name="split")
        split.filter(lambda x: x > 4, name="large").collect(name="out")
        split.side_output(side).collect(name="threes")
        statistics = await (await flow.start()).wait()

        def counts(step: str) -> tuple[int, int]:
            told = statistics.step(step)
            return told.records_in, told.records_out

        assert counts("in") == (10, 10)
        assert counts("split") == (10, 14)
        assert counts("large") == (10, 5)
        assert counts("out") == (5, 0)
        assert counts("threes") == (4, 0)
        assert [task.name for task in statistics.tasks] == ["in[0]", "in[1]", "out[0]", "threes[0]"]
        assert [step.step for step in statistics.tasks[0].steps] == ["in", "split", "large"]
        assert all(task.ended for task in statistics.tasks)
        with pytest.raises(KeyError, match="no step 'large-2'; there are in, split, large, out, threes"):
            statistics.step("large-2")

    async def test_channels_tell_their_ends_depth_peak_and_totals(self) -> None:
        """Which of two partitions is behind."""
        opening, fed = asyncio.Event(), Fed()
        flow = Flow("f")
        flow.from_source(lambda: fed, name="in").process(lambda: Valve(opening), name="valve")
        job = await flow.start()
        fed.give(1)
        await turns()
        fed.give(*range(5))
        await turns()
        [channel] = job.statistics().tasks[1].inputs
        assert (channel.name, channel.records, channel.peak_records) == ("in[0] → valve[0]", 5, 5)
        assert (channel.total_records, channel.total_batches) == (6, 2)
        opening.set()
        await turns()
        [channel] = job.statistics().tasks[1].inputs
        assert (channel.records, channel.peak_records, channel.total_records) == (0, 5, 6)
        await job.stop("abort")

    async def test_time_is_the_clock_s_and_blocked_time_is_told(self) -> None:
        """How long a step waited for the one behind it: the one behind is slow."""
        clock, opening, fed = VirtualClock(), asyncio.Event(), Fed()
        flow = Flow("f")
        flow.from_source(lambda: fed, name="in").process(lambda: Valve(opening), name="valve")
        job = await flow.start(clock=clock, channel_limits=ChannelLimits(records=1))
        for number in range(4):
            fed.give(number)
        await clock.advance(7)
        opening.set()
        await clock.advance(2)
        statistics = job.statistics()
        assert (statistics.flow, statistics.state, statistics.elapsed_s) == ("f", "running", 9)
        assert statistics.tasks[0].blocked_s == pytest.approx(7)
        await job.stop("abort")
        await clock.advance(5)
        assert job.statistics().elapsed_s == 9

    async def test_an_operator_sees_its_own(self) -> None:
        """``context.statistics``, also while it runs."""
        seen: list[int] = []

        class Curious(Operator):
            def open(self, context: Context) -> None:
                self.context = context

            def process_batch(self, batch: Any, out: Output) -> None:
                out.emit_batch(batch)
                seen.append(self.context.statistics.records_in)

            def finish(self, out: Output) -> None:
                seen.append(self.context.statistics.records_out)

        flow = Flow("f")
        flow.from_items(Columns({"x": np.arange(10)})).process(Curious)
        await (await flow.start()).wait()
        assert seen == [10, 10]

    async def test_epoch_watermark_and_names_of_a_connected_step(self) -> None:
        """Before the first epoch is complete it is below 0."""

        class Both(Operator):
            def process_a(self, record: Any, out: Output) -> None: ...

            def process_b(self, record: Any, out: Output) -> None: ...

        flow = Flow("f", parallelism=2)
        a, b = flow.from_items([1], name="a"), flow.from_items([2], name="b")
        connect(a=a, b=b.rebalance()).process(Both, name="both")
        statistics = await (await flow.start()).wait()
        task = next(task for task in statistics.tasks if task.name == "both[1]")
        assert task.epoch_watermark == -1
        assert [channel.name for channel in task.inputs] == [
            "a[1] → both[1]",
            "b[0] → both[1]",
            "b[1] → both[1]",
        ]


async def test_a_source_opens_at_its_positions_and_closes_once() -> None:
    """None for a new run, so that a source can tell it from one that goes on at its very beginning."""
    opened_at: list[Positions | None] = []

    class Noting(Fed):
        def open(self, context: Context, positions: Positions | None) -> None:
            opened_at.append(positions)

    fed = [Noting() for _ in range(3)]
    flow = Flow("f")
    flow.from_source(lambda: fed[len(opened_at)])
    job = await flow.start()
    empty = await job.snapshot()
    await job.stop("abort")
    job = await flow.start(snapshot=empty)
    fed[1].give("a", "b")
    await turns()
    snapshot = await job.snapshot()
    await job.stop("abort")
    job = await flow.start(snapshot=snapshot)
    await job.stop("abort")
    assert opened_at == [None, {}, {"brought": 2}]
    assert [source.closed for source in fed] == [1, 1, 1]


class WantsModel(Operator):
    """Takes a mini-batch for each model; meanwhile it has no use for data."""

    def __init__(self) -> None:
        self.models = 0
        self.taken: list[Any] = []

    def wanted_inputs(self) -> tuple[str, ...]:
        return ("data",) if self.models else ("model",)

    def process_model(self, record: Any, out: Output) -> None:
        self.models += 1

    def process_data(self, record: Any, out: Output) -> None:
        self.models -= 1
        self.taken.append(record)


@pytest.mark.parametrize("limit", [1, 5, 100])
async def test_snapshot_after_snapshot_sets_aside_no_more_than_a_few_channels_hold(limit: int) -> None:
    """Each barrier pushed what all channels on its way held into its snapshot; then they filled again."""
    life, models = Life(), Fed()
    flow = Flow("f")
    data = (
        flow.from_source(lambda: ProbeSource(life)).rebalance().process(lambda: Valve(opened()), name="hop")
    )
    learner = WantsModel()
    connect(model=flow.from_source(lambda: models, name="models"), data=data.rebalance()).process(
        lambda: learner, name="learn"
    )
    job = await flow.start(channel_limits=ChannelLimits(records=limit))
    held: list[int] = []
    for number in range(40):
        await turns(20 * limit + 200)
        await job.snapshot()
        [task] = [task for task in job.statistics().tasks if task.name == "learn[0]"]
        held.append(task.held_records)
        models.give(number)  # It handles one record, far less than comes.
    assert max(held) <= 8 * limit + 8, held
    assert learner.taken == list(range(len(learner.taken)))
    assert len(learner.taken) >= 39
    await job.stop("abort")
