"""Tools of the Kafka benchmarks: new topics, and clients of aiokafka with good settings.

The settings are the same as in streamiter's connector: read committed, checksums verified, 1 MB of each
partition in an answer, record batches of up to 1 MB, an idempotent producer, no lingering.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import uuid
from collections.abc import AsyncIterator, Iterable, Sequence
from itertools import islice
from typing import Any

import uvloop
from aiokafka import AIOKafkaConsumer, AIOKafkaProducer, TopicPartition

from benchmarks.measuring import Contender, Trial
from benchmarks.session import Session
from streamiter import topic
from streamiter.topics.topic import Topic

__all__ = [
    "BatchSender",
    "consumer",
    "count_records",
    "fill",
    "new_topic",
    "producer",
    "run",
    "with_rare_collections",
]

_BATCH_BYTES = 1_000_000
_FETCH_BYTES = 8_000_000
# The number of events that go to one partition before the next partition; a batch that is read is larger.
_RUN_RECORDS = 5_000


def run(main: Any) -> Any:
    """Run a coroutine on uvloop, as flows do."""
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(main)


def with_rare_collections(contender: Contender) -> Contender:
    """Return the contender with as few garbage collections as ``flow.run`` has, which an experienced engineer sets."""

    def run_it() -> Trial:
        before = gc.get_threshold()
        gc.set_threshold(50_000, *before[1:])
        try:
            return contender()
        finally:
            gc.set_threshold(*before)

    return run_it


def new_topic(session: Session, label: str, *, partitions: int = 1) -> Topic:
    """Create a topic with the label in its name, and return it."""
    made = topic(f"kafka://{session.kafka}/bench-{label}-{uuid.uuid4().hex[:8]}")
    run(made.create(partitions=partitions))
    return made


def fill(session: Session, target: Topic, values: Iterable[bytes], *, partitions: int) -> None:
    """Write values to a topic, in runs that go to the partitions in turn."""

    async def write() -> None:
        async with producer(session.kafka) as client:
            sender = BatchSender(client, target.name)
            remaining, turn = iter(values), 0
            while part := list(islice(remaining, _RUN_RECORDS)):
                await sender.send(part, partition=turn % partitions)
                turn += 1
            await sender.flush()

    run(write())


def count_records(session: Session, of: Topic) -> int:
    """Return the number of records in a topic, from its offsets; without transactions, each offset is a record."""
    description = run(of.describe())
    return sum(end - first for first, end in description.offsets.values())


@contextlib.asynccontextmanager
async def consumer(address: str, *topics: str, partitions: int) -> AsyncIterator[AIOKafkaConsumer]:
    """Open a consumer of all partitions from their beginning."""
    client = AIOKafkaConsumer(
        bootstrap_servers=address,
        enable_auto_commit=False,
        isolation_level="read_committed",
        fetch_max_bytes=_FETCH_BYTES,
        max_partition_fetch_bytes=_BATCH_BYTES,
    )
    await client.start()
    try:
        assigned = [TopicPartition(name, number) for name in topics for number in range(partitions)]
        client.assign(assigned)
        await client.seek_to_beginning(*assigned)
        yield client
    finally:
        await client.stop()


@contextlib.asynccontextmanager
async def producer(address: str, **options: Any) -> AsyncIterator[AIOKafkaProducer]:
    """Open a producer that loses no record and stores no record twice."""
    client = AIOKafkaProducer(
        bootstrap_servers=address,
        acks="all",
        enable_idempotence=True,
        max_batch_size=_BATCH_BYTES,
        linger_ms=0,
        **options,
    )
    await client.start()
    try:
        yield client
    finally:
        await client.stop()


class BatchSender:
    """Sends whole batches, which is the fastest way in aiokafka, with a limit of the unanswered batches."""

    def __init__(self, client: AIOKafkaProducer, topic_name: str, *, limit: int = 16) -> None:
        self._client = client
        self._topic = topic_name
        self._limit = limit
        self._under_way: list[Any] = []

    async def send(self, values: Sequence[bytes], *, partition: int) -> None:
        """Send values to a partition, in as few batches as possible."""
        batch = self._client.create_batch()
        append = batch.append
        for value in values:
            if append(key=None, value=value, timestamp=None) is None:
                await self._send(batch, partition)
                batch = self._client.create_batch()
                append = batch.append
                append(key=None, value=value, timestamp=None)
        await self._send(batch, partition)

    async def flush(self) -> None:
        """Wait until all batches are stored."""
        await asyncio.gather(*self._under_way)
        self._under_way.clear()

    async def _send(self, batch: Any, partition: int) -> None:
        if len(self._under_way) >= self._limit:
            await self._under_way.pop(0)
        self._under_way.append(await self._client.send_batch(batch, self._topic, partition=partition))
