"""Dropping records that a topic's settings say are too old, too many, too large, or superseded."""

from __future__ import annotations

import sqlite3
from typing import Final, NamedTuple

from streamiter_sqlite.compaction import compact
from streamiter_sqlite.failures import checked_numbers
from streamiter_sqlite.log import TopicRow

__all__ = ["RETENTION_SETTINGS", "retain"]

RETENTION_SETTINGS: Final = ("retention_bytes", "retention_ms", "retention_records")


def retain(connection: sqlite3.Connection, topic: TopicRow, now_ms: int) -> None:
    """Drop what the topic's settings say is too old, too much, too large or superseded, with each write.

    By count exactly, otherwise by whole blocks; a partition's newest block stays.
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
