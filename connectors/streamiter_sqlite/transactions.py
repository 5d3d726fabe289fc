"""Records of open transactions in the file: staged, then given their offsets or thrown away.

Every function here is one transaction of the file, in a `Database`'s thread.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Concatenate, Final, ParamSpec

from streamiter.errors import ProducerFenced, TopicError, TransactionExpired
from streamiter.topics.topic import OutgoingBatch, Topic, Transactions
from streamiter.topics.topic_sink import check_outgoing, check_record_sizes, spread
from streamiter_sqlite.blocks import PackedBlock, PendingRecords, blocks_of
from streamiter_sqlite.database import Database, SqliteOptions, uninterrupted
from streamiter_sqlite.log import (
    StoredBlock,
    TopicRow,
    append,
    append_entry,
    find_partitions,
    insert_block,
    partition_ends,
    retain,
)
from streamiter_sqlite.schema import DamagedFile, checked_numbers, write_transaction

__all__ = [
    "SqliteTransactions",
]


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


def _staged_entries(connection: sqlite3.Connection, owner: Owner) -> list[StoredBlock]:
    rows = connection.execute(
        "SELECT block_id, topic_id, partition, records, size_bytes, latest_ms FROM staged"
        " WHERE transactional_id = ? ORDER BY block_id",
        (owner.transactional_id,),
    )
    return [StoredBlock(*checked_numbers(row, "staged")) for row in rows]


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


Parameters = ParamSpec("Parameters")


class OpenTransaction:
    """What has been written since ``begin`` and is not staged yet, by topic."""

    def __init__(self, *, due_s: float, deadline_ms: int) -> None:
        self.due_s = due_s  # on the monotonic clock, for ourselves
        self.deadline_ms = deadline_ms  # the same on the wall clock, for other processes
        self.targets: dict[str, Target] = {}

    @property
    def topics(self) -> list[TopicRow]:
        """The topics written to, in the order of their first records."""
        return [target.topic for target in self.targets.values()]

    def take(self) -> list[Gathered]:
        """All gathered records, which are then no longer here."""
        return [(target.topic, target.pending.take()) for target in self.targets.values()]

    def put_back(self, gathered: list[Gathered]) -> None:
        """Undo a ``take`` whose records could not be stored."""
        for topic, parts in gathered:
            self.targets[topic.name].pending.put_back(parts)


class Target:
    """One topic of the open transaction."""

    def __init__(self, topic: TopicRow, partitions: int) -> None:
        self.topic = topic
        self.partitions = partitions
        self.pending = PendingRecords()


class SqliteTransactions(Transactions):
    """Transactions under one id.

    Where there is no room left on the disk, the transaction stays open with all that was handed over, the
    batch of the failing ``write`` included: ``commit`` can be tried again, or the transaction aborted.

    Transactions over all topics of one SQLite file.

    Records are gathered in memory, and from one block's worth on they are *staged*: stored without offsets,
    where no reader sees them. The commit gives everything its offsets in one short transaction of the file, so
    two long transactions do not hold each other up, and readers never wait for an open one.

    Each ``open_transactions`` counts the run number of its id up. Every statement that stages, commits or
    aborts compares that number first, within the same transaction of the file: an older run is fenced.
    """

    def __init__(
        self, database: Database, domain: str, owner: Owner, timeout_s: float, options: SqliteOptions
    ) -> None:
        self._database = database
        self._domain = domain
        self._owner = owner
        self._timeout_s = timeout_s
        self._options = options
        self._open: OpenTransaction | None = None
        self._turn = 0
        self._fenced_because: ProducerFenced | None = None
        self._is_closed = False

    @classmethod
    async def open(
        cls,
        database: Database,
        domain: str,
        transactional_id: str,
        timeout_s: float,
        options: SqliteOptions,
    ) -> SqliteTransactions:
        """Take the id over; what is made here owns ``database`` from then on."""
        try:
            owner = await database.run(take_over, transactional_id, options.clock.now_ms())
        except BaseException:
            await database.close()
            raise
        return cls(database, domain, owner, timeout_s, options)

    async def begin(self) -> None:
        self._check_usable()
        if self._open is not None:
            raise TopicError(f"transactions {self._id!r}: commit or abort the open one before begin()")
        await self._as_owner(check_run)
        clock, timeout_s = self._options.clock, self._timeout_s
        self._open = OpenTransaction(
            due_s=clock.monotonic_s() + timeout_s, deadline_ms=clock.now_ms() + int(timeout_s * 1000)
        )

    async def write(self, topic: Topic, batch: OutgoingBatch) -> None:
        transaction = await self._transaction()
        if topic.commit_domain != self._domain:
            raise TopicError(
                f"transactions {self._id!r}: {topic.url} is of another commit domain; expected a topic in the "
                f"file of {self._domain}"
            )
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
        await uninterrupted(self._commit(await self._transaction()))

    async def abort(self) -> None:
        await self._transaction()
        await uninterrupted(self._discard())

    async def close(self) -> None:
        if self._is_closed:
            return
        self._is_closed = True
        try:
            if self._open is not None:
                await uninterrupted(self._discard())
        except TopicError:
            pass  # no reader sees what is staged, and the next owner of the id throws it away
        finally:
            await self._database.close()

    async def _commit(self, transaction: OpenTransaction) -> None:
        gathered = transaction.take()
        try:
            await self._as_owner(commit, transaction.topics, gathered, self._options.clock.now_ms())
        except BaseException:
            transaction.put_back(gathered)
            raise
        self._open = None

    @property
    def _id(self) -> str:
        return self._owner.transactional_id

    def _check_usable(self) -> None:
        if self._is_closed:
            raise TopicError(f"transactions {self._id!r} are closed")
        if self._fenced_because is not None:
            raise self._fenced_because

    async def _transaction(self) -> OpenTransaction:
        self._check_usable()
        if self._open is None:
            raise TopicError(f"transactions {self._id!r}: none is open; call begin() first")
        if self._options.clock.monotonic_s() > self._open.due_s:
            await uninterrupted(self._discard())
            self._fenced_because = TransactionExpired(
                f"transaction of {self._id!r} aborted: it was open for over {self._timeout_s:g} s"
            )
            self._check_usable()
        return self._open

    async def _target(self, transaction: OpenTransaction, name: str) -> Target:
        if name not in transaction.targets:
            topic, partitions = await self._database.run(find_partitions, name)
            transaction.targets.setdefault(name, Target(topic, partitions))
        return transaction.targets[name]

    async def _as_owner(
        self,
        function: Callable[Concatenate[sqlite3.Connection, Owner, Parameters], None],
        *args: Parameters.args,
        **kwargs: Parameters.kwargs,
    ) -> None:
        """``function`` in the database's thread; once fenced, always fenced."""
        try:
            await self._database.run(function, self._owner, *args, **kwargs)
        except ProducerFenced as error:
            self._open = None
            self._fenced_because = error
            raise

    async def _stage(self, transaction: OpenTransaction) -> None:
        """Move what is gathered from memory into the file."""
        gathered = transaction.take()
        try:
            await self._as_owner(stage, gathered, transaction.deadline_ms)
        except BaseException:
            transaction.put_back(gathered)
            raise

    async def _discard(self) -> None:
        await self._as_owner(discard)
        self._open = None  # not before: what is staged still belongs to this transaction
