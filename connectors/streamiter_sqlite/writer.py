"""Writing to topics of an SQLite file: at once, or in transactions.

`SqliteWriter` commits the records that it is given. The records that arrive during a commit go into the next one.
`SqliteTransactions` gathers records in memory. When they fill a block, it *stages* them: it stores them without
offsets, so no reader sees them. A commit gives all staged records their offsets in one short transaction of the file.
So two long transactions do not delay each other, and readers never wait for an open transaction.

Each call of ``open_transactions`` raises the run number of its transactional id. Every statement that stages, commits
or aborts first compares that number, in the same transaction of the file: an older run is fenced.
"""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Concatenate, Final, ParamSpec

from streamiter.errors import ProducerFenced, TopicError, TransactionExpired
from streamiter.topics.connecting import TransactionState, check_outgoing, check_record_sizes, closed_error, spread
from streamiter.topics.topic import OutgoingBatch, Topic, TopicWriter, Transactions
from streamiter.values.helpers.clock import Clock
from streamiter.values.helpers.closing import closed_after, undone_on_failure
from streamiter.values.helpers.files import uninterrupted
from streamiter_sqlite.file import DamagedFile, SqliteDatabase, SqliteOptions, checked_numbers, write_transaction
from streamiter_sqlite.log import (
    PackedBlock,
    PendingRecords,
    StoredBlock,
    TopicRow,
    append_blocks,
    append_entry,
    blocks_of,
    find_partitions,
    insert_block,
    partition_ends,
    retain,
)


class SqliteWriter(TopicWriter):
    """Writes to one topic, and owns its database.

    At most one commit runs at a time. It takes all records that were written before it began, so commits grow under
    load, and a single record is committed at once. A commit that fails stores nothing. Its records stay pending, in
    order, so ``flush`` can be called again once the cause is removed.
    """

    def __init__(self, database: SqliteDatabase, topic: TopicRow, partitions: int, clock: Clock) -> None:
        self._database = database
        self._topic = topic
        self._partitions = partitions
        self._clock = clock
        self._pending = PendingRecords()
        self._committing: asyncio.Task[None] | None = None
        self._failure: Exception | None = None
        self._turn = 0
        self._is_closed = False

    async def write(self, batch: OutgoingBatch) -> None:
        self._check_open()
        await self._check(batch)
        while self._pending.is_full:
            await self._one_commit()
        self._raise_failure()
        now_ms = self._clock.now_ms()
        for partition, part in spread(batch, self._partitions, unkeyed=self._turn % self._partitions):
            self._pending.add(partition, part, now_ms=now_ms)
        self._turn += 1
        self._start_commits()

    async def flush(self) -> None:
        self._check_open()
        self._raise_failure()
        while self._pending or self._is_committing:
            await self._one_commit()

    async def close(self) -> None:
        if self._is_closed:
            return
        async with closed_after(self._wait_for_commits, self._database.close):
            try:
                await self.flush()
            finally:
                self._is_closed = True

    async def _check(self, batch: OutgoingBatch) -> None:
        if batch.partition is not None and batch.partition >= self._partitions:  # it may be a new partition
            self._partitions = await self._database.run(_count_partitions, self._topic)
        check_outgoing(batch, topic=self._topic.name, partitions=self._partitions)
        check_record_sizes(batch, self._topic.max_record_bytes, topic=self._topic.name)

    def _check_open(self) -> None:
        if self._is_closed:
            raise closed_error("writer", self._topic.name)

    def _raise_failure(self) -> None:
        """Raise the failure of an earlier batch, once."""
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure

    @property
    def _is_committing(self) -> bool:
        return self._committing is not None and not self._committing.done()

    async def _one_commit(self) -> None:
        """Wait for one commit; raise its failure."""
        self._start_commits()
        await self._wait_for_commits()
        self._raise_failure()

    async def _wait_for_commits(self) -> None:
        if self._committing is not None:
            await asyncio.wait({self._committing})  # a cancellation of this wait does not cancel the commit

    def _start_commits(self) -> None:
        if self._pending and not self._is_committing:
            self._committing = asyncio.create_task(self._commit_all())

    async def _commit_all(self) -> None:
        while self._pending:
            taken = self._pending.take()
            try:
                self._partitions = await self._database.run(_store, self._topic, taken, self._clock.now_ms())
            except Exception as error:  # the next write or flush raises it
                self._pending.put_back(taken)
                self._failure = error
                return


def _store(
    connection: sqlite3.Connection, topic: TopicRow, parts: Mapping[int, Sequence[OutgoingBatch]], now_ms: int
) -> int:
    """Commit the records; return the number of partitions that the topic has now."""
    blocks = list(blocks_of(parts))  # packs them before the file is locked
    with write_transaction(connection):
        append_blocks(connection, topic, blocks)
        retain(connection, topic, now_ms)
        return _count_partitions(connection, topic)


def _count_partitions(connection: sqlite3.Connection, topic: TopicRow) -> int:
    return len(partition_ends(connection, topic))


Parameters = ParamSpec("Parameters")


class SqliteTransactions(Transactions):
    """Transactions of one transactional id, over all topics of one SQLite file; they own their database.

    If the disk is full, the transaction stays open with all of its records, those of the failed ``write`` included:
    call ``commit`` again, or ``abort``.
    """

    def __init__(
        self, database: SqliteDatabase, domain: str, owner: TransactionOwner, timeout_s: float, options: SqliteOptions
    ) -> None:
        self._database = database
        self._domain = domain
        self._owner = owner
        self._timeout_s = timeout_s
        self._options = options
        self._state = TransactionState(f"transactions {owner.transactional_id!r}")
        self._transaction = OpenTransaction(due_s=0.0, deadline_ms=0)
        """The open transaction, or the last one."""
        self._turn = 0

    async def begin(self) -> None:
        self._state.check_idle()
        await self._as_owner(check_run)
        clock, timeout_s = self._options.clock, self._timeout_s
        self._transaction = OpenTransaction(
            due_s=clock.monotonic_s() + timeout_s, deadline_ms=clock.now_ms() + int(timeout_s * 1000)
        )
        self._state.begin()

    async def write(self, topic: Topic, batch: OutgoingBatch) -> None:
        transaction = await self._opened()
        self._state.check_topic(topic, self._domain)
        target = await self._target(transaction, topic.name)
        check_outgoing(batch, topic=topic.name, partitions=target.partitions)
        check_record_sizes(batch, target.topic.max_record_bytes, topic=topic.name)
        now_ms = self._options.clock.now_ms()
        for partition, part in spread(batch, target.partitions, unkeyed=self._turn % target.partitions):
            target.pending.add(partition, part, now_ms=now_ms)
        self._turn += 1
        if target.pending.has_full_block:
            await uninterrupted(self._stage(transaction))

    async def commit(self) -> None:
        await uninterrupted(self._commit(await self._opened()))

    async def abort(self) -> None:
        await self._opened()
        await uninterrupted(self._discard())

    async def close(self) -> None:
        if self._state.is_closed:
            return
        is_open = self._state.is_open
        self._state.close()
        async with closed_after(self._database.close):
            if is_open:
                with suppress(TopicError):  # No reader sees staged records, and the id's next owner discards them.
                    await uninterrupted(self._discard())

    async def _commit(self, transaction: OpenTransaction) -> None:
        gathered = transaction.take()
        with undone_on_failure(lambda: transaction.put_back(gathered)):
            await self._as_owner(commit, transaction.topics, gathered, self._options.clock.now_ms())
        self._state.end()

    async def _opened(self) -> OpenTransaction:
        """Return the open transaction; abort it and raise ``TransactionExpired`` after its timeout."""
        self._state.check_open()
        if self._options.clock.monotonic_s() > self._transaction.due_s:
            await uninterrupted(self._discard())
            raise self._state.fence(
                TransactionExpired(
                    f"{self._state.subject}: the transaction was aborted: it was open for over {self._timeout_s:g} s"
                )
            )
        return self._transaction

    async def _target(self, transaction: OpenTransaction, name: str) -> TopicOfTransaction:
        if name not in transaction.targets:
            topic, partitions = await self._database.run(find_partitions, name)
            transaction.targets.setdefault(name, TopicOfTransaction(topic, partitions))
        return transaction.targets[name]

    async def _as_owner(
        self,
        function: Callable[Concatenate[sqlite3.Connection, TransactionOwner, Parameters], None],
        *args: Parameters.args,
        **kwargs: Parameters.kwargs,
    ) -> None:
        """Call ``function`` in the thread of the database; a fence that it raises is final."""
        try:
            await self._database.run(function, self._owner, *args, **kwargs)
        except ProducerFenced as error:
            self._state.fence(error)
            raise

    async def _stage(self, transaction: OpenTransaction) -> None:
        """Move the gathered records from memory into the file."""
        gathered = transaction.take()
        with undone_on_failure(lambda: transaction.put_back(gathered)):
            await self._as_owner(stage, gathered, transaction.deadline_ms)

    async def _discard(self) -> None:
        await self._as_owner(discard)
        self._state.end()  # not before: until then the staged records belong to this transaction


class OpenTransaction:
    """The records of a transaction that are not staged yet, by topic."""

    def __init__(self, *, due_s: float, deadline_ms: int) -> None:
        self.due_s = due_s  # on the monotonic clock, for this process
        self.deadline_ms = deadline_ms  # the same on the wall clock, for other processes
        self.targets: dict[str, TopicOfTransaction] = {}

    @property
    def topics(self) -> list[TopicRow]:
        """The topics written to, in the order of their first records."""
        return [target.topic for target in self.targets.values()]

    def take(self) -> list[GatheredBatches]:
        """Remove and return all gathered records."""
        return [(target.topic, target.pending.take()) for target in self.targets.values()]

    def put_back(self, gathered: list[GatheredBatches]) -> None:
        """Put back records that were taken and could not be stored."""
        for topic, parts in gathered:
            self.targets[topic.name].pending.put_back(parts)


class TopicOfTransaction:
    """One topic of the open transaction."""

    def __init__(self, topic: TopicRow, partitions: int) -> None:
        self.topic = topic
        self.partitions = partitions
        self.pending = PendingRecords()


GatheredBatches = tuple[TopicRow, Mapping[int, Sequence[OutgoingBatch]]]
"""Records for one topic, by partition."""

# Stored in place of a deadline: the staged records were discarded because their deadline had passed, and no writer has
# taken over the id since.
_DISCARDED: Final = -1


@dataclass(frozen=True, slots=True)
class TransactionOwner:
    """A transactional id and the number of its run."""

    transactional_id: str
    run: int


def take_over(connection: sqlite3.Connection, transactional_id: str, now_ms: int) -> TransactionOwner:
    """Begin the next run of the id. Discard the records that its earlier runs, and expired owners, have staged."""
    with write_transaction(connection):
        expired = connection.execute(
            "SELECT id FROM transactional_ids WHERE deadline_ms >= 0 AND deadline_ms < ? AND id <> ?",
            (now_ms, transactional_id),
        ).fetchall()
        for (other,) in expired:
            _next_run(connection, other)
            _set_deadline(connection, other, _DISCARDED)
        return TransactionOwner(transactional_id, _next_run(connection, transactional_id))


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
        "DELETE FROM blocks WHERE id IN (SELECT block_id FROM staged WHERE transactional_id = ?)", (transactional_id,)
    )
    connection.execute("DELETE FROM staged WHERE transactional_id = ?", (transactional_id,))


def check_run(connection: sqlite3.Connection, owner: TransactionOwner) -> None:
    """Raise ``ProducerFenced`` after a newer run has taken over, and ``TransactionExpired`` after the timeout."""
    row = connection.execute(
        "SELECT run, deadline_ms FROM transactional_ids WHERE id = ?", (owner.transactional_id,)
    ).fetchone()
    if row is None:
        raise DamagedFile(f"the transactional id {owner.transactional_id!r} is missing")
    run, deadline_ms = row
    if run == owner.run:
        return
    subject = f"transactional id {owner.transactional_id!r}"
    if deadline_ms == _DISCARDED:
        raise TransactionExpired(
            f"{subject}: the transaction was open for longer than its timeout, so another process discarded it"
        )
    raise ProducerFenced(f"{subject}: a newer writer took over (this is run {owner.run}, the file has {run})")


def stage(
    connection: sqlite3.Connection, owner: TransactionOwner, gathered: Sequence[GatheredBatches], deadline_ms: int
) -> None:
    """Store records where no reader sees them."""
    packed = [(topic, list(blocks_of(parts))) for topic, parts in gathered]  # packs them before the file is locked
    with write_transaction(connection):
        check_run(connection, owner)
        _set_deadline(connection, owner.transactional_id, deadline_ms)
        for topic, blocks in packed:
            for partition, block in blocks:
                _stage_block(connection, owner, topic, partition, block)


def _stage_block(
    connection: sqlite3.Connection, owner: TransactionOwner, topic: TopicRow, partition: int, block: PackedBlock
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
    owner: TransactionOwner,
    topics: Sequence[TopicRow],
    gathered: Sequence[GatheredBatches],
    now_ms: int,
) -> None:
    """Make the staged records and the gathered rest visible together, in the order of writing."""
    packed = [(topic, list(blocks_of(parts))) for topic, parts in gathered]  # before the file is locked
    names = {topic.id: topic.name for topic in topics}
    with write_transaction(connection):
        check_run(connection, owner)
        for topic in topics:
            partition_ends(connection, topic)  # raises for a deleted topic, whose staged records are gone
        for entry in _staged_entries(connection, owner):
            append_entry(connection, entry, topic_name=names[entry.topic_id])
        for topic, blocks in packed:
            append_blocks(connection, topic, blocks)
        for topic in topics:
            retain(connection, topic, now_ms)
        connection.execute("DELETE FROM staged WHERE transactional_id = ?", (owner.transactional_id,))
        _set_deadline(connection, owner.transactional_id, None)


def _staged_entries(connection: sqlite3.Connection, owner: TransactionOwner) -> list[StoredBlock]:
    rows = connection.execute(
        "SELECT block_id, topic_id, partition, records, size_bytes, latest_ms FROM staged"
        " WHERE transactional_id = ? ORDER BY block_id",
        (owner.transactional_id,),
    )
    return [StoredBlock(*checked_numbers(row, "staged")) for row in rows]


def discard(connection: sqlite3.Connection, owner: TransactionOwner) -> None:
    """Discard the staged records."""
    with write_transaction(connection):
        check_run(connection, owner)
        _discard_staged(connection, owner.transactional_id)
        _set_deadline(connection, owner.transactional_id, None)


def _set_deadline(connection: sqlite3.Connection, transactional_id: str, deadline_ms: int | None) -> None:
    connection.execute("UPDATE transactional_ids SET deadline_ms = ? WHERE id = ?", (deadline_ms, transactional_id))
