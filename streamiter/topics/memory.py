"""Topics in memory."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from types import MappingProxyType
from typing import ClassVar

from streamiter.clock import Clock, SystemClock
from streamiter.errors import ConfigurationError, OffsetOutOfRange, TopicError, TopicNotFound
from streamiter.topics.memory_log import (
    MemoryTopics,
    MemoryTransactions,
    TopicLog,
    append,
    check_not_deleted,
    joined,
)
from streamiter.topics.secrets import shown_url
from streamiter.topics.topic import (
    Connector,
    Decoder,
    OutgoingBatch,
    ReadRequest,
    SizeLimit,
    Topic,
    TopicBatch,
    TopicDescription,
    TopicReader,
    TopicWriter,
    check_identities,
    check_named_partitions,
    check_request,
    first_position,
    out_of_range_message,
    partitions_of,
    stop_offsets,
)

__all__ = [
    "MemoryBroker",
    "MemoryConnector",
    "MemoryReader",
    "MemoryTopic",
]


class MemoryBroker:
    """Holds topics, as a server would: whoever has the same broker sees the same topics.

    May be used from several threads and event loops. ``clock`` gives the time stamps and the time after
    which an open transaction is aborted. Topics grow without limit unless they are created with
    ``settings={"retention_records": "100000"}``, or ``{"compact": "1"}`` for one of few keys that keeps the last
    record of each; ``max_record_bytes`` limits one record.

    Where topics in memory come from: a broker of your own, or that of the process.
    """

    def __init__(self, *, clock: Clock | None = None) -> None:
        self._store = MemoryTopics(clock if clock is not None else SystemClock())

    def topic(self, name: str) -> MemoryTopic:
        """The topic of that name, which need not be there yet."""
        return MemoryTopic(self._store, name)

    def topic_names(self) -> list[str]:
        """The names of the topics there are, sorted."""
        return self._store.topic_names()


class MemoryConnector(Connector):
    """Serves ``memory://name``.

    The process itself is the server of this scheme: all ``memory://`` topics of a process live in one
    broker, from their creation to the process's end. Tests that want their own use `MemoryBroker`.
    """

    def topic(self, url: str, options: Mapping[str, object]) -> MemoryTopic:
        _refuse_options(url, options)
        name = url.partition("://")[2].strip("/")
        if not name:
            raise ConfigurationError(f"topic {shown_url(url)!r}: expected a name, as in memory://clicks")
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
            f"topic {shown_url(url)!r}: memory topics take no options, given {', '.join(sorted(options))}"
        )


class MemoryTopic(Topic):
    """A topic of a `MemoryBroker`. Its ``memory://`` URL leads to it only in the process's own broker.

    A topic in memory.
    """

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

    def default_decoder(self) -> Decoder | None:
        return None

    async def open_reader(self, request: ReadRequest) -> MemoryReader:
        check_request(request, self._name)
        return MemoryReader(self._store, self._name, request)

    async def open_writer(self) -> MemoryWriter:
        with self._store.lock:
            return MemoryWriter(self._store, self._store.log(self._name))

    async def open_transactions(
        self, transactional_id: str, *, timeout_s: float = 60.0
    ) -> MemoryTransactions:
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
            return TopicDescription(self._name, offsets, dict(log.settings), log.identities)

    async def size_limit(self) -> SizeLimit | None:
        settings = (await self.describe()).settings
        return SizeLimit(int(settings["max_record_bytes"])) if "max_record_bytes" in settings else None

    async def delete(self) -> None:
        self._store.delete(self._name)

    def __repr__(self) -> str:
        return f"MemoryTopic({self._name!r})"


class MemoryReader(TopicReader):
    """Reads its share of a memory topic; waits without polling.

    Reading a topic in memory.
    """

    def __init__(self, store: MemoryTopics, name: str, request: ReadRequest) -> None:
        self._store = store
        self._request = request
        self._is_closed = False
        with store.lock:
            self._log = store.log(name)
            check_named_partitions(request, len(self._log.partitions), topic=name)
            ends = {number: partition.ends for number, partition in enumerate(self._log.partitions)}
            check_identities(request, self._log.identities, ends, topic=name)
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
            with self._store.lock:
                self._check_usable()
                batch = self._next_batch()
                if batch is not None or self._is_at_end():
                    return batch
                waiting = self._log.waiters.add()
            try:
                await waiting
            finally:
                with self._store.lock:
                    self._log.waiters.discard(waiting)

    def positions(self) -> Mapping[int, int]:
        with self._store.lock:
            return {number: self._positions[number] for number in sorted(self._positions)}

    def identities(self) -> Mapping[int, str]:
        with self._store.lock:
            return self._log.identities

    def lag(self) -> Mapping[int, int]:
        with self._store.lock:
            partitions = self._log.partitions
            return {
                number: max(
                    0, self._limit(number, partitions[number].stable_offset) - self._positions[number]
                )
                for number in sorted(self._positions)
                if number < len(partitions)
            }

    async def close(self) -> None:
        with self._store.lock:
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
    """Writes to a memory topic: what is handed over can be read at once.

    Writing to a topic in memory.
    """

    def __init__(self, store: MemoryTopics, log: TopicLog) -> None:
        self._store = store
        self._log = log
        self._turn = 0
        self._is_closed = False

    async def write(self, batch: OutgoingBatch) -> None:
        if self._is_closed:
            raise TopicError(f"writer of {self._log.name!r} is closed")
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
