"""The returning side: from the topic to one head."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Iterable, Iterator, Mapping, Sequence
from contextlib import aclosing
from itertools import count
from typing import Final, NamedTuple, Protocol, final

from streamiter.checkpoints.disk_queue import SpillQueue
from streamiter.checkpoints.plain_data import PlainData
from streamiter.clock import Clock
from streamiter.errors import PlainDataError, TopicError, TopicNotFound
from streamiter.operators.output import Origin
from streamiter.records import Batch, CheckpointBarrier, Control, DataBatch
from streamiter.runtime.feedback import FeedbackChannel, Point, TopicRange, check_is_there, missing_records
from streamiter.runtime.topic_outlets import DATA, RUN_HEADER, START, Message, control_of, not_fed_back
from streamiter.topics.topic import Headers, ReadRequest, Topic, TopicBatch, TopicReader

__all__ = [
    "RECORDS_PER_READ",
    "Inlet",
    "ReturningPump",
    "ReturningSupply",
    "Track",
    "gather",
]


# Records of one read: each may be a batch of up to a megabyte, and all of them wait beside what the head holds.
RECORDS_PER_READ: Final = 256


@final
class ReturningPump:
    """Reads the partitions of one head, and puts what belongs to this run into the head's channels.

    While a channel holds more than its limit, nothing is read: the topic keeps the rest.
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
        """``inlets`` by the number of the producer."""
        self._run_id = run_id.encode()
        self._topic = topic
        self._inlets = inlets
        self._memory_bytes = memory_bytes
        self._plain_data = plain_data
        self._clock = clock
        self._following: dict[tuple[int, int], int] = {}
        """The next sequence number, by producer and partition."""
        self._starts: dict[tuple[int, int], str] = {}
        self._full: FeedbackChannel | None = None
        self._room = asyncio.Event()

    @property
    def is_paused(self) -> bool:
        """Whether the head has to take something before more is read."""
        return self._full is not None

    async def run(self, reader: TopicReader) -> None:
        """Bring first what a checkpoint goes on with from earlier runs, then what comes in this one, for ever."""
        await self._bring_restored()
        while (batch := await reader.read()) is not None:
            await self._take_in(batch)
            await asyncio.sleep(0)  # A reader that always has something must leave others their turn.

    def look_for_room(self) -> None:
        """Something was taken from one of the channels."""
        if self._full is not None and not self._is_full(self._full):
            self._room.set()

    def _is_full(self, channel: FeedbackChannel) -> bool:
        return len(channel.queue) > 0 and channel.queue.bytes_in_memory >= self._memory_bytes

    async def _bring_restored(self) -> None:
        """One range of each channel after the other: where there are several, they are of several runs."""
        inlets = self._inlets.values()
        for number in count():
            of_channels = {
                inlet.track.restored[number]: inlet for inlet in inlets if number < len(inlet.track.restored)
            }
            if not of_channels:
                return
            records = restored_records(
                self._topic, list(of_channels), max_records=RECORDS_PER_READ, clock=self._clock
            )
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
                inlet, at = self._inlets[message.producer], Point(offset, message.sequence)
                inlet.track.passed(at)
                await self._bring(inlet, message, at, batch.partition, value or b"")

    async def _bring(
        self,
        inlet: Inlet,
        message: Message,
        at: Point,
        partition: int,
        value: bytes,
        restored: RestoredRange | None = None,
    ) -> None:
        if message.kind == DATA:
            records = self._decoded(value, partition, at.offset)
            inlet.put(DataBatch(records, message.number), at, restored)
            await self._make_room(inlet.channel)
        elif message.kind != START:
            inlet.put_control(control_of(message.kind, message.number), at, restored)

    def _message(self, partition: int, offset: int, headers: Headers) -> Message | None:
        """What a record says; None if it is of another run."""
        run = next((value for name, value in headers if name == RUN_HEADER), None)
        if run is not None and run != self._run_id:
            return None
        try:
            message = Message.of(headers)
        except ValueError as error:
            raise not_fed_back(self._topic, partition, offset, error) from None
        if message.producer not in self._inlets:
            raise TopicError(
                f"{self._place(partition, offset)}: expected a producer of this flow, given number "
                f"{message.producer}; start the same flow with the same parallelism in all workers"
            )
        return message

    def _is_next(self, message: Message, partition: int, offset: int) -> bool:
        """Whether it has not come before; a record that is missing, or a second start, is an error."""
        key = message.producer, partition
        following = self._following.get(key, 0)
        if message.kind == START and self._starts.setdefault(key, message.start) != message.start:
            raise TopicError(
                f"{self._place(partition, offset)}: expected each worker to be started once in run "
                f"{message.run!r}, given a second start (step {message.step!r}, producer {message.producer}); "
                "what its loop held is lost: stop all workers, and start them with a new run_id"
            )
        if message.sequence > following:
            raise TopicError(
                f"{self._place(partition, offset)}: expected record {following} of producer "
                f"{message.producer}, given {message.sequence}; the topic has lost what lies between: let it keep "
                "records longer, and do not compact it"
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
        try:
            while self._is_full(channel):
                self._room.clear()
                await self._room.wait()
        finally:
            self._full = None


class Pump(Protocol):
    """What fills the channels of a head."""

    @property
    def is_paused(self) -> bool:
        """Whether the head has to take something before more is read."""

    def look_for_room(self) -> None:
        """Something was taken from one of the channels."""


@final
class ReturningSupply:
    """What a channel of a head is told of the topic behind it, and tells it."""

    def __init__(
        self, pump: Pump, outgoing: FeedbackChannel, track: Track, plain_data: PlainData, *, is_shared: bool
    ) -> None:
        """``outgoing`` is where this process feeds into the topic what comes back in the channel; where the
        channel ``is_shared``, what comes from other processes does, too.
        """
        self.track = track
        self._pump = pump
        self._outgoing = outgoing
        self._plain_data = plain_data
        self._is_shared = is_shared
        self.restored_records = 0
        """Those that earlier runs had fed back."""

    @property
    def is_behind(self) -> bool:
        return self._pump.is_paused or self._outgoing.is_spilling

    def under_way(self, came: int) -> int:
        return 0 if self._is_shared else self._outgoing.total_records + self.restored_records - came

    def taken(self) -> None:
        self.track.taken()
        self._pump.look_for_room()

    def closed(self) -> None:
        self.track.close()
        self._pump.look_for_room()
        self._outgoing.close()

    # -- for snapshots: of a loop that is shared there are none ------------------------------------------

    def mark(self) -> Mark:
        return self.track.mark()

    def since(self, mark: Mark) -> list[bytes]:
        ranges = self.track.since(mark)
        return [self._plain_data.encode([lying.plain() for lying in ranges])] if ranges else []

    def restore(self, ranges: Sequence[TopicRange]) -> None:
        self.track.restore(ranges)


@final
class Inlet:
    """A channel of the head's gate, and the track of what is put into it.

    Where what one producer feeds back to one head comes out of the topic.
    """

    def __init__(
        self, channel: FeedbackChannel, supply: ReturningSupply, *, takes_barriers: bool, takes_epochs: bool
    ) -> None:
        """``takes_barriers``: not those of another worker. ``takes_epochs``: whether watermarks count."""
        self.channel = channel
        self.track = supply.track
        self._supply = supply
        self._takes_barriers = takes_barriers
        self._takes_epochs = takes_epochs

    def put(self, batch: DataBatch, at: Point, restored: RestoredRange | None = None) -> None:
        """Bring a batch that lies there in the topic to the head."""
        if restored is not None:
            self._supply.restored_records += len(batch.records)
        self.track.put(at, restored)
        self.channel.put(batch)

    def put_control(self, control: Control, at: Point, restored: RestoredRange | None = None) -> None:
        """Bring a control record to the head, if it concerns it."""
        is_barrier = isinstance(control, CheckpointBarrier)
        if is_barrier and restored is not None:
            return  # Of a checkpoint that was taken before, or given up.
        if self._takes_barriers if is_barrier else self._takes_epochs:
            self.track.put(at, restored)
            self.channel.put_control(control)


class RestoredRecord(NamedTuple):
    """A record that belongs to one of the ranges.

    What earlier runs have left in the topic, as far as a checkpoint says that it belongs to it.
    """

    restored: RestoredRange
    message: Message
    at: Point
    partition: int
    value: bytes


async def restored_records(
    topic: Topic, ranges: Sequence[RestoredRange], *, max_records: int, clock: Clock
) -> AsyncGenerator[RestoredRecord, None]:
    """All records of the ranges, each in its order, in one pass. Raises CheckpointError where some are missing.

    What lies between them is skipped: records of other runs, of this one that are not part of the
    checkpoint, and what a writer has stored twice.
    """
    wanted = {(each.range.run.encode(), each.range.producer, each.range.partition): each for each in ranges}
    partitions = {each.range.partition for each in ranges}
    request = ReadRequest(
        positions={number: _first(ranges, number) for number in partitions},
        stop={number: _end(ranges, number) for number in partitions},
        max_records=max_records,
        clock=clock,
    )
    reader = await topic.open_reader(request)
    try:
        while (batch := await reader.read()) is not None:
            for record in _of_ranges(batch, wanted, topic):
                yield record
            await asyncio.sleep(0)  # A reader that always has something must leave others their turn.
    finally:
        await reader.close()
    for each in ranges:
        if each.following.sequence < each.range.stop.sequence:
            raise missing_records(each.range, topic, each.following.sequence)


def _first(ranges: Sequence[RestoredRange], partition: int) -> int:
    return min(each.range.start.offset for each in ranges if each.range.partition == partition)


def _end(ranges: Sequence[RestoredRange], partition: int) -> int:
    return max(each.range.stop.offset for each in ranges if each.range.partition == partition)


def _of_ranges(
    batch: TopicBatch, wanted: Mapping[tuple[bytes, int, int], RestoredRange], topic: Topic
) -> Iterator[RestoredRecord]:
    runs = {run for run, _, _ in wanted}
    for offset, headers, value in zip(batch.offsets, batch.headers, batch.values, strict=True):
        run = next((content for name, content in headers if name == RUN_HEADER), b"")
        if run not in runs:
            continue
        try:
            message = Message.of(headers)
        except ValueError as error:
            raise not_fed_back(topic, batch.partition, offset, error) from None
        restored = wanted.get((run, message.producer, batch.partition))
        if restored is None or not restored.range.start.offset <= offset < restored.range.stop.offset:
            continue
        at = Point(offset, message.sequence)
        following = restored.following.sequence
        if at.sequence > following:
            raise missing_records(restored.range, topic, following)
        if at.sequence == following:
            restored.track.passed(at, restored)
            yield RestoredRecord(restored, message, at, batch.partition, value or b"")


# Of one read, all of them are in memory: each may be a batch of up to a megabyte.
_RECORDS_PER_READ: Final = 64


async def gather(
    queue: SpillQueue, topic: Topic, ranges: Sequence[TopicRange], *, plain_data: PlainData, clock: Clock
) -> None:
    """Put what lies in the ranges into a queue, in order. Raises CheckpointError where some is missing.

    What lies in ranges of a feedback topic, taken out of it: for heads that are others than before.
    """
    try:
        description = await topic.describe()
    except TopicNotFound:
        description = None
    track = Track(topic.name, "", 0)
    track.restore(ranges)
    for restored in track.restored:
        check_is_there(restored.range, topic, description)
        records = restored_records(topic, [restored], max_records=_RECORDS_PER_READ, clock=clock)
        async with aclosing(records):
            async for record in records:
                kind, number = record.message.kind, record.message.number
                if kind == DATA:
                    queue.put(DataBatch(plain_data.decode_batch(record.value), number))
                elif kind != START and not isinstance(control := control_of(kind, number), CheckpointBarrier):
                    queue.put(control)


class Mark(NamedTuple):
    """A place in all that comes to a channel: the number of the part, and where in it."""

    part: int
    at: Point


@final
class RestoredRange:
    """A range of an earlier run on its way into the channel."""

    def __init__(self, track: Track, part: int, lying: TopicRange) -> None:
        self.track = track
        self.part = part
        self.range = lying
        self.following = lying.start
        """Of its producer nothing before that comes any more."""


@final
class Track:
    """Of one channel: first come what earlier runs have left, range by range, then what this run feeds back.

    The track: from where in the topic each thing has come that waits in a channel of a head.

    So a snapshot can say which part of the topic belongs to it, however much lies there.
    """

    def __init__(self, topic: str, run: str, producer: int) -> None:
        self._topic = topic
        self._run = run
        self._producer = producer
        self._partition = 0
        self._began = self._following = Point(0, 0)
        self.restored: list[RestoredRange] = []
        self._waiting: deque[Mark] = deque()
        """Of what is in the channel."""
        self._last: Mark | None = None
        """Of what was taken last."""
        self._is_closed = False

    # -- by the pump -------------------------------------------------------------------------------------

    def restore(self, ranges: Iterable[TopicRange]) -> None:
        """These come before what this run feeds back."""
        for lying in ranges:
            self.restored.append(RestoredRange(self, len(self.restored), lying))

    def begin(self, partition: int, offset: int) -> None:
        """What is fed back in this run will lie in that partition, from that offset on."""
        self._partition = partition
        self._began = self._following = Point(offset, 0)

    def passed(self, at: Point, restored: RestoredRange | None = None) -> None:
        """A record of this producer was read."""
        if restored is None:
            self._following = at.behind
        else:
            restored.following = at.behind

    def put(self, at: Point, restored: RestoredRange | None = None) -> None:
        """What it brought was put into the channel."""
        if not self._is_closed:
            self._waiting.append(Mark(self._own_part if restored is None else restored.part, at))

    # -- by the channel ----------------------------------------------------------------------------------

    def taken(self) -> None:
        """The first thing was taken from the channel."""
        self._last = self._waiting.popleft()

    def close(self) -> None:
        """The channel takes nothing more."""
        self._is_closed = True
        self._waiting.clear()

    # -- for snapshots -----------------------------------------------------------------------------------

    def mark(self) -> Mark:
        """Where what is taken next comes from."""
        if self._waiting:
            return self._waiting[0]
        for restored in self.restored:
            if restored.following.sequence < restored.range.stop.sequence:
                return Mark(restored.part, restored.following)
        return Mark(self._own_part, self._following)

    def since(self, mark: Mark) -> list[TopicRange]:
        """All from ``mark`` to before what was taken last, which is of this run."""
        last = self._last
        assert last is not None
        assert last.part == self._own_part
        ranges: list[TopicRange] = []
        for restored in self.restored[mark.part :]:
            start = mark.at if restored.part == mark.part else restored.range.start
            before = restored.range
            ranges.append(
                TopicRange(before.topic, before.run, before.producer, before.partition, start, before.stop)
            )
        start = mark.at if mark.part == self._own_part else self._began
        ranges.append(TopicRange(self._topic, self._run, self._producer, self._partition, start, last.at))
        return [lying for lying in ranges if not lying.is_empty]

    @property
    def _own_part(self) -> int:
        return len(self.restored)
