"""Tools for the contract of topics: a connector, a clock, and functions to write and read."""

from __future__ import annotations

import asyncio
import contextlib
import heapq
import itertools
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import pytest
from support.waiting import PATIENCE_S

from streamiter.topics import OutgoingBatch, ReadRequest, Topic, TopicReader, TopicRecord, TopicWriter, Transactions

Result = TypeVar("Result")


@contextlib.contextmanager
def missing_soon() -> Iterator[None]:
    """Let a topic that Kafka does not know be missing after 0.1 s. No topic may be created in the block: a new one may
    be unknown for a moment, so users wait for a second.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("streamiter_kafka.trouble._MISSING_S", 0.1)
        yield


@dataclass
class TopicCase:
    """One connector under test.

    ``handle(name)`` returns a topic object for a name, without a connection; a second call returns the handle of
    another client. Names are unique within one test; on a server that outlives the test, ``prefix`` keeps tests
    apart. The settings limit a record's size, or keep only the last records; they are None if the connector cannot
    do that.
    """

    handle: Callable[[str], Topic]
    prefix: str = ""
    record_limit_settings: Mapping[str, str] | None = None
    record_limit_bytes: int = 0
    retention_settings: Mapping[str, str] | None = None
    url_is_global: bool = True

    def topic(self, name: str = "clicks") -> Topic:
        """Return a handle; the topic may not exist."""
        return self.handle(self.prefix + name)

    async def make_topic(
        self, name: str = "clicks", partitions: int = 1, settings: Mapping[str, str] | None = None
    ) -> Topic:
        """Create a new topic."""
        return await created(self.topic(name), partitions=partitions, settings=settings)

    async def transactions(self, topic: Topic) -> Transactions:
        """Open transactions; skip the check if the connector has none."""
        if not topic.has_transactions:
            pytest.skip("this connector has no transactions")
        return await topic.open_transactions(self.prefix + "t")


class ManualClock:
    """A clock that advances only when a test says so."""

    def __init__(self, now_s: float = 1_000_000.0) -> None:
        self._now_s = now_s
        self._due: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()
        self._called_off: set[int] = set()

    def now_ms(self) -> int:
        return round(self._now_s * 1000)

    def monotonic_s(self) -> float:
        return self._now_s

    def call_later(self, delay_s: float, callback: Callable[[], None]) -> _ManualTimer:
        number = next(self._order)
        heapq.heappush(self._due, (self._now_s + delay_s, number, callback))
        return _ManualTimer(self._called_off, number)

    async def sleep(self, delay_s: float) -> None:
        done = asyncio.get_running_loop().create_future()
        timer = self.call_later(delay_s, lambda: done.done() or done.set_result(None))
        try:
            await done
        finally:
            timer.cancel()

    def advance(self, seconds: float) -> None:
        """Advance the time, and run the timers that become due."""
        end = self._now_s + seconds
        while self._due and self._due[0][0] <= end:
            self._now_s, number, callback = heapq.heappop(self._due)
            if number not in self._called_off:
                callback()
        self._now_s = end

    @property
    def timers(self) -> int:
        """The number of timers that are set."""
        return sum(number not in self._called_off for _, number, _ in self._due)


@dataclass
class _ManualTimer:
    called_off: set[int]
    number: int

    def cancel(self) -> None:
        self.called_off.add(self.number)


TopicT = TypeVar("TopicT", bound=Topic)


async def created(topic: TopicT, *, partitions: int = 1, settings: Mapping[str, str] | None = None) -> TopicT:
    """Create a topic, and return it."""
    await topic.create(partitions=partitions, settings=settings)
    return topic


async def begun(topic: Topic, transactional_id: str) -> Transactions:
    """Return transactions, of which one is open."""
    transactions = await topic.open_transactions(transactional_id)
    await patiently(transactions.begin())
    return transactions


async def patiently(waiting: Awaitable[Result]) -> Result:
    """Wait for the result, and fail after a time limit."""
    async with asyncio.timeout(PATIENCE_S):
        return await waiting


def numbered(numbers: Iterable[int]) -> list[bytes]:
    """Return a value for each number."""
    return [b"%d" % number for number in numbers]


def values_of(records: Iterable[TopicRecord]) -> list[bytes | None]:
    return [record.value for record in records]


def numbers_of(records: Iterable[TopicRecord]) -> list[int]:
    return [int(record.value or b"-1") for record in records]


async def write(topic: Topic, batch: OutgoingBatch | Sequence[bytes | None]) -> None:
    """Write with a new writer, and close it, which flushes the records."""
    writer = await patiently(topic.open_writer())
    try:
        batch = batch if isinstance(batch, OutgoingBatch) else OutgoingBatch(batch)
        await patiently(writer.write(batch))
    finally:
        await patiently(writer.close())


async def write_and_flush(writer: TopicWriter, batch: OutgoingBatch) -> None:
    """Write and flush; a connector may refuse a record in either call."""
    await patiently(writer.write(batch))
    await patiently(writer.flush())


async def write_and_commit(transactions: Transactions, topic: Topic, values: Sequence[bytes]) -> None:
    """Write and commit; a connector may refuse a record in either call."""
    await patiently(transactions.write(topic, OutgoingBatch(values)))
    await patiently(transactions.commit())


async def read_to_end(topic: Topic, request: ReadRequest | None = None) -> list[TopicRecord]:
    """Return all records of a bounded read, in the order of their arrival."""
    reader = await patiently(topic.open_reader(request or ReadRequest(stop="latest")))
    records: list[TopicRecord] = []
    try:
        while (batch := await patiently(reader.read())) is not None:
            assert len(batch) > 0
            records.extend(batch.records())
    finally:
        await patiently(reader.close())
    return records


async def content(topic: Topic) -> list[TopicRecord]:
    """Return all records of a topic, partition by partition."""
    return sorted(await read_to_end(topic), key=lambda record: (record.partition, record.offset))


async def read_count(reader: TopicReader, count: int) -> list[TopicRecord]:
    """Read until there are ``count`` records; more at once is a failure."""
    records: list[TopicRecord] = []
    while len(records) < count:
        batch = await patiently(reader.read())
        assert batch is not None, f"the topic ended after {len(records)} of {count} records"
        records.extend(batch.records())
    assert len(records) == count
    return records


async def write_transaction(transactions: Transactions, topic: Topic, values: Sequence[bytes], *, commit: bool) -> None:
    await patiently(transactions.begin())
    await patiently(transactions.write(topic, OutgoingBatch(values)))
    await patiently(transactions.commit() if commit else transactions.abort())


def by_partition(records: Iterable[TopicRecord]) -> dict[int, list[TopicRecord]]:
    parts: dict[int, list[TopicRecord]] = {}
    for record in records:
        parts.setdefault(record.partition, []).append(record)
    return parts
