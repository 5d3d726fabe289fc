"""Topics in memory, for tests and small flows: the broker, the topic, its reader and its writer.

A broker holds topics as a server does. All ``memory://`` URLs of a process lead to one broker; a test that wants topics
of its own makes a `MemoryBroker`.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from types import MappingProxyType
from typing import ClassVar

from streamiter.errors import ConfigurationError, OffsetOutOfRange, TopicNotFound
from streamiter.topics.connecting import (
    check_request,
    closed_error,
    out_of_range_message,
    partitions_of,
    reading_positions,
)
from streamiter.topics.memory_log import MemoryTopics, MemoryTransactions, TopicLog, append, check_not_deleted
from streamiter.topics.topic import (
    Connector,
    OutgoingBatch,
    ReadRequest,
    SizeLimit,
    Topic,
    TopicBatch,
    TopicDescription,
    TopicReader,
    TopicWriter,
)
from streamiter.topics.urls import check_options, shown_url
from streamiter.values.helpers.clock import Clock, SystemClock


class MemoryBroker:
    """Holds topics as a server does: all users of one broker see the same topics.

    Several threads and event loops may use a broker. ``clock`` gives the time stamps, and the time after which an open
    transaction is aborted. A topic grows without limit unless it is created with a setting:
    ``{"retention_records": "100000"}`` keeps the last records; ``{"compact": "1"}`` keeps the last record of each key,
    for topics of few keys. ``max_record_bytes`` limits the size of one record.
    """

    def __init__(self, *, clock: Clock | None = None) -> None:
        self._store = MemoryTopics(clock if clock is not None else SystemClock())

    def topic(self, name: str) -> MemoryTopic:
        """Return the topic of that name, which need not exist yet."""
        return MemoryTopic(self._store, name)

    def topic_names(self) -> list[str]:
        """Return the names of the topics, sorted."""
        return self._store.topic_names()


class MemoryConnector(Connector):
    """Serves ``memory://name``: topics in the one broker of the process, which live until the process ends."""

    def topic(self, url: str, options: Mapping[str, object]) -> MemoryTopic:
        check_options(f"topic {shown_url(url)!r}", options, ())
        name = url.partition("://")[2].strip("/")
        if not name:
            raise ConfigurationError(f"topic {shown_url(url)!r}: expected a name, as in memory://clicks")
        return process_broker().topic(name)

    async def list_topics(self, url: str, options: Mapping[str, object]) -> list[str]:
        check_options(f"topic {shown_url(url)!r}", options, ())
        return process_broker().topic_names()


@functools.cache
def process_broker() -> MemoryBroker:
    """Return the broker of all ``memory://`` URLs of this process."""
    return MemoryBroker()


class MemoryTopic(Topic):
    """A topic of a `MemoryBroker`. Its ``memory://`` URL leads to it only if the process has no other broker."""

    seen_from: ClassVar = "process"
    compaction_settings: ClassVar[Mapping[str, str]] = MappingProxyType({"compact": "1"})

    def __init__(self, store: MemoryTopics, name: str) -> None:
        self._store = store
        self._name = name

    @property
    def url(self) -> str:
        return f"memory://{self._name}"

    @property
    def name(self) -> str:
        return self._name

    @property
    def commit_domain(self) -> str:
        return self._store.commit_domain

    def beside(self, name: str) -> MemoryTopic:
        return MemoryTopic(self._store, name)

    async def open_reader(self, request: ReadRequest) -> MemoryReader:
        check_request(request, self._name)
        return MemoryReader(self._store, self._name, request)

    async def open_writer(self) -> MemoryWriter:
        with self._store.lock:
            return MemoryWriter(self._store, self._store.log(self._name))

    async def open_transactions(self, transactional_id: str, *, timeout_s: float = 60.0) -> MemoryTransactions:
        transactions = MemoryTransactions(self._store, transactional_id, timeout_s)
        self._store.take_over(transactional_id, transactions)
        return transactions

    async def create(self, *, partitions: int = 1, settings: Mapping[str, str] | None = None) -> None:
        self._store.create(self._name, partitions, settings or {})

    async def describe(self) -> TopicDescription:
        with self._store.lock:
            log = self._store.log(self._name)
            offsets = {
                number: (partition.start_offset, partition.end_offset)
                for number, partition in enumerate(log.partitions)
            }
            settings = {name: str(value) for name, value in log.settings.items()}
            return TopicDescription(self._name, offsets, settings, log.identities)

    async def size_limit(self) -> SizeLimit | None:
        settings = (await self.describe()).settings
        return SizeLimit(int(settings["max_record_bytes"])) if "max_record_bytes" in settings else None

    async def delete(self) -> None:
        self._store.delete(self._name)


class MemoryReader(TopicReader):
    """Reads its share of the partitions of a topic in memory; waits for records without polling."""

    def __init__(self, store: MemoryTopics, name: str, request: ReadRequest) -> None:
        self._store = store
        self._request = request
        self._is_closed = False
        with store.lock:
            self._log = store.log(name)
            ends = {number: partition.ends for number, partition in enumerate(self._log.partitions)}
            self._positions = reading_positions(request, ends, self._log.identities, self._offset_at, topic=name)

    async def read(self) -> TopicBatch | None:
        while True:
            with self._store.lock:
                self._check_usable()
                batch = self._next_batch()
                if batch is not None or self._positions.are_at_stop:
                    return batch
                waiting = self._log.waiters.add()
            try:
                await waiting
            finally:
                with self._store.lock:
                    self._log.waiters.discard(waiting)

    def positions(self) -> Mapping[int, int]:
        with self._store.lock:
            return self._positions.by_partition()

    def identities(self) -> Mapping[int, str]:
        with self._store.lock:
            return self._log.identities

    def lag(self) -> Mapping[int, int]:
        with self._store.lock:
            return self._positions.lag(
                {number: partition.stable_offset for number, partition in enumerate(self._log.partitions)}
            )

    async def close(self) -> None:
        with self._store.lock:
            self._is_closed = True
            self._log.waiters.wake()

    def _offset_at(self, number: int, timestamp_ms: int) -> int:
        return self._log.partitions[number].offset_at(timestamp_ms)

    def _check_usable(self) -> None:
        if self._is_closed:
            raise closed_error("reader", self._log.name)
        if self._log.is_deleted:
            raise TopicNotFound(f"topic {self._log.name!r} was deleted while it was read")

    def _next_batch(self) -> TopicBatch | None:
        partitions = self._log.partitions
        share = partitions_of(self._request, len(partitions))
        self._positions.add_new(share, lambda number: partitions[number].start_offset)
        for number in list(self._positions):
            batch = self._batch_of(number)
            if batch is not None:
                return batch
        return None

    def _batch_of(self, number: int) -> TopicBatch | None:
        partition, position = self._log.partitions[number], self._positions[number]
        limit = self._positions.limit(number, partition.stable_offset)
        if position >= limit:
            return None
        if position < partition.start_offset:
            message = out_of_range_message(self._log.name, number, position, partition.ends)
            raise OffsetOutOfRange(message)
        parts, next_position = partition.read(position, limit, self._request.max_records)
        if not parts:
            self._positions.passed(number, next_position)
            return None
        self._positions.returned(number, next_position)
        return TopicBatch.joined(parts)


class MemoryWriter(TopicWriter):
    """Writes to a topic in memory: records can be read as soon as ``write`` returns."""

    def __init__(self, store: MemoryTopics, log: TopicLog) -> None:
        self._store = store
        self._log = log
        self._turn = 0
        self._is_closed = False

    async def write(self, batch: OutgoingBatch) -> None:
        if self._is_closed:
            raise closed_error("writer", self._log.name)
        with self._store.lock:
            append(self._log, batch, self._store.clock.now_ms(), unkeyed=self._turn)
            self._log.retain()
            self._log.waiters.wake()
        self._turn += 1

    async def flush(self) -> None:
        with self._store.lock:
            check_not_deleted(self._log)

    async def close(self) -> None:
        self._is_closed = True
