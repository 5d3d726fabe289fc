"""The commit of a checkpoint: one transaction for all transactional sinks of a job.

Records in transactional outputs become visible when the checkpoint that they belong to is committed. All sinks in one
*commit domain* (for example one Kafka cluster) write into one transaction, :class:`JobTransaction`. With the outputs it
commits a :class:`CommitRecord`, which names the checkpoint; after a crash, that record says what is committed. From its
barrier on, a sink's :class:`TransactionalWriter` holds new records back, until the checkpoint
is committed and the next transaction has begun. :func:`snapshot_in_memory` is a snapshot without a store.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import tempfile
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Final, NoReturn, final

import msgspec

from streamiter.engine.checkpointing.committed import SourcePositions, id_of
from streamiter.engine.storage.disk_queue import SpillQueue
from streamiter.engine.storage.snapshot import CheckpointId
from streamiter.engine.tasks.task import Task
from streamiter.engine.tasks.task_barriers import SERVICE, STEP, PartName, TakenParts, held_in_memory, task_state
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
from streamiter.topics.compacted import ensure_commit_topic, last_value
from streamiter.topics.source_and_sink import Outputs, TopicSink
from streamiter.topics.topic import OutgoingBatch, Topic, TopicRecord, TopicWriter, Transactions
from streamiter.values.deferred import PlainValue
from streamiter.values.helpers.clock import Clock
from streamiter.values.helpers.closing import close_all
from streamiter.values.plain_data import PlainData
from streamiter.values.records import DataBatch


@dataclass(frozen=True, slots=True)
class CommitRecord:
    """The last commit of a flow: the record that is committed in the same transaction as the outputs.

    >>> record = CommitRecord("clicks", CheckpointId(7, "a1"))
    >>> record.outgoing().values
    [b'{"flow":"clicks","checkpoint":{"number":7,"run":"a1"}}']
    """

    flow: str
    """The name of the flow."""
    checkpoint: CheckpointId | None
    """The committed checkpoint; None if a run has started without one and has not committed any."""

    def outgoing(self) -> OutgoingBatch:
        """Return the record for its topic; its key is the name of the flow."""
        return OutgoingBatch(values=[msgspec.json.encode(self)], keys=[self.flow.encode()])

    @classmethod
    def read(cls, record: TopicRecord, where: str) -> CommitRecord:
        """Return the commit record that ``outgoing`` made. Raises CheckpointError for another record."""
        try:
            return msgspec.json.decode(record.value or b"", type=cls)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise CheckpointError(
                f"{where}, offset {record.offset}: expected a commit record, given {record.value!r}; something else "
                "writes to this topic; start without state with restore=None, or with the number of a checkpoint"
            ) from error


_log = logging.getLogger("streamiter.job")


def output_to_commit_with(flow: str, tasks: Sequence[Task]) -> Topic | None:
    """Return the output whose commit domain is used for the job; None if no output is transactional.

    It is the first transactional output in the flow; an output for dead letters only if there is no other. For each
    output that is written at least once, a message is logged.
    """
    instances = [instance for task in tasks for instance in task.instances]
    sinks = {each.step.name: each.operator for each in instances if isinstance(each.operator, TopicSink)}
    exactly_once = [sink for sink in sinks.values() if sink.is_transactional]
    # The sort is stable: otherwise the order of the flow.
    exactly_once.sort(key=lambda sink: sink.is_for_dead_letters)
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


@final
class JobTransaction(Outputs):
    """The job's one transaction: the records that its sinks write between two commits, and the commit record.

    Outputs in its commit domain become visible with a checkpoint; other outputs become visible immediately. Opening it
    fences older runs of the flow, so the last commit record does not change any more after that.
    """

    def __init__(
        self,
        flow: str,
        output: Topic,
        *,
        clock: Clock,
        timeout_s: float,
        plain_data: PlainData,
        is_newest_run: Callable[[], Awaitable[bool]],
        positions: SourcePositions | None = None,
    ) -> None:
        """``output`` is one of the outputs; ``is_newest_run`` returns whether no later run has claimed the flow.

        Of a job without state, the ``positions`` of the sources are committed in place of a commit record.
        """
        self.commit_domain = output.commit_domain
        self._flow = flow
        self._output = output
        self._clock = clock
        self._timeout_s = timeout_s
        self._plain_data = plain_data
        self._began_s = clock.monotonic_s()
        self._is_newest_run = is_newest_run
        self._positions = positions
        self._transactions: Transactions | None = None
        self._commits: Topic | None = None
        self._writers: list[TransactionalWriter] = []
        self._one_at_a_time = asyncio.Lock()
        self._seals = False

    # -- for sinks ---------------------------------------------------------------------------------------

    async def open_writer(self, topic: Topic, *, at_least_once: bool, step: str) -> TopicWriter:
        if at_least_once or topic.commit_domain != self.commit_domain:
            return await topic.open_writer()
        await topic.describe()  # A missing topic must be found now, not with the first record.
        writer = TransactionalWriter(topic, self._write, held_batches(step, self._plain_data), step=step)
        self._writers.append(writer)
        return writer

    async def barrier_passed(self, writer: TopicWriter) -> None:
        if not isinstance(writer, TransactionalWriter):
            await writer.flush()
        elif self._seals:
            writer.seal()

    async def _write(self, topic: Topic, batch: OutgoingBatch) -> None:
        async with self._one_at_a_time:
            try:
                await self._opened.write(topic, batch)
            except ProducerFenced as error:
                await self._raise_explained(error)

    # -- for the job -------------------------------------------------------------------------------------

    async def open(self) -> TopicRecord | None:
        """Fence older runs and begin a transaction; return the last commit record, None if there is none."""
        if self._positions is None:
            self._commits = await ensure_commit_topic(self._output)
        self._transactions = await self._output.open_transactions(id_of(self._flow), timeout_s=self._timeout_s)
        commits, key = self._commits, self._flow.encode()
        record = None if commits is None else await last_value(commits, key, clock=self._clock)
        # Raises if a newer run has started since: then this run must not claim the store.
        await self._begin()
        return record

    @property
    def commits_in(self) -> str:
        """The URL of the topic of commit records, or of an output if there are none."""
        return (self._commits or self._output).url

    async def begin_with(self, checkpoint: CheckpointId | None) -> None:
        """Commit a record of the checkpoint that the run starts from."""
        await self._commit(checkpoint, continues=True)

    async def _begin(self) -> None:
        self._began_s = self._clock.monotonic_s()
        await self._opened.begin()

    def checkpoint_begins(self) -> None:
        """From now on, each sink holds back the records behind its barrier."""
        self._seals = True

    async def commit(self, checkpoint: CheckpointId, *, continues: bool) -> None:
        """Commit the records before the barriers; if the job ``continues``, write the records that were held back.

        After StorageFull nothing is committed. The transaction stays open, and this commit record is in it; the record
        of the checkpoint that is committed later follows it, and counts.
        """
        await self._commit(checkpoint, continues=continues)
        if continues:
            await self.checkpoint_over()

    async def _commit(self, checkpoint: CheckpointId | None, *, continues: bool) -> None:
        async with self._one_at_a_time:
            try:
                if self._positions is not None:
                    await self._positions.write_into(self._opened, self.commit_domain)
                elif self._commits is not None:
                    await self._opened.write(self._commits, CommitRecord(self._flow, checkpoint).outgoing())
                await self._opened.commit()
                if continues:
                    try:
                        await self._begin()
                    except StorageFull as error:  # A StorageFull would mean that nothing is committed.
                        raise TopicError(f"the next transaction cannot begin: {error}") from error
            except ProducerFenced as error:
                await self._raise_explained(error)

    async def checkpoint_over(self) -> None:
        """The checkpoint is committed or given up: write the records that were held back into the open transaction."""
        self._seals = False
        for writer in self._writers:
            await writer.unseal()

    async def _raise_explained(self, error: ProducerFenced) -> NoReturn:
        """Raise ``TransactionExpired`` instead of ``ProducerFenced`` if no newer run has fenced this one.

        A server reports a transaction that was open for too long like a newer run; after the former, the job may be
        restarted. The clock alone cannot tell: a run that slept for longer than the timeout may have been replaced. A
        newer run claims the flow in the store as soon as it has fenced this one.
        """
        is_expired = isinstance(error, TransactionExpired)
        is_over_time = is_expired or self._clock.monotonic_s() - self._began_s > self._timeout_s
        if is_over_time and await self._is_newest_run():
            if is_expired:
                raise error
            raise TransactionExpired(
                f"the transaction was open for longer than its timeout of {self._timeout_s:g} s, and no other run "
                f"has taken over: {error}"
            ) from error
        raise ProducerFenced(f"another run of the flow has taken over, so this one must end: {error}") from error

    def unanswered_since_s(self) -> float | None:
        return None if self._transactions is None else self._transactions.unanswered_since_s()

    async def close(self) -> None:
        """Abort the open transaction, and drop the records that are held back."""
        transactions, self._transactions = self._transactions, None
        closing: list[Callable[[], object]] = [] if transactions is None else [transactions.close]
        await close_all([*closing, *(writer.drop for writer in self._writers)])

    @property
    def _opened(self) -> Transactions:
        assert self._transactions is not None
        return self._transactions


# A fast sink fills it in some hundred milliseconds, the time of most checkpoints.
_MEMORY_BYTES: Final = 32 << 20

# A fast sink fills it in a minute, the time after which a checkpoint is given up.
_DISK_BYTES: Final = 8 << 30


def held_batches(
    step: str, plain_data: PlainData, *, memory_limit_bytes: int = _MEMORY_BYTES, disk_limit_bytes: int = _DISK_BYTES
) -> SpillQueue:
    """Return a queue for the batches that one sink subtask holds back between its barrier and the commit."""
    return SpillQueue(
        name=f"outputs of {step}",
        plain_data=plain_data,
        memory_limit_bytes=memory_limit_bytes,
        disk_limit_bytes=disk_limit_bytes,
        directory=tempfile.gettempdir(),
    )


Write = Callable[[Topic, OutgoingBatch], Awaitable[None]]


class _Seal(Enum):
    """Whether a writer holds records back."""

    OPEN = "open"
    """It writes into the open transaction."""
    SEALED = "sealed"
    """Its barrier has passed: it holds records back."""
    DRAINING = "draining"
    """The next transaction is open: it writes the held batches, and waits with others. Otherwise a fast sink would
    never end this."""


@final
class TransactionalWriter(TopicWriter):
    """A sink's writer whose records become visible with the checkpoint they belong to.

    It writes into the open transaction. From a barrier until the commit, it holds its records back: in memory, then on
    disk. It must not wait, because behind a loop the barrier returns only after all feedback before it has passed the
    body, and the output of the body comes here. It waits only at the disk limit; the checkpoint of a loop is given up
    then.
    """

    def __init__(self, topic: Topic, write: Write, held: SpillQueue, *, step: str) -> None:
        self._topic = topic
        self._step = step
        self._write = write
        self._held = held
        self._seal = _Seal.OPEN
        self._changed = asyncio.Event()

    async def write(self, batch: OutgoingBatch) -> None:
        while self._seal is not _Seal.OPEN:
            if self._seal is _Seal.SEALED:
                with contextlib.suppress(LoopOverflow, StorageFull):
                    self._held.put(DataBatch([batch.plain()]))
                    return
            self._changed.clear()
            await self._changed.wait()
        await self._write(self._topic, batch)

    async def flush(self) -> None:
        """Do nothing: records are stored, and become visible, with the commit."""

    async def close(self) -> None:
        """Do nothing: the held batches belong to the job, which writes or drops them."""

    def seal(self) -> None:
        """The barrier has passed: hold back the records of the next transaction."""
        self._seal = _Seal.SEALED

    async def unseal(self) -> None:
        """The next transaction is open: write the held batches into it, in order, and stop holding back.

        A batch that cannot be written is a failure of the sink, as without a barrier. It may be in the transaction
        nevertheless, so it must not be written again.
        """
        self._seal = _Seal.DRAINING
        while len(self._held):
            item = self._held.peek()
            assert isinstance(item, DataBatch)
            try:
                await self._write(self._topic, OutgoingBatch(*item.records[0]))
            except StreamiterError as error:
                raise RecordFailure(self._step) from error
            self._held.take()
        self._seal = _Seal.OPEN
        self._changed.set()

    def drop(self) -> None:
        self._held.close()


JobSnapshot = dict[str, PlainValue]
"""The states of tasks and parameter servers by name, as plain data."""


def snapshot_in_memory(taken: TakenParts, plain_data: PlainData) -> JobSnapshot:
    """Return the snapshot of a running job in memory, for ``job.snapshot()`` and ``flow.start(snapshot=…)``.

    It is independent of the tasks. Deferred pieces are read and released.
    """
    snapshot: JobSnapshot = {}
    for task, parts in taken.items():
        states: dict[str, PlainValue] = {}
        for part in parts:
            # As lists: several jobs may start from one snapshot, so it is read more than once.
            pieces = [list(map(plain_data.decode, held_in_memory(deferred))) for deferred in part.deferred]
            states[part.name] = plain_data.decode_state(part.content, pieces.__getitem__)
        if (name := PartName.of(next(iter(states)))).kind == SERVICE:
            snapshot[task] = [states[str(name)]]
            continue
        steps = [name.step for name in map(PartName.of, states) if name.kind == STEP]
        head, _, subtask = task.removesuffix("]").rpartition("[")
        snapshot[task] = task_state(head, int(subtask), steps, states)
    return snapshot
