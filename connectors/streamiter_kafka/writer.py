"""Writing to one topic, outside transactions."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator, Mapping
from typing import Final

from streamiter.errors import StreamiterError, TopicError
from streamiter.topics.topic import OutgoingBatch, TopicWriter
from streamiter_kafka.admin import shown_settings
from streamiter_kafka.cluster import Cluster
from streamiter_kafka.options import KafkaOptions
from streamiter_kafka.packing import DEFAULT_LIMIT_BYTES, Packing, ProducerIdentity
from streamiter_kafka.sender import Sender
from streamiter_kafka.trouble import check
from streamiter_kafka.wire import InitProducerIdRequest

__all__ = ["KafkaWriter", "open_packing", "open_writer"]

_NO_TRANSACTION_TIMEOUT_MS: Final = 2**31 - 1


async def open_writer(cluster: Cluster, topic: str) -> KafkaWriter:
    """A writer; it owns ``cluster`` and closes it."""
    await cluster.require(topic)
    packing = await open_packing(cluster, topic, cluster.options, transactional=False)
    producer = await cluster.persist(lambda: _new_producer(cluster, topic))
    return KafkaWriter(cluster, packing, producer)


async def open_packing(
    cluster: Cluster, topic: str, options: KafkaOptions, *, transactional: bool
) -> Packing:
    """How records for ``topic`` are packed; asks the broker how large they may be."""
    return Packing(
        topic,
        await _limit_bytes(cluster, topic),
        compression=options.compression,
        max_batch_bytes=options.max_batch_bytes,
        transactional=transactional,
    )


async def _limit_bytes(cluster: Cluster, topic: str) -> int:
    settings = await shown_settings(cluster, topic)
    return int(settings.get("max.message.bytes", DEFAULT_LIMIT_BYTES))


async def _new_producer(cluster: Cluster, topic: str) -> ProducerIdentity:
    """An identity by which brokers recognize a batch that is sent again; it costs one request."""
    if cluster.options.acks != "all":
        return ProducerIdentity()
    response = await cluster.request_any(InitProducerIdRequest(None, _NO_TRANSACTION_TIMEOUT_MS))
    check(response.error_code, f"writer to topic {topic!r}")
    return ProducerIdentity(response.producer_id, response.producer_epoch)


class KafkaWriter(TopicWriter):
    """Writes to one topic. An error that is raised once is raised by every later call too."""

    def __init__(self, cluster: Cluster, packing: Packing, producer: ProducerIdentity) -> None:
        self._cluster = cluster
        self._packing = packing
        self._sender = Sender(cluster, f"writer to topic {packing.topic!r} at {cluster.address}", producer)
        self._has_reported = False
        self._is_closed = False

    async def write(self, batch: OutgoingBatch) -> None:
        self._check_open()
        if not len(batch):
            return
        leaders = await self._prepare()
        # From here on nothing waits: a batch is taken as a whole or, where a wait is cancelled, not at all.
        for number, part in self._packing.spread(batch, leaders):
            self._sender.put(self._packing, number, part)

    async def flush(self) -> None:
        self._check_open()
        with self._reporting():
            await self._sender.flush()

    async def close(self) -> None:
        if self._is_closed:
            return
        self._is_closed = True
        async with self._cluster:  # closed even where one of these waits is cancelled
            try:
                if not self._has_reported:
                    await self._sender.flush()
            finally:
                await self._sender.stop()

    async def _prepare(self) -> Mapping[int, int]:
        # A turn for the tasks that send: a caller that never waits would never let them run.
        await asyncio.sleep(0)
        with self._reporting():
            await self._sender.room()
        return await self._cluster.fresh_leaders(self._packing.topic)

    @contextlib.contextmanager
    def _reporting(self) -> Iterator[None]:
        """Notes that a failure has been raised: ``close`` need not raise it again."""
        try:
            yield
        except StreamiterError:
            self._has_reported = True
            raise

    def _check_open(self) -> None:
        if self._is_closed:
            raise TopicError(f"writer to topic {self._packing.topic!r}: it is closed")
