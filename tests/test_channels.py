"""The bounded channel between two tasks keeps its order and its limits, and wakes both tasks."""

import asyncio
from collections import deque
from random import Random

import numpy as np
import pytest
from support.examples import random_examples
from support.waiting import PATIENCE_S

from streamiter.engine.graph.channels import Channel, Intake
from streamiter.errors import InternalError
from streamiter.values.records import Control, DataBatch, EndOfData, EndOfInput, EpochWatermark, estimated_bytes


def channel_of(records: int = 10, size_bytes: int = 1 << 20) -> Channel:
    return Channel("a → b", limit_records=records, limit_bytes=size_bytes)


def test_a_batch_over_the_record_limit_is_refused_and_changes_nothing() -> None:
    """A fast source before a slow consumer filled the memory until the process was killed."""
    channel = channel_of(records=4)
    assert channel.try_put(DataBatch([1, 2, 3]))
    before = channel.statistics()

    assert not channel.try_put(DataBatch([4, 5]))

    assert channel.statistics() == before
    assert channel.try_put(DataBatch([4]))


def test_a_batch_over_the_byte_limit_is_refused() -> None:
    """A few records of several megabytes filled the memory, because only the number of records was limited."""
    channel = channel_of(records=1000, size_bytes=1000)
    assert channel.try_put(DataBatch(np.zeros(100, np.uint8)))
    assert not channel.try_put(DataBatch(np.zeros(901, np.uint8)))
    assert channel.try_put(DataBatch(np.zeros(900, np.uint8)))


@pytest.mark.parametrize("batch", [DataBatch([1] * 50), DataBatch(np.zeros(5000, np.uint8))])
def test_one_batch_above_the_limit_passes_alone(batch: DataBatch) -> None:
    """A job hung at its first batch that was larger than the limit."""
    channel = channel_of(records=4, size_bytes=100)
    assert channel.try_put(batch)
    assert not channel.try_put(DataBatch([1]))
    assert channel.take() is batch
    assert channel.try_put(DataBatch([1]))


def test_control_records_pass_a_full_channel_in_order() -> None:
    """A barrier waited for room in a channel, and the task that could make the room waited for the barrier."""
    channel = channel_of(records=1)
    data, watermark, end = DataBatch([1]), EpochWatermark(0), EndOfInput()
    assert channel.try_put(data)
    channel.put_control(watermark)
    channel.put_control(end)
    assert [channel.take() for _ in range(3)] == [data, watermark, end]
    assert channel.peek() is None


def test_control_records_alone_leave_room_for_a_batch_above_the_limit() -> None:
    """Waiting watermarks kept out a batch above the limit, although only data counts as full."""
    channel = channel_of(records=2)
    channel.put_control(EpochWatermark(0))
    assert channel.try_put(DataBatch([1, 2, 3]))


def test_the_consumer_is_woken_only_when_an_empty_channel_gets_an_item() -> None:
    """A consumer was not woken and slept, although its channel had input."""
    channel, woken = channel_of(), deque[str]()
    channel.attach(lambda: woken.append("ready"))
    channel.try_put(DataBatch([1]))
    channel.try_put(DataBatch([2]))
    channel.put_control(EndOfInput())
    assert len(woken) == 1
    for _ in range(3):
        channel.take()
    channel.put_control(EndOfInput())
    assert len(woken) == 2


async def test_a_producer_that_waits_for_room_continues_when_an_item_is_taken() -> None:
    """A producer was not woken, and the job stopped for ever at its first full channel."""
    channel = channel_of(records=1)
    channel.try_put(DataBatch([1]))
    waiting = asyncio.create_task(channel.wait_for_room())
    await asyncio.sleep(0)
    assert not waiting.done()
    channel.take()
    await waiting
    assert channel.try_put(DataBatch([2]))


async def test_waiting_for_room_in_an_empty_channel_returns_at_once() -> None:
    """The consumer took everything between the refusal and the wait, and no call woke the producer."""
    await channel_of().wait_for_room()


async def test_a_cancelled_wait_for_room_can_be_repeated() -> None:
    """A job was aborted while its producer waited, and the old waiter blocked the next one."""
    channel = channel_of(records=1)
    channel.try_put(DataBatch([1]))
    waiting = asyncio.create_task(channel.wait_for_room())
    await asyncio.sleep(0)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    again = asyncio.create_task(channel.wait_for_room())
    await asyncio.sleep(0)
    channel.take()
    await again


async def test_a_second_waiter_is_an_internal_error() -> None:
    """Two producers on one channel overtook each other, and no error reported it."""
    channel = channel_of(records=1)
    channel.try_put(DataBatch([1]))
    waiting = asyncio.create_task(channel.wait_for_room())
    await asyncio.sleep(0)
    with pytest.raises(InternalError, match="a → b"):
        await channel.wait_for_room()
    channel.take()
    await waiting


def test_statistics_count_waiting_records_peaks_and_totals() -> None:
    """The numbers of a channel were wrong, and operators of a job looked for its slow step at the wrong place."""
    channel = channel_of()
    nothing = channel.statistics()
    assert (nothing.records, nothing.peak_records, nothing.peak_bytes, nothing.total_records) == (0, 0, 0, 0)
    channel.try_put(DataBatch(np.zeros(3)))
    channel.try_put(DataBatch(np.zeros(4)))
    channel.put_control(EpochWatermark(0))
    channel.take()
    channel.try_put(DataBatch(np.zeros(1)))
    statistics = channel.statistics()
    assert (statistics.name, statistics.records, statistics.size_bytes) == ("a → b", 5, 40)
    assert (statistics.peak_records, statistics.peak_bytes) == (7, 56)
    assert (statistics.total_records, statistics.total_batches, statistics.total_bytes) == (8, 3, 64)


def test_waiting_watermarks_are_merged() -> None:
    """A worker was stuck behind a filter that drops everything, and half a million watermarks waited in its channel."""
    channel = channel_of()
    channel.try_put(DataBatch([1]))
    channel.try_put(DataBatch([2]))
    for epoch in range(1000):
        channel.put_control(EpochWatermark(epoch))
    channel.put_control(EndOfData())
    channel.put_control(EpochWatermark(1000))
    items = []
    while channel.peek() is not None:
        items.append(channel.take())
    assert [repr(item) for item in items] == [
        "DataBatch(1 records, epoch 0)",
        "DataBatch(1 records, epoch 0)",
        "EpochWatermark(999)",
        "EndOfData(0)",
        "EpochWatermark(1000)",
    ]


Actions = tuple[list[int | str], int, int]


def actions_and_limits(random: Random) -> Actions:
    """Return actions (a batch of this many records, a control record, or a take) and the limits.

    The limits are those of the records and of the bytes.
    """
    actions: list[int | str] = [
        random.choice((random.randint(0, 9), random.randint(0, 3), "control", "take"))
        for _ in range(random.randrange(31))
    ]
    return actions, random.randint(1, 12), random.randint(1, 90)


@random_examples(actions_and_limits)
def test_order_limits_and_numbers_are_right_for_any_actions(example: Actions) -> None:
    """A channel lost its order, exceeded a limit with more than one batch, or counted wrong sizes."""
    actions, records, size_bytes = example
    channel = channel_of(records, size_bytes)
    model: deque[DataBatch | Control] = deque()
    for action in actions:
        if action == "take":
            assert channel.peek() is (model[0] if model else None)
            if model:
                assert channel.take() is model.popleft()
        elif action == "control":
            model.append(EndOfData())
            channel.put_control(model[-1])  # type: ignore[arg-type]
        else:
            batch = DataBatch(np.zeros(int(action)))
            waiting = [item for item in model if isinstance(item, DataBatch)]
            after = [*waiting, batch]
            fits = (
                sum(len(item.records) for item in after) <= records
                and sum(estimated_bytes(item.records) for item in after) <= size_bytes
            )
            alone = sum(len(item.records) for item in waiting) == 0
            assert channel.try_put(batch) == (fits or alone)
            if fits or alone:
                model.append(batch)
        waiting = [item for item in model if isinstance(item, DataBatch)]
        statistics = channel.statistics()
        assert statistics.records == channel.records == sum(len(item.records) for item in waiting)
        assert statistics.size_bytes == sum(estimated_bytes(item.records) for item in waiting)


Calls = list[tuple[str, int, int]]


def some_calls_on_two_channels(random: Random) -> Calls:
    """Return calls on channels 0 and 1; the number of a call is bytes for a batch, and records otherwise."""
    kinds = ("put", "put", "take", "aside", "aside", "release", "make way", "make no way")
    return [
        (random.choice(kinds), random.randrange(2), random.choice((1, 2, 3, 4, 5, 9)))
        for _ in range(random.randrange(30))
    ]


@random_examples(some_calls_on_two_channels)
def test_records_set_aside_take_room_and_shut_intakes_by_their_sums(calls: Calls) -> None:
    """Records set aside were not counted, so each checkpoint of a slow learner was larger than the one before."""
    limit_records, limit_bytes, ways = 4, 40, (1, 2)
    channels = [channel_of(limit_records, limit_bytes) for _ in ways]
    shared, own = Intake(), Intake()
    channels[0].shut_intakes([shared], ways[0])
    channels[1].shut_intakes([shared, own], ways[1])
    aside: tuple[list[tuple[int, int]], list[tuple[int, int]]] = ([], [])
    inside: tuple[list[int], list[int]] = ([], [])
    makes_way = [False, False]
    assert not shared.is_shut
    for kind, which, number in calls:
        channel = channels[which]
        records_aside = sum(records for records, _ in aside[which])
        bytes_aside = sum(size_bytes for _, size_bytes in aside[which])
        match kind:
            case "put":
                counted, counted_bytes = sum(inside[which]), sum(inside[which])
                if not makes_way[which]:
                    counted, counted_bytes = counted + records_aside, counted_bytes + bytes_aside
                fits = not counted or (counted + number <= limit_records and counted_bytes + number <= limit_bytes)
                assert channel.try_put(DataBatch(np.zeros(number, np.uint8))) is fits
                if fits:
                    inside[which].append(number)
            case "take" if inside[which]:
                assert len(channel.take().records) == inside[which].pop(0)
            case "aside":
                aside[which].append((number % 4, 5 * number))
                channel.set_aside(number % 4, 5 * number)
            case "release" if aside[which]:
                channel.release(*aside[which].pop(0))
            case "make way" | "make no way":
                makes_way[which] = kind == "make way"
                channel.make_way(makes_way[which])
        overfull = [
            sum(records for records, _ in aside[each]) > ways[each] * limit_records
            or sum(size_bytes for _, size_bytes in aside[each]) > ways[each] * limit_bytes
            for each in (0, 1)
        ]
        assert (shared.is_shut, own.is_shut) == (any(overfull), overfull[1])
        statistics = channel.statistics()
        assert statistics.aside_records == sum(records for records, _ in aside[which])
        assert statistics.aside_bytes == sum(size_bytes for _, size_bytes in aside[which])


async def test_a_source_reads_again_when_every_channel_has_opened_its_intake() -> None:
    """One of two channels had room, and a source read on although the other channel was too full."""
    intake = Intake()
    await asyncio.wait_for(intake.wait(), PATIENCE_S)
    intake.shut()
    intake.shut()
    waiting = asyncio.ensure_future(intake.wait())
    intake.open()
    await asyncio.sleep(0)
    assert intake.is_shut
    assert not waiting.done()
    intake.open()
    await waiting
    assert not intake.is_shut


async def test_a_producer_waits_for_room_while_records_are_set_aside_unless_the_channel_makes_way() -> None:
    """A producer asked for room again and again, or waited for ever and the job hung."""
    channel = channel_of(records=2)
    channel.set_aside(2, 2)
    waiting = asyncio.ensure_future(channel.wait_for_room())
    await asyncio.sleep(0)
    assert not waiting.done()
    channel.release(1, 1)
    await waiting
    waiting = asyncio.ensure_future(channel.wait_for_room())
    await asyncio.sleep(0)
    assert not waiting.done()
    channel.make_way(True)
    await waiting
    await asyncio.wait_for(channel.wait_for_room(), PATIENCE_S)
