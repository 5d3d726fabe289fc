"""Tools of the Kafka benchmarks: new topics, and clients of aiokafka and of confluent-kafka with good settings.

The settings are the same as in streamiter's connector: read committed, checksums verified, 4 MB of each
partition in an answer, record batches of up to 1 MB, an idempotent producer that lingers as the benchmark says.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import sys
import uuid
from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from importlib.util import find_spec
from itertools import islice
from typing import Any

import uvloop
from aiokafka import AIOKafkaConsumer, AIOKafkaProducer, TopicPartition

from benchmarks.measuring import Contender, Trial
from benchmarks.session import Session
from streamiter import topic
from streamiter.topics.topic import Topic

__all__ = [
    "CONSUMED_TOGETHER",
    "BatchSender",
    "confluent_clients",
    "consumer",
    "count_records",
    "fill",
    "has_confluent",
    "new_topic",
    "producer",
    "run",
    "with_rare_collections",
]

_BATCH_BYTES = 1_000_000
_PARTITION_BYTES = 4_000_000
_FETCH_BYTES = 8_000_000
# For ``consume`` of confluent-kafka. From 1,000 to 20,000 records at once, the speed is the same within the noise.
CONSUMED_TOGETHER = 5_000
# A queue of librdkafka that is full refuses records; a whole benchmark has room in this one.
_QUEUED_RECORDS = 2_000_000
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


def new_topic(session: Session, label: str, *, partitions: int = 1, linger_s: float = 0.0) -> Topic:
    """Create a topic with the label in its name, and return it."""
    made = topic(f"kafka://{session.kafka}/bench-{label}-{uuid.uuid4().hex[:8]}", linger_s=linger_s)
    # Some records have times of 1970, which a broker with its default settings would soon delete.
    run(made.create(partitions=partitions, settings={"retention.ms": "-1"}))
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
        max_partition_fetch_bytes=_PARTITION_BYTES,
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
async def producer(address: str, *, linger_s: float = 0.0, **options: Any) -> AsyncIterator[AIOKafkaProducer]:
    """Open a producer that loses no record and stores no record twice."""
    client = AIOKafkaProducer(
        bootstrap_servers=address,
        acks="all",
        enable_idempotence=True,
        max_batch_size=_BATCH_BYTES,
        linger_ms=int(linger_s * 1000),
        **options,
    )
    await client.start()
    try:
        yield client
    finally:
        await client.stop()


def has_confluent() -> bool:
    """Return whether confluent-kafka is installed; say it where it is not."""
    if find_spec("confluent_kafka") is not None:
        return True
    print("  confluent-kafka is left out, because it is not installed", file=sys.stderr, flush=True)
    return False


@contextlib.contextmanager
def confluent_clients(address: str, source: Topic, *, partitions: int, linger_s: float) -> Iterator[tuple[Any, Any]]:
    """Open a consumer of all partitions of a topic from their beginning, and a producer, of confluent-kafka.

    librdkafka fetches and sends in threads of its own. After its queue was full, the consumer would wait for a second
    before the next fetch; 5 ms keep the queue filled.
    """
    from confluent_kafka import OFFSET_BEGINNING, Consumer, Producer, TopicPartition

    reader = Consumer(
        {
            "bootstrap.servers": address,
            "group.id": "benchmarks",  # required, though nothing is committed
            "enable.auto.commit": False,
            "isolation.level": "read_committed",
            "check.crcs": True,
            "fetch.queue.backoff.ms": 5,
            "fetch.max.bytes": _FETCH_BYTES,
            "max.partition.fetch.bytes": _PARTITION_BYTES,
        }
    )
    writer = Producer(
        {
            "bootstrap.servers": address,
            "enable.idempotence": True,
            "batch.size": _BATCH_BYTES,
            "linger.ms": linger_s * 1000,
            "queue.buffering.max.messages": _QUEUED_RECORDS,
        }
    )
    reader.assign([TopicPartition(source.name, number, OFFSET_BEGINNING) for number in range(partitions)])
    try:
        yield reader, writer
        left = writer.flush(60)
        assert left == 0, f"expected all records to be stored, given {left} that are not"
    finally:
        reader.close()


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
