"""Records of open transactions in the file: staged, then given their offsets or thrown away.

Every function here is one transaction of the file, in a `Database`'s thread.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from streamiter.errors import ProducerFenced, TransactionExpired
from streamiter.topics.topic import OutgoingBatch
from streamiter_sqlite.blocks import PackedBlock, blocks_of
from streamiter_sqlite.failures import DamagedFile, checked_numbers
from streamiter_sqlite.locking import write_transaction
from streamiter_sqlite.log import Entry, TopicRow, append, append_entry, insert_block, partition_ends
from streamiter_sqlite.retention import retain

__all__ = ["Gathered", "Owner", "check_run", "commit", "discard", "stage", "take_over"]

Gathered = tuple[TopicRow, Mapping[int, Sequence[OutgoingBatch]]]
"""Records for one topic, by partition."""

# In place of a deadline: what was staged has been thrown away because its deadline had passed, and nobody
# has taken the id over since.
_THROWN_AWAY: Final = -1


@dataclass(frozen=True, slots=True)
class Owner:
    """A transactional id and the run that it is in."""

    transactional_id: str
    run: int


def take_over(connection: sqlite3.Connection, transactional_id: str, now_ms: int) -> Owner:
    """The next run of the id; what earlier runs and owners long gone have staged is thrown away."""
    with write_transaction(connection):
        expired = connection.execute(
            "SELECT id FROM transactional_ids WHERE deadline_ms >= 0 AND deadline_ms < ? AND id <> ?",
            (now_ms, transactional_id),
        ).fetchall()
        for (other,) in expired:
            _next_run(connection, other)
            _set_deadline(connection, other, _THROWN_AWAY)
        return Owner(transactional_id, _next_run(connection, transactional_id))


def _next_run(connection: sqlite3.Connection, transactional_id: str) -> int:
    _discard_staged(connection, transactional_id)
    [run] = connection.execute(
        "INSERT INTO transactional_ids (id, run) VALUES (?, 1)"
        " ON CONFLICT (id) DO UPDATE SET run = run + 1, deadline_ms = NULL RETURNING run",
        (transactional_id,),
    ).fetchone()
    [checked] = checked_numbers([run], "transactional_ids")
    return checked


def _discard_staged(connection: sqlite3.Connection, transactional_id: str) -> None:
    connection.execute(
        "DELETE FROM blocks WHERE id IN (SELECT block_id FROM staged WHERE transactional_id = ?)",
        (transactional_id,),
    )
    connection.execute("DELETE FROM staged WHERE transactional_id = ?", (transactional_id,))


def check_run(connection: sqlite3.Connection, owner: Owner) -> None:
    """Raise ``ProducerFenced`` where a newer run has taken over, or ``TransactionExpired`` where none has."""
    row = connection.execute(
        "SELECT run, deadline_ms FROM transactional_ids WHERE id = ?", (owner.transactional_id,)
    ).fetchone()
    if row is None:
        raise DamagedFile(f"the transactional id {owner.transactional_id!r} is missing")
    run, deadline_ms = row
    if run == owner.run:
        return
    subject = f"transactional id {owner.transactional_id!r}"
    if deadline_ms == _THROWN_AWAY:
        raise TransactionExpired(
            f"{subject}: the transaction was open for longer than its timeout, so another process threw it away"
        )
    raise ProducerFenced(f"{subject}: a newer writer took over (this is run {owner.run}, the file has {run})")


def stage(
    connection: sqlite3.Connection, owner: Owner, gathered: Sequence[Gathered], deadline_ms: int
) -> None:
    """Store records where no reader sees them."""
    packed = [(topic, list(blocks_of(parts))) for topic, parts in gathered]  # before the file is locked
    with write_transaction(connection):
        check_run(connection, owner)
        _set_deadline(connection, owner.transactional_id, deadline_ms)
        for topic, blocks in packed:
            for partition, block in blocks:
                _stage_block(connection, owner, topic, partition, block)


def _stage_block(
    connection: sqlite3.Connection, owner: Owner, topic: TopicRow, partition: int, block: PackedBlock
) -> None:
    connection.execute(
        "INSERT INTO staged (block_id, transactional_id, topic_id, partition, records, size_bytes, latest_ms)"
        " VALUES (?, ?, ?, ?, ?, ?, ?)",
        (
            insert_block(connection, block),
            owner.transactional_id,
            topic.id,
            partition,
            block.records,
            len(block.payload),
            block.latest_ms,
        ),
    )


def commit(
    connection: sqlite3.Connection,
    owner: Owner,
    topics: Sequence[TopicRow],
    gathered: Sequence[Gathered],
    now_ms: int,
) -> None:
    """Make the staged records and the gathered rest visible together, in the order of writing."""
    packed = [(topic, list(blocks_of(parts))) for topic, parts in gathered]  # before the file is locked
    names = {topic.id: topic.name for topic in topics}
    with write_transaction(connection):
        check_run(connection, owner)
        for topic in topics:
            partition_ends(connection, topic)  # a deleted topic has taken its staged records with it
        for entry in _staged_entries(connection, owner):
            append_entry(connection, entry, topic_name=names[entry.topic_id])
        for topic, blocks in packed:
            append(connection, topic, blocks)
        for topic in topics:
            retain(connection, topic, now_ms)
        connection.execute("DELETE FROM staged WHERE transactional_id = ?", (owner.transactional_id,))
        _set_deadline(connection, owner.transactional_id, None)


def _staged_entries(connection: sqlite3.Connection, owner: Owner) -> list[Entry]:
    rows = connection.execute(
        "SELECT block_id, topic_id, partition, records, size_bytes, latest_ms FROM staged"
        " WHERE transactional_id = ? ORDER BY block_id",
        (owner.transactional_id,),
    )
    return [Entry(*checked_numbers(row, "staged")) for row in rows]


def discard(connection: sqlite3.Connection, owner: Owner) -> None:
    """Throw away what is staged."""
    with write_transaction(connection):
        check_run(connection, owner)
        _discard_staged(connection, owner.transactional_id)
        _set_deadline(connection, owner.transactional_id, None)


def _set_deadline(connection: sqlite3.Connection, transactional_id: str, deadline_ms: int | None) -> None:
    connection.execute(
        "UPDATE transactional_ids SET deadline_ms = ? WHERE id = ?", (deadline_ms, transactional_id)
    )
