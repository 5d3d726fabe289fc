"""The job's one transaction: what its sinks write between two commits, and the commit record."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import final

from streamiter.checkpoints.plain_data import PlainData
from streamiter.checkpoints.snapshot import CheckpointId
from streamiter.clock import Clock
from streamiter.errors import ProducerFenced, StorageFull, TopicError, TransactionExpired
from streamiter.runtime.checkpointing.commit_record import CommitRecord
from streamiter.runtime.checkpointing.held_batches import HeldBatches
from streamiter.runtime.checkpointing.transactional_writer import TransactionalWriter
from streamiter.topics.commit_topic import ensure_commit_topic
from streamiter.topics.last_value import last_value
from streamiter.topics.outputs import Outputs
from streamiter.topics.topic import OutgoingBatch, Topic, TopicRecord, TopicWriter, Transactions

__all__ = ["JobTransaction"]


@final
class JobTransaction(Outputs):
    """Outputs in one commit domain become visible with a checkpoint; those elsewhere at once.

    Opening it fences older runs of the flow: only then does the last commit record say something that lasts.
    """

    def __init__(
        self,
        flow: str,
        beside: Topic,
        *,
        clock: Clock,
        timeout_s: float,
        plain_data: PlainData,
        is_newest_run: Callable[[], Awaitable[bool]],
    ) -> None:
        """``beside`` is one of the outputs; ``is_newest_run`` is whether nobody has claimed the flow since."""
        self.commit_domain = beside.commit_domain
        self._flow = flow
        self._beside = beside
        self._clock = clock
        self._timeout_s = timeout_s
        self._plain_data = plain_data
        self._began_s = clock.monotonic_s()
        self._is_newest_run = is_newest_run
        self._transactions: Transactions | None = None
        self._commits: Topic | None = None
        self._writers: list[TransactionalWriter] = []
        self._one_at_a_time = asyncio.Lock()
        self._seals = False

    # -- for sinks ---------------------------------------------------------------------------------------

    async def open_writer(self, topic: Topic, *, at_least_once: bool, step: str) -> TopicWriter:
        if at_least_once or topic.commit_domain != self.commit_domain:
            return await topic.open_writer()
        await topic.describe()  # One that is not there is to be found out now, not with the first record.
        held = HeldBatches(step, self._plain_data)
        writer = TransactionalWriter(topic, self._write, held, step=step)
        self._writers.append(writer)
        return writer

    async def barrier_passed(self, writer: TopicWriter) -> None:
        if not isinstance(writer, TransactionalWriter):
            await writer.flush()
        elif self._seals:
            writer.seal()

    async def _write(self, topic: Topic, batch: OutgoingBatch) -> None:
        async with self._one_at_a_time, self._fence_explained():
            await self._opened.write(topic, batch)

    # -- for the job -------------------------------------------------------------------------------------

    async def open(self) -> TopicRecord | None:
        """Take over from older runs, and begin a transaction; gives the last commit, None where there was never one."""
        commits = self._commits = await ensure_commit_topic(self._beside)
        transactional_id = f"streamiter-{self._flow}"
        self._transactions = await commits.open_transactions(transactional_id, timeout_s=self._timeout_s)
        record = await last_value(commits, self._flow.encode(), clock=self._clock)
        # Raises if a newer run has taken over meanwhile: then the store must not be claimed from under it.
        await self._begin()
        return record

    @property
    def commits_in(self) -> str:
        """The URL of the topic of commit records."""
        assert self._commits is not None
        return self._commits.url

    async def begin_with(self, checkpoint: CheckpointId | None) -> None:
        """Say which checkpoint the run begins with, as a commit of its own."""
        await self._commit(checkpoint, goes_on=True)

    async def _begin(self) -> None:
        self._began_s = self._clock.monotonic_s()
        await self._opened.begin()

    def checkpoint_begins(self) -> None:
        """From now on a sink whose barrier has passed holds what comes after it."""
        self._seals = True

    async def commit(self, checkpoint: CheckpointId, *, goes_on: bool) -> None:
        """Make visible what was written before the barriers; if the job ``goes_on``, what was held comes next.

        After StorageFull nothing is committed. The transaction stays open, with this commit record in it: that of the
        checkpoint that is committed at last comes behind it, and is the one that counts.
        """
        await self._commit(checkpoint, goes_on=goes_on)
        if goes_on:
            await self.checkpoint_over()

    async def _commit(self, checkpoint: CheckpointId | None, *, goes_on: bool) -> None:
        assert self._commits is not None
        async with self._one_at_a_time, self._fence_explained():
            await self._opened.write(self._commits, CommitRecord(self._flow, checkpoint).outgoing())
            await self._opened.commit()
            if goes_on:
                await self._begin_next()

    async def _begin_next(self) -> None:
        try:
            await self._begin()
        except StorageFull as error:  # Of a commit it says that nothing is committed yet.
            raise TopicError(f"the next transaction cannot begin: {error}") from error

    async def checkpoint_over(self) -> None:
        """Committed or given up: what was held goes into the open transaction."""
        self._seals = False
        for writer in self._writers:
            await writer.unseal()

    @contextlib.asynccontextmanager
    async def _fence_explained(self) -> AsyncIterator[None]:
        """Tell a newer run from a transaction that was open for too long: with the latter, the job goes on by itself.

        Servers do not tell, and the clock alone does not either: a run that slept for longer than the timeout may
        have been replaced meanwhile. A newer run claims the flow in the store as soon as it has fenced this one.
        """
        try:
            yield
        except ProducerFenced as error:
            is_expired = isinstance(error, TransactionExpired)
            is_over_time = is_expired or self._clock.monotonic_s() - self._began_s > self._timeout_s
            if is_over_time and await self._is_newest_run():
                if is_expired:
                    raise
                raise TransactionExpired(
                    f"the transaction was open for longer than its timeout of {self._timeout_s:g} s, and no other run "
                    f"has taken over: {error}"
                ) from error
            raise ProducerFenced(
                f"another run of the flow has taken over, so this one must end: {error}"
            ) from error

    async def close(self) -> None:
        """Take back what is not committed, and let go."""
        for writer in self._writers:
            writer.let_go()
        if self._transactions is not None:
            transactions, self._transactions = self._transactions, None
            await transactions.close()

    @property
    def _opened(self) -> Transactions:
        assert self._transactions is not None
        return self._transactions
