"""Feedback through a topic, the returning side: from the topic to one head.

Each head has a :class:`ReturningPump`, an asyncio task, which reads the partitions of the head and puts the feedback of
this run into the channels of the head. The :class:`TopicReturnPath` of a channel is the end of the way of one
producer. It notes where in the topic each waiting item came from, so that a checkpoint can have the range of the topic
instead of the records. :func:`restored_records` reads the ranges of a checkpoint back.
"""

from __future__ import annotations

import asyncio
import sys
from collections import deque
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from itertools import count
from typing import Final, NamedTuple, final

from streamiter.engine.graph.feedback import (
    FeedbackChannel,
    RecordPoint,
    ReturnPath,
    TopicRange,
    check_range_in_topic,
    missing_records_error,
)
from streamiter.engine.storage.disk_queue import SpillQueue
from streamiter.engine.tasks.topic_outgoing import DATA, RUN_HEADER, START, Message, control_from_kind, message_of
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
        paths: Mapping[int, TopicReturnPath],
        memory_bytes: int,
        plain_data: PlainData,
        clock: Clock,
    ) -> None:
        """``paths``, the ways into the channels of the head, are by the number of the producer."""
        self._run_id = run_id.encode()
        self._topic = topic
        self._paths = paths
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
        """Bring the feedback of the restored checkpoint, then the feedback of this run, until cancelled."""
        await self._bring_restored()
        while (batch := await reader.read()) is not None:
            await self._take_in(batch)
            await asyncio.sleep(0)  # A reader that always has records must let other tasks run.

    def look_for_room(self) -> None:
        """An item was taken from one of the channels: continue if there is room."""
        if self._full is not None and not self._is_full(self._full):
            self._room.set()

    def _is_full(self, channel: FeedbackChannel) -> bool:
        queue = channel.queue
        return len(queue) > 0 and (queue.bytes_in_memory >= self._memory_bytes or queue.bytes_on_disk > 0)

    async def _bring_restored(self) -> None:
        """Bring the first range of each channel, then the second, and so on: they are of consecutive runs."""
        paths = self._paths.values()
        for number in count():
            of_channels = {path.restored[number]: path for path in paths if number < len(path.restored)}
            if not of_channels:
                return
            records = restored_records(self._topic, list(of_channels), clock=self._clock)
            async with aclosing(records):
                async for track, message, at, partition, value in records:
                    await self._bring(of_channels[track], track, message, at, partition, value)

    async def _take_in(self, batch: TopicBatch) -> None:
        columns = zip(batch.offsets, batch.headers, batch.values, strict=True)
        for offset, headers, value in columns:
            message = self._message(batch.partition, offset, headers)
            if message is None or not self._is_next(message, batch.partition, offset):
                continue
            if message.home == batch.partition:
                path, at = self._paths[message.producer], RecordPoint(offset, message.sequence)
                path.own.following = at.behind
                await self._bring(path, path.own, message, at, batch.partition, value or b"")

    async def _bring(
        self, path: TopicReturnPath, track: Track, message: Message, at: RecordPoint, partition: int, value: bytes
    ) -> None:
        if message.kind == DATA:
            path.put(DataBatch(self._decoded(value, partition, at.offset), message.number), at, track)
            await self._make_room(path.channel)
        elif message.kind != START:
            path.put(control_from_kind(message.kind, message.number), at, track)

    def _message(self, partition: int, offset: int, headers: Headers) -> Message | None:
        """Return the message of a record; None if it is of another run."""
        run = next((value for name, value in headers if name == RUN_HEADER), None)
        if run is not None and run != self._run_id:
            return None
        message = message_of(headers, self._topic, partition, offset)
        if message.producer not in self._paths:
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


class TrackPlace(NamedTuple):
    """The place of an item in the topic: the number of its part, and its point there.

    Parts are the restored ranges, in order; the last part is the feedback of this run.
    """

    part: int
    at: RecordPoint


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
        *,
        name: str,
        queue: SpillQueue,
        topic: str,
        run: str,
        producer: int,
    ) -> None:
        """``outgoing`` leads into the topic. ``name`` and ``queue`` are for the channel."""
        self.channel = FeedbackChannel(name, queue, self)
        """The channel of the head's inbox, which this way leads into."""
        self.restored: list[Track] = []
        """The ranges of earlier runs."""
        own = TopicRange(topic, run, producer, 0, RecordPoint(0, 0), _OPEN)
        self.own = Track(own, RecordPoint(0, 0))
        """The range of this run, up to the record that was read last."""
        self._pump = pump
        self._outgoing = outgoing
        self._restored_records = 0
        self._waiting: deque[TrackPlace] = deque()
        """The places of the items in the channel."""
        self._last: TrackPlace | None = None
        """The place of the last item taken from the channel."""
        self._logged_from = TrackPlace(0, RecordPoint(0, 0))
        """The place of the item with which the last log has begun."""
        self._is_closed = False

    # -- by the pump -------------------------------------------------------------------------------------

    def begin(self, partition: int, offset: int) -> None:
        """Begin to read a partition from an offset on.

        From now on the channel never spills: above its limit, the feedback waits in the topic.
        """
        self.channel.queue.memory_limit_bytes = sys.maxsize
        self.own.following = RecordPoint(offset, 0)
        self.own.range = replace(self.own.range, partition=partition, start=self.own.following)

    def put(self, item: DataBatch | Control, at: RecordPoint, track: Track) -> None:
        """Put an item into the channel; ``at`` is its place in the topic."""
        if track is not self.own:
            if isinstance(item, CheckpointBarrier):
                return  # It belongs to an earlier or abandoned checkpoint.
            self._restored_records += len(item.records) if isinstance(item, DataBatch) else 0
        if not self._is_closed:
            part = len(self.restored) if track is self.own else self.restored.index(track)
            self._waiting.append(TrackPlace(part, at))
        if isinstance(item, DataBatch):
            self.channel.put(item)
        else:
            self.channel.put_control(item)

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
        self.restored += [Track(topic_range, topic_range.start) for topic_range in ranges]

    def start_log(self) -> None:
        if self._waiting:
            self._logged_from = self._waiting[0]
            return
        part, track = next(each for each in enumerate(self._tracks) if not each[1].is_read)
        self._logged_from = TrackPlace(part, track.following)

    def end_log(self) -> Sequence[TopicRange]:
        first, last = self._logged_from, self._last
        assert last is not None
        assert last.part == len(self.restored)
        ranges = [track.range for track in self._tracks[first.part :]]
        ranges[0] = replace(ranges[0], start=first.at)
        ranges[-1] = replace(ranges[-1], stop=last.at)
        return [topic_range for topic_range in ranges if not topic_range.is_empty]

    @property
    def _tracks(self) -> list[Track]:
        return [*self.restored, self.own]


# The end of a range that grows.
_OPEN: Final = RecordPoint(sys.maxsize, sys.maxsize)


@final
@dataclass(eq=False, slots=True)
class Track:
    """A range of the topic that is being read into a channel."""

    range: TopicRange
    following: RecordPoint
    """The next point: all records of its producer before it were read."""

    @property
    def is_read(self) -> bool:
        return self.following.sequence >= self.range.stop.sequence


class RestoredRecord(NamedTuple):
    """A record of an earlier run that belongs to a range of the restored checkpoint."""

    track: Track
    message: Message
    at: RecordPoint
    partition: int
    value: bytes


async def restored_records(
    topic: Topic, tracks: Sequence[Track], *, clock: Clock
) -> AsyncGenerator[RestoredRecord, None]:
    """Give all records of the tracks in one pass, each track in order. Raises CheckpointError if any is missing.

    Other records are skipped: records of other runs, records that are not part of the checkpoint, and duplicates that a
    writer has stored.
    """
    wanted = {(each.range.run.encode(), each.range.producer, each.range.partition): each for each in tracks}
    of_partition: dict[int, list[TopicRange]] = {}
    for each in tracks:
        of_partition.setdefault(each.range.partition, []).append(each.range)
    request = ReadRequest(
        positions={number: min(each.start.offset for each in there) for number, there in of_partition.items()},
        stop={number: max(each.stop.offset for each in there) for number, there in of_partition.items()},
        max_records=RECORDS_PER_READ,
        clock=clock,
    )
    reader = await topic.open_reader(request)
    async with closed_after(reader.close):
        while (batch := await reader.read()) is not None:
            for record in _of_ranges(batch, wanted, topic):
                yield record
            await asyncio.sleep(0)  # A reader that always has records must let other tasks run.
    for each in tracks:
        if not each.is_read:
            raise missing_records_error(each.range, topic, each.following.sequence)


def _of_ranges(
    batch: TopicBatch, wanted: Mapping[tuple[bytes, int, int], Track], topic: Topic
) -> Iterator[RestoredRecord]:
    runs = {run for run, _, _ in wanted}
    for offset, headers, value in zip(batch.offsets, batch.headers, batch.values, strict=True):
        run = next((content for name, content in headers if name == RUN_HEADER), b"")
        if run not in runs:
            continue
        message = message_of(headers, topic, batch.partition, offset)
        track = wanted.get((run, message.producer, batch.partition))
        if track is None or not track.range.start.offset <= offset < track.range.stop.offset:
            continue
        at = RecordPoint(offset, message.sequence)
        following = track.following.sequence
        if at.sequence > following:
            raise missing_records_error(track.range, topic, following)
        if at.sequence == following:
            track.following = at.behind
            yield RestoredRecord(track, message, at, batch.partition, value or b"")


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
    for topic_range in ranges:
        check_range_in_topic(topic_range, topic, description)
        track = Track(topic_range, topic_range.start)
        records = restored_records(topic, [track], clock=clock)
        async with aclosing(records):
            async for record in records:
                kind, number = record.message.kind, record.message.number
                if kind == DATA:
                    queue.put(DataBatch(plain_data.decode_batch(record.value), number))
                elif kind != START:
                    control = control_from_kind(kind, number)
                    if not isinstance(control, CheckpointBarrier):
                        queue.put(control)
