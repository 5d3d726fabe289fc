"""Finding records: the statements that only read. All of it runs in a `Database`'s thread."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any, Final

from streamiter.errors import OffsetOutOfRange, TopicError
from streamiter.topics.topic import (
    PartitionEnds,
    ReadRequest,
    TopicBatch,
    TopicReader,
    check_identities,
    check_named_partitions,
    first_position,
    out_of_range_message,
    partitions_of,
    stop_offsets,
)
from streamiter_sqlite.blocks import RecordBlock, unpacked
from streamiter_sqlite.database import Database, SqliteOptions
from streamiter_sqlite.log import COMPACTION_SETTING, TopicRow, find_topic, partition_ends
from streamiter_sqlite.schema import DamagedFile, checked_numbers, read_transaction

__all__ = [
    "SqliteReader",
]


@dataclass(frozen=True, slots=True)
class Wanted:
    """What to look for: partitions in the order of their turns, and where each is to be read from and to.

    At least one block and about ``max_bytes`` in all are fetched, and of each partition blocks until it has
    ``max_records``. ``seen_version`` is the state of the file in which the last look found nothing.
    """

    positions: Mapping[int, int]
    stops: Mapping[int, int] | None
    max_records: int
    max_bytes: int
    seen_version: int | None


@dataclass(frozen=True, slots=True)
class Fetched:
    """Records by partition, the ends of all partitions, and the state of the file in which they were found.

    ``passed`` says where to read on in partitions that had no records left up to their end or stop.
    """

    batches: Mapping[int, TopicBatch]
    passed: Mapping[int, int]
    ends: Mapping[int, PartitionEnds]
    version: int


def fetch(connection: sqlite3.Connection, topic: TopicRow, wanted: Wanted) -> Fetched | None:
    """Records from the wanted positions, or None where the file has not changed since the last look.

    Looking at an unchanged file reads a counter in shared memory that the commits of others change.
    """
    [version] = connection.execute("PRAGMA data_version").fetchone()
    if version == wanted.seen_version:
        return None
    with read_transaction(connection):
        ends = partition_ends(connection, topic)
        batches, passed = _fetch_batches(connection, topic, wanted, ends)
        return Fetched(batches, passed, ends, version)


def _fetch_batches(
    connection: sqlite3.Connection, topic: TopicRow, wanted: Wanted, ends: Mapping[int, PartitionEnds]
) -> tuple[dict[int, TopicBatch], dict[int, int]]:
    batches: dict[int, TopicBatch] = {}
    passed: dict[int, int] = {}
    room_bytes = wanted.max_bytes
    for partition, position in wanted.positions.items():
        stop = ends[partition].end if wanted.stops is None else wanted.stops.get(partition, 0)
        span = Span(topic, partition, position, min(stop, ends[partition].end))
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
class Span:
    """Offsets of one partition: ``start`` to ``stop``, half-open."""

    topic: TopicRow
    partition: int
    start: int
    stop: int

    @property
    def is_empty(self) -> bool:
        """Whether there is no offset in it."""
        return self.start >= self.stop


@dataclass(frozen=True, slots=True)
class BlockSlice:
    """The records of one block that lie in a span."""

    offsets: range
    block: RecordBlock


def _fetch_parts(
    connection: sqlite3.Connection, span: Span, max_records: int, max_bytes: int
) -> tuple[list[BlockSlice], int]:
    parts: list[BlockSlice] = []
    records = size_bytes = 0
    following = span.start
    for first_offset, end_offset, payload, crc32 in _payloads(connection, span):
        block = _block(span, following, (first_offset, end_offset), payload, crc32)
        following = end_offset
        part = _part(first_offset, block, span)
        size_bytes += len(payload or b"")
        if not part.offsets:  # it lies before the span, behind which compaction has left a gap
            continue
        parts.append(part)
        records += len(part.offsets)
        if records >= max_records or size_bytes >= max_bytes:
            break
    else:
        _check_gap(span, following, span.stop)
    return parts, size_bytes


def _block(
    span: Span, following: int, offsets: tuple[int, int], payload: bytes | None, crc32: int | None
) -> RecordBlock:
    """A stored block; raises ``DamagedFile`` if it is not all there, or records before it are missing."""
    first_offset, end_offset = checked_numbers(offsets, "entries")
    _check_gap(span, following, first_offset)
    block = None if payload is None else unpacked(payload, crc32)
    if block is None or len(block.values) != end_offset - first_offset:
        raise DamagedFile(f"a block of topic {span.topic.name!r}, from offset {first_offset} on, is missing")
    return block


def _check_gap(span: Span, following: int, offset: int) -> None:
    """Only compaction leaves gaps behind the earliest record."""
    if offset > following and not span.topic.settings.get(COMPACTION_SETTING):
        raise DamagedFile(
            f"records of topic {span.topic.name!r}, partition {span.partition}, from offset {following} to "
            f"{offset - 1} are missing"
        )


def _payloads(
    connection: sqlite3.Connection, span: Span
) -> Iterator[tuple[int, int, bytes | None, int | None]]:
    """The offsets and blocks that have records of the span, in order, each with its checksum."""
    return connection.execute(
        "SELECT first_offset, end_offset, payload, crc32 FROM entries LEFT JOIN blocks ON blocks.id = block_id"
        " WHERE topic_id = :topic AND partition = :partition AND first_offset < :stop AND first_offset >= coalesce(("
        "  SELECT max(first_offset) FROM entries"
        "  WHERE topic_id = :topic AND partition = :partition AND first_offset <= :start), :start)"
        " ORDER BY first_offset",
        {"topic": span.topic.id, "partition": span.partition, "start": span.start, "stop": span.stop},
    )


def _part(first_offset: int, block: RecordBlock, span: Span) -> BlockSlice:
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
    return TopicBatch(
        partition=partition,
        values=list(chain.from_iterable(block.values for block in blocks)),
        offsets=_joined_offsets([part.offsets for part in parts]),
        timestamps_ms=list(chain.from_iterable(block.times_ms() for block in blocks)),
        keys=_joined_column([block.keys for block in blocks], blocks, None),
        headers=_joined_column([block.headers for block in blocks], blocks, ()),
    )


def _joined_offsets(ranges: Sequence[range]) -> Sequence[int]:
    whole = range(ranges[0].start, ranges[-1].stop)
    if len(whole) == sum(map(len, ranges)):
        return whole
    return list(chain.from_iterable(ranges))  # compaction has left gaps


def _joined_column(
    columns: Sequence[Sequence[Any] | None], blocks: Sequence[RecordBlock], missing: object
) -> list[Any] | None:
    if all(column is None for column in columns):
        return None
    joined: list[Any] = []
    for column, block in zip(columns, blocks, strict=True):
        joined.extend([missing] * len(block.values) if column is None else column)
    return joined


def offset_at(
    connection: sqlite3.Connection, topic: TopicRow, partition: int, ends: PartitionEnds, timestamp_ms: int
) -> int:
    """The offset of the first record at or after a time; the end when there is none."""
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


# Packed bytes that one look brings into memory, for all partitions together: four full blocks.
_FETCH_BYTES: Final = 4 << 20

# How much longer the pause gets with each empty look: from 20 ms to 200 ms within a second. Waking up an idle
# process for a look costs about 0.5 ms of CPU here: 2.5 % at 50 looks a second, 0.25 % at 5.
_PAUSE_GROWTH: Final = 1.2


@dataclass(frozen=True, slots=True)
class ReaderStart:
    """What a reader begins with."""

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
class Buffered:
    """Fetched records of one partition, of which the first ``taken`` were returned."""

    batch: TopicBatch
    taken: int = 0


class SqliteReader(TopicReader):
    """Reads its share of a topic; looks for new records at intervals, whoever writes them.

    Reading a topic of an SQLite file.
    """

    def __init__(
        self, database: Database, beginning: ReaderStart, request: ReadRequest, options: SqliteOptions
    ) -> None:
        self._database = database
        self._topic = beginning.topic
        # The order of the partitions here is the order of their turns: who was served goes to the end.
        self._positions = beginning.positions
        self._stops = beginning.stops
        self._ends: Mapping[int, PartitionEnds] = beginning.ends
        self._request = request
        self._options = options
        self._buffers: dict[int, Buffered] = {}
        self._seen_version: int | None = None
        self._pause_s = options.poll_interval_s
        self._is_closed = False

    @classmethod
    async def open(
        cls, database: Database, name: str, request: ReadRequest, options: SqliteOptions
    ) -> SqliteReader:
        """A reader at its start position; it owns ``database`` from here on."""
        try:
            return cls(database, await database.run(_begin, name, request), request, options)
        except BaseException:
            await database.close()
            raise

    async def read(self) -> TopicBatch | None:
        while True:
            if self._is_closed:
                raise TopicError(f"reader of {self._topic.name!r} is closed")
            batch = self._take()
            if batch is not None or self._is_at_end():
                return batch
            if not await self._look():
                await self._request.clock.sleep(self._pause_s)
                self._pause_s = min(self._options.poll_interval_max_s, self._pause_s * _PAUSE_GROWTH)

    def positions(self) -> Mapping[int, int]:
        return {number: self._positions[number] for number in sorted(self._positions)}

    def identities(self) -> Mapping[int, str]:
        return self._topic.identities(self._positions)

    def lag(self) -> Mapping[int, int]:
        return {
            number: max(0, self._limit(number) - self._positions[number])
            for number in sorted(self._positions)
        }

    async def close(self) -> None:
        self._is_closed = True
        await self._database.close()

    def _take(self) -> TopicBatch | None:
        """The next records that are in memory, of the partition whose turn it is."""
        for number in self._positions:
            if number in self._buffers:
                return self._take_from(number, self._buffers[number])
        return None

    def _take_from(self, number: int, buffered: Buffered) -> TopicBatch:
        start, stop = buffered.taken, buffered.taken + self._request.max_records
        batch = buffered.batch if stop - start >= len(buffered.batch) else buffered.batch[start:stop]
        buffered.taken = stop
        if stop >= len(buffered.batch):
            del self._buffers[number]
        del self._positions[number]
        self._positions[number] = batch.next_offset
        return batch

    def _is_at_end(self) -> bool:
        return self._stops is not None and all(
            position >= self._stops.get(number, 0) for number, position in self._positions.items()
        )

    def _limit(self, number: int) -> int:
        end = self._ends[number].end
        return end if self._stops is None else min(end, self._stops.get(number, 0))

    async def _look(self) -> bool:
        """Fetch into the buffers; whether it is worth while to go on without a pause."""
        wanted = Wanted(
            self._positions, self._stops, self._request.max_records, _FETCH_BYTES, self._seen_version
        )
        fetched = await self._database.run(fetch, self._topic, wanted)
        if fetched is None:
            return False
        self._ends = fetched.ends
        self._buffers = {number: Buffered(batch) for number, batch in fetched.batches.items()}
        self._positions.update(fetched.passed)
        has_news = self._add_partitions() or bool(fetched.batches)
        # Where there were records there may be more than fitted into one look: look again in any case.
        self._seen_version = None if has_news else fetched.version
        if has_news:
            self._pause_s = self._options.poll_interval_s
        return has_news

    def _add_partitions(self) -> bool:
        share = partitions_of(self._request, len(self._ends))
        added = [number for number in share if number not in self._positions]
        self._positions.update({number: self._ends[number].earliest for number in added})
        return bool(added)
