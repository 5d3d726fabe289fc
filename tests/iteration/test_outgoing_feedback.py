"""Waiting feedback is joined: it goes into a topic in few records and few writes."""

from __future__ import annotations

import asyncio
from itertools import groupby
from pathlib import Path

import numpy as np
import pytest

from streamiter.engine.graph.feedback import FeedbackChannel
from streamiter.engine.storage.disk_queue import SpillQueue
from streamiter.engine.tasks.topic_outlets import DATA, FeedbackOutlet, Message, OutgoingPump
from streamiter.topics import MemoryBroker, OutgoingBatch
from streamiter.topics.topic import ReadRequest, TopicWriter
from streamiter.values.plain_data import PlainData
from streamiter.values.records import Batch, DataBatch, EpochWatermark

LIMIT_BYTES = 1 << 20
PRODUCERS, HEADS = 3, 2


class Counting(TopicWriter):
    """Passes all calls on and counts the records of each write."""

    def __init__(self, inner: TopicWriter) -> None:
        self._inner = inner
        self.writes: list[int] = []
        self.flushes = 0

    async def write(self, batch: OutgoingBatch) -> None:
        self.writes.append(len(batch))
        await self._inner.write(batch)

    async def flush(self) -> None:
        self.flushes += 1
        await self._inner.flush()

    async def close(self) -> None:
        await self._inner.close()


class Fed:
    """Outlets of some producers to some heads, each with a partition, and a pump for the outlets."""

    def __init__(self, directory: Path) -> None:
        self.topic = MemoryBroker().topic("loop")
        self.outlets = [
            FeedbackOutlet(producer, "step", head, FeedbackChannel(f"{producer} → {head}", self._queue(directory)))
            for producer in range(PRODUCERS)
            for head in range(HEADS)
        ]
        self.pump = OutgoingPump("run", "start", self.outlets, PlainData())

    @staticmethod
    def _queue(directory: Path) -> SpillQueue:
        return SpillQueue(name="step", directory=directory, memory_limit_bytes=1 << 30, disk_limit_bytes=1 << 30)

    async def open(self) -> Counting:
        await self.topic.create(partitions=HEADS)
        for outlet in self.outlets:
            outlet.assign([outlet.head])
        writer = Counting(await self.topic.open_writer())
        await self.pump.open(writer, LIMIT_BYTES)
        return writer

    async def write_all(self) -> None:
        await self.stop_when_written(asyncio.create_task(self.pump.run()))

    @staticmethod
    async def stop_when_written(running: asyncio.Task[None]) -> None:
        """Stop the pump when it waits for new items: nothing in memory needs so many turns of the event loop."""
        for _ in range(1_000):
            await asyncio.sleep(0)
        assert not running.done()
        running.cancel()
        await asyncio.wait([running])

    async def written(self) -> dict[tuple[int, int], list[tuple[Message, Batch]]]:
        """Return the headers and records in the topic by producer and head, without the starts."""
        reader = await self.topic.open_reader(ReadRequest(stop="latest"))
        found: dict[tuple[int, int], list[tuple[Message, Batch]]] = {}
        while (batch := await reader.read()) is not None:
            for headers, value in zip(batch.headers, batch.values, strict=True):
                message = Message.from_headers(headers)
                if message.kind != "start":
                    records = PlainData().decode_batch(value or b"") if message.kind == DATA else []
                    found.setdefault((message.producer, batch.partition), []).append((message, records))
        await reader.close()
        return found


@pytest.fixture
def fed(tmp_path: Path) -> Fed:
    return Fed(tmp_path)


async def test_small_waiting_batches_become_one_record_of_the_topic(fed: Fed) -> None:
    """Each small batch became a separate record of the topic, and returned as small as before."""
    await fed.open()
    for outlet in fed.outlets:
        for number in range(1_000):
            outlet.channel.put(DataBatch([number], 1))
    await fed.write_all()
    written = await fed.written()
    assert len(written) == PRODUCERS * HEADS
    for entries in written.values():
        assert [records for _, records in entries] == [list(range(1_000))]


async def test_all_waiting_batches_are_one_write_for_each_partition(fed: Fed) -> None:
    """A write for each queue gave the subtasks a turn between writes, in which they fed smaller batches back."""
    writer = await fed.open()
    assert (writer.writes, writer.flushes) == ([PRODUCERS] * HEADS, 1)  # the starts
    for outlet in fed.outlets:
        for epoch in range(1, 6):
            outlet.channel.put(DataBatch([epoch], epoch))
            outlet.channel.put_control(EpochWatermark(epoch))
    await fed.write_all()
    assert (writer.writes[HEADS:], writer.flushes) == ([PRODUCERS * 10] * HEADS, 2)


async def test_batches_that_arrive_during_a_write_are_joined(fed: Fed) -> None:
    """A pump that did not wait for a slow topic wrote each batch alone, instead of joining waiting batches."""
    writer = await fed.open()
    stored, is_storing = asyncio.Event(), asyncio.Event()
    store = writer.flush

    async def slow_flush() -> None:
        is_storing.set()
        await stored.wait()
        await store()

    writer.flush = slow_flush  # type: ignore[method-assign]
    running = asyncio.create_task(fed.pump.run())
    [outlet, *_] = fed.outlets
    outlet.channel.put(DataBatch([0], 1))
    await is_storing.wait()
    for number in range(1, 500):
        outlet.channel.put(DataBatch([number], 1))
        await asyncio.sleep(0)
    stored.set()
    await fed.stop_when_written(running)
    [entries] = (await fed.written()).values()
    assert [records for _, records in entries] == [[0], list(range(1, 500))]


async def test_joined_batches_keep_order_epochs_types_and_control_records(fed: Fed) -> None:
    """Batches of different epochs or types were joined, or overtook a control record between them."""
    await fed.open()
    [outlet, *_] = fed.outlets
    batches: list[tuple[int, Batch]] = [
        (1, [1]),
        (1, [2]),
        (2, [3]),
        (1, [4]),
        (1, np.array([5])),
        (1, np.array([6])),
        (1, np.array([7.0])),
    ]
    for epoch, records in batches:
        outlet.channel.put(DataBatch(records, epoch))
    outlet.channel.put_control(EpochWatermark(1))
    outlet.channel.put(DataBatch(np.array([8.0]), 2))
    outlet.channel.put(DataBatch(np.array([9.0]), 2))
    await fed.write_all()
    [entries] = (await fed.written()).values()
    assert [(message.kind, message.epoch, list(records)) for message, records in entries] == [
        ("data", 1, [1, 2]),
        ("data", 2, [3]),
        ("data", 1, [4]),
        ("data", 1, [5, 6]),
        ("data", 1, [7.0]),
        ("watermark", 1, []),
        ("data", 2, [8.0, 9.0]),
    ]
    start = 1  # The first record of the run is its start, which was written before.
    assert [message.sequence for message, _ in entries] == list(range(start, start + len(entries)))


async def test_a_write_is_bounded_and_all_outlets_take_turns(fed: Fed) -> None:
    """Feedback that waited on disk, to save memory, was read back into memory for one write."""
    writer = await fed.open()
    for outlet in fed.outlets:
        for epoch in range(4):
            outlet.channel.put(DataBatch(np.zeros(50_000), epoch + 1))
    await fed.write_all()
    # An outlet's batch has 400 kB: no write call holds more than a megabyte and the batch that exceeded it.
    assert writer.flushes > len(fed.outlets)
    assert max(writer.writes[HEADS:]) <= 3
    written = await fed.written()
    for entries in written.values():
        epochs = [epoch for epoch, _ in groupby(message.epoch for message, _ in entries)]
        assert epochs == [1, 2, 3, 4]
        assert sum(len(records) for _, records in entries) == 200_000
