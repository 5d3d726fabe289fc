"""What topics in memory hold: the topics of a broker, the log of each partition, and transactions.

`MemoryTopics` holds the topics by name, a `TopicLog` one topic, a `PartitionLog` the records of one partition. One lock
guards all of them; it is held around every call of a log. `MemoryTransactions` write to several topics at once.
"""

from __future__ import annotations

import asyncio
import bisect
import contextlib
import threading
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from streamiter.errors import ProducerFenced, TopicNotFound, TransactionExpired
from streamiter.topics.compacted import COMPACTED_BLOCKS, is_superseded
from streamiter.topics.connecting import (
    PartitionEnds,
    TransactionState,
    check_outgoing,
    check_partition_count,
    check_record_sizes,
    spread,
    whole_number_settings,
)
from streamiter.topics.topic import OutgoingBatch, Topic, TopicBatch, Transactions
from streamiter.values.helpers.clock import Clock, TimerHandle


class Waiters:
    """The readers that wait for a change of a topic. They are woken from any thread and any event loop."""

    def __init__(self) -> None:
        self._futures: list[asyncio.Future[None]] = []

    def add(self) -> asyncio.Future[None]:
        """Return a future of the running loop; the next ``wake`` resolves it."""
        future = asyncio.get_running_loop().create_future()
        self._futures.append(future)
        return future

    def discard(self, future: asyncio.Future[None]) -> None:
        """Forget a future that no reader awaits any more."""
        with contextlib.suppress(ValueError):
            self._futures.remove(future)

    def wake(self) -> None:
        """Resolve all futures, each in its own event loop."""
        futures, self._futures = self._futures, []
        for future in futures:
            with contextlib.suppress(RuntimeError):  # its event loop is closed, so no reader waits there
                future.get_loop().call_soon_threadsafe(_resolve, future)


def _resolve(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)


_SETTINGS: Final = ("compact", "max_record_bytes", "retention_records")


class MemoryTopics:
    """The topics of one broker by name, and the owner of each transactional id.

    ``lock`` is held around every access to a topic.
    """

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        # One lock for all topics: each call under it is short, and a commit is visible in all topics at once.
        self.lock = threading.Lock()
        self._logs: dict[str, TopicLog] = {}
        self._creations: Counter[str] = Counter()
        self._owners: dict[str, MemoryTransactions] = {}

    @property
    def commit_domain(self) -> str:
        """The commit domain: each broker has one of its own."""
        return f"memory:{id(self)}"

    def topic_names(self) -> list[str]:
        with self.lock:
            return sorted(self._logs)

    def log(self, name: str) -> TopicLog:
        """Return the log of a topic, or raise ``TopicNotFound``. The caller holds the lock."""
        log = self._logs.get(name)
        if log is None:
            there_are = ", ".join(sorted(self._logs)) or "none"
            raise TopicNotFound(
                f"no topic {name!r} in memory; the topics there are: {there_are}. Create it with "
                f"`await topic.create(partitions=...)`"
            )
        return log

    def create(self, name: str, partitions: int, settings: Mapping[str, str]) -> None:
        """Create a topic, or add the partitions that it lacks."""
        check_partition_count(name, partitions)
        checked = whole_number_settings(name, settings, _SETTINGS)
        with self.lock:
            if name not in self._logs:
                self._creations[name] += 1
                self._logs[name] = TopicLog(name, checked, self._creations[name])
            self._logs[name].add_partitions(partitions)

    def delete(self, name: str) -> None:
        """Delete a topic; its readers and writers raise ``TopicNotFound`` from then on."""
        with self.lock:
            self.log(name).delete()
            del self._logs[name]

    def take_over(self, transactional_id: str, transactions: MemoryTransactions) -> None:
        """Fence the owner of ``transactional_id`` and abort its open transaction."""
        with self.lock:
            previous = self._owners.get(transactional_id)
            self._owners[transactional_id] = transactions
            if previous is not None:
                previous.fence(
                    ProducerFenced(f"a newer writer with the transactional id {transactional_id!r} took over")
                )


class TopicLog:
    """One topic: its partitions, its settings, and the readers that wait for its records."""

    def __init__(self, name: str, settings: Mapping[str, int], creation: int) -> None:
        """``creation`` counts how often a topic of this name was created in this broker."""
        self.name = name
        self._creation = creation
        self.settings = dict(settings)
        self.partitions: list[PartitionLog] = []
        self.waiters = Waiters()
        self.is_deleted = False

    @property
    def identities(self) -> dict[int, str]:
        """A text for each partition. No other topic, and no deleted topic of the same name, has an equal text.

        The count starts again in another process: a flow under test may resume there with topics that were filled in
        the same way.
        """
        return dict.fromkeys(range(len(self.partitions)), f"{self.name}, creation {self._creation}")

    def add_partitions(self, partitions: int) -> None:
        """Add partitions until the topic has this number of them; never remove one."""
        while len(self.partitions) < partitions:
            self.partitions.append(PartitionLog(len(self.partitions)))
        self.waiters.wake()

    def delete(self) -> None:
        """Drop the records and wake the readers, which then raise ``TopicNotFound``."""
        self.is_deleted = True
        self.partitions.clear()
        self.waiters.wake()

    def retain(self) -> None:
        """Apply the retention and the compaction of the settings."""
        if "retention_records" in self.settings:
            for partition in self.partitions:
                partition.retain(self.settings["retention_records"])
        if self.settings.get("compact"):
            for partition in self.partitions:
                partition.compact()


def append(
    log: TopicLog, batch: OutgoingBatch, now_ms: int, *, unkeyed: int, transaction: Transaction | None = None
) -> None:
    """Check ``batch`` and write all of it, or nothing. The caller holds the lock."""
    check_not_deleted(log)
    partitions = len(log.partitions)
    check_outgoing(batch, topic=log.name, partitions=partitions)
    if "max_record_bytes" in log.settings:
        check_record_sizes(batch, log.settings["max_record_bytes"], topic=log.name)
    for number, part in spread(batch, partitions, unkeyed=unkeyed % partitions):
        timestamps_ms = part.timestamps_ms if part.timestamps_ms is not None else [now_ms] * len(part)
        log.partitions[number].append(part, timestamps_ms, transaction)


def check_not_deleted(log: TopicLog) -> None:
    """Raise ``TopicNotFound`` for a topic that was deleted while a writer had it open."""
    if log.is_deleted:
        raise TopicNotFound(f"topic {log.name!r} was deleted while it was written")


@dataclass(slots=True, eq=False)
class Transaction:
    """The state of a transaction. Records that refer to an aborted transaction are invisible."""

    is_aborted: bool = False


@dataclass(frozen=True, slots=True)
class LogSegment:
    """Records of consecutive offsets that were written together."""

    offsets: range
    records: TopicBatch
    transaction: Transaction | None = None

    def between(self, start: int, stop: int) -> TopicBatch:
        """Return the records of the offsets ``start`` to ``stop`` (half-open), as far as the segment has them."""
        return self.records[max(0, start - self.offsets.start) : max(0, stop - self.offsets.start)]


class PartitionLog:
    """The records of one partition in offset order, and the transactions that they belong to.

    As in Kafka, the end of a transaction takes one offset of each partition that it wrote to. So offsets have gaps, and
    tests with topics in memory cover them.

    >>> log = PartitionLog(0)
    >>> transaction = Transaction()
    >>> log.append(OutgoingBatch([b"a", b"b"]), [1, 1])
    >>> log.append(OutgoingBatch([b"c"]), [2], transaction)
    >>> [(part.offsets, part.values) for part in log.read(0, log.stable_offset, 10)[0]]
    [(range(0, 2), [b'a', b'b'])]
    >>> log.end_transaction(transaction, committed=True)
    >>> [part.values for part in log.read(2, log.stable_offset, 10)[0]]
    [[b'c']]
    """

    def __init__(self, number: int) -> None:
        self._number = number
        self.start_offset = 0
        self.end_offset = 0
        self._parts: list[LogSegment] = []
        self._open: dict[Transaction, int] = {}  # the first offset of each open transaction, the oldest first

    @property
    def stable_offset(self) -> int:
        """The first offset of the oldest open transaction; the end if no transaction is open."""
        return next(iter(self._open.values()), self.end_offset)

    @property
    def ends(self) -> PartitionEnds:
        """The earliest offset, the last stable offset and the end."""
        return PartitionEnds(self.start_offset, self.stable_offset, self.end_offset)

    def append(
        self, batch: OutgoingBatch, timestamps_ms: Sequence[int], transaction: Transaction | None = None
    ) -> None:
        """Append ``batch``, as part of ``transaction`` if one is given."""
        if not len(batch):
            return
        if transaction is not None:
            self._open.setdefault(transaction, self.end_offset)
        offsets = range(self.end_offset, self.end_offset + len(batch))
        # Copies, because the caller may reuse its lists.
        records = TopicBatch(
            partition=self._number,
            values=list(batch.values),
            offsets=offsets,
            timestamps_ms=list(timestamps_ms),
            keys=None if batch.keys is None else list(batch.keys),
            headers=None if batch.headers is None else list(batch.headers),
        )
        self._parts.append(LogSegment(offsets, records, transaction))
        self.end_offset = offsets.stop

    def end_transaction(self, transaction: Transaction, *, committed: bool) -> None:
        """Make the records of ``transaction`` visible, or drop them from view; its end takes one offset."""
        if self._open.pop(transaction, None) is None:
            return
        transaction.is_aborted = not committed
        self.end_offset += 1

    def read(self, position: int, limit: int, max_records: int) -> tuple[list[TopicBatch], int]:
        """Return the visible records from ``position`` on, before ``limit`` and at most ``max_records``.

        The second result is the offset to read next; records before it that were not returned are never visible.
        """
        taken: list[TopicBatch] = []
        room = max_records
        for index in range(self._index_of(position), len(self._parts)):
            part = self._parts[index]
            if part.offsets.start >= limit:
                break
            if part.transaction is not None and part.transaction.is_aborted:
                continue
            first = max(position, part.offsets.start)
            taken.append(part.between(first, min(limit, first + room)))
            position = taken[-1].next_offset
            room -= len(taken[-1])
            if room == 0:
                return taken, position
        return taken, max(position, limit)

    def offset_at(self, timestamp_ms: int) -> int:
        """Return the offset of the first record of that time or later; otherwise the last stable offset."""
        for part in self._parts:
            for offset, timestamp in zip(part.offsets, part.records.timestamps_ms, strict=True):
                if timestamp >= timestamp_ms and offset >= self.start_offset:
                    return offset
        return self.stable_offset

    def retain(self, records: int) -> None:
        """Drop the records before the last ``records`` offsets, but no record of an open transaction."""
        self.start_offset = max(self.start_offset, min(self.stable_offset, self.end_offset - records))
        del self._parts[: self._index_of(self.start_offset)]

    def compact(self) -> None:
        """Drop each of the last segments if every record of it has a newer record with its key.

        This is exact while the last segments hold all keys: afterwards the topic has hardly more segments than keys.
        """
        first = max(0, len(self._parts) - COMPACTED_BLOCKS)
        superseded: set[bytes] = set()
        kept: list[LogSegment] = []
        for part in reversed(self._parts[first:]):
            if part.transaction in self._open:
                kept.append(part)  # it may be aborted later; then it supersedes no record
            elif part.transaction is not None and part.transaction.is_aborted:
                continue
            elif not is_superseded(part.records.keys, superseded):
                kept.append(part)
                superseded.update(key for key in part.records.keys if key is not None)
        self._parts[first:] = reversed(kept)

    def _index_of(self, offset: int) -> int:
        """Return the index of the first segment that has ``offset`` or a later one."""
        return bisect.bisect_right(self._parts, offset, key=lambda part: part.offsets.stop)


class MemoryTransactions(Transactions):
    """Transactions over all topics of one broker."""

    def __init__(self, store: MemoryTopics, transactional_id: str, timeout_s: float) -> None:
        self._store = store
        self._timeout_s = timeout_s
        self._turn = 0
        self._state = TransactionState(f"transactions {transactional_id!r}")
        self._transaction = Transaction()
        """The open transaction, or the last one."""
        self._logs: list[TopicLog] = []
        """The topics that the open transaction has written to."""
        self._timer: TimerHandle | None = None

    async def begin(self) -> None:
        with self._store.lock:
            self._state.begin()
            self._transaction = Transaction()
        self._timer = self._store.clock.call_later(self._timeout_s, self._expire)

    async def write(self, topic: Topic, batch: OutgoingBatch) -> None:
        self._state.check_topic(topic, self._store.commit_domain)
        with self._store.lock:
            self._state.check_open()
            log = self._store.log(topic.name)
            append(log, batch, self._store.clock.now_ms(), unkeyed=self._turn, transaction=self._transaction)
            if log not in self._logs:
                self._logs.append(log)
        self._turn += 1

    async def commit(self) -> None:
        with self._store.lock:
            self._state.check_open()
            for log in self._logs:
                check_not_deleted(log)
            self._end(committed=True)

    async def abort(self) -> None:
        with self._store.lock:
            self._state.check_open()
            self._end(committed=False)

    async def close(self) -> None:
        with self._store.lock:
            if self._state.is_open:
                self._end(committed=False)
            self._state.close()

    def fence(self, reason: ProducerFenced) -> None:
        """Abort the open transaction and refuse all further calls. The caller holds the lock of the topics."""
        if self._state.is_open:
            self._end(committed=False)
        self._state.fence(reason)

    def _expire(self) -> None:
        with self._store.lock:
            self.fence(
                TransactionExpired(
                    f"{self._state.subject}: the transaction was aborted: it was open for over {self._timeout_s:g} s"
                )
            )

    def _end(self, *, committed: bool) -> None:
        self._state.end()
        logs, self._logs = self._logs, []
        for log in logs:
            for partition in log.partitions:
                partition.end_transaction(self._transaction, committed=committed)
            log.retain()
        for log in logs:
            log.waiters.wake()
        if self._timer is not None:
            self._timer.cancel()
