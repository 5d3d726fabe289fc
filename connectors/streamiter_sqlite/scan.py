"""Finding records: the statements that only read. All of it runs in a `Database`'s thread."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

from streamiter.errors import OffsetOutOfRange
from streamiter.topics.positions import PartitionEnds, out_of_range_message
from streamiter.topics.topic import TopicBatch
from streamiter_sqlite.blocks import Block, unpacked
from streamiter_sqlite.compaction import COMPACTION_SETTING
from streamiter_sqlite.failures import DamagedFile, checked_numbers
from streamiter_sqlite.locking import read_transaction
from streamiter_sqlite.log import TopicRow, partition_ends

__all__ = ["Fetched", "Wanted", "fetch", "offset_at"]


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
class Part:
    """The records of one block that lie in a span."""

    offsets: range
    block: Block


def _fetch_parts(
    connection: sqlite3.Connection, span: Span, max_records: int, max_bytes: int
) -> tuple[list[Part], int]:
    parts: list[Part] = []
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
) -> Block:
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


def _part(first_offset: int, block: Block, span: Span) -> Part:
    start = max(0, span.start - first_offset)
    stop = min(len(block.values), span.stop - first_offset)
    offsets = range(first_offset + start, first_offset + stop)
    return Part(offsets, block.between(start, stop))


def _joined(partition: int, parts: Sequence[Part]) -> TopicBatch:
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
    columns: Sequence[Sequence[Any] | None], blocks: Sequence[Block], missing: object
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
