"""Topics in memory, for tests and for trying things out: ``memory://clicks``.

They do what Kafka's do: partitions, transactions with fencing, reading committed records only, gaps in
the offsets where transactions end, retention. They are as durable as their process.

>>> import asyncio
>>> async def main():
...     topic = MemoryBroker().topic("clicks")
...     await topic.create(partitions=1)
...     writer = await topic.open_writer()
...     await writer.write(OutgoingBatch([b"a", b"b"]))
...     reader = await topic.open_reader(ReadRequest(stop="latest"))
...     print((await reader.read()).values, await reader.read())
>>> asyncio.run(main())
[b'a', b'b'] None
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Mapping
from typing import Final

from streamiter.clock import Clock, SystemClock, TimerHandle
from streamiter.errors import ConfigurationError, OffsetOutOfRange, ProducerFenced, TopicError, TopicNotFound
from streamiter.topics.memory_log import TopicLog, Transaction, joined
from streamiter.topics.outgoing import check_outgoing, check_record_sizes, spread
from streamiter.topics.positions import (
    check_named_partitions,
    check_request,
    first_position,
    out_of_range_message,
    partitions_of,
    stop_offsets,
)
from streamiter.topics.topic import (
    Connector,
    Decoder,
    OutgoingBatch,
    ReadRequest,
    Topic,
    TopicBatch,
    TopicDescription,
    TopicReader,
    TopicWriter,
    Transactions,
)

__all__ = ["MemoryBroker", "MemoryConnector", "MemoryTopic"]

_SETTINGS: Final = ("max_record_bytes", "retention_records")


class MemoryBroker:
    """Holds topics, as a server would: whoever has the same broker sees the same topics.

    May be used from several threads and event loops. ``clock`` gives the time stamps and the time after
    which an open transaction is aborted. Topics grow without limit unless they are created with
    ``settings={"retention_records": "100000"}``; ``max_record_bytes`` limits one record.
    """

    def __init__(self, *, clock: Clock | None = None) -> None:
        self.clock: Clock = clock if clock is not None else SystemClock()
        # One lock for everything: each call under it is short, and a commit is seen in all topics at once.
        self.lock = threading.Lock()
        self._logs: dict[str, TopicLog] = {}
        self._transactions: dict[str, MemoryTransactions] = {}

    def topic(self, name: str) -> MemoryTopic:
        """The topic of that name, which need not be there yet."""
        return MemoryTopic(self, name)

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
                self._logs[name] = TopicLog(name, checked)
            self._logs[name].add_partitions(partitions)

    def delete(self, name: str) -> None:
        """Delete a topic; its readers and writers find it gone."""
        with self.lock:
            self.log(name).delete()
            del self._logs[name]

    def take_over(self, transactional_id: str, transactions: MemoryTransactions) -> None:
        """Fence whoever held ``transactional_id``, and abort what they have open."""
        with self.lock:
            previous = self._transactions.get(transactional_id)
            self._transactions[transactional_id] = transactions
            if previous is not None:
                previous.fence(f"a newer writer with the transactional id {transactional_id!r} took over")


def _checked_settings(name: str, settings: Mapping[str, str]) -> dict[str, str]:
    for setting, value in settings.items():
        if setting not in _SETTINGS:
            raise ConfigurationError(
                f"topic {name!r}: expected settings out of {', '.join(_SETTINGS)}, given {setting!r}"
            )
        if not str(value).isdecimal():
            raise ConfigurationError(f"topic {name!r}: expected {setting} as a whole number, given {value!r}")
    return {setting: str(value) for setting, value in settings.items()}


class MemoryConnector(Connector):
    """Serves ``memory://name``.

    The process itself is the server of this scheme: all ``memory://`` topics of a process live in one
    broker, from their creation to the process's end. Tests that want their own use `MemoryBroker`.
    """

    def topic(self, url: str, options: Mapping[str, object]) -> MemoryTopic:
        _refuse_options(url, options)
        name = url.partition("://")[2].strip("/")
        if not name:
            raise ConfigurationError(f"topic {url!r}: expected a name, as in memory://clicks")
        return process_broker().topic(name)

    async def list_topics(self, url: str, options: Mapping[str, object]) -> list[str]:
        _refuse_options(url, options)
        return process_broker().topic_names()


@functools.cache
def process_broker() -> MemoryBroker:
    """The broker of all ``memory://`` URLs of this process."""
    return MemoryBroker()


def _refuse_options(url: str, options: Mapping[str, object]) -> None:
    if options:
        raise ConfigurationError(
            f"topic {url!r}: memory topics take no options, given {', '.join(sorted(options))}"
        )


class MemoryTopic(Topic):
    """A topic of a `MemoryBroker`. The ``memory://`` URL leads to it only in the process's own broker."""

    def __init__(self, broker: MemoryBroker, name: str) -> None:
        self._broker = broker
        self._name = name

    @property
    def url(self) -> str:
        return f"memory://{self._name}"

    @property
    def name(self) -> str:
        return self._name

    @property
    def broker(self) -> MemoryBroker:
        """The broker that holds it."""
        return self._broker

    @property
    def commit_domain(self) -> str:
        return f"memory:{id(self._broker)}"  # another broker is another domain

    def default_decoder(self) -> Decoder | None:
        return None

    async def open_reader(self, request: ReadRequest) -> MemoryReader:
        check_request(request, self._name)
        return MemoryReader(self._broker, self._name, request)

    async def open_writer(self) -> MemoryWriter:
        with self._broker.lock:
            return MemoryWriter(self._broker, self._broker.log(self._name))

    async def open_transactions(
        self, transactional_id: str, *, timeout_s: float = 60.0
    ) -> MemoryTransactions:
        transactions = MemoryTransactions(self._broker, transactional_id, timeout_s)
        self._broker.take_over(transactional_id, transactions)
        return transactions

    async def create(self, *, partitions: int = 1, settings: Mapping[str, str] | None = None) -> None:
        self._broker.create(self._name, partitions, settings or {})

    async def describe(self) -> TopicDescription:
        with self._broker.lock:
            log = self._broker.log(self._name)
            offsets = {
                number: (partition.start_offset, partition.end_offset)
                for number, partition in enumerate(log.partitions)
            }
            return TopicDescription(self._name, offsets, dict(log.settings))

    async def delete(self) -> None:
        self._broker.delete(self._name)

    def __repr__(self) -> str:
        return f"MemoryTopic({self._name!r})"


class MemoryReader(TopicReader):
    """Reads its share of a memory topic; waits without polling."""

    def __init__(self, broker: MemoryBroker, name: str, request: ReadRequest) -> None:
        self._broker = broker
        self._request = request
        self._is_closed = False
        with broker.lock:
            self._log = broker.log(name)
            check_named_partitions(request, len(self._log.partitions), topic=name)
            # The order of the partitions here is the order of their turns: who was served goes to the end.
            self._positions = {
                number: first_position(request, number, partition.ends, partition.offset_at, topic=name)
                for number in partitions_of(request, len(self._log.partitions))
                for partition in [self._log.partitions[number]]
            }
            stable = {number: self._log.partitions[number].stable_offset for number in self._positions}
            self._stops = stop_offsets(request, stable)

    async def read(self) -> TopicBatch | None:
        while True:
            with self._broker.lock:
                self._check_usable()
                batch = self._next_batch()
                if batch is not None or self._is_at_end():
                    return batch
                waiting = self._log.waiters.add()
            try:
                await waiting
            finally:
                with self._broker.lock:
                    self._log.waiters.discard(waiting)

    def lag(self) -> Mapping[int, int]:
        with self._broker.lock:
            partitions = self._log.partitions
            return {
                number: max(
                    0, self._limit(number, partitions[number].stable_offset) - self._positions[number]
                )
                for number in sorted(self._positions)
                if number < len(partitions)
            }

    async def close(self) -> None:
        with self._broker.lock:
            self._is_closed = True
            self._log.waiters.wake()

    def _check_usable(self) -> None:
        if self._is_closed:
            raise TopicError(f"reader of {self._log.name!r} is closed")
        if self._log.is_deleted:
            raise TopicNotFound(f"topic {self._log.name!r} was deleted while it was read")

    def _next_batch(self) -> TopicBatch | None:
        self._find_new_partitions()
        for number in list(self._positions):
            batch = self._batch_of(number)
            if batch is not None:
                return batch
        return None

    def _find_new_partitions(self) -> None:
        for number in partitions_of(self._request, len(self._log.partitions)):
            if number not in self._positions:
                self._positions[number] = self._log.partitions[number].start_offset

    def _batch_of(self, number: int) -> TopicBatch | None:
        partition, position = self._log.partitions[number], self._positions[number]
        limit = self._limit(number, partition.stable_offset)
        if position >= limit:
            return None
        if position < partition.start_offset:
            message = out_of_range_message(self._log.name, number, position, partition.ends)
            raise OffsetOutOfRange(message)
        parts, next_position = partition.read(position, limit, self._request.max_records)
        if parts:
            del self._positions[number]
        self._positions[number] = next_position
        return joined(number, parts) if parts else None

    def _limit(self, number: int, stable_offset: int) -> int:
        if self._stops is None:
            return stable_offset
        return min(stable_offset, self._stops.get(number, 0))

    def _is_at_end(self) -> bool:
        return self._stops is not None and all(
            position >= self._stops.get(number, 0) for number, position in self._positions.items()
        )


class MemoryWriter(TopicWriter):
    """Writes to a memory topic: what is handed over can be read at once."""

    def __init__(self, broker: MemoryBroker, log: TopicLog) -> None:
        self._broker = broker
        self._log = log
        self._turn = 0
        self._is_closed = False

    async def write(self, batch: OutgoingBatch) -> None:
        if self._is_closed:
            raise TopicError(f"writer of {self._log.name!r} is closed")
        with self._broker.lock:
            append(self._log, batch, self._broker.clock.now_ms(), unkeyed=self._turn)
            self._log.retain()
            self._log.waiters.wake()
        self._turn += 1

    async def flush(self) -> None:
        with self._broker.lock:
            check_not_deleted(self._log)

    async def close(self) -> None:
        self._is_closed = True


class MemoryTransactions(Transactions):
    """Transactions over all topics of one broker."""

    def __init__(self, broker: MemoryBroker, transactional_id: str, timeout_s: float) -> None:
        self._broker = broker
        self._id = transactional_id
        self._timeout_s = timeout_s
        self._turn = 0
        self._transaction: Transaction | None = None
        self._logs: list[TopicLog] = []
        self._timer: TimerHandle | None = None
        self._fenced_because: str | None = None

    async def begin(self) -> None:
        with self._broker.lock:
            self._check_not_fenced()
            if self._transaction is not None:
                raise TopicError(f"transactions {self._id!r}: commit or abort the open one before begin()")
            self._transaction = Transaction()
        self._timer = self._broker.clock.call_later(self._timeout_s, self._expire)

    async def write(self, topic: Topic, batch: OutgoingBatch) -> None:
        if not isinstance(topic, MemoryTopic) or topic.broker is not self._broker:
            raise TopicError(
                f"transactions {self._id!r}: {topic.url} is of another commit domain; expected a topic of "
                "the same memory broker"
            )
        with self._broker.lock:
            transaction = self._open_transaction()
            log = self._broker.log(topic.name)
            append(log, batch, self._broker.clock.now_ms(), unkeyed=self._turn, transaction=transaction)
            if log not in self._logs:
                self._logs.append(log)
        self._turn += 1

    async def commit(self) -> None:
        with self._broker.lock:
            self._open_transaction()
            for log in self._logs:
                check_not_deleted(log)
            self._end(committed=True)

    async def abort(self) -> None:
        with self._broker.lock:
            self._open_transaction()
            self._end(committed=False)

    async def close(self) -> None:
        with self._broker.lock:
            if self._transaction is not None:
                self._end(committed=False)
            if self._fenced_because is None:
                self._fenced_because = f"transactions {self._id!r} are closed"

    def fence(self, reason: str) -> None:
        """Abort what is open and refuse all further calls; the broker's lock must be held."""
        self._fenced_because = reason
        if self._transaction is not None:
            self._end(committed=False)

    def _expire(self) -> None:
        with self._broker.lock:
            self.fence(f"transaction of {self._id!r} aborted: it was open for over {self._timeout_s:g} s")

    def _check_not_fenced(self) -> None:
        if self._fenced_because is not None:
            raise ProducerFenced(self._fenced_because)

    def _open_transaction(self) -> Transaction:
        self._check_not_fenced()
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
