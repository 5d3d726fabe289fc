"""Transactions over all topics of one SQLite file.

Records are gathered in memory, and from one block's worth on they are *staged*: stored without offsets,
where no reader sees them. The commit gives everything its offsets in one short transaction of the file, so
two long transactions do not hold each other up, and readers never wait for an open one.

Each ``open_transactions`` counts the run number of its id up. Every statement that stages, commits or
aborts compares that number first, within the same transaction of the file: an older run is fenced.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable
from typing import Concatenate, ParamSpec

from streamiter.errors import ProducerFenced, TopicError, TransactionExpired
from streamiter.topics.outgoing import check_outgoing, check_record_sizes, spread
from streamiter.topics.topic import OutgoingBatch, Topic, Transactions
from streamiter_sqlite.blocks import PendingRecords
from streamiter_sqlite.database import Database, uninterrupted
from streamiter_sqlite.log import TopicRow, find_partitions
from streamiter_sqlite.options import SqliteOptions
from streamiter_sqlite.staging import Gathered, Owner, check_run, commit, discard, stage, take_over

__all__ = ["SqliteTransactions"]

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
