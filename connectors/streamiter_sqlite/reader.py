"""Reading a topic of an SQLite file.

A `SqliteReader` looks for new records at intervals. A *look* (`fetch`) runs in the thread of the `Database` and returns
the records of several partitions; the reader buffers them and returns them partition by partition, in turns.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Final

from streamiter.errors import OffsetOutOfRange
from streamiter.topics.connecting import (
    PartitionEnds,
    ReadingPositions,
    check_identities,
    check_named_partitions,
    closed_error,
    first_position,
    joined_column,
    out_of_range_message,
    partitions_of,
    stop_offsets,
)
from streamiter.topics.topic import ReadRequest, TopicBatch, TopicReader
from streamiter_sqlite.file import DamagedFile, Database, SqliteOptions, checked_numbers, read_transaction
from streamiter_sqlite.log import (
    COMPACTION_SETTING,
    RecordBlock,
    TopicRow,
    find_topic,
    partition_ends,
    unpacked,
)

# The packed bytes that one look brings into memory, over all partitions: four full blocks.
_FETCH_BYTES: Final = 4 << 20

# The factor by which each empty look lengthens the pause: from 20 ms to 200 ms within a second. Measured: to wake an
# idle process for a look costs about 0.5 ms of CPU, so 2.5 % at 50 looks a second and 0.25 % at 5.
_PAUSE_GROWTH: Final = 1.2


@dataclass(frozen=True, slots=True)
class ReaderStart:
    """The topic and the offsets of a reader when it is opened."""

    topic: TopicRow
    positions: dict[int, int]
    stops: dict[int, int] | None
    ends: dict[int, PartitionEnds]


def _begin(connection: sqlite3.Connection, name: str, request: ReadRequest) -> ReaderStart:
    with read_transaction(connection):
        topic = find_topic(connection, name)
        all_ends = partition_ends(connection, topic)
        check_named_partitions(request, len(all_ends), topic=name)
        check_identities(request, topic.identities(all_ends), all_ends, topic=name)
        ends = {number: all_ends[number] for number in partitions_of(request, len(all_ends))}
        positions = {
            number: first_position(
                request, number, its_ends, partial(offset_at, connection, topic, number, its_ends), topic=name
            )
            for number, its_ends in ends.items()
        }
    stops = stop_offsets(request, {number: its_ends.stable for number, its_ends in ends.items()})
    return ReaderStart(topic, positions, stops, ends)


@dataclass(slots=True)
class BufferedBatch:
    """Fetched records of one partition; the first ``taken`` of them were returned."""

    batch: TopicBatch
    taken: int = 0


class SqliteReader(TopicReader):
    """Reads its share of a topic's partitions; looks for new records at intervals, whichever process writes them."""

    def __init__(
        self, database: Database, beginning: ReaderStart, request: ReadRequest, options: SqliteOptions
    ) -> None:
        self._database = database
        self._topic = beginning.topic
        self._positions = ReadingPositions(beginning.positions, beginning.stops)
        self._ends: Mapping[int, PartitionEnds] = beginning.ends
        self._request = request
        self._options = options
        self._buffers: dict[int, BufferedBatch] = {}
        self._seen_version: int | None = None
        self._pause_s = options.poll_interval_s
        self._is_closed = False

    @classmethod
    async def open(
        cls, database: Database, name: str, request: ReadRequest, options: SqliteOptions
    ) -> SqliteReader:
        """Return a reader at its start position, which owns ``database``."""
        return cls(database, await database.run(_begin, name, request), request, options)

    async def read(self) -> TopicBatch | None:
        while True:
            if self._is_closed:
                raise closed_error("reader", self._topic.name)
            batch = self._take()
            if batch is not None or self._positions.are_at_stop:
                return batch
            if not await self._look():
                await self._request.clock.sleep(self._pause_s)
                self._pause_s = min(self._options.poll_interval_max_s, self._pause_s * _PAUSE_GROWTH)

    def positions(self) -> Mapping[int, int]:
        return self._positions.by_partition()

    def identities(self) -> Mapping[int, str]:
        return self._topic.identities(self._positions.by_partition())

    def lag(self) -> Mapping[int, int]:
        return self._positions.lag({number: ends.end for number, ends in self._ends.items()})

    async def close(self) -> None:
        self._is_closed = True
        await self._database.close()

    def _take(self) -> TopicBatch | None:
        """Return the next buffered records of the partition whose turn it is; None where no record is buffered."""
        for number in self._positions:
            if number in self._buffers:
                return self._take_from(number, self._buffers[number])
        return None

    def _take_from(self, number: int, buffered: BufferedBatch) -> TopicBatch:
        start, stop = buffered.taken, buffered.taken + self._request.max_records
        batch = buffered.batch if stop - start >= len(buffered.batch) else buffered.batch[start:stop]
        buffered.taken = stop
        if stop >= len(buffered.batch):
            del self._buffers[number]
        self._positions.returned(number, batch.next_offset)
        return batch

    async def _look(self) -> bool:
        """Fetch into the buffers; return whether the next look should follow without a pause."""
        wanted = LookRequest(
            self._positions.in_turn(),
            self._positions.stops,
            self._request.max_records,
            _FETCH_BYTES,
            self._seen_version,
        )
        fetched = await self._database.run(fetch, self._topic, wanted)
        if fetched is None:
            return False
        self._ends = fetched.ends
        self._buffers = {number: BufferedBatch(batch) for number, batch in fetched.batches.items()}
        for number, following in fetched.passed.items():
            self._positions.passed(number, following)
        has_news = self._add_partitions() or bool(fetched.batches)
        # After records there may be more than one look can fetch, so the next look must not be skipped.
        self._seen_version = None if has_news else fetched.version
        if has_news:
            self._pause_s = self._options.poll_interval_s
        return has_news

    def _add_partitions(self) -> bool:
        share = partitions_of(self._request, len(self._ends))
        return self._positions.add_new(share, lambda number: self._ends[number].earliest)


@dataclass(frozen=True, slots=True)
class LookRequest:
    """What a look searches for. It fetches whole blocks, and at least one where there are records."""

    positions: Mapping[int, int]
    """The offset to read next of each partition, in the order of their turns."""
    stops: Mapping[int, int] | None
    """The offset before which reading ends, for each partition; None where it never ends."""
    max_records: int
    """Fetch no further block of a partition that has so many records."""
    max_bytes: int
    """Fetch no further block where so many bytes were fetched, over all partitions."""
    seen_version: int | None
    """The version of the file in which the last look found no records."""


@dataclass(frozen=True, slots=True)
class LookResult:
    """What a look has found."""

    batches: Mapping[int, TopicBatch]
    """The records, by partition."""
    passed: Mapping[int, int]
    """The offset to read next of each partition that had no records up to its end or stop."""
    ends: Mapping[int, PartitionEnds]
    """The ends of all partitions."""
    version: int
    """The version of the file, which the commits of other connections change."""


def fetch(connection: sqlite3.Connection, topic: TopicRow, wanted: LookRequest) -> LookResult | None:
    """Return the records from the wanted positions, or None where the file has not changed since the last look.

    For an unchanged file this only reads a counter in shared memory, which the commits of other connections change.
    """
    [version] = connection.execute("PRAGMA data_version").fetchone()
    if version == wanted.seen_version:
        return None
    with read_transaction(connection):
        ends = partition_ends(connection, topic)
        batches, passed = _fetch_batches(connection, topic, wanted, ends)
        return LookResult(batches, passed, ends, version)


def _fetch_batches(
    connection: sqlite3.Connection, topic: TopicRow, wanted: LookRequest, ends: Mapping[int, PartitionEnds]
) -> tuple[dict[int, TopicBatch], dict[int, int]]:
    batches: dict[int, TopicBatch] = {}
    passed: dict[int, int] = {}
    room_bytes = wanted.max_bytes
    for partition, position in wanted.positions.items():
        stop = ends[partition].end if wanted.stops is None else wanted.stops.get(partition, 0)
        span = OffsetSpan(topic, partition, position, min(stop, ends[partition].end))
        if span.is_empty or room_bytes <= 0:
            continue
        if position < ends[partition].earliest:
            message = out_of_range_message(topic.name, partition, position, ends[partition])
            raise OffsetOutOfRange(message)
        parts, size_bytes = _fetch_parts(connection, span, wanted.max_records, room_bytes)
        if parts:
            batches[partition] = _joined(partition, parts)
        else:
            passed[partition] = span.stop
        room_bytes -= size_bytes
    return batches, passed


@dataclass(frozen=True, slots=True)
class OffsetSpan:
    """The offsets ``start`` to ``stop`` (half-open) of one partition."""

    topic: TopicRow
    partition: int
    start: int
    stop: int

    @property
    def is_empty(self) -> bool:
        """Whether it has no offset."""
        return self.start >= self.stop


@dataclass(frozen=True, slots=True)
class BlockSlice:
    """The records of one block that are in a span."""

    offsets: range
    block: RecordBlock


def _fetch_parts(
    connection: sqlite3.Connection, span: OffsetSpan, max_records: int, max_bytes: int
) -> tuple[list[BlockSlice], int]:
    parts: list[BlockSlice] = []
    records = size_bytes = 0
    following = span.start
    for first_offset, end_offset, payload, crc32 in _payloads(connection, span):
        block = _block(span, following, (first_offset, end_offset), payload, crc32)
        following = end_offset
        part = _part(first_offset, block, span)
        size_bytes += len(payload or b"")
        if not part.offsets:  # the block is before the span, and compaction has left a gap after it
            continue
        parts.append(part)
        records += len(part.offsets)
        if records >= max_records or size_bytes >= max_bytes:
            break
    else:
        _check_gap(span, following, span.stop)
    return parts, size_bytes


def _block(
    span: OffsetSpan, following: int, offsets: tuple[int, int], payload: bytes | None, crc32: int | None
) -> RecordBlock:
    """Return a stored block; raise ``DamagedFile`` if the block is incomplete or records before it are missing."""
    first_offset, end_offset = checked_numbers(offsets, "entries")
    _check_gap(span, following, first_offset)
    block = None if payload is None else unpacked(payload, crc32)
    if block is None or len(block.values) != end_offset - first_offset:
        raise DamagedFile(f"a block of topic {span.topic.name!r}, from offset {first_offset} on, is missing")
    return block


def _check_gap(span: OffsetSpan, following: int, offset: int) -> None:
    """Raise ``DamagedFile`` for a gap, unless the topic is compacted: only compaction leaves gaps."""
    if offset > following and not span.topic.settings.get(COMPACTION_SETTING):
        raise DamagedFile(
            f"records of topic {span.topic.name!r}, partition {span.partition}, from offset {following} to "
            f"{offset - 1} are missing"
        )


def _payloads(
    connection: sqlite3.Connection, span: OffsetSpan
) -> Iterator[tuple[int, int, bytes | None, int | None]]:
    """Return the offsets, the bytes and the checksum of each block that has records of the span, in order."""
    return connection.execute(
        "SELECT first_offset, end_offset, payload, crc32 FROM entries LEFT JOIN blocks ON blocks.id = block_id"
        " WHERE topic_id = :topic AND partition = :partition AND first_offset < :stop AND first_offset >= coalesce(("
        "  SELECT max(first_offset) FROM entries"
        "  WHERE topic_id = :topic AND partition = :partition AND first_offset <= :start), :start)"
        " ORDER BY first_offset",
        {"topic": span.topic.id, "partition": span.partition, "start": span.start, "stop": span.stop},
    )


def _part(first_offset: int, block: RecordBlock, span: OffsetSpan) -> BlockSlice:
    start = max(0, span.start - first_offset)
    stop = min(len(block.values), span.stop - first_offset)
    offsets = range(first_offset + start, first_offset + stop)
    return BlockSlice(offsets, block.between(start, stop))


def _joined(partition: int, parts: Sequence[BlockSlice]) -> TopicBatch:
    blocks = [part.block for part in parts]
    if len(blocks) == 1:
        [block] = blocks
        return TopicBatch(
            partition=partition,
            values=block.values,
            offsets=parts[0].offsets,
            timestamps_ms=block.times_ms(),
            keys=block.keys,
            headers=block.headers,
        )
    lengths = [len(block.values) for block in blocks]
    return TopicBatch(
        partition=partition,
        values=list(chain.from_iterable(block.values for block in blocks)),
        offsets=_joined_offsets([part.offsets for part in parts]),
        timestamps_ms=list(chain.from_iterable(block.times_ms() for block in blocks)),
        keys=joined_column([block.keys for block in blocks], lengths, None),
        headers=joined_column([block.headers for block in blocks], lengths, ()),
    )


def _joined_offsets(ranges: Sequence[range]) -> Sequence[int]:
    whole = range(ranges[0].start, ranges[-1].stop)
    if len(whole) == sum(map(len, ranges)):
        return whole
    return list(chain.from_iterable(ranges))  # compaction has left gaps


def offset_at(
    connection: sqlite3.Connection, topic: TopicRow, partition: int, ends: PartitionEnds, timestamp_ms: int
) -> int:
    """Return the offset of the first record at or after a time; the end where there is none."""
    rows = connection.execute(
        "SELECT first_offset, payload, crc32 FROM entries JOIN blocks ON blocks.id = block_id"
        " WHERE topic_id = ? AND partition = ? AND latest_ms >= ? ORDER BY first_offset",
        (topic.id, partition, timestamp_ms),
    )
    for first_offset, payload, crc32 in rows:
        for offset, time_ms in enumerate(unpacked(payload, crc32).times_ms(), first_offset):
            if time_ms >= timestamp_ms and offset >= ends.earliest:
                return offset
    return ends.end
