"""The feedback edge in memory, on disk and through a topic, into which it goes in few records and few writes."""

import asyncio
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from iteration.iteration_support import SMALL, cut_items, run
from support.waiting import until

from streamiter import (
    Flow,
    IterationBodyResult,
    IterationConfig,
    Operator,
    OutputTag,
    Stream,
    connect,
    epochs_every,
    iterate_unbounded_streams,
)
from streamiter.engine.graph.feedback import FeedbackChannel, FeedbackLimits
from streamiter.engine.plan.job_settings import ChannelLimits
from streamiter.engine.storage.disk_queue import SpillQueue
from streamiter.engine.tasks.topic_outgoing import DATA, Message, OutgoingPath, OutgoingPump
from streamiter.errors import JobFailed
from streamiter.operators.source import Source, SourceBatch
from streamiter.topics import MemoryBroker, OutgoingBatch
from streamiter.topics.topic import ReadRequest, TopicWriter
from streamiter.values.plain_data import PlainData
from streamiter.values.records import Batch, DataBatch, EpochWatermark

LEAVES = OutputTag("leaves")


def in_memory(size_bytes: int, disk_bytes: int = 1 << 30) -> IterationConfig:
    return IterationConfig(feedback_limits=FeedbackLimits(memory_bytes=size_bytes, disk_bytes=disk_bytes))


class Branch(Operator):
    """Makes ``width`` records of the next depth from a record (depth, number); the deepest records leave the loop."""

    def __init__(self, width: int) -> None:
        self._width = width

    def process(self, record: tuple[int, int], out: Any) -> None:
        depth, number = record
        if depth == 0:
            out.emit(number, tag=LEAVES)
        else:
            for branch in range(self._width):
                out.emit((depth - 1, number * self._width + branch))


@pytest.mark.parametrize("limit", [1, 2, 3])
@pytest.mark.parametrize("memory_bytes", [0, 10_000, 64 << 20])
@pytest.mark.parametrize("seed", range(2))
def test_a_loop_that_multiplies_its_records_never_deadlocks(limit: int, memory_bytes: int, seed: int) -> None:
    """Every channel of the loop was full and waited for the next one, and the last waited for the first."""
    flow = Flow("loop")

    def body(variables: list[Stream], data: list[Stream]) -> IterationBodyResult:
        spread = variables[0].rebalance().map(lambda x: x, parallelism=2)
        branched = spread.process(lambda: Branch(10), parallelism=2)
        return IterationBodyResult([branched.rebalance()], [branched.side_output(LEAVES)])

    [leaves] = iterate_unbounded_streams(
        [cut_items(flow, [(3, 0), (3, 1)], seed=seed)], [], body, in_memory(memory_bytes)
    )
    collected = leaves.collect()
    run(flow, seed=seed, limits=ChannelLimits(records=limit))
    assert sorted(collected.items) == list(range(2_000))


def test_feedback_on_disk_returns_in_order() -> None:
    """Feedback of one edge came from disk in another order than it was written."""
    flow = Flow("loop")

    class Pump(Operator):
        """Makes many records from the first record; they leave when they return."""

        def process(self, record: int, out: Any) -> None:
            if record < 0:
                for start in range(0, 20_000, 100):
                    out.emit_batch(np.arange(start, start + 100))
            else:
                out.emit(int(record), tag=LEAVES)

    def body(variables: list[Stream], data: list[Stream]) -> IterationBodyResult:
        pumped = variables[0].process(Pump)
        return IterationBodyResult([pumped], [pumped.side_output(LEAVES)])

    [leaves] = iterate_unbounded_streams([flow.from_items([-1])], [], body, in_memory(1_000))
    collected = leaves.collect()
    statistics = run(flow)
    assert collected.items == list(range(20_000))
    [channel] = [channel for task in statistics.tasks for channel in task.feedback]
    assert channel.peak_bytes_on_disk > 0
    # Above the limit memory holds only the next batch.
    assert channel.peak_bytes_in_memory < channel.peak_bytes_on_disk / 2


def test_past_its_disk_limit_the_job_ends_with_an_error_that_names_the_loop() -> None:
    """A loop without limit that multiplied its records filled the disk of all programs on the machine."""
    flow = Flow("loop")

    def body(variables: list[Stream], data: list[Stream]) -> IterationBodyResult:
        branched = variables[0].process(lambda: Branch(50), name="branch")
        return IterationBodyResult([branched], [branched.side_output(LEAVES)])

    config = in_memory(1_000, disk_bytes=100_000)
    iterate_unbounded_streams([flow.from_items([(5, 0)])], [], body, config)
    with pytest.raises(JobFailed, match=r"branch.*expected.*100,?000.*given.*(disk|feedback)"):
        run(flow, limits=SMALL)


class Tap(Source):
    """Gives a record at every read: more new input than the loop can handle."""

    bounded = False

    def __init__(self) -> None:
        self._given = 0

    async def read(self) -> SourceBatch:
        await asyncio.sleep(0)
        self._given += 1
        return SourceBatch([self._given], {"given": self._given})


async def test_new_input_falls_to_one_batch_in_sixteen_but_never_to_none() -> None:
    """A loop that was busy with its feedback did not receive the end of its input, or a new model, for hours."""
    flow = Flow("loop")
    came: list[str] = []

    class Mix(Operator):
        """Feeds everything back, so that the feedback only grows."""

        def process_data(self, record: int, out: Any) -> None:
            came.append("new")
            out.emit(record)

        def process_fed_back(self, record: int, out: Any) -> None:
            came.append("fed back")
            out.emit(record)

    def body(variables: list[Stream], data: list[Stream]) -> IterationBodyResult:
        mixed = connect(fed_back=variables[0], data=data[0]).process(Mix)
        return IterationBodyResult([mixed], [])

    initial = flow.from_items(range(1_000))
    iterate_unbounded_streams([initial], [flow.from_source(Tap)], body, in_memory(0))
    job = await flow.start(channel_limits=ChannelLimits(records=1))
    await until(lambda: len(came) > 30_000)
    await job.stop("abort")
    busy = came[5_000:30_000]
    new = [place for place, kind in enumerate(busy) if kind == "new"]
    assert len(new) > 10
    # A batch of feedback may have many records after it was on disk, because small batches are joined.
    assert len(new) <= len(busy) / 8


async def test_a_loop_that_is_not_overloaded_is_not_throttled() -> None:
    """The throttling of new input slowed a loop that was not overloaded."""
    flow = Flow("loop")
    seen: list[int] = []

    def body(variables: list[Stream], data: list[Stream]) -> IterationBodyResult:
        return IterationBodyResult(variables, [data[0]])

    [passed] = iterate_unbounded_streams([flow.from_items([])], [flow.from_items(range(5_000))], body)
    passed.map(seen.append)
    job = await flow.start()
    await job.wait()
    assert seen == list(range(5_000))


async def test_input_ahead_of_its_loop_waits_at_its_source() -> None:
    """A fast topic with a slow model filled the memory with examples of later epochs."""
    flow, taps = Flow("loop"), list[Tap]()

    class Slow(Operator):
        async def process(self, record: int, out: Any) -> None:
            if record > 3:
                await asyncio.Event().wait()
            out.emit(record)

    def tap() -> Tap:
        taps.append(Tap())
        return taps[-1]

    tap.bounded = False  # type: ignore[attr-defined]

    def body(variables: list[Stream], data: list[Stream]) -> IterationBodyResult:
        slow = data[0].process(Slow)
        return IterationBodyResult([variables[0].union(slow)], [])

    data = epochs_every(flow.from_source(tap), records=1)
    config = IterationConfig(max_epochs_ahead=0)
    iterate_unbounded_streams([flow.from_items([])], [data], body, config)
    job = await flow.start(channel_limits=ChannelLimits(records=10))
    for _ in range(3_000):
        await asyncio.sleep(0)
    given = taps[0]._given
    for _ in range(3_000):
        await asyncio.sleep(0)
    assert taps[0]._given == given <= 60
    await job.stop("abort")


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
    """Outgoing paths of some producers to some heads, each with a partition, and a pump for the paths."""

    def __init__(self, directory: Path) -> None:
        self.topic = MemoryBroker().topic("loop")
        self.paths = [
            OutgoingPath(producer, "step", head, FeedbackChannel(f"{producer} → {head}", self._queue(directory)))
            for producer in range(PRODUCERS)
            for head in range(HEADS)
        ]
        self.pump = OutgoingPump("run", "start", self.paths, PlainData())

    @staticmethod
    def _queue(directory: Path) -> SpillQueue:
        return SpillQueue(name="step", directory=directory, memory_limit_bytes=1 << 30, disk_limit_bytes=1 << 30)

    async def open(self) -> Counting:
        await self.topic.create(partitions=HEADS)
        for path in self.paths:
            path.assign([path.head])
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
    for path in fed.paths:
        for number in range(1_000):
            path.channel.put(DataBatch([number], 1))
    await fed.write_all()
    written = await fed.written()
    assert len(written) == PRODUCERS * HEADS
    for entries in written.values():
        assert [records for _, records in entries] == [list(range(1_000))]


async def test_all_waiting_batches_are_one_write_for_each_partition(fed: Fed) -> None:
    """A write for each queue gave the subtasks a turn between writes, in which they fed smaller batches back."""
    writer = await fed.open()
    assert (writer.writes, writer.flushes) == ([PRODUCERS] * HEADS, 1)  # the starts
    for path in fed.paths:
        for epoch in range(1, 6):
            path.channel.put(DataBatch([epoch], epoch))
            path.channel.put_control(EpochWatermark(epoch))
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
    [path, *_] = fed.paths
    path.channel.put(DataBatch([0], 1))
    await is_storing.wait()
    for number in range(1, 500):
        path.channel.put(DataBatch([number], 1))
        await asyncio.sleep(0)
    stored.set()
    await fed.stop_when_written(running)
    [entries] = (await fed.written()).values()
    assert [records for _, records in entries] == [[0], list(range(1, 500))]


async def test_joined_batches_keep_order_epochs_types_and_control_records(fed: Fed) -> None:
    """Batches of different epochs or types were joined, or overtook a control record between them."""
    await fed.open()
    [path, *_] = fed.paths
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
        path.channel.put(DataBatch(records, epoch))
    path.channel.put_control(EpochWatermark(1))
    path.channel.put(DataBatch(np.array([8.0]), 2))
    path.channel.put(DataBatch(np.array([9.0]), 2))
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
    for path in fed.paths:
        for epoch in range(4):
            path.channel.put(DataBatch(np.zeros(50_000), epoch + 1))
    await fed.write_all()
    # The batch of a path has 400 kB: no write call holds more than a megabyte and the batch that exceeded it.
    assert writer.flushes > len(fed.paths)
    assert max(writer.writes[HEADS:]) <= 3
    written = await fed.written()
    for entries in written.values():
        epochs = [epoch for epoch, _ in groupby(message.epoch for message, _ in entries)]
        assert epochs == [1, 2, 3, 4]
        assert sum(len(records) for _, records in entries) == 200_000
