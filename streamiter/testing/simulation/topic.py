"""A memory topic behind a network with faults."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

from streamiter.testing.simulation.network import Connection
from streamiter.testing.simulation.reader import SimulatedReader
from streamiter.testing.simulation.transactions import SimulatedTransactions
from streamiter.testing.simulation.writer import SimulatedWriter
from streamiter.topics.memory import MemoryBroker, MemoryTopic
from streamiter.topics.topic import (
    Decoder,
    ReadRequest,
    SizeLimit,
    Topic,
    TopicDescription,
    TopicReader,
    TopicWriter,
    Transactions,
)

__all__ = ["Cluster", "SimulatedTopic"]

# What one read gives at most: small, so that few records already come in several batches.
_READ_RECORDS_MAX = 16


class Cluster:
    """The topics of a simulation as one run of the job sees them."""

    def __init__(self, broker: MemoryBroker, connection: Connection, on_commit: Callable[[], None]) -> None:
        self.broker = broker
        self.connection = connection
        self.on_commit = on_commit
        self.readers: list[SimulatedReader] = []
        """Those that are open."""
        self.transactional_ids: dict[str, None] = {}
        """Those that were opened, for whoever wants to take over."""


class SimulatedTopic(Topic):
    """Does what a :class:`~streamiter.topics.MemoryTopic` does, but late, twice, not at all or with an error."""

    compaction_settings = MemoryTopic.compaction_settings
    eager_compaction_settings = MemoryTopic.eager_compaction_settings

    def __init__(self, cluster: Cluster, name: str) -> None:
        self._cluster = cluster
        self._connection = cluster.connection
        self._stored = cluster.broker.topic(name)

    @property
    def url(self) -> str:
        return self._stored.url

    @property
    def name(self) -> str:
        return self._stored.name

    @property
    def commit_domain(self) -> str:
        return "memory:simulation"

    def beside(self, name: str) -> Topic:
        return SimulatedTopic(self._cluster, name)

    def default_decoder(self) -> Decoder | None:
        return None

    async def open_reader(self, request: ReadRequest) -> TopicReader:
        network = self._connection.network
        if network.levels.cuts_batches:
            limit = network.random.randint(1, _READ_RECORDS_MAX)
            request = replace(request, max_records=min(request.max_records, limit))
        stored = await self._connection.call(
            f"open a reader of {self.name}", lambda: self._stored.open_reader(request)
        )
        reader = SimulatedReader(stored, self._connection, self.name, self._cluster.readers.remove)
        self._cluster.readers.append(reader)
        return reader

    async def open_writer(self) -> TopicWriter:
        stored = await self._connection.call(f"open a writer of {self.name}", self._stored.open_writer)
        return SimulatedWriter(stored, self._connection, self.name)

    async def open_transactions(self, transactional_id: str, *, timeout_s: float = 60.0) -> Transactions:
        self._cluster.transactional_ids[transactional_id] = None
        stored = await self._connection.call(
            f"open transactions {transactional_id}",
            lambda: self._stored.open_transactions(transactional_id, timeout_s=timeout_s),
        )
        return SimulatedTransactions(stored, self._connection, self._cluster.broker, self._cluster.on_commit)

    async def create(self, *, partitions: int = 1, settings: Mapping[str, str] | None = None) -> None:
        await self._connection.call(
            f"create {self.name}", lambda: self._stored.create(partitions=partitions, settings=settings)
        )

    async def describe(self) -> TopicDescription:
        return await self._connection.call(f"describe {self.name}", self._stored.describe)

    async def size_limit(self) -> SizeLimit | None:
        return await self._stored.size_limit()

    async def delete(self) -> None:
        await self._connection.call(f"delete {self.name}", self._stored.delete)

    def __repr__(self) -> str:
        return f"SimulatedTopic({self.name!r})"
