"""Dropping blocks all of whose records have a newer one of their key."""

from __future__ import annotations

import sqlite3
from typing import Final, NamedTuple

from streamiter.topics.compaction import COMPACTED_BLOCKS, is_superseded
from streamiter_sqlite.blocks import unpacked
from streamiter_sqlite.failures import DamagedFile, checked_numbers
from streamiter_sqlite.log import TopicRow

__all__ = ["COMPACTION_SETTING", "compact"]

COMPACTION_SETTING: Final = "compact"

# Where blocks are large it ends with the last few of them: it holds up the commit that it is part of.
_BYTES: Final = 1 << 20


class _Entry(NamedTuple):
    partition: int
    first_offset: int
    block_id: int
    size_bytes: int


def compact(connection: sqlite3.Connection, topic: TopicRow) -> None:
    """Compact each partition of a topic whose settings say so. Applied with each write."""
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
            _drop(connection, topic, entry)
        newer.update(key for key in keys or () if key is not None)
        looked_at_bytes += entry.size_bytes
        if looked_at_bytes > _BYTES:
            break


def _last_entries(connection: sqlite3.Connection, topic: TopicRow, number: int) -> list[_Entry]:
    rows = connection.execute(
        "SELECT partition, first_offset, block_id, size_bytes FROM entries"
        " WHERE topic_id = ? AND partition = ? ORDER BY first_offset DESC LIMIT ?",
        (topic.id, number, COMPACTED_BLOCKS),
    )
    return [_Entry(*checked_numbers(row, "entries")) for row in rows]


def _keys(connection: sqlite3.Connection, entry: _Entry) -> list[bytes | None] | None:
    row = connection.execute("SELECT payload, crc32 FROM blocks WHERE id = ?", (entry.block_id,)).fetchone()
    if row is None:
        raise DamagedFile(f"block {entry.block_id} is missing")
    return unpacked(*row).keys


def _drop(connection: sqlite3.Connection, topic: TopicRow, entry: _Entry) -> None:
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
