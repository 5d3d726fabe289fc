"""Every statement on topics and their records. All of it runs in a `Database`'s thread.

What changes several rows is called within `transaction`, so that it happens as a whole or not at all.
"""

from __future__ import annotations

import contextlib
import json
import sqlite3
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from streamiter.errors import TopicNotFound
from streamiter.topics.positions import PartitionEnds
from streamiter_sqlite.blocks import Block, PackedBlock, unpacked

__all__ = [
    "StoredBlock",
    "TopicRow",
    "add_partitions",
    "append",
    "append_entry",
    "create_topic",
    "delete_topic",
    "find_topic",
    "insert_block",
    "offset_at",
    "partition_ends",
    "read_blocks",
    "retain",
    "topic_names",
    "write_transaction",
]


@contextlib.contextmanager
def write_transaction(connection: sqlite3.Connection) -> Iterator[None]:
    """All statements within take effect together, or none does. Waits for other writers of the file."""
    connection.execute("BEGIN IMMEDIATE")
    try:
        yield
        connection.execute("COMMIT")
    except BaseException:
        if connection.in_transaction:  # some errors, a full disk among them, have rolled back already
            connection.execute("ROLLBACK")
        raise


@contextlib.contextmanager
def read_transaction(connection: sqlite3.Connection) -> Iterator[None]:
    """All statements within see the same state of the file."""
    connection.execute("BEGIN")
    try:
        yield
    finally:
        connection.execute("COMMIT")


@dataclass(frozen=True, slots=True)
class TopicRow:
    """A topic as it is stored. Another topic of the same name has another id."""

    id: int
    name: str
    settings: Mapping[str, int]

    @property
    def is_retained_for_ever(self) -> bool:
        """Whether no setting asks for records to be dropped."""
        return not any(setting.startswith("retention_") for setting in self.settings)


def topic_names(connection: sqlite3.Connection) -> list[str]:
    """The names of all topics, sorted."""
    return [name for (name,) in connection.execute("SELECT name FROM topics ORDER BY name")]


def find_topic(connection: sqlite3.Connection, name: str) -> TopicRow:
    """The topic of that name, or ``TopicNotFound``."""
    row = connection.execute("SELECT id, name, settings FROM topics WHERE name = ?", (name,)).fetchone()
    if row is None:
        there_are = ", ".join(topic_names(connection)) or "none"
        raise TopicNotFound(
            f"no topic {name!r} in the file; the topics there are: {there_are}. Create it with "
            "`await topic.create(partitions=...)`"
        )
    return TopicRow(row[0], row[1], json.loads(row[2]))


def create_topic(
    connection: sqlite3.Connection, name: str, partitions: int, settings: Mapping[str, int]
) -> None:
    """Create the topic unless it is there, and the partitions that it lacks."""
    connection.execute(
        "INSERT INTO topics (name, settings) VALUES (?, ?) ON CONFLICT (name) DO NOTHING",
        (name, json.dumps(dict(settings))),
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
        raise TopicNotFound(f"topic {topic.name!r} was deleted while it was open")
    # Records are visible as soon as they have an offset: every offset is stable.
    return {number: PartitionEnds(start, end, end) for number, start, end in rows}


# -- writing -----------------------------------------------------------------------------------------------


def append(
    connection: sqlite3.Connection, topic: TopicRow, blocks: Iterable[tuple[int, PackedBlock]], now_ms: int
) -> None:
    """Store blocks at the ends of their partitions, visible with the transaction's end."""
    for partition, block in blocks:
        block_id = insert_block(connection, block)
        entry = Entry(block_id, topic.id, partition, block.records, len(block.payload), block.latest_ms)
        append_entry(connection, entry, topic_name=topic.name)
    retain(connection, topic, now_ms)


@dataclass(frozen=True, slots=True)
class Entry:
    """A stored block that is to get its offsets."""

    block_id: int
    topic_id: int
    partition: int
    records: int
    size_bytes: int
    latest_ms: int


def insert_block(connection: sqlite3.Connection, block: PackedBlock) -> int:
    """Store the bytes of a block that no reader sees yet; its id."""
    row_id = connection.execute("INSERT INTO blocks (payload) VALUES (?)", (block.payload,)).lastrowid
    assert row_id is not None
    return row_id


def append_entry(connection: sqlite3.Connection, entry: Entry, *, topic_name: str) -> None:
    """Give a stored block the next offsets of its partition."""
    row = connection.execute(
        "UPDATE partitions SET end_offset = end_offset + ?, size_bytes = size_bytes + ?"
        " WHERE topic_id = ? AND number = ? RETURNING end_offset",
        (entry.records, entry.size_bytes, entry.topic_id, entry.partition),
    ).fetchone()
    if row is None:
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


# -- retention ---------------------------------------------------------------------------------------------


def retain(connection: sqlite3.Connection, topic: TopicRow, now_ms: int) -> None:
    """Drop what the topic's settings say is too old, too much or too large. Applied with each write.

    By count exactly, otherwise by whole blocks; a partition's newest block stays.
    """
    if topic.is_retained_for_ever:
        return
    partitions = connection.execute(
        "SELECT number, start_offset, end_offset, size_bytes FROM partitions WHERE topic_id = ?", (topic.id,)
    ).fetchall()
    for number, start_offset, end_offset, size_bytes in partitions:
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
    for block_end, block_id, block_bytes, latest_ms in _oldest_blocks(connection, topic, number):
        is_over = block_end <= kept_from or size_bytes > bytes_max or latest_ms < latest_ms_min
        if block_end == end_offset or not is_over:
            break
        _drop_block(connection, topic, number, block_id)
        start_offset, size_bytes = block_end, size_bytes - block_bytes
    connection.execute(
        "UPDATE partitions SET start_offset = ?, size_bytes = ? WHERE topic_id = ? AND number = ?",
        (max(start_offset, kept_from), size_bytes, topic.id, number),
    )


def _oldest_blocks(
    connection: sqlite3.Connection, topic: TopicRow, number: int
) -> Iterator[tuple[int, int, int, int]]:
    """The blocks of a partition, oldest first, each found anew: the caller deletes them on the way."""
    after = -1
    while True:
        row = connection.execute(
            "SELECT end_offset, block_id, size_bytes, latest_ms FROM entries"
            " WHERE topic_id = ? AND partition = ? AND first_offset > ? ORDER BY first_offset LIMIT 1",
            (topic.id, number, after),
        ).fetchone()
        if row is None:
            return
        yield row
        after = row[0] - 1


def _drop_block(connection: sqlite3.Connection, topic: TopicRow, number: int, block_id: int) -> None:
    connection.execute("DELETE FROM blocks WHERE id = ?", (block_id,))
    connection.execute(
        "DELETE FROM entries WHERE topic_id = ? AND partition = ? AND block_id = ?",
        (topic.id, number, block_id),
    )


# -- reading -----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class StoredBlock:
    """A block and the offset of its first record."""

    first_offset: int
    block: Block


def read_blocks(
    connection: sqlite3.Connection, topic: TopicRow, partition: int, position: int, stop: int
) -> Iterator[StoredBlock]:
    """The blocks that have records from ``position`` to ``stop`` (half-open), in order."""
    rows = connection.execute(
        "SELECT first_offset, payload FROM entries JOIN blocks ON blocks.id = block_id"
        " WHERE topic_id = ?1 AND partition = ?2 AND first_offset < ?4 AND first_offset >= ("
        "  SELECT coalesce(max(first_offset), 0) FROM entries"
        "  WHERE topic_id = ?1 AND partition = ?2 AND first_offset <= ?3)"
        " ORDER BY first_offset",
        (topic.id, partition, position, stop),
    )
    for first_offset, payload in rows:
        yield StoredBlock(first_offset, unpacked(payload))


def offset_at(
    connection: sqlite3.Connection, topic: TopicRow, partition: int, ends: PartitionEnds, timestamp_ms: int
) -> int:
    """The offset of the first record at or after a time; the end when there is none."""
    rows = connection.execute(
        "SELECT first_offset, payload FROM entries JOIN blocks ON blocks.id = block_id"
        " WHERE topic_id = ? AND partition = ? AND latest_ms >= ? ORDER BY first_offset",
        (topic.id, partition, timestamp_ms),
    )
    for first_offset, payload in rows:
        for offset, time_ms in enumerate(unpacked(payload).times_ms(), first_offset):
            if time_ms >= timestamp_ms and offset >= ends.earliest:
                return offset
    return ends.end
