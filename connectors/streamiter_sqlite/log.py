"""Topics, and records at their ends: the statements that change them.

All of it runs in a `Database`'s thread. What changes several rows is called within `write_transaction`, so
that it happens as a whole or not at all.
"""

from __future__ import annotations

import json
import sqlite3
import uuid
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final, NamedTuple

import msgspec

from streamiter.errors import TopicNotFound
from streamiter.topics.compacted import COMPACTED_BLOCKS, is_superseded
from streamiter.topics.topic import PartitionEnds
from streamiter_sqlite.blocks import PackedBlock, unpacked
from streamiter_sqlite.schema import DamagedFile, checked_numbers, read_transaction

__all__ = [
    "COMPACTION_SETTING",
    "RETENTION_SETTINGS",
    "StoredBlock",
    "TopicRow",
    "append",
    "append_entry",
    "create_topic",
    "delete_topic",
    "find_partitions",
    "find_topic",
    "insert_block",
    "partition_ends",
    "retain",
    "topic_names",
]


# Unless a topic's settings say less. SQLite's own limit for a BLOB is 1,000,000,000 bytes.
_RECORD_BYTES_MAX: Final = 256 << 20


@dataclass(frozen=True, slots=True)
class TopicRow:
    """A topic as it is stored. Another topic of the same name has another id."""

    id: int
    name: str
    settings: Mapping[str, int]
    identity: str | None
    """The same for as long as the topic is there, in copies of the file too; None where it is not known."""

    def identities(self, partitions: Iterable[int]) -> dict[int, str]:
        """The identity, by partition; empty where it is not known."""
        return {} if self.identity is None else dict.fromkeys(partitions, self.identity)

    @property
    def max_record_bytes(self) -> int:
        """The largest record that it takes."""
        return self.settings.get("max_record_bytes", _RECORD_BYTES_MAX)

    @property
    def is_retained_for_ever(self) -> bool:
        """Whether no setting asks for records to be dropped."""
        return not any(setting.startswith("retention_") for setting in self.settings)


def topic_names(connection: sqlite3.Connection) -> list[str]:
    """The names of all topics, sorted."""
    return [name for (name,) in connection.execute("SELECT name FROM topics ORDER BY name")]


def find_topic(connection: sqlite3.Connection, name: str) -> TopicRow:
    """The topic of that name, or ``TopicNotFound``."""
    row = connection.execute(
        "SELECT id, name, settings, identity FROM topics WHERE name = ?", (name,)
    ).fetchone()
    if row is None:
        _check_table(connection)
        there_are = ", ".join(topic_names(connection)) or "none"
        raise TopicNotFound(
            f"no topic {name!r} in the file; the topics there are: {there_are}. Create it with "
            "`await topic.create(partitions=...)`"
        )
    return TopicRow(row[0], row[1], _settings_of(row[2]), _identity_of(row[3]))


def _with_checksum(text: str) -> str:
    return f"{text}-{zlib.crc32(text.encode()):08x}"


def _identity_of(stored: object) -> str | None:
    """A damaged identity would say that the topic was created again; so it has a checksum."""
    if stored is None:
        return None
    if not isinstance(stored, str) or _with_checksum(stored.partition("-")[0]) != stored:
        raise DamagedFile(f"the identity of a topic is {stored!r:.80}")
    return stored


def _settings_of(stored: str) -> dict[str, int]:
    try:
        return msgspec.json.decode(stored, type=dict[str, int])
    except (msgspec.DecodeError, TypeError) as error:
        raise DamagedFile(f"settings of a topic cannot be read: {error}") from error


def _check_table(connection: sqlite3.Connection) -> None:
    """Raise ``DamagedFile`` if a topic may be missing for damage to the table: its rows and their index differ."""
    [[found], *_] = connection.execute("PRAGMA integrity_check (topics)").fetchall()
    if found != "ok":
        raise DamagedFile(found)


def create_topic(
    connection: sqlite3.Connection, name: str, partitions: int, settings: Mapping[str, int]
) -> None:
    """Create the topic unless it is there, and the partitions that it lacks."""
    connection.execute(
        "INSERT INTO topics (name, settings, identity) VALUES (?, ?, ?) ON CONFLICT (name) DO NOTHING",
        (name, json.dumps(dict(settings)), _with_checksum(uuid.uuid4().hex)),
    )
    topic = find_topic(connection, name)
    connection.executemany(
        "INSERT INTO partitions (topic_id, number) VALUES (?, ?) ON CONFLICT DO NOTHING",
        [(topic.id, number) for number in range(partitions)],
    )


def delete_topic(connection: sqlite3.Connection, name: str) -> None:
    """Delete the topic with its records, staged ones too."""
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
    """The offsets of all partitions by number; ``TopicNotFound`` where the topic was deleted."""
    rows = connection.execute(
        "SELECT number, start_offset, end_offset FROM partitions WHERE topic_id = ? ORDER BY number",
        (topic.id,),
    ).fetchall()
    if not rows:
        _check_deleted(connection, topic.id, topic.name)
        raise TopicNotFound(f"topic {topic.name!r} was deleted while it was open")
    # Records are visible as soon as they have an offset: every offset is stable.
    checked = [checked_numbers(row, "partitions") for row in rows]
    return {number: PartitionEnds(start, end, end) for number, start, end in checked}


def _check_deleted(connection: sqlite3.Connection, topic_id: int, name: str) -> None:
    """Raise ``DamagedFile`` for a topic that lacks partitions though it was not deleted."""
    if connection.execute("SELECT 1 FROM topics WHERE id = ?", (topic_id,)).fetchone():
        raise DamagedFile(f"partitions of topic {name!r} are missing")


def find_partitions(connection: sqlite3.Connection, name: str) -> tuple[TopicRow, int]:
    """The topic of that name and how many partitions it has."""
    with read_transaction(connection):
        topic = find_topic(connection, name)
        return topic, len(partition_ends(connection, topic))


def append(
    connection: sqlite3.Connection, topic: TopicRow, blocks: Iterable[tuple[int, PackedBlock]]
) -> None:
    """Store blocks at the ends of their partitions, visible with the transaction's end."""
    for partition, block in blocks:
        block_id = insert_block(connection, block)
        entry = StoredBlock(block_id, topic.id, partition, block.records, len(block.payload), block.latest_ms)
        append_entry(connection, entry, topic_name=topic.name)


@dataclass(frozen=True, slots=True)
class StoredBlock:
    """A stored block that is to get its offsets."""

    block_id: int
    topic_id: int
    partition: int
    records: int
    size_bytes: int
    latest_ms: int


def insert_block(connection: sqlite3.Connection, block: PackedBlock) -> int:
    """Store the bytes of a block that no reader sees yet; its id."""
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


COMPACTION_SETTING: Final = "compact"

# Where blocks are large it ends with the last few of them: it holds up the commit that it is part of.
_BYTES: Final = 1 << 20


class _CompactedBlock(NamedTuple):
    partition: int
    first_offset: int
    block_id: int
    size_bytes: int


def compact(connection: sqlite3.Connection, topic: TopicRow) -> None:
    """Compact each partition of a topic whose settings say so. Applied with each write.

    Dropping blocks all of whose records have a newer one of their key.
    """
    if not topic.settings.get(COMPACTION_SETTING):
        return
    partitions = connection.execute(
        "SELECT number FROM partitions WHERE topic_id = ?", (topic.id,)
    ).fetchall()
    for (number,) in partitions:
        _compact_partition(connection, topic, number)


def _compact_partition(connection: sqlite3.Connection, topic: TopicRow, number: int) -> None:
    newer: set[bytes] = set()
    looked_at_bytes = 0
    for entry in _last_entries(connection, topic, number):
        keys = _keys(connection, entry)
        if is_superseded(keys, newer):
            _drop_offsets(connection, topic, entry)
        newer.update(key for key in keys or () if key is not None)
        looked_at_bytes += entry.size_bytes
        if looked_at_bytes > _BYTES:
            break


def _last_entries(connection: sqlite3.Connection, topic: TopicRow, number: int) -> list[_CompactedBlock]:
    rows = connection.execute(
        "SELECT partition, first_offset, block_id, size_bytes FROM entries"
        " WHERE topic_id = ? AND partition = ? ORDER BY first_offset DESC LIMIT ?",
        (topic.id, number, COMPACTED_BLOCKS),
    )
    return [_CompactedBlock(*checked_numbers(row, "entries")) for row in rows]


def _keys(connection: sqlite3.Connection, entry: _CompactedBlock) -> list[bytes | None] | None:
    row = connection.execute("SELECT payload, crc32 FROM blocks WHERE id = ?", (entry.block_id,)).fetchone()
    if row is None:
        raise DamagedFile(f"block {entry.block_id} is missing")
    return unpacked(*row).keys


def _drop_offsets(connection: sqlite3.Connection, topic: TopicRow, entry: _CompactedBlock) -> None:
    """The partition's ends stay: readers pass over the gap."""
    connection.execute("DELETE FROM blocks WHERE id = ?", (entry.block_id,))
    connection.execute(
        "DELETE FROM entries WHERE topic_id = ? AND partition = ? AND first_offset = ?",
        (topic.id, entry.partition, entry.first_offset),
    )
    connection.execute(
        "UPDATE partitions SET size_bytes = size_bytes - ? WHERE topic_id = ? AND number = ?",
        (entry.size_bytes, topic.id, entry.partition),
    )


RETENTION_SETTINGS: Final = ("retention_bytes", "retention_ms", "retention_records")


def retain(connection: sqlite3.Connection, topic: TopicRow, now_ms: int) -> None:
    """Drop what the topic's settings say is too old, too much, too large or superseded, with each write.

    By count exactly, otherwise by whole blocks; a partition's newest block stays.

    Dropping records that a topic's settings say are too old, too many, too large, or superseded.
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
    connection: sqlite3.Connection,
    topic: TopicRow,
    number: int,
    state: tuple[int, int, int],
    now_ms: int,
) -> None:
    start_offset, end_offset, size_bytes = state
    kept_from = end_offset - topic.settings.get("retention_records", end_offset)
    bytes_max = topic.settings.get("retention_bytes", size_bytes)
    latest_ms_min = now_ms - topic.settings.get("retention_ms", now_ms)
    while (oldest := _oldest_block(connection, topic, number)) is not None:
        is_over = oldest.end_offset <= kept_from or size_bytes > bytes_max or oldest.latest_ms < latest_ms_min
        if oldest.end_offset == end_offset or not is_over:
            break
        _drop(connection, topic, number, oldest)
        start_offset, size_bytes = oldest.end_offset, size_bytes - oldest.size_bytes
    connection.execute(
        "UPDATE partitions SET start_offset = ?, size_bytes = ? WHERE topic_id = ? AND number = ?",
        (max(start_offset, kept_from), size_bytes, topic.id, number),
    )


class _OldestBlock(NamedTuple):
    first_offset: int
    end_offset: int
    block_id: int
    size_bytes: int
    latest_ms: int


def _oldest_block(connection: sqlite3.Connection, topic: TopicRow, number: int) -> _OldestBlock | None:
    row = connection.execute(
        "SELECT first_offset, end_offset, block_id, size_bytes, latest_ms FROM entries"
        " WHERE topic_id = ? AND partition = ? ORDER BY first_offset LIMIT 1",
        (topic.id, number),
    ).fetchone()
    return None if row is None else _OldestBlock(*checked_numbers(row, "entries"))


def _drop(connection: sqlite3.Connection, topic: TopicRow, number: int, block: _OldestBlock) -> None:
    connection.execute("DELETE FROM blocks WHERE id = ?", (block.block_id,))
    connection.execute(
        "DELETE FROM entries WHERE topic_id = ? AND partition = ? AND first_offset = ?",
        (topic.id, number, block.first_offset),
    )
