"""The commit of a checkpoint: one transaction for all sinks, and what they hold until it is through."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import tempfile
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final, final

import orjson

from streamiter.checkpoints.disk_queue import SpillQueue
from streamiter.checkpoints.plain_data import PlainData
from streamiter.checkpoints.snapshot import CheckpointId
from streamiter.clock import Clock
from streamiter.errors import (
    CheckpointError,
    LoopOverflow,
    ProducerFenced,
    StorageFull,
    StreamiterError,
    TopicError,
    TransactionExpired,
)
from streamiter.operators.output import RecordFailure
from streamiter.records import DataBatch
from streamiter.runtime.checkpointing.barriers import TakenParts
from streamiter.runtime.checkpointing.task_parts import SERVICE, STEP, PartName, held_in_memory, task_state
from streamiter.runtime.task import Task
from streamiter.topics.compacted import ensure_commit_topic, last_value
from streamiter.topics.connecting import batch_bytes
from streamiter.topics.source_and_sink import Outputs, TopicSink
from streamiter.topics.topic import OutgoingBatch, Topic, TopicRecord, TopicWriter, Transactions

__all__ = [
    "CommitRecord",
    "HeldBatches",
    "JobSnapshot",
    "JobTransaction",
    "TransactionalWriter",
    "in_memory",
    "output_to_commit_with",
]


@dataclass(frozen=True, slots=True)
class CommitRecord:
    """The last commit of a flow.

    >>> record = CommitRecord("clicks", CheckpointId(7, "a1"))
    >>> record.outgoing().values
    [b'{"flow":"clicks","checkpoint":7,"run":"a1"}']

    The commit record: what says, in the same transaction as the outputs, which checkpoint they belong to.
    """

    flow: str
    checkpoint: CheckpointId | None
    """None where a run has begun anew and has not committed a checkpoint yet."""

    def outgoing(self) -> OutgoingBatch:
        """The record as it is written; its key is the flow's name."""
        checkpoint = self.checkpoint
        value = {
            "flow": self.flow,
            "checkpoint": None if checkpoint is None else checkpoint.number,
            "run": None if checkpoint is None else checkpoint.run,
        }
        return OutgoingBatch(values=[orjson.dumps(value)], keys=[self.flow.encode()])

    @classmethod
    def read(cls, record: TopicRecord, where: str) -> CommitRecord:
        """What ``outgoing`` wrote. Raises CheckpointError for anything else."""
        try:
            content = orjson.loads(record.value or b"")
            number, run = content["checkpoint"], content["run"]
            checkpoint = None if number is None else CheckpointId(int(number), str(run))
            return cls(str(content["flow"]), checkpoint)
        except (ValueError, TypeError, KeyError) as error:
            raise CheckpointError(
                f"{where}, offset {record.offset}: expected a commit record, given {record.value!r}; something else "
                "writes to this topic; start with restore=None to begin anew, or with the number of a checkpoint"
            ) from error


_log = logging.getLogger("streamiter.job")


def output_to_commit_with(flow: str, tasks: Sequence[Task]) -> Topic | None:
    """One of the outputs that are committed with checkpoints; None where there are none. Says which are not.

    The first in the flow decides where they are committed; dead letters only where there are no results to commit.

    Which outputs of a flow are committed together, and which are at least once.
    """
    sinks = dict(_sinks(tasks))
    exactly_once = [sink for sink in sinks.values() if sink.topic.has_transactions and not sink.at_least_once]
    exactly_once.sort(key=lambda sink: sink.is_for_dead_letters)  # Stable: else in the order of the flow.
    chosen = exactly_once[0].topic if exactly_once else None
    for step, sink in sinks.items():
        if sink.at_least_once:
            _log.info("flow %r, step %r: delivers at least once, as its delivery= says", flow, step)
        elif chosen is None or sink.topic.commit_domain != chosen.commit_domain:
            _log.warning(
                "flow %r, step %r: delivers at least once to %s: after a restart some records may come twice, "
                'since %s; delivery="at_least_once" says that this is meant',
                flow,
                step,
                sink.topic.url,
                "it has no transactions"
                if chosen is None or not sink.topic.has_transactions
                else f"the flow commits its outputs to {chosen.commit_domain}, and one transaction cannot span both",
            )
    return chosen


def _sinks(tasks: Sequence[Task]) -> Iterator[tuple[str, TopicSink]]:
    for task in tasks:
        for instance in task.instances:
            if isinstance(instance.operator, TopicSink):
                yield instance.step.name, instance.operator


@final
class JobTransaction(Outputs):
    """Outputs in one commit domain become visible with a checkpoint; those elsewhere at once.

    Opening it fences older runs of the flow: only then does the last commit record say something that lasts.

    The job's one transaction: what its sinks write between two commits, and the commit record.
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


# Some hundred milliseconds of a fast sink, as long as most checkpoints take.
_MEMORY_BYTES: Final = 32 << 20

# A minute of a fast sink, as long as a checkpoint may take before it is given up.
_DISK_BYTES: Final = 8 << 30


@final
class HeldBatches:
    """First in, first out. Of one sink subtask; to be closed.

    >>> held = HeldBatches("clicks", PlainData(), memory_limit_bytes=3)
    >>> [held.put(OutgoingBatch([value])) for value in (b"abc", b"on disk")]
    [True, True]
    >>> held.drop_first()
    >>> held.first()
    OutgoingBatch(values=[b'on disk'], keys=None, headers=None, timestamps_ms=None, partition=None)
    >>> held.close()

    What a sink holds between its barrier and the commit: in memory, then on disk.
    """

    def __init__(
        self,
        step: str,
        plain_data: PlainData,
        *,
        memory_limit_bytes: int = _MEMORY_BYTES,
        disk_limit_bytes: int = _DISK_BYTES,
    ) -> None:
        self._memory: deque[OutgoingBatch] = deque()
        self._bytes_in_memory = 0
        self._memory_limit_bytes = memory_limit_bytes
        # Behind all that is in memory; in its own memory it has but the batch that comes first.
        self._disk = SpillQueue(
            name=f"outputs of {step}",
            plain_data=plain_data,
            memory_limit_bytes=0,
            disk_limit_bytes=disk_limit_bytes,
            directory=tempfile.gettempdir(),
        )

    def put(self, batch: OutgoingBatch) -> bool:
        """Whether there was room for it."""
        if not len(self._disk) and self._bytes_in_memory < self._memory_limit_bytes:
            self._memory.append(batch)
            self._bytes_in_memory += batch_bytes(batch)
            return True
        try:
            self._disk.put(DataBatch([_plain(batch)]))
        except (LoopOverflow, StorageFull):
            return False
        return True

    def first(self) -> OutgoingBatch | None:
        """What was put first, which stays."""
        if self._memory:
            return self._memory[0]
        if not len(self._disk):
            return None
        item = self._disk.peek()
        assert isinstance(item, DataBatch)
        return OutgoingBatch(*item.records[0])

    def drop_first(self) -> None:
        """It is written."""
        if self._memory:
            self._bytes_in_memory -= batch_bytes(self._memory.popleft())
        else:
            self._disk.take()

    def close(self) -> None:
        """Drop everything. May be called more than once."""
        self._memory.clear()
        self._disk.close()


def _plain(batch: OutgoingBatch) -> tuple[object, ...]:
    columns = (batch.values, batch.keys, batch.headers, batch.timestamps_ms)
    return *(None if column is None else list(column) for column in columns), batch.partition


Write = Callable[[Topic, OutgoingBatch], Awaitable[None]]


@final
class TransactionalWriter(TopicWriter):
    """Writes into the open transaction; behind a barrier it holds what it is given until that is committed.

    What it holds goes on on disk when memory is used up, since it must not wait: behind a loop, the barrier comes back
    only when all feedback before it has passed the body, and what the body emits comes here. Only when the disk
    limit is reached, too, does it wait; the checkpoint of a loop is then given up.

    A sink's writer whose records become visible with the checkpoint they belong to.
    """

    def __init__(self, topic: Topic, write: Write, held: HeldBatches, *, step: str) -> None:
        self._topic = topic
        self._step = step
        self._write = write
        self._held = held
        self._is_sealed = False
        self._is_draining = False
        self._changed = asyncio.Event()

    async def write(self, batch: OutgoingBatch) -> None:
        # While what is held is written, nothing is added to it: a fast sink would never let it end.
        while self._is_draining or (self._is_sealed and not self._held.put(batch)):
            self._changed.clear()
            await self._changed.wait()
        if not self._is_sealed:
            await self._write(self._topic, batch)

    async def flush(self) -> None:
        """Nothing to wait for: records are stored, and seen, with the commit."""

    async def close(self) -> None:
        """Nothing to let go of: what is held belongs to the job, which writes it or takes it back."""

    def seal(self) -> None:
        """The barrier has passed: what comes now belongs to the next transaction."""
        self._is_sealed = True

    async def unseal(self) -> None:
        """A transaction is open that what is held belongs to: write it there, in order, and go on.

        What cannot be written is a failure of the sink, as it would have been without a barrier: it may be part of the
        transaction nevertheless, so that nobody may write it again.
        """
        self._is_draining = True
        while (batch := self._held.first()) is not None:
            try:
                await self._write(self._topic, batch)
            except StreamiterError as error:
                raise RecordFailure(self._step) from error
            self._held.drop_first()
        self._is_sealed = self._is_draining = False
        self._changed.set()

    def let_go(self) -> None:
        """Drop what is held."""
        self._held.close()


JobSnapshot = dict[str, Any]
"""States of the tasks, and of parameter servers, by name: plain data."""


def in_memory(taken: TakenParts, plain_data: PlainData) -> JobSnapshot:
    """The states of all tasks, independent of those that gave them. Releases what is deferred.

    The snapshot of a running job in memory: what ``job.snapshot()`` gives and ``flow.start(snapshot=…)`` takes.
    """
    snapshot: JobSnapshot = {}
    for task, parts in taken.items():
        states: dict[str, Any] = {}
        for part in parts:
            # As lists, since one snapshot may be gone on from more than once.
            pieces = [list(map(plain_data.decode, held_in_memory(deferred))) for deferred in part.deferred]
            states[part.name] = plain_data.decode_state(part.content, pieces.__getitem__)
        if (name := PartName.of(next(iter(states)))).kind == SERVICE:
            snapshot[task] = states[str(name)]
            continue
        steps = [name.step for name in map(PartName.of, states) if name.kind == STEP]
        head, _, subtask = task.removesuffix("]").rpartition("[")
        snapshot[task] = task_state(head, int(subtask), steps, states)
    return snapshot
