"""Feedback through a topic, the returning side: from the topic to one head.

Each head has a :class:`ReturningPump`, an asyncio task, which reads the partitions of the head and puts the feedback of
this run into the channels of the head. An :class:`Inlet` is the end of the way of one producer. The
:class:`TopicReturnPath` of a channel notes where in the topic each waiting item came from, so that a checkpoint can
have the range of the topic instead of the records. :func:`restored_records` reads the ranges of a checkpoint back.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import replace
from itertools import count
from typing import Final, NamedTuple, final

from streamiter.engine.graph.feedback import (
    FeedbackChannel,
    RecordPoint,
    ReturnPath,
    TopicRange,
    TrackMark,
    check_range_in_topic,
    missing_records_error,
)
from streamiter.engine.storage.disk_queue import SpillQueue
from streamiter.engine.tasks.topic_outlets import (
    DATA,
    RUN_HEADER,
    START,
    Message,
    control_from_kind,
    foreign_record_error,
)
from streamiter.errors import PlainDataError, TopicError, TopicNotFound
from streamiter.operators.output import Origin
from streamiter.topics.topic import Headers, ReadRequest, Topic, TopicBatch, TopicReader
from streamiter.values.helpers.clock import Clock
from streamiter.values.helpers.closing import closed_after
from streamiter.values.plain_data import PlainData
from streamiter.values.records import Batch, CheckpointBarrier, Control, DataBatch

# The most records of one read. Each may be a batch of up to a megabyte, and all of them are in memory.
RECORDS_PER_READ: Final = 256


@final
class ReturningPump:
    """Reads the partitions of one head, and puts the feedback of this run into the head's channels.

    While a channel is above its limit, the pump does not read: the feedback waits in the topic.
    """

    def __init__(
        self,
        run_id: str,
        topic: Topic,
        inlets: Mapping[int, Inlet],
        memory_bytes: int,
        plain_data: PlainData,
        clock: Clock,
    ) -> None:
        """``inlets`` are by the number of the producer."""
        self._run_id = run_id.encode()
        self._topic = topic
        self._inlets = inlets
        self._memory_bytes = memory_bytes
        self._plain_data = plain_data
        self._clock = clock
        self._following: dict[tuple[int, int], int] = {}
        """The next sequence number, by producer and partition."""
        self._full: FeedbackChannel | None = None
        self._room = asyncio.Event()
        self.on_limit: Callable[[], None] = lambda: None
        """Called when it pauses, and when it continues."""

    @property
    def is_paused(self) -> bool:
        """Whether the pump waits until the head takes an item."""
        return self._full is not None

    async def run(self, reader: TopicReader) -> None:
        """Bring the feedback of the restored checkpoint first, then that of this run, until cancelled."""
        await self._bring_restored()
        while (batch := await reader.read()) is not None:
            await self._take_in(batch)
            await asyncio.sleep(0)  # A reader that always has records must let other tasks run.

    def look_for_room(self) -> None:
        """An item was taken from one of the channels: continue if there is room."""
        if self._full is not None and not self._is_full(self._full):
            self._room.set()

    def _is_full(self, channel: FeedbackChannel) -> bool:
        return len(channel.queue) > 0 and channel.queue.bytes_in_memory >= self._memory_bytes

    async def _bring_restored(self) -> None:
        """Bring the first range of each channel, then the second, and so on: they are of consecutive runs."""
        inlets = self._inlets.values()
        for number in count():
            of_channels = {
                inlet.return_path.restored[number]: inlet
                for inlet in inlets
                if number < len(inlet.return_path.restored)
            }
            if not of_channels:
                return
            records = restored_records(self._topic, list(of_channels), max_records=RECORDS_PER_READ, clock=self._clock)
            async with aclosing(records):
                async for restored, message, at, partition, value in records:
                    await self._bring(of_channels[restored], message, at, partition, value, restored)

    async def _take_in(self, batch: TopicBatch) -> None:
        columns = zip(batch.offsets, batch.headers, batch.values, strict=True)
        for offset, headers, value in columns:
            message = self._message(batch.partition, offset, headers)
            if message is None or not self._is_next(message, batch.partition, offset):
                continue
            if message.home == batch.partition:
                inlet, at = self._inlets[message.producer], RecordPoint(offset, message.sequence)
                inlet.return_path.passed(at)
                await self._bring(inlet, message, at, batch.partition, value or b"")

    async def _bring(
        self,
        inlet: Inlet,
        message: Message,
        at: RecordPoint,
        partition: int,
        value: bytes,
        restored: RestoredRange | None = None,
    ) -> None:
        if message.kind == DATA:
            records = self._decoded(value, partition, at.offset)
            inlet.put(DataBatch(records, message.number), at, restored)
            await self._make_room(inlet.channel)
        elif message.kind != START:
            inlet.put_control(control_from_kind(message.kind, message.number), at, restored)

    def _message(self, partition: int, offset: int, headers: Headers) -> Message | None:
        """Return the message of a record; None if it is of another run."""
        run = next((value for name, value in headers if name == RUN_HEADER), None)
        if run is not None and run != self._run_id:
            return None
        try:
            message = Message.from_headers(headers)
        except ValueError as error:
            raise foreign_record_error(self._topic, partition, offset, error) from None
        if message.producer not in self._inlets:
            raise TopicError(
                f"{self._place(partition, offset)}: expected a producer of this flow, given number "
                f"{message.producer}; let no other flow write to the topic"
            )
        return message

    def _is_next(self, message: Message, partition: int, offset: int) -> bool:
        """Return whether the record is new. Raises TopicError for a missing record."""
        key = message.producer, partition
        following = self._following.get(key, 0)
        if message.sequence > following:
            raise TopicError(
                f"{self._place(partition, offset)}: expected record {following} of producer "
                f"{message.producer}, given {message.sequence}; the topic has lost the records between them: let it "
                "keep records longer, and do not compact it"
            )
        if message.sequence < following:
            return False
        self._following[key] = following + 1
        return True

    def _decoded(self, value: bytes, partition: int, offset: int) -> Batch:
        try:
            return self._plain_data.decode_batch(value)
        except PlainDataError as error:
            raise TopicError(f"{self._place(partition, offset)}: {error}") from error

    def _place(self, partition: int, offset: int) -> Origin:
        return Origin(self._topic.url, partition, offset)

    async def _make_room(self, channel: FeedbackChannel) -> None:
        if not self._is_full(channel):
            return
        self._full = channel
        self.on_limit()
        try:
            while self._is_full(channel):
                self._room.clear()
                await self._room.wait()
        finally:
            self._full = None
            self.on_limit()


@final
class TopicReturnPath(ReturnPath):
    """The way of feedback through the topic into one channel of a head.

    It notes the place in the topic of each item in the channel, so that a snapshot can have its range. The restored
    ranges of earlier runs come first, in order; then the feedback of this run.
    """

    def __init__(
        self,
        pump: ReturningPump,
        outgoing: FeedbackChannel,
        plain_data: PlainData,
        *,
        topic: str,
        run: str,
        producer: int,
    ) -> None:
        """``outgoing`` leads into the topic."""
        self.restored: list[RestoredRange] = []
        """The ranges of earlier runs."""
        self._pump = pump
        self._outgoing = outgoing
        self._plain_data = plain_data
        self._topic = topic
        self._run = run
        self._producer = producer
        self._restored_records = 0
        self._partition = 0
        self._began = self._following = RecordPoint(0, 0)
        self._waiting: deque[TrackMark] = deque()
        """The places of the items in the channel."""
        self._last: TrackMark | None = None
        """The place of the last item taken from the channel."""
        self._is_closed = False

    # -- by the pump -------------------------------------------------------------------------------------

    def begin(self, partition: int, offset: int) -> None:
        self._partition = partition
        self._began = self._following = RecordPoint(offset, 0)

    def passed(self, at: RecordPoint) -> None:
        """Note that a record of this run was read."""
        self._following = at.behind

    def put(self, at: RecordPoint, restored: RestoredRange | None, records: int = 0) -> None:
        """Note that an item with so many records is put into the channel."""
        if restored is not None:
            self._restored_records += records
        if not self._is_closed:
            self._waiting.append(TrackMark(self._own_part if restored is None else restored.part, at))

    # -- by the channel ----------------------------------------------------------------------------------

    @property
    def is_behind(self) -> bool:
        return self._pump.is_paused or self._outgoing.is_spilling

    def call_at_limit(self, call: Callable[[], None]) -> None:
        self._pump.on_limit = call
        self._outgoing.call_at_limit(call)

    def under_way(self, received: int) -> int:
        return self._outgoing.total_records + self._restored_records - received

    def taken(self) -> None:
        self._last = self._waiting.popleft()
        self._pump.look_for_room()

    def closed(self) -> None:
        self._is_closed = True
        self._waiting.clear()
        self._pump.look_for_room()
        self._outgoing.close()

    # -- for snapshots -----------------------------------------------------------------------------------

    def restore(self, ranges: Iterable[TopicRange]) -> None:
        self.restored += [RestoredRange(part, topic_range) for part, topic_range in enumerate(ranges, self._own_part)]

    def mark(self) -> TrackMark:
        if self._waiting:
            return self._waiting[0]
        for restored in self.restored:
            if restored.following.sequence < restored.range.stop.sequence:
                return TrackMark(restored.part, restored.following)
        return TrackMark(self._own_part, self._following)

    def since(self, mark: TrackMark) -> list[bytes]:
        last = self._last
        assert last is not None
        assert last.part == self._own_part
        ranges = [
            replace(restored.range, start=mark.at) if restored.part == mark.part else restored.range
            for restored in self.restored[mark.part :]
        ]
        start = mark.at if mark.part == self._own_part else self._began
        ranges.append(TopicRange(self._topic, self._run, self._producer, self._partition, start, last.at))
        frame = [topic_range.plain() for topic_range in ranges if not topic_range.is_empty]
        return [self._plain_data.encode(frame)] if frame else []

    @property
    def _own_part(self) -> int:
        return len(self.restored)


@final
class Inlet:
    """The end of the way of one producer's feedback: a channel of the head's inbox, and the way into it."""

    def __init__(self, channel: FeedbackChannel, return_path: TopicReturnPath) -> None:
        self.channel = channel
        self.return_path = return_path

    def put(self, batch: DataBatch, at: RecordPoint, restored: RestoredRange | None) -> None:
        """Put a batch into the channel; ``at`` is its place in the topic."""
        self.return_path.put(at, restored, len(batch.records))
        self.channel.put(batch)

    def put_control(self, control: Control, at: RecordPoint, restored: RestoredRange | None) -> None:
        """Put a control record into the channel."""
        if restored is not None and isinstance(control, CheckpointBarrier):
            return  # It belongs to an earlier or abandoned checkpoint.
        self.return_path.put(at, restored)
        self.channel.put_control(control)


@final
class RestoredRange:
    """A range of an earlier run that is being read into the channel."""

    def __init__(self, part: int, topic_range: TopicRange) -> None:
        self.part = part
        self.range = topic_range
        self.following = topic_range.start
        """The next point: all records of its producer before it were read."""

    def passed(self, at: RecordPoint) -> None:
        """Note that a record of the range was read."""
        self.following = at.behind


class RestoredRecord(NamedTuple):
    """A record of an earlier run that belongs to a range of the restored checkpoint."""

    restored: RestoredRange
    message: Message
    at: RecordPoint
    partition: int
    value: bytes


async def restored_records(
    topic: Topic, ranges: Sequence[RestoredRange], *, max_records: int, clock: Clock
) -> AsyncGenerator[RestoredRecord, None]:
    """Give all records of the ranges in one pass, each range in order. Raises CheckpointError if any is missing.

    Other records are skipped: those of other runs, those that are not part of the checkpoint, and duplicates that a
    writer has stored.
    """
    wanted = {(each.range.run.encode(), each.range.producer, each.range.partition): each for each in ranges}
    of_partition: dict[int, list[TopicRange]] = {}
    for each in ranges:
        of_partition.setdefault(each.range.partition, []).append(each.range)
    request = ReadRequest(
        positions={number: min(each.start.offset for each in there) for number, there in of_partition.items()},
        stop={number: max(each.stop.offset for each in there) for number, there in of_partition.items()},
        max_records=max_records,
        clock=clock,
    )
    reader = await topic.open_reader(request)
    async with closed_after(reader.close):
        while (batch := await reader.read()) is not None:
            for record in _of_ranges(batch, wanted, topic):
                yield record
            await asyncio.sleep(0)  # A reader that always has records must let other tasks run.
    for each in ranges:
        if each.following.sequence < each.range.stop.sequence:
            raise missing_records_error(each.range, topic, each.following.sequence)


def _of_ranges(
    batch: TopicBatch, wanted: Mapping[tuple[bytes, int, int], RestoredRange], topic: Topic
) -> Iterator[RestoredRecord]:
    runs = {run for run, _, _ in wanted}
    for offset, headers, value in zip(batch.offsets, batch.headers, batch.values, strict=True):
        run = next((content for name, content in headers if name == RUN_HEADER), b"")
        if run not in runs:
            continue
        try:
            message = Message.from_headers(headers)
        except ValueError as error:
            raise foreign_record_error(topic, batch.partition, offset, error) from None
        restored = wanted.get((run, message.producer, batch.partition))
        if restored is None or not restored.range.start.offset <= offset < restored.range.stop.offset:
            continue
        at = RecordPoint(offset, message.sequence)
        following = restored.following.sequence
        if at.sequence > following:
            raise missing_records_error(restored.range, topic, following)
        if at.sequence == following:
            restored.passed(at)
            yield RestoredRecord(restored, message, at, batch.partition, value or b"")


# The most records of one read: all of them are in memory, and each may be a batch of up to a megabyte.
_RECORDS_PER_READ: Final = 64


async def fetch_ranges(
    queue: SpillQueue, topic: Topic, ranges: Sequence[TopicRange], *, plain_data: PlainData, clock: Clock
) -> None:
    """Put the items of these ranges into a queue, in order. Raises CheckpointError if any is missing.

    This is for a loop whose heads have changed: their feedback is then redistributed.
    """
    try:
        description = await topic.describe()
    except TopicNotFound:
        description = None
    for part, topic_range in enumerate(ranges):
        check_range_in_topic(topic_range, topic, description)
        restored = RestoredRange(part, topic_range)
        records = restored_records(topic, [restored], max_records=_RECORDS_PER_READ, clock=clock)
        async with aclosing(records):
            async for record in records:
                kind, number = record.message.kind, record.message.number
                if kind == DATA:
                    queue.put(DataBatch(plain_data.decode_batch(record.value), number))
                elif kind != START:
                    control = control_from_kind(kind, number)
                    if not isinstance(control, CheckpointBarrier):
                        queue.put(control)
