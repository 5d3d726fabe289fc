"""Writing to a topic of an SQLite file: what is handed over while a commit runs goes into the next one."""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import Mapping, Sequence

from streamiter.clock import Clock
from streamiter.errors import TopicError
from streamiter.topics.topic import OutgoingBatch, TopicWriter
from streamiter.topics.topic_sink import check_outgoing, check_record_sizes, spread
from streamiter_sqlite.blocks import PendingRecords, blocks_of
from streamiter_sqlite.database import Database
from streamiter_sqlite.log import TopicRow, append, find_partitions, partition_ends, retain
from streamiter_sqlite.schema import write_transaction

__all__ = ["SqliteWriter"]


def _count_partitions(connection: sqlite3.Connection, topic: TopicRow) -> int:
    return len(partition_ends(connection, topic))


def _store(
    connection: sqlite3.Connection, topic: TopicRow, parts: Mapping[int, Sequence[OutgoingBatch]], now_ms: int
) -> int:
    """Commit the records; how many partitions the topic has now."""
    blocks = list(blocks_of(parts))  # packed before the file is locked
    with write_transaction(connection):
        append(connection, topic, blocks)
        retain(connection, topic, now_ms)
        return _count_partitions(connection, topic)


class SqliteWriter(TopicWriter):
    """Writes to one topic.

    At most one commit runs at a time, and it takes all that was handed over before it began: under load
    commits grow by themselves, and a single record is committed at once. A commit that fails stores
    nothing; its records stay pending, in order, so that ``flush`` can be called again once the reason is gone.
    """

    def __init__(self, database: Database, topic: TopicRow, partitions: int, clock: Clock) -> None:
        self._database = database
        self._topic = topic
        self._partitions = partitions
        self._clock = clock
        self._pending = PendingRecords()
        self._committing: asyncio.Task[None] | None = None
        self._failure: Exception | None = None
        self._turn = 0
        self._is_closed = False

    @classmethod
    async def open(cls, database: Database, name: str, clock: Clock) -> SqliteWriter:
        """A writer to an existing topic; it owns ``database`` from here on."""
        try:
            topic, partitions = await database.run(find_partitions, name)
        except BaseException:
            await database.close()
            raise
        return cls(database, topic, partitions, clock)

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
        try:
            await self.flush()
        finally:
            self._is_closed = True
            try:
                await self._wait_for_commits()
            finally:
                await self._database.close()

    async def _check(self, batch: OutgoingBatch) -> None:
        if batch.partition is not None and batch.partition >= self._partitions:  # was it added meanwhile?
            self._partitions = await self._database.run(_count_partitions, self._topic)
        check_outgoing(batch, topic=self._topic.name, partitions=self._partitions)
        check_record_sizes(batch, self._topic.max_record_bytes, topic=self._topic.name)

    def _check_open(self) -> None:
        if self._is_closed:
            raise TopicError(f"writer of {self._topic.name!r} is closed")

    def _raise_failure(self) -> None:
        """Tell what went wrong with an earlier batch, once."""
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure

    @property
    def _is_committing(self) -> bool:
        return self._committing is not None and not self._committing.done()

    async def _one_commit(self) -> None:
        """Let pending records become fewer, or raise what stands in the way."""
        self._start_commits()
        await self._wait_for_commits()
        self._raise_failure()

    async def _wait_for_commits(self) -> None:
        if self._committing is not None:
            await asyncio.wait({self._committing})  # which does not cancel it with us

    def _start_commits(self) -> None:
        if self._pending and not self._is_committing:
            self._committing = asyncio.create_task(self._commit_all())

    async def _commit_all(self) -> None:
        while self._pending:
            taken = self._pending.take()
            try:
                self._partitions = await self._database.run(_store, self._topic, taken, self._clock.now_ms())
            except Exception as error:  # whatever it is, the next write or flush raises it
                self._pending.put_back(taken)
                self._failure = error
                return
