"""A topic of a Kafka cluster."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from types import MappingProxyType
from typing import ClassVar, TypeVar

from streamiter.errors import ConfigurationError
from streamiter.topics.topic import (
    Connector,
    Decoder,
    ReadRequest,
    SizeLimit,
    Topic,
    TopicDescription,
    TopicReader,
    TopicWriter,
    Transactions,
)
from streamiter_kafka import admin
from streamiter_kafka.admin import commit_group_offsets
from streamiter_kafka.cluster import BrokerConnections
from streamiter_kafka.options import KafkaAddress, KafkaOptions
from streamiter_kafka.reader import open_reader
from streamiter_kafka.transactions import open_transactions
from streamiter_kafka.writer import open_packing, open_writer

__all__ = [
    "KafkaConnector",
]


Opened = TypeVar("Opened")


class KafkaTopic(Topic):
    """A topic of a Kafka cluster; each reader, writer and transaction has connections of its own."""

    compaction_settings: ClassVar[Mapping[str, str]] = MappingProxyType({"cleanup.policy": "compact"})
    eager_compaction_settings: ClassVar[Mapping[str, str]] = MappingProxyType(
        {
            # Only closed segments are compacted. By default one is open for 7 days, or up to 1 GiB; 1 MiB is
            # the least that brokers take (since 4.1), and has about 4,000 commits.
            "segment.bytes": str(1 << 20),
            "segment.ms": str(60 * 60 * 1000),
            # By default a partition waits until half of it could be dropped.
            "min.cleanable.dirty.ratio": "0.01",
            # The ends of transactions are records too, and stay for as long as tombstones: 24 h by default.
            "delete.retention.ms": str(60 * 60 * 1000),
        }
    )

    def __init__(self, address: KafkaAddress, options: KafkaOptions) -> None:
        self._address = address
        self.options = options

    @property
    def url(self) -> str:
        return self._address.url

    @property
    def name(self) -> str:
        return self._address.topic

    @property
    def commit_domain(self) -> str:
        return f"kafka://{self._address.cluster}"

    def beside(self, name: str) -> KafkaTopic:
        return KafkaTopic(self._address.beside(name), self.options)

    def default_decoder(self) -> Decoder | None:
        return None

    async def open_reader(self, request: ReadRequest) -> TopicReader:
        return await self._open(lambda cluster: open_reader(cluster, self.name, request))

    async def open_writer(self) -> TopicWriter:
        return await self._open(lambda cluster: open_writer(cluster, self.name))

    async def open_transactions(self, transactional_id: str, *, timeout_s: float = 60.0) -> Transactions:
        return await self._open(
            lambda cluster: open_transactions(cluster, self.commit_domain, transactional_id, timeout_s)
        )

    async def report_positions(self, group: str, positions: Mapping[int, int]) -> None:
        """Commit them as the offsets of the consumer group ``group``, outside any transaction."""
        async with self._cluster() as cluster:
            await commit_group_offsets(cluster, group, self.name, positions)

    async def create(self, *, partitions: int = 1, settings: Mapping[str, str] | None = None) -> None:
        async with self._cluster() as cluster:
            await admin.create(cluster, self.name, partitions, settings or {})

    async def describe(self) -> TopicDescription:
        async with self._cluster() as cluster:
            return await admin.describe(cluster, self.name)

    async def size_limit(self) -> SizeLimit:
        async with self._cluster() as cluster:
            await cluster.require(self.name)
            packing = await open_packing(cluster, self.name, self.options, transactional=False)
        return packing.size_limit()

    async def delete(self) -> None:
        async with self._cluster() as cluster:
            await admin.delete(cluster, self.name)

    def _cluster(self) -> BrokerConnections:
        return BrokerConnections(self._address.servers, self.options, f"topic {self.name!r}")

    async def _open(self, opening: Callable[[BrokerConnections], Awaitable[Opened]]) -> Opened:
        """What is opened owns its cluster; where opening fails, nothing is left open."""
        cluster = self._cluster()
        try:
            return await opening(cluster)
        except BaseException:
            await cluster.close()
            raise

    def __repr__(self) -> str:
        return f"KafkaTopic({self.url!r})"


class KafkaConnector(Connector):
    """Topics on Kafka: ``kafka://host:9092,host2:9092/topic``.

    Options are given by keyword or in the URL's query; passwords better by keyword. What they are,
    :class:`KafkaOptions` tells.

    >>> KafkaConnector().topic("kafka://127.0.0.1:9092/clicks?compression=lz4", {"give_up_after_s": 5})
    KafkaTopic('kafka://127.0.0.1:9092/clicks?compression=lz4')

    What stands behind ``kafka://`` URLs.
    """

    def topic(self, url: str, options: Mapping[str, object]) -> KafkaTopic:
        address = KafkaAddress.parse(url)
        if not address.topic:
            raise ConfigurationError(f"topic {address.url!r}: expected a topic, as in {address.url}clicks")
        return KafkaTopic(address, _options(address, options, f"topic {address.url!r}"))

    async def list_topics(self, url: str, options: Mapping[str, object]) -> list[str]:
        address = KafkaAddress.parse(url)
        subject = f"topics of {address.cluster}"
        async with BrokerConnections(
            address.servers, _options(address, options, subject), subject
        ) as cluster:
            return await cluster.persist(cluster.topic_names)


def _options(address: KafkaAddress, options: Mapping[str, object], subject: str) -> KafkaOptions:
    """Keyword options go before those of the URL."""
    return KafkaOptions.parse({**address.query, **options}, subject)
