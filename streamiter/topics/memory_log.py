"""What topics in memory hold: partitions, their logs, and transactions."""

from __future__ import annotations

import asyncio
import bisect
import contextlib
import threading
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, Final, Protocol

from streamiter.clock import Clock, TimerHandle
from streamiter.errors import (
    ConfigurationError,
    ProducerFenced,
    TopicError,
    TopicNotFound,
    TransactionExpired,
)
from streamiter.numbers import whole_number_in
from streamiter.topics.compacted import COMPACTED_BLOCKS, is_superseded
from streamiter.topics.topic import OutgoingBatch, PartitionEnds, Topic, TopicBatch, Transactions
from streamiter.topics.topic_sink import check_outgoing, check_record_sizes, spread

__all__ = [
    "MemoryTopics",
    "MemoryTransactions",
    "TopicLog",
    "append",
    "check_not_deleted",
    "joined",
]


class Waiters:
    """Readers that wait for something to change; woken from any thread and any event loop.

    Waking those who wait for something in a topic to change.
    """

    def __init__(self) -> None:
        self._futures: list[asyncio.Future[None]] = []

    def add(self) -> asyncio.Future[None]:
        """A future of the running loop that the next ``wake`` resolves."""
        future = asyncio.get_running_loop().create_future()
        self._futures.append(future)
        return future

    def discard(self, future: asyncio.Future[None]) -> None:
        """Forget a future nobody waits for any more."""
        with contextlib.suppress(ValueError):
            self._futures.remove(future)

    def wake(self) -> None:
        """Resolve all futures, each in its own loop."""
        futures, self._futures = self._futures, []
        for future in futures:
            with contextlib.suppress(RuntimeError):  # its loop is closed: nobody waits there any more
                future.get_loop().call_soon_threadsafe(_resolve, future)


def _resolve(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)


_SETTINGS: Final = ("compact", "max_record_bytes", "retention_records")


class Fenceable(Protocol):
    """An owner of a transactional id.

    All topics that live together: what a server would hold.
    """

    def fence(self, reason: ProducerFenced) -> None:
        """Abort what is open and refuse all further calls; the store's lock is held."""


class MemoryTopics:
    """Topics by name, and who owns the transactional ids. ``lock`` is held around every look at a topic."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        # One lock for everything: each call under it is short, and a commit is seen in all topics at once.
        self.lock = threading.Lock()
        self._logs: dict[str, TopicLog] = {}
        self._creations: Counter[str] = Counter()
        self._owners: dict[str, Fenceable] = {}

    @property
    def commit_domain(self) -> str:
        """Another store is another domain."""
        return f"memory:{id(self)}"

    def topic_names(self) -> list[str]:
        """The names of the topics there are, sorted."""
        with self.lock:
            return sorted(self._logs)

    def log(self, name: str) -> TopicLog:
        """The storage of a topic; the lock must be held."""
        log = self._logs.get(name)
        if log is None:
            there_are = ", ".join(sorted(self._logs)) or "none"
            raise TopicNotFound(
                f"no topic {name!r} in memory; the topics there are: {there_are}. Create it with "
                f"`await topic.create(partitions=...)`"
            )
        return log

    def create(self, name: str, partitions: int, settings: Mapping[str, str]) -> None:
        """Create or widen a topic."""
        if partitions < 1:
            raise ConfigurationError(f"topic {name!r}: expected partitions >= 1, given {partitions}")
        checked = _checked_settings(name, settings)
        with self.lock:
            if name not in self._logs:
                self._creations[name] += 1
                self._logs[name] = TopicLog(name, checked, self._creations[name])
            self._logs[name].add_partitions(partitions)

    def delete(self, name: str) -> None:
        """Delete a topic; its readers and writers find it gone."""
        with self.lock:
            self.log(name).delete()
            del self._logs[name]

    def take_over(self, transactional_id: str, transactions: Fenceable) -> None:
        """Fence whoever held ``transactional_id``, and abort what they have open."""
        with self.lock:
            previous = self._owners.get(transactional_id)
            self._owners[transactional_id] = transactions
            if previous is not None:
                previous.fence(
                    ProducerFenced(f"a newer writer with the transactional id {transactional_id!r} took over")
                )


def _checked_settings(name: str, settings: Mapping[str, str]) -> dict[str, str]:
    for setting, value in settings.items():
        if setting not in _SETTINGS:
            raise ConfigurationError(
                f"topic {name!r}: expected settings out of {', '.join(_SETTINGS)}, given {setting!r}"
            )
        if whole_number_in(str(value)) is None:
            raise ConfigurationError(f"topic {name!r}: expected {setting} as a whole number, given {value!r}")
    return {setting: str(value) for setting, value in settings.items()}


class TopicLog:
    """One topic: its partitions, its settings, and who waits for its records.

    One topic in memory. The broker's lock is held around every call.
    """

    def __init__(self, name: str, settings: Mapping[str, str], creation: int) -> None:
        """``creation`` counts how often a topic of this name was created."""
        self.name = name
        self._creation = creation
        self.settings = dict(settings)
        self.partitions: list[PartitionLog] = []
        self.waiters = Waiters()
        self.is_deleted = False

    @property
    def identities(self) -> dict[int, str]:
        """What tells the topic from those of its name that were deleted, by partition.

        In another process the count begins again: a flow that is tested there may go on with topics that were
        filled in the same way.
        """
        return dict.fromkeys(range(len(self.partitions)), f"creation {self._creation}")

    def add_partitions(self, partitions: int) -> None:
        """Grow to that many partitions; never shrinks."""
        while len(self.partitions) < partitions:
            self.partitions.append(PartitionLog())
        self.waiters.wake()

    def delete(self) -> None:
        """Drop the records and wake the readers, who find that it is gone."""
        self.is_deleted = True
        self.partitions.clear()
        self.waiters.wake()

    def retain(self) -> None:
        """Apply the retention and compaction that the settings ask for."""
        if "retention_records" in self.settings:
            for partition in self.partitions:
                partition.retain(int(self.settings["retention_records"]))
        if int(self.settings.get("compact", "0")):
            for partition in self.partitions:
                partition.compact()


def append(
    log: TopicLog,
    batch: OutgoingBatch,
    now_ms: int,
    *,
    unkeyed: int,
    transaction: Transaction | None = None,
) -> None:
    """Check ``batch`` and write it all, or nothing; the broker's lock must be held."""
    check_not_deleted(log)
    partitions = len(log.partitions)
    check_outgoing(batch, topic=log.name, partitions=partitions)
    if "max_record_bytes" in log.settings:
        check_record_sizes(batch, int(log.settings["max_record_bytes"]), topic=log.name)
    for number, part in spread(batch, partitions, unkeyed=unkeyed % partitions):
        timestamps_ms = part.timestamps_ms if part.timestamps_ms is not None else [now_ms] * len(part)
        log.partitions[number].append(part, timestamps_ms, transaction)


def check_not_deleted(log: TopicLog) -> None:
    """Raise ``TopicNotFound`` for a topic that was deleted while it was open."""
    if log.is_deleted:
        raise TopicNotFound(f"topic {log.name!r} was deleted while it was written")


class Transaction:
    """Whether the records that point to it may be seen."""

    __slots__ = ("is_aborted",)

    def __init__(self) -> None:
        self.is_aborted = False


@dataclass(frozen=True, slots=True)
class LogSegment:
    """Records of consecutive offsets, written together; also a slice of them."""

    offsets: range
    values: Sequence[bytes | None]
    timestamps_ms: Sequence[int]
    keys: Sequence[bytes | None] | None
    headers: Sequence[Any] | None
    transaction: Transaction | None = None

    def between(self, start: int, stop: int) -> LogSegment:
        """The records of the offsets ``start`` to ``stop`` (half-open) as far as they are here."""
        which = slice(max(0, start - self.offsets.start), max(0, stop - self.offsets.start))
        return LogSegment(
            self.offsets[which],
            self.values[which],
            self.timestamps_ms[which],
            None if self.keys is None else self.keys[which],
            None if self.headers is None else self.headers[which],
        )


class PartitionLog:
    """One partition: append at the end, read anywhere, drop at the front.

    As in Kafka, the end of a transaction takes one offset of each partition it wrote to, so that
    offsets have gaps and readers meet them in tests.

    One partition in memory: records in offset order, and the transactions they belong to.

    Nothing here waits or does I/O. The broker's lock is held around every call.

    >>> log = PartitionLog()
    >>> transaction = Transaction()
    >>> log.append(OutgoingBatch([b"a", b"b"]), [1, 1])
    >>> log.append(OutgoingBatch([b"c"]), [2], transaction)
    >>> [(part.offsets, part.values) for part in log.read(0, log.stable_offset, 10)[0]]
    [(range(0, 2), [b'a', b'b'])]
    >>> log.end_transaction(transaction, committed=True)
    >>> [part.values for part in log.read(2, log.stable_offset, 10)[0]]
    [[b'c']]
    """

    def __init__(self) -> None:
        self.start_offset = 0
        self.end_offset = 0
        self._parts: list[LogSegment] = []
        self._open: dict[Transaction, int] = {}  # its first offset here; the oldest transaction first

    @property
    def stable_offset(self) -> int:
        """Where the records begin that are not decided yet; the end when there are none."""
        return next(iter(self._open.values()), self.end_offset)

    @property
    def ends(self) -> PartitionEnds:
        """The earliest, the last stable and the end offset."""
        return PartitionEnds(self.start_offset, self.stable_offset, self.end_offset)

    def append(
        self, batch: OutgoingBatch, timestamps_ms: Sequence[int], transaction: Transaction | None = None
    ) -> None:
        """Write ``batch`` at the end, within ``transaction`` if there is one."""
        if not len(batch):
            return
        if transaction is not None:
            self._open.setdefault(transaction, self.end_offset)
        offsets = range(self.end_offset, self.end_offset + len(batch))
        # Lists are copied: the caller may go on using its own.
        self._parts.append(
            LogSegment(
                offsets,
                list(batch.values),
                list(timestamps_ms),
                None if batch.keys is None else list(batch.keys),
                None if batch.headers is None else list(batch.headers),
                transaction,
            )
        )
        self.end_offset = offsets.stop

    def end_transaction(self, transaction: Transaction, *, committed: bool) -> None:
        """Decide the records of ``transaction``; its end takes one offset."""
        if self._open.pop(transaction, None) is None:
            return
        transaction.is_aborted = not committed
        self.end_offset += 1

    def read(self, position: int, limit: int, max_records: int) -> tuple[list[LogSegment], int]:
        """Visible records from ``position``, at most ``max_records`` and before ``limit``, and where to
        read on: behind what can never be seen.
        """
        taken: list[LogSegment] = []
        room = max_records
        for index in range(self._index_of(position), len(self._parts)):
            part = self._parts[index]
            if part.offsets.start >= limit:
                break
            if part.transaction is not None and part.transaction.is_aborted:
                continue
            first = max(position, part.offsets.start)
            taken.append(part.between(first, min(limit, first + room)))
            position = taken[-1].offsets.stop
            room -= len(taken[-1].offsets)
            if room == 0:
                return taken, position
        return taken, max(position, limit)

    def offset_at(self, timestamp_ms: int) -> int:
        """The first offset whose record is of that time or later; the end when there is none."""
        for part in self._parts:
            for offset, timestamp in zip(part.offsets, part.timestamps_ms, strict=True):
                if timestamp >= timestamp_ms and offset >= self.start_offset:
                    return offset
        return self.stable_offset

    def retain(self, records: int) -> None:
        """Drop what lies before the last ``records`` offsets, but nothing that is not decided yet."""
        self.start_offset = max(self.start_offset, min(self.stable_offset, self.end_offset - records))
        del self._parts[: self._index_of(self.start_offset)]

    def compact(self) -> None:
        """Drop parts all of whose records have a newer one of their key, among the last parts.

        That is exact as long as these hold all keys: after it the topic has hardly more parts than keys.
        """
        first = max(0, len(self._parts) - COMPACTED_BLOCKS)
        superseded: set[bytes] = set()
        kept: list[LogSegment] = []
        for part in reversed(self._parts[first:]):
            if part.transaction in self._open:
                kept.append(part)  # may yet be aborted, and then supersedes nothing
            elif part.transaction is not None and part.transaction.is_aborted:
                continue
            elif not is_superseded(part.keys, superseded):
                kept.append(part)
                superseded.update(key for key in part.keys or () if key is not None)
        self._parts[first:] = reversed(kept)

    def _index_of(self, offset: int) -> int:
        """The first part that has ``offset`` or a later one."""
        return bisect.bisect_right(self._parts, offset, key=lambda part: part.offsets.stop)


def joined(partition: int, parts: Sequence[LogSegment]) -> TopicBatch:
    """One batch of all parts, which must not be empty."""
    if len(parts) == 1:
        [part] = parts
        return TopicBatch(
            partition=partition,
            values=part.values,
            offsets=part.offsets,
            timestamps_ms=part.timestamps_ms,
            keys=part.keys,
            headers=part.headers,
        )
    return TopicBatch(
        partition=partition,
        values=list(chain.from_iterable(part.values for part in parts)),
        offsets=list(chain.from_iterable(part.offsets for part in parts)),
        timestamps_ms=list(chain.from_iterable(part.timestamps_ms for part in parts)),
        keys=_joined_column([part.keys for part in parts], parts, None),
        headers=_joined_column([part.headers for part in parts], parts, ()),
    )


def _joined_column(
    columns: Sequence[Sequence[Any] | None], parts: Sequence[LogSegment], missing: object
) -> list[Any] | None:
    if all(column is None for column in columns):
        return None
    merged: list[Any] = []
    for column, part in zip(columns, parts, strict=True):
        merged.extend([missing] * len(part.offsets) if column is None else column)
    return merged


class MemoryTransactions(Transactions):
    """Transactions over all topics of one store.

    Records of several topics in memory that become visible together.
    """

    def __init__(self, store: MemoryTopics, transactional_id: str, timeout_s: float) -> None:
        self._store = store
        self._id = transactional_id
        self._timeout_s = timeout_s
        self._turn = 0
        self._transaction: Transaction | None = None
        self._logs: list[TopicLog] = []
        self._timer: TimerHandle | None = None
        self._fenced_because: ProducerFenced | None = None
        self._is_closed = False

    async def begin(self) -> None:
        with self._store.lock:
            self._check_usable()
            if self._transaction is not None:
                raise TopicError(f"transactions {self._id!r}: commit or abort the open one before begin()")
            self._transaction = Transaction()
        self._timer = self._store.clock.call_later(self._timeout_s, self._expire)

    async def write(self, topic: Topic, batch: OutgoingBatch) -> None:
        if topic.commit_domain != self._store.commit_domain:
            raise TopicError(
                f"transactions {self._id!r}: {topic.url} is of another commit domain; expected a topic of "
                "the same memory broker"
            )
        with self._store.lock:
            transaction = self._open_transaction()
            log = self._store.log(topic.name)
            append(log, batch, self._store.clock.now_ms(), unkeyed=self._turn, transaction=transaction)
            if log not in self._logs:
                self._logs.append(log)
        self._turn += 1

    async def commit(self) -> None:
        with self._store.lock:
            self._open_transaction()
            for log in self._logs:
                check_not_deleted(log)
            self._end(committed=True)

    async def abort(self) -> None:
        with self._store.lock:
            self._open_transaction()
            self._end(committed=False)

    async def close(self) -> None:
        with self._store.lock:
            if self._transaction is not None:
                self._end(committed=False)
            self._is_closed = True

    def fence(self, reason: ProducerFenced) -> None:
        """Abort what is open and refuse all further calls; the store's lock must be held."""
        self._fenced_because = reason
        if self._transaction is not None:
            self._end(committed=False)

    def _expire(self) -> None:
        with self._store.lock:
            self.fence(
                TransactionExpired(
                    f"transaction of {self._id!r} aborted: it was open for over {self._timeout_s:g} s"
                )
            )

    def _check_usable(self) -> None:
        if self._is_closed:
            raise TopicError(f"transactions {self._id!r} are closed")
        if self._fenced_because is not None:
            raise self._fenced_because

    def _open_transaction(self) -> Transaction:
        self._check_usable()
        if self._transaction is None:
            raise TopicError(f"transactions {self._id!r}: none is open; call begin() first")
        return self._transaction

    def _end(self, *, committed: bool) -> None:
        transaction, self._transaction = self._transaction, None
        assert transaction is not None
        logs, self._logs = self._logs, []
        for log in logs:
            for partition in log.partitions:
                partition.end_transaction(transaction, committed=committed)
            log.retain()
        for log in logs:
            log.waiters.wake()
        if self._timer is not None:
            self._timer.cancel()
