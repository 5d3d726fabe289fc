"""What the file stores: topics, their partitions, and records packed into blocks.

The statements that change the file are here. All of them run in the thread of a `Database`. Several rows are changed
within `write_transaction`, so all of these changes take effect or none does.

>>> pending = PendingRecords()
>>> pending.add(0, OutgoingBatch([b"a", b"b"]), now_ms=5)
>>> pending.add(0, OutgoingBatch([b"c"], keys=[b"k"]), now_ms=6)
>>> [(partition, block)] = blocks_of(pending.take())
>>> partition, block.records, block.latest_ms
(0, 3, 6)
>>> unpacked(block.payload, block.crc32)
RecordBlock(values=[b'a', b'b', b'c'], keys=[None, None, b'k'], headers=None, timestamps_ms=[5, 5, 6])
"""

from __future__ import annotations

import json
import sqlite3
import uuid
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Literal, NamedTuple, TypeVar

import msgspec

from streamiter.errors import TopicNotFound
from streamiter.topics.compacted import COMPACTED_BLOCKS, is_superseded
from streamiter.topics.connecting import PartitionEnds, batch_bytes
from streamiter.topics.joined_values import joined_column
from streamiter.topics.topic import Headers, OutgoingBatch
from streamiter.values.records import BATCH_RECORDS
from streamiter_sqlite.file import DamagedFile, checked_numbers, read_transaction, write_transaction

# The limit of a topic without the setting max_record_bytes. SQLite's own limit for a BLOB is 1,000,000,000 bytes.
_RECORD_BYTES_MAX: Final = 256 << 20


@dataclass(frozen=True, slots=True)
class TopicRow:
    """A stored topic. A later topic of the same name has another id."""

    id: int
    name: str
    settings: Mapping[str, int]
    identity: str
    """A text that stays the same until the topic is deleted, also in copies of the file."""

    def identities(self, partitions: Iterable[int]) -> dict[int, str]:
        """Return the identity for each partition."""
        return dict.fromkeys(partitions, self.identity)

    @property
    def max_record_bytes(self) -> int:
        """The size of the largest record that the topic takes."""
        return self.settings.get("max_record_bytes", _RECORD_BYTES_MAX)

    @property
    def is_retained_for_ever(self) -> bool:
        """Whether no setting makes the topic drop records."""
        return not any(setting.startswith("retention_") for setting in self.settings)


def topic_names(connection: sqlite3.Connection) -> list[str]:
    return [name for (name,) in connection.execute("SELECT name FROM topics ORDER BY name")]


def find_topic(connection: sqlite3.Connection, name: str) -> TopicRow:
    """Return the topic of that name, or raise ``TopicNotFound``."""
    row = connection.execute("SELECT id, name, settings, identity FROM topics WHERE name = ?", (name,)).fetchone()
    if row is None:
        _check_table(connection)
        there_are = ", ".join(topic_names(connection)) or "none"
        raise TopicNotFound(
            f"no topic {name!r} in the file; the topics there are: {there_are}. Create it with "
            "`await topic.create(partitions=...)`"
        )
    return TopicRow(row[0], row[1], _settings_of(row[2]), _identity_of(row[3]))


def find_partitions(connection: sqlite3.Connection, name: str) -> tuple[TopicRow, int]:
    """Return the topic of that name and its number of partitions."""
    with read_transaction(connection):
        topic = find_topic(connection, name)
        return topic, len(partition_ends(connection, topic))


def _settings_of(stored: str) -> dict[str, int]:
    try:
        return msgspec.json.decode(stored, type=dict[str, int])
    except (msgspec.DecodeError, TypeError) as error:
        raise DamagedFile(f"settings of a topic cannot be read: {error}") from error


def _identity_of(stored: object) -> str:
    """Return the identity without damage: it has a checksum, since a damaged one would look like a new topic."""
    if not isinstance(stored, str) or _with_checksum(stored.partition("-")[0]) != stored:
        raise DamagedFile(f"the identity of a topic is {stored!r:.80}")
    return stored


def _with_checksum(text: str) -> str:
    return f"{text}-{zlib.crc32(text.encode()):08x}"


def _check_table(connection: sqlite3.Connection) -> None:
    """Raise ``DamagedFile`` if the rows of the table and their index differ: then a topic may be missing."""
    [[found], *_] = connection.execute("PRAGMA integrity_check (topics)").fetchall()
    if found != "ok":
        raise DamagedFile(found)


def add_topic(connection: sqlite3.Connection, name: str, partitions: int, settings: Mapping[str, int]) -> None:
    """Create the topic unless it exists, and the partitions that it lacks."""
    with write_transaction(connection):
        connection.execute(
            "INSERT INTO topics (name, settings, identity) VALUES (?, ?, ?) ON CONFLICT (name) DO NOTHING",
            (name, json.dumps(dict(settings)), _with_checksum(uuid.uuid4().hex)),
        )
        topic = find_topic(connection, name)
        connection.executemany(
            "INSERT INTO partitions (topic_id, number) VALUES (?, ?) ON CONFLICT DO NOTHING",
            [(topic.id, number) for number in range(partitions)],
        )


def remove_topic(connection: sqlite3.Connection, name: str) -> None:
    """Delete the topic and its records, staged records included."""
    with write_transaction(connection):
        topic = find_topic(connection, name)
        for table in ("entries", "staged"):
            connection.execute(
                f"DELETE FROM blocks WHERE id IN (SELECT block_id FROM {table} WHERE topic_id = ?)",  # noqa: S608
                (topic.id,),
            )
            connection.execute(f"DELETE FROM {table} WHERE topic_id = ?", (topic.id,))  # noqa: S608
        connection.execute("DELETE FROM partitions WHERE topic_id = ?", (topic.id,))
        connection.execute("DELETE FROM topics WHERE id = ?", (topic.id,))


def partition_ends(connection: sqlite3.Connection, topic: TopicRow) -> dict[int, PartitionEnds]:
    """Return the ends of all partitions by number; raise ``TopicNotFound`` after the topic was deleted."""
    rows = connection.execute(
        "SELECT number, start_offset, end_offset FROM partitions WHERE topic_id = ? ORDER BY number", (topic.id,)
    ).fetchall()
    if not rows:
        _check_deleted(connection, topic.id, topic.name)
        raise TopicNotFound(f"topic {topic.name!r} was deleted while it was open")
    # A record is visible as soon as it has an offset, so every offset is stable.
    checked = [checked_numbers(row, "partitions") for row in rows]
    return {number: PartitionEnds(start, end, end) for number, start, end in checked}


def _check_deleted(connection: sqlite3.Connection, topic_id: int, name: str) -> None:
    """Raise ``DamagedFile`` for a topic that was not deleted and lacks its partitions."""
    if connection.execute("SELECT 1 FROM topics WHERE id = ?", (topic_id,)).fetchone():
        raise DamagedFile(f"partitions of topic {name!r} are missing")


def append_blocks(connection: sqlite3.Connection, topic: TopicRow, blocks: Iterable[tuple[int, PackedBlock]]) -> None:
    """Store blocks at the ends of their partitions. They are visible when the transaction ends."""
    for partition, block in blocks:
        block_id = insert_block(connection, block)
        entry = StoredBlock(block_id, topic.id, partition, block.records, len(block.payload), block.latest_ms)
        append_entry(connection, entry, topic_name=topic.name)


@dataclass(frozen=True, slots=True)
class StoredBlock:
    """A stored block that gets its offsets next."""

    block_id: int
    topic_id: int
    partition: int
    records: int
    size_bytes: int
    latest_ms: int


def insert_block(connection: sqlite3.Connection, block: PackedBlock) -> int:
    """Store the bytes of a block, which no reader sees yet; return its id."""
    row_id = connection.execute(
        "INSERT INTO blocks (payload, crc32) VALUES (?, ?)", (block.payload, block.crc32)
    ).lastrowid
    assert row_id is not None
    return row_id


def append_entry(connection: sqlite3.Connection, entry: StoredBlock, *, topic_name: str) -> None:
    """Give a stored block the next offsets of its partition."""
    row = connection.execute(
        "UPDATE partitions SET end_offset = end_offset + ?, size_bytes = size_bytes + ?"
        " WHERE topic_id = ? AND number = ? RETURNING end_offset",
        (entry.records, entry.size_bytes, entry.topic_id, entry.partition),
    ).fetchone()
    if row is None:
        _check_deleted(connection, entry.topic_id, topic_name)
        raise TopicNotFound(f"topic {topic_name!r} was deleted while it was written")
    [end_offset] = row
    connection.execute(
        "INSERT INTO entries (topic_id, partition, first_offset, end_offset, block_id, size_bytes, latest_ms)"
        " VALUES (?, ?, ?, ?, ?, ?, ?)",
        (
            entry.topic_id,
            entry.partition,
            end_offset - entry.records,
            end_offset,
            entry.block_id,
            entry.size_bytes,
            entry.latest_ms,
        ),
    )


RETENTION_SETTINGS: Final = ("retention_bytes", "retention_ms", "retention_records")


def retain(connection: sqlite3.Connection, topic: TopicRow, now_ms: int) -> None:
    """Drop the records that are too old, too many, too large together, or superseded, by the topic's settings.

    Called at each write. A limit on the number of records is exact. The other limits drop whole blocks, and never the
    newest block of a partition.
    """
    compact(connection, topic)
    if topic.is_retained_for_ever:
        return
    partitions = connection.execute(
        "SELECT number, start_offset, end_offset, size_bytes FROM partitions WHERE topic_id = ?", (topic.id,)
    ).fetchall()
    for row in partitions:
        number, start_offset, end_offset, size_bytes = checked_numbers(row, "partitions")
        _retain_partition(connection, topic, number, (start_offset, end_offset, size_bytes), now_ms)


def _retain_partition(
    connection: sqlite3.Connection, topic: TopicRow, number: int, state: tuple[int, int, int], now_ms: int
) -> None:
    start_offset, end_offset, size_bytes = state
    kept_from = end_offset - topic.settings.get("retention_records", end_offset)
    bytes_max = topic.settings.get("retention_bytes", size_bytes)
    latest_ms_min = now_ms - topic.settings.get("retention_ms", now_ms)
    while oldest_entries := _entries(connection, topic, number, "ASC", 1):
        [oldest] = oldest_entries
        is_over = oldest.end_offset <= kept_from or size_bytes > bytes_max or oldest.latest_ms < latest_ms_min
        if oldest.end_offset == end_offset or not is_over:
            break
        _drop(connection, topic, number, oldest)
        start_offset, size_bytes = oldest.end_offset, size_bytes - oldest.size_bytes
    connection.execute(
        "UPDATE partitions SET start_offset = ?, size_bytes = ? WHERE topic_id = ? AND number = ?",
        (max(start_offset, kept_from), size_bytes, topic.id, number),
    )


DELETION_SETTING: Final = "delete_read"


def delete_read(connection: sqlite3.Connection, topic: TopicRow, positions: Mapping[int, int]) -> None:
    """Drop the records before these offsets, by partition: whole blocks, and of the next block what is visible."""
    with write_transaction(connection):
        for number, position in positions.items():
            values = {"topic": topic.id, "partition": number, "position": position}
            those = "FROM entries WHERE topic_id = :topic AND partition = :partition AND end_offset <= :position"
            # The key has the first offset only; with it, no entry behind the position is looked at.
            those += " AND first_offset < :position"
            [dropped_bytes] = connection.execute(f"SELECT coalesce(sum(size_bytes), 0) {those}", values).fetchone()
            connection.execute(f"DELETE FROM blocks WHERE id IN (SELECT block_id {those})", values)  # noqa: S608
            connection.execute(f"DELETE {those}", values)
            connection.execute(
                "UPDATE partitions SET start_offset = max(start_offset, min(end_offset, :position)),"
                " size_bytes = size_bytes - :dropped WHERE topic_id = :topic AND number = :partition",
                {**values, "dropped": dropped_bytes},
            )


class _Entry(NamedTuple):
    first_offset: int
    end_offset: int
    block_id: int
    size_bytes: int
    latest_ms: int


def _entries(
    connection: sqlite3.Connection, topic: TopicRow, number: int, order: Literal["ASC", "DESC"], limit: int
) -> list[_Entry]:
    """Return the first, or the last, entries of a partition, at most that many."""
    rows = connection.execute(
        "SELECT first_offset, end_offset, block_id, size_bytes, latest_ms FROM entries"  # noqa: S608
        f" WHERE topic_id = ? AND partition = ? ORDER BY first_offset {order} LIMIT ?",
        (topic.id, number, limit),
    )
    return [_Entry(*checked_numbers(row, "entries")) for row in rows]


def _drop(connection: sqlite3.Connection, topic: TopicRow, number: int, entry: _Entry) -> None:
    connection.execute("DELETE FROM blocks WHERE id = ?", (entry.block_id,))
    connection.execute(
        "DELETE FROM entries WHERE topic_id = ? AND partition = ? AND first_offset = ?",
        (topic.id, number, entry.first_offset),
    )


COMPACTION_SETTING: Final = "compact"

# Compaction looks at blocks of this many bytes in all, since it delays the commit that it is part of.
_BYTES: Final = 1 << 20


def compact(connection: sqlite3.Connection, topic: TopicRow) -> None:
    """Compact each partition of a topic with the setting ``compact``, at each write.

    A block is dropped when each of its records has a newer record with its key.
    """
    if not topic.settings.get(COMPACTION_SETTING):
        return
    partitions = connection.execute("SELECT number FROM partitions WHERE topic_id = ?", (topic.id,)).fetchall()
    for (number,) in partitions:
        _compact_partition(connection, topic, number)


def _compact_partition(connection: sqlite3.Connection, topic: TopicRow, number: int) -> None:
    newer: set[bytes] = set()
    looked_at_bytes = 0
    for entry in _entries(connection, topic, number, "DESC", COMPACTED_BLOCKS):
        keys = _keys(connection, entry)
        if is_superseded(keys, newer):
            # The ends of the partition stay the same; readers skip the gap.
            _drop(connection, topic, number, entry)
            connection.execute(
                "UPDATE partitions SET size_bytes = size_bytes - ? WHERE topic_id = ? AND number = ?",
                (entry.size_bytes, topic.id, number),
            )
        newer.update(key for key in keys or () if key is not None)
        looked_at_bytes += entry.size_bytes
        if looked_at_bytes > _BYTES:
            break


def _keys(connection: sqlite3.Connection, entry: _Entry) -> list[bytes | None] | None:
    row = connection.execute("SELECT payload, crc32 FROM blocks WHERE id = ?", (entry.block_id,)).fetchone()
    if row is None:
        raise DamagedFile(f"block {entry.block_id} is missing")
    return unpacked(*row).keys


# A block is read and unpacked as a whole: large enough that the cost of a row is small for each record, small enough
# for a reader that wants a few records.
_BLOCK_RECORDS: Final = BATCH_RECORDS

_BLOCK_BYTES: Final = 1 << 20

# A writer holds at most this many bytes that are not stored yet, and one batch more: a few commits of full blocks.
_PENDING_BYTES: Final = 16 << 20

# The memory of a record besides its bytes: the objects of its value and its time stamp.
_RECORD_OVERHEAD_BYTES: Final = 100

Entry = TypeVar("Entry")


class RecordBlock(msgspec.Struct, array_like=True):
    """Records as columns. Keys or headers are None where no record has any; equal time stamps are stored as one."""

    values: list[bytes | None]
    keys: list[bytes | None] | None
    headers: list[Headers] | None
    timestamps_ms: int | list[int]

    def times_ms(self) -> list[int]:
        """Return the time stamp of each record."""
        return [self.timestamps_ms] * len(self.values) if isinstance(self.timestamps_ms, int) else self.timestamps_ms


@dataclass(frozen=True, slots=True)
class PackedBlock:
    """A block as it is stored, with its number of records and its latest time stamp."""

    payload: bytes
    records: int
    latest_ms: int

    @property
    def crc32(self) -> int:
        """The checksum that is stored with the block."""
        return zlib.crc32(self.payload)


def unpacked(payload: bytes, crc32: int) -> RecordBlock:
    """Return the records of a payload with its stored checksum; raise ``DamagedFile`` if the payload differs."""
    if not isinstance(payload, bytes) or zlib.crc32(payload) != crc32:
        raise DamagedFile("a block of records has a wrong checksum")
    try:
        return msgspec.msgpack.decode(payload, type=RecordBlock)
    except (msgspec.DecodeError, TypeError, UnicodeDecodeError) as error:
        raise DamagedFile(f"a block of records cannot be read: {error}") from error


class PendingRecords:
    """Records that were written and are not stored yet, by partition, in order."""

    def __init__(self) -> None:
        self._parts: dict[int, list[OutgoingBatch]] = {}
        self._size_bytes = 0

    @property
    def is_full(self) -> bool:
        """Whether a writer must wait for a commit before it adds more."""
        return self._size_bytes >= _PENDING_BYTES

    @property
    def has_full_block(self) -> bool:
        """Whether the records fill a block, so that storing them is worth a transaction."""
        return self._size_bytes >= _BLOCK_BYTES

    def __bool__(self) -> bool:
        return bool(self._parts)

    def add(self, partition: int, part: OutgoingBatch, *, now_ms: int) -> None:
        """Add records of one partition; records without time stamps get ``now_ms``."""
        if not len(part):
            return
        timestamps_ms = part.timestamps_ms if part.timestamps_ms is not None else [now_ms] * len(part)
        self._parts.setdefault(partition, []).append(
            # Copies, because the caller may reuse its lists.
            OutgoingBatch(list(part.values), _copied(part.keys), _copied(part.headers), list(timestamps_ms))
        )
        self._size_bytes += batch_bytes(part) + _RECORD_OVERHEAD_BYTES * len(part)

    def take(self) -> dict[int, list[OutgoingBatch]]:
        """Remove and return all records."""
        parts, self._parts, self._size_bytes = self._parts, {}, 0
        return parts

    def put_back(self, taken: Mapping[int, Sequence[OutgoingBatch]]) -> None:
        """Put back taken records that could not be stored, before the records that were added since."""
        for partition, parts in taken.items():
            self._parts[partition] = [*parts, *self._parts.get(partition, [])]
            self._size_bytes += sum(batch_bytes(part) + _RECORD_OVERHEAD_BYTES * len(part) for part in parts)


def _copied(column: Sequence[Entry] | None) -> list[Entry] | None:
    return None if column is None else list(column)


def blocks_of(parts: Mapping[int, Sequence[OutgoingBatch]]) -> Iterator[tuple[int, PackedBlock]]:
    """Yield the blocks to store, each with its partition."""
    for partition, batches in parts.items():
        for merged in _merged(batches):
            yield partition, _packed(merged)


def _merged(batches: Sequence[OutgoingBatch]) -> Iterator[OutgoingBatch]:
    """Yield the same records as batches of the size of a block."""
    whole = _concatenated(batches)
    records = max(1, min(_BLOCK_RECORDS, _BLOCK_BYTES * len(whole) // max(1, batch_bytes(whole))))
    for start in range(0, len(whole), records):
        yield whole if records >= len(whole) else whole[start : start + records]


def _concatenated(batches: Sequence[OutgoingBatch]) -> OutgoingBatch:
    if len(batches) == 1:
        return batches[0]
    lengths = [len(batch) for batch in batches]
    return OutgoingBatch(
        values=[value for batch in batches for value in batch.values],
        keys=joined_column([batch.keys for batch in batches], lengths, None),
        headers=joined_column([batch.headers for batch in batches], lengths, ()),
        timestamps_ms=joined_column([batch.timestamps_ms for batch in batches], lengths, 0),
    )


def _packed(batch: OutgoingBatch) -> PackedBlock:
    timestamps_ms = batch.timestamps_ms
    assert timestamps_ms
    first, latest = timestamps_ms[0], max(timestamps_ms)
    is_one_time = first == latest == min(timestamps_ms)
    columns = (batch.values, batch.keys, batch.headers, first if is_one_time else timestamps_ms)
    return PackedBlock(msgspec.msgpack.encode(columns), len(batch), latest)
