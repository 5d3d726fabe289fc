"""Bounded memory, fair turns, and the statistics of a job."""

import asyncio
from collections import Counter
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from flow.small_flows import Fed
from hypothesis import given
from hypothesis import strategies as st
from runtime.probe import Life, ProbeSource, Valve, turns
from support.waiting import turn, until
from topics.topic_case import write

from streamiter import (
    Columns,
    Flow,
    IterationBodyResult,
    Operator,
    OutputTag,
    Stream,
    connect,
    iterate_bounded_streams_until_termination,
)
from streamiter.engine.graph.statistics import JobStatistics
from streamiter.engine.inbox.turn import TURN_S, TurnSize
from streamiter.engine.plan.job_settings import ChannelLimits
from streamiter.errors import RejectRecords
from streamiter.operators import Output
from streamiter.operators.operator import Context
from streamiter.operators.source import Positions, Source, SourceBatch
from streamiter.testing import VirtualClock
from streamiter.topics import MemoryBroker
from streamiter.values.records import Batch


def peaks(statistics: JobStatistics) -> list[int]:
    return [channel.peak_records for task in statistics.tasks for channel in task.inputs]


@pytest.mark.parametrize("limit", [1, 7, 100])
async def test_a_slow_sink_holds_a_fast_source_back(limit: int) -> None:
    """Without backpressure, the records of an hour filled the memory until the process was killed."""
    life, opened = Life(), asyncio.Event()
    flow = Flow("f")
    flow.from_source(lambda: ProbeSource(life)).map(lambda x: x).process(lambda: Valve(opened))
    job = await flow.start(channel_limits=ChannelLimits(records=limit))
    await turns(1000)
    assert max(peaks(job.statistics())) <= limit
    # Records are in the feeder's channel, in the channel before the valve, in the valve; one waits at each place.
    assert life.count("source read") <= 2 * limit + 5
    await job.stop("abort")


async def test_a_limit_in_bytes_holds_a_source_back() -> None:
    """A few images took as much memory as a million clicks."""

    class Images(Source):
        async def read(self) -> SourceBatch:
            await asyncio.sleep(0)
            return SourceBatch([np.zeros(1000, np.uint8)], {})

    flow = Flow("f")
    flow.from_source(Images).process(lambda: Valve(asyncio.Event()))
    job = await flow.start(channel_limits=ChannelLimits(size_bytes=5000))
    await turns(500)
    channels = [channel for task in job.statistics().tasks for channel in task.inputs]
    assert {(channel.peak_bytes, channel.records) for channel in channels} == {(5000, 5)}
    await job.stop("abort")


async def test_the_output_of_a_large_call_is_sent_before_the_next_call() -> None:
    """A flat_map with a thousand outputs for each input kept the output of many calls outside of the channel."""
    life = Life()
    flow = Flow("f")
    flow.from_source(lambda: ProbeSource(life)).flat_map(lambda x: [x] * 1000).process(lambda: Valve(asyncio.Event()))
    job = await flow.start(channel_limits=ChannelLimits(records=10))
    await turns(1000)
    assert job.statistics().step("flat_map").records_in <= 3
    await job.stop("abort")


async def test_a_full_branch_holds_the_other_branch_back() -> None:
    """Of two sinks one was slow, and the records for the other one grew in memory."""
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


async def test_a_source_that_always_has_records_leaves_others_their_turn() -> None:
    """A file that is read without waiting blocked the event loop until its channel was full."""
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
    """Heartbeats, HTTP and signals in the same event loop had to wait for a busy step."""
    fed = Fed()
    flow = Flow("f")
    handled: list[int] = []
    flow.from_source(lambda: fed).rebalance().process(lambda: Valve(opened()), name="before").map(handled.append)
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
        """Loss and load could not be found because the counts were wrong."""
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

    async def test_channels_report_their_ends_depth_peak_and_totals(self) -> None:
        """The statistics did not show which of two partitions was behind."""
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

    async def test_time_is_the_clock_s_and_blocked_time_is_reported(self) -> None:
        """The time that a step waited for the slow step after it was missing in the statistics."""
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

    async def test_an_operator_sees_its_own_statistics(self) -> None:
        """``context.statistics`` had no numbers while the operator ran."""
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
        assert seen[-2:] == [10, 10]

    async def test_epoch_watermark_and_names_of_a_connected_step(self) -> None:
        """The watermark before the first complete epoch was not below 0, or the channels had wrong names."""

        class Both(Operator):
            def process_a(self, record: Any, out: Output) -> None: ...

            def process_b(self, record: Any, out: Output) -> None: ...

        flow = Flow("f", parallelism=2)
        a, b = flow.from_items([1], name="a"), flow.from_items([2], name="b")
        connect(a=a, b=b.rebalance()).process(Both, name="both")
        statistics = await (await flow.start()).wait()
        task = next(task for task in statistics.tasks if task.name == "both[1]")
        assert task.epoch_watermark == -1
        assert [channel.name for channel in task.inputs] == ["a[1] → both[1]", "b[0] → both[1]", "b[1] → both[1]"]


async def test_a_source_opens_at_its_positions_and_closes_once() -> None:
    """A source could not distinguish a new run, which has no positions, from a run that resumes at the start."""
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
    """Takes a mini-batch for each model; without a model it wants no data."""

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
async def test_many_snapshots_set_aside_no_more_than_a_few_channels_hold(limit: int) -> None:
    """Each barrier moved the content of all channels before it into its snapshot, and the channels filled again."""
    life, models = Life(), Fed()
    flow = Flow("f")
    data = flow.from_source(lambda: ProbeSource(life)).rebalance().process(lambda: Valve(opened()), name="hop")
    learner = WantsModel()
    connect(model=flow.from_source(lambda: models, name="models"), data=data.rebalance()).process(
        lambda: learner, name="learn"
    )
    job = await flow.start(channel_limits=ChannelLimits(records=limit))
    held: list[int] = []
    paused: list[bool] = []
    for number in range(40):
        await turns(20 * limit + 200)
        await job.snapshot()
        [task] = [task for task in job.statistics().tasks if task.name == "learn[0]"]
        held.append(task.held_records)
        assert task.held_records == sum(channel.aside_records for channel in task.inputs)
        paused.append(job.statistics().tasks[0].is_paused)
        models.give(number)  # The model admits one record, far fewer than arrive.
    assert max(held) <= 8 * limit + 8, held
    assert paused[-1]
    assert learner.taken == list(range(len(learner.taken)))
    assert len(learner.taken) >= 39
    await job.stop("abort")


class WorkClock(VirtualClock):
    """A clock that advances by the duration of the work."""

    def work(self, seconds: float) -> None:
        self.now_s += seconds


class Slow(Operator):
    """Takes 5 ms for each record, as a large model does."""

    def __init__(self, clock: WorkClock, seen: list[int]) -> None:
        self._clock = clock
        self._seen = seen

    def process(self, record: Any, out: Output) -> None:
        self._clock.work(0.005)
        self._seen.append(int(record))
        out.emit(record)


class SlowInThread(Slow):
    runs_in_thread = True


class SlowAwaited(Slow):
    async def process(self, record: Any, out: Output) -> None:  # type: ignore[override]
        super().process(record, out)


class SlowBatches(Slow):
    """Handles whole batches slowly; rejects every seventh record."""

    process = None  # type: ignore[assignment]

    def process_batch(self, batch: Batch, out: Output) -> None:
        if bad := [index for index, record in enumerate(batch) if record % 7 == 3]:
            raise RejectRecords(bad, "every seventh")
        self._clock.work(0.005 * len(batch))
        self._seen.extend(int(record) for record in batch)
        out.emit_batch(batch)


def records_of(kind: str, count: int) -> Any:
    if kind == "columns":
        return Columns({"x": np.arange(count)})
    return np.arange(count) if kind == "array" else list(range(count))


@pytest.mark.parametrize("kind", ["list", "array", "columns"])
@pytest.mark.parametrize("made", [Slow, SlowAwaited, SlowBatches])
@pytest.mark.parametrize("hop", [False, True])
async def test_a_slow_step_leaves_others_their_turn_within_a_batch(made: type[Slow], kind: str, hop: bool) -> None:
    """A barrier, a stop and all other steps waited 40 seconds for a batch of 8,192 records at 5 ms each."""
    clock, seen, count = WorkClock(), list[int](), 2000
    flow = Flow("f")
    stream = flow.from_items(records_of(kind, count), name="items")
    if kind == "columns":
        stream = stream.map_batch(lambda batch: batch["x"])
    if hop:
        stream = stream.process(lambda: Valve(opened()), name="hops", parallelism=2)
    stream.process(lambda: made(clock, seen), name="slow", on_error="skip", parallelism=1)
    job = await flow.start(clock=clock)
    longest_s, last_s = 0.0, clock.monotonic_s()
    while job.statistics().state == "running":
        await turn()
        longest_s, last_s = max(longest_s, clock.monotonic_s() - last_s), clock.monotonic_s()
    assert longest_s <= 0.065
    assert sorted(seen) == [number for number in range(count) if made is not SlowBatches or number % 7 != 3]
    await job.wait()


async def test_a_loop_in_one_task_leaves_others_their_turn_after_a_few_rounds() -> None:
    """Since a round takes one turn of its task, 16 rounds of a loop passed between two turns of a timer."""
    seen, turns_of_others = list[int](), list[int]()
    flow = Flow("f")

    def round_of(number: int) -> int:
        seen.append(len(turns_of_others))
        return number + 1

    def body(variables: list[Stream], data: list[Stream]) -> IterationBodyResult:
        raised = variables[0].map(round_of)
        return IterationBodyResult([raised.filter(lambda number: number < 100)], [])

    iterate_bounded_streams_until_termination([flow.from_items([0])], [], body)
    job = await flow.start()
    while len(seen) < 100:
        turns_of_others.append(0)
        await turn()
    await job.wait()
    assert max(Counter(seen).values()) <= 8


async def test_a_slow_step_in_a_thread_takes_its_batches_in_pieces() -> None:
    """The event loop was free, but a barrier and a stop waited for the thread."""
    clock, seen = WorkClock(), list[int]()
    flow = Flow("f")
    flow.from_items(range(500)).process(lambda: SlowInThread(clock, seen), name="slow")
    statistics = await (await flow.start(clock=clock)).wait()
    assert seen == list(range(500))
    assert statistics.step("slow").batches_in >= 50


@pytest.mark.parametrize("made", ["items", "topic"])
async def test_a_barrier_passes_a_slow_source_within_a_batch(made: str) -> None:
    """The barrier waited for all records that the source had read at once, and the checkpoint was abandoned."""
    clock, seen, count = WorkClock(), list[int](), 2000
    broker = MemoryBroker()
    topic = broker.topic("numbers")
    await topic.create()
    await write(topic, [str(number).encode() for number in range(count)])

    def build() -> Flow:
        flow = Flow("f")
        numbers = flow.from_items(range(count)) if made == "items" else flow.source(topic, stop="latest")
        numbers.process(lambda: Slow(clock, seen), name="slow")
        return flow

    job = await build().start(clock=clock)
    await until(lambda: len(seen) > 0)
    for _ in range(5):
        before_s, before = clock.monotonic_s(), len(seen)
        snapshot = await job.snapshot()
        assert clock.monotonic_s() - before_s <= 0.5
        await until(lambda before=before: len(seen) > before)  # type: ignore[misc]
    at_snapshot = snapshot["items[0]" if made == "items" else "numbers[0]"]["positions"]
    [position] = (value for of, value in at_snapshot.items() if of != "identities")
    assert 0 < position < count
    await job.stop("abort")
    seen.clear()
    job = await build().start(clock=clock, snapshot=snapshot)
    await job.wait()
    assert seen == list(range(position, count))


async def test_the_rest_of_a_batch_takes_room() -> None:
    """A slow step's channel was filled again after each batch that the step had started."""
    clock, seen = WorkClock(), list[int]()
    flow = Flow("f")
    numbers = flow.from_source(lambda: ProbeSource(Life()))
    hops = numbers.process(lambda: Valve(opened()), name="hops", parallelism=2)
    hops.process(lambda: Slow(clock, seen), name="slow", parallelism=1)
    job = await flow.start(clock=clock, channel_limits=ChannelLimits(records=100))
    most = 0
    while len(seen) < 1000:
        await turn()
        [task] = [task for task in job.statistics().tasks if task.name == "slow[0]"]
        most = max(most, *(channel.records + channel.aside_records for channel in task.inputs))
    assert most <= 100
    await job.stop("abort")


# -- the length of a turn: pure functions, so thousands of examples are fast ------------------------------


@given(fixed_ms=st.floats(0, 200), each_ms=st.floats(0.0001, 20), available=st.lists(st.integers(1, 8192), max_size=30))
def test_turns_find_their_length_for_any_duration_of_a_record(
    fixed_ms: float, each_ms: float, available: list[int]
) -> None:
    """Batches stayed cut to single records after one slow call, or were never cut."""
    size = TurnSize()

    def turn_of(records: int) -> float:
        taken_s = (fixed_ms + each_ms * records) / 1000
        size.took(records, taken_s)
        assert 1 <= size.records <= 8192
        return taken_s

    for records in available:
        turn_of(min(records, size.records))
    for _ in range(150):
        turn_of(size.records)
    turns_s, records = [], 0
    for _ in range(32):
        records += size.records
        turns_s.append(turn_of(size.records))
    # Twice the fixed part if it is large, and no part of a record; every eighth turn is twice as long.
    assert max(turns_s) <= 2.2 * max(TURN_S, (2 * fixed_ms + each_ms) / 1000)
    fastest = 8192 / (fixed_ms + each_ms * 8192)
    assert records / (1000 * sum(turns_s)) >= 0.4 * fastest


@given(st.lists(st.tuples(st.integers(1, 8192), st.floats(0, 6e-6)), max_size=40))
def test_turns_of_fast_steps_do_not_depend_on_the_clock(turns_taken: list[tuple[int, float]]) -> None:
    """Two runs of the same flow cut its batches differently, without a reason."""
    timed, untimed = TurnSize(), TurnSize()
    for available, each_s in turns_taken:
        records = min(available, untimed.records)
        timed.took(records, records * each_s)
        untimed.took(records, 0.0)
        assert timed.records == untimed.records
