"""A channel and the two halves of one keep the same contract, however the bytes between the halves are cut."""

import asyncio
from collections import deque
from collections.abc import Callable, Coroutine
from random import Random
from typing import Any

import numpy as np
import pytest
from processes.pipes import Pipe, open_pipe
from support.examples import random_examples

from streamiter.engine.graph.channels import Channel, Intake
from streamiter.engine.processes.remote_channel import ArrivingChannel, DepartingChannel, window
from streamiter.errors import PlainDataError
from streamiter.values.records import CheckpointBarrier, Control, DataBatch, EndOfData, EndOfInput, EpochWatermark

LIMITS = {"limit_records": 8, "limit_bytes": 60}


class Ends:
    """The producer's and the consumer's end of a channel: the same object, or two halves."""

    def __init__(self, producer: Channel, consumer: Channel, pipe: Pipe | None = None) -> None:
        self.producer, self.consumer, self._pipe = producer, consumer, pipe

    async def settle(self, random: Random | None = None) -> None:
        """Let both ends know all of each other."""
        if self._pipe is None:
            await asyncio.sleep(0)
        else:
            await self._pipe.settle(random)

    async def move(self, random: Random) -> None:
        """Let time pass: some bytes arrive, from one side."""
        await asyncio.sleep(0)
        if self._pipe is not None:
            self._pipe.deliver(random.randrange(2), random.choice((1, 10, 60, 500)))


async def one_process(random: Random) -> Ends:
    channel = Channel("a → b", **LIMITS)
    return Ends(channel, channel)


async def two_halves(random: Random) -> Ends:
    first, second, _, _, pipe = await open_pipe(random)
    return Ends(DepartingChannel("a → b", first, 5, **LIMITS), ArrivingChannel("a → b", second, 5), pipe)


either = pytest.mark.parametrize("ends_of", [one_process, two_halves])
EndsOf = Callable[[Random], Coroutine[Any, Any, Ends]]


def schedule_of(random: Random) -> tuple[list[Any], int]:
    """Return items (sizes of batches in records, or control records), and a seed for the schedule."""
    items = [
        random.choice((random.randint(0, 4), random.randint(1, 12), "watermark", "barrier"))
        for _ in range(random.randrange(25))
    ]
    return items, random.randrange(1 << 30)


@either
@random_examples(schedule_of, examples=400)
def test_items_arrive_in_order_and_never_exceed_the_limits(example: tuple[list[Any], int], ends_of: EndsOf) -> None:
    """Credits were counted twice over a slow link: two halves held more than the limit, or both waited for ever."""
    items, seed = example
    asyncio.run(_run_schedule(items, Random(seed), ends_of))


async def _run_schedule(items: list[Any], random: Random, ends_of: EndsOf) -> None:
    ends = await ends_of(random)
    made: list[DataBatch | Control] = []
    for number, item in enumerate(items):
        if isinstance(item, int):
            made.append(
                DataBatch(np.full(item, number, np.uint8) if random.random() < 0.5 else [number] * item, number)
            )
        else:
            made.append(EpochWatermark(number) if item == "watermark" else CheckpointBarrier(number))
    made.append(EndOfInput())
    put_records = 0

    async def produce() -> None:
        nonlocal put_records
        for item in made:
            if isinstance(item, Control):
                ends.producer.put_control(item)
                continue
            while not ends.producer.try_put(item):
                await ends.producer.wait_for_room()
            put_records += len(item.records)

    largest = max((len(item.records) for item in made if isinstance(item, DataBatch)), default=0)
    producer = asyncio.create_task(produce())
    arrived: list[DataBatch | Control] = []
    aside: deque[int] = deque()
    taken_records, makes_way, has_made_way, idle = 0, False, False, 0
    while not (arrived and isinstance(arrived[-1], EndOfInput)):
        await ends.move(random)
        idle += 1
        assert idle < 20_000, f"nothing moves: {ends.producer.statistics()} {ends.consumer.statistics()}"
        match random.randrange(5):
            case 0 | 1 if (item := ends.consumer.peek()) is not None:
                assert ends.consumer.take() is item
                arrived.append(item)
                idle = 0
                if isinstance(item, DataBatch):
                    taken_records += len(item.records)
                    if random.random() < 0.4:
                        aside.append(len(item.records))
                        ends.consumer.set_aside(len(item.records), len(item.records))
            case 2 if aside:
                released = aside.popleft()
                ends.consumer.release(released, released)
            case 3 if random.random() < 0.2:
                makes_way = not makes_way
                has_made_way |= makes_way
                ends.consumer.make_way(makes_way)
        held = put_records - taken_records + (0 if has_made_way else sum(aside))
        assert held <= max(LIMITS["limit_records"], largest)
    await producer
    await ends.settle(random)
    _check_same(made, arrived)
    statistics = ends.producer.statistics()
    assert (statistics.records, statistics.size_bytes) == (0, 0)
    assert (statistics.total_records, statistics.aside_records) == (put_records, sum(aside))
    assert statistics.peak_records <= max(LIMITS["limit_records"], largest)


def _check_same(made: list[DataBatch | Control], arrived: list[DataBatch | Control]) -> None:
    """Only a watermark may be missing, if another watermark comes behind it."""
    left = deque(arrived)
    for number, item in enumerate(made):
        if left and repr(left[0]) == repr(item):
            first = left.popleft()
            if isinstance(first, DataBatch):
                assert isinstance(item, DataBatch)
                assert type(first.records) is type(item.records)
                assert list(first.records) == list(item.records)
        else:
            assert isinstance(item, EpochWatermark)
            assert isinstance(made[number + 1], EpochWatermark)
    assert not left


@either
async def test_one_batch_above_the_limits_passes_alone(ends_of: EndsOf) -> None:
    """A job hung at its first batch that was larger than the limit."""
    ends = await ends_of(Random(1))
    assert ends.producer.try_put(DataBatch([1] * 50))
    assert not ends.producer.try_put(DataBatch([1]))
    await ends.settle()
    assert not ends.producer.try_put(DataBatch([1]))
    ends.consumer.take()
    await ends.settle()
    assert ends.producer.try_put(DataBatch([1]))


@either
async def test_control_records_pass_a_full_channel(ends_of: EndsOf) -> None:
    """A barrier waited for room in a channel, and the task that could make the room waited for the barrier."""
    ends = await ends_of(Random(2))
    assert ends.producer.try_put(DataBatch([1] * 50))
    ends.producer.put_control(CheckpointBarrier(1))
    ends.producer.put_control(EndOfInput())
    await ends.settle()
    ends.consumer.take()
    assert repr(ends.consumer.take()) == "CheckpointBarrier(1)"
    assert repr(ends.consumer.take()) == "EndOfInput()"


@either
async def test_the_consumer_is_woken_only_when_an_empty_channel_gets_an_item(ends_of: EndsOf) -> None:
    """A consumer was not woken and slept, although its channel had input."""
    ends = await ends_of(Random(3))
    woken: list[int] = []
    ends.consumer.attach(lambda: woken.append(1))
    ends.producer.try_put(DataBatch([1]))
    ends.producer.try_put(DataBatch([2]))
    await ends.settle()
    assert len(woken) == 1
    ends.consumer.take()
    ends.consumer.take()
    ends.producer.put_control(EndOfInput())
    await ends.settle()
    assert len(woken) == 2


@either
async def test_waiting_watermarks_are_merged(ends_of: EndsOf) -> None:
    """Half a million watermarks waited in the channel of a worker that was stuck."""
    ends = await ends_of(Random(4))
    ends.producer.try_put(DataBatch([1]))
    for epoch in range(1000):
        ends.producer.put_control(EpochWatermark(epoch))
        if epoch % 100 == 0:
            await ends.settle()
    ends.producer.put_control(EndOfData())
    ends.producer.put_control(EpochWatermark(1000))
    await ends.settle()
    items = []
    while ends.consumer.peek() is not None:
        items.append(repr(ends.consumer.take()))
    assert items == ["DataBatch(1 records, epoch 0)", "EpochWatermark(999)", "EndOfData(0)", "EpochWatermark(1000)"]


@either
async def test_records_set_aside_shut_the_sources_before_the_producer(ends_of: EndsOf) -> None:
    """A source in another process read on, and the snapshots of a slow learner grew."""
    ends = await ends_of(Random(5))
    intake = Intake()
    ends.producer.shut_intakes([intake], 2)
    for aside, is_shut in ((16, False), (17, True)):
        ends.consumer.set_aside(aside, 0)
        await ends.settle()
        assert intake.is_shut is is_shut
        ends.consumer.release(aside, 0)
        await ends.settle()
        assert not intake.is_shut


async def test_a_channel_further_downstream_shuts_sources_two_processes_away() -> None:
    """Only the sources of the neighbour stopped; those of the process before it filled its memory."""
    near = await two_halves(Random(6))
    far = await two_halves(Random(7))
    source = Intake()
    assert isinstance(far.consumer, ArrivingChannel)
    far.producer.shut_intakes([source], 1)
    near.producer.shut_intakes([far.consumer.intake], 2)
    for aside, is_shut in ((100, True), (-100, False)):
        near.consumer.set_aside(aside, 0)
        await near.settle()
        await far.settle()
        assert source.is_shut is is_shut


async def test_a_batch_that_is_no_plain_data_is_refused_and_not_counted() -> None:
    """The error named neither the step nor the record; or the batch kept its room for ever, and the job stood still."""
    ends = await two_halves(Random(8))
    before = ends.producer.statistics()
    with pytest.raises(
        PlainDataError, match=r'a → b, in another process: record 1 of the batch: record\["x"\]: expected'
    ):
        ends.producer.try_put(DataBatch([{"x": 1}, {"x": {2}}]))
    assert ends.producer.statistics() == before
    assert ends.producer.try_put(DataBatch([{"x": 1}] * 8)), "all the room is there"


async def test_items_and_reports_of_one_turn_leave_in_one_write() -> None:
    """Each item and each report was a write of its own, which took more time than the step."""
    first, second, _, _, pipe = await open_pipe()
    there = DepartingChannel("a → b", first, 1), ArrivingChannel("a → b", second, 1)
    back = DepartingChannel("b → a", second, 2), ArrivingChannel("b → a", first, 2)
    back[0].try_put(DataBatch([1]))
    await pipe.settle()
    writes = pipe.ends[0].writes
    for number in range(20):
        there[0].try_put(DataBatch([number]))
        there[0].put_control(EpochWatermark(number))
    first.send_message("hello")
    back[1].take()
    await pipe.settle()
    assert pipe.ends[0].writes == writes + 1
    assert there[0].statistics().records == 20
    assert back[0].statistics().records == 0


async def test_the_first_of_many_items_leave_before_the_end_of_the_turn() -> None:
    """The other process was idle while this one encoded a full window, and the two never worked at the same time."""
    first, second, _, _, pipe = await open_pipe()
    departing = DepartingChannel("a → b", first, 1, limit_records=200_000)
    arriving = ArrivingChannel("a → b", second, 1)
    batches = [np.full(10_000, number, np.uint8) for number in range(20)]
    for batch in batches:
        assert departing.try_put(DataBatch(batch))
        departing.put_control(EpochWatermark(int(batch[0])))
    assert 64 << 10 <= len(pipe.ends[0].waiting) < 200_000
    await pipe.settle()
    for batch in batches:
        taken = arriving.take()
        assert isinstance(taken, DataBatch)
        assert np.array_equal(taken.records, batch)
        assert repr(arriving.take()) == f"EpochWatermark({batch[0]})"


async def test_a_watermark_does_not_overtake_a_message() -> None:
    """A coordinator was told that an epoch was over before it was told what belonged to the epoch."""
    first, second, _, owner, pipe = await open_pipe()
    departing, arriving = DepartingChannel("a → b", first, 1), ArrivingChannel("a → b", second, 1)
    owner.on_message = lambda link, message: owner.messages.append((message, repr(arriving.peek())))
    departing.put_control(EpochWatermark(1))
    departing.put_control(EpochWatermark(2))
    first.send_message("between")
    departing.put_control(EpochWatermark(3))
    await pipe.settle()
    assert owner.messages == [("between", "EpochWatermark(2)")]
    assert repr(arriving.take()) == "EpochWatermark(3)"


def test_many_channels_share_the_memory_of_eight() -> None:
    """A task behind 64 processes could hold 64 full windows, 256 MiB."""
    assert window(1) == window(8)
    windows = [window(channels) for channels in range(1, 2000)]
    assert windows == sorted(windows, reverse=True)
    assert window(100_000) == (256, 64 << 10)
    assert window(100, limit_records=100, limit_bytes=1000) == (100, 1000)


async def test_sources_before_a_small_window_are_shut_at_the_full_limits() -> None:
    """A source stood still with records that the other channels before the reader had room for, and so did the job."""
    first, second, _, _, pipe = await open_pipe()
    departing = DepartingChannel("a → b", first, 1, limit_records=8192, neighbours=64)
    arriving = ArrivingChannel("a → b", second, 1)
    intake = Intake()
    departing.shut_intakes([intake], 2)
    assert departing.limit_records == 1024
    for aside, is_shut in ((2 * 8192, False), (1, True)):
        arriving.set_aside(aside, 0)
        await pipe.settle()
        assert intake.is_shut is is_shut
