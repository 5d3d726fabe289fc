"""Reading a topic behind a network with faults, in batches that are cut at random."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace

from streamiter.checkpoints.snapshot import CheckpointId, SnapshotHeader, SnapshotPart
from streamiter.checkpoints.store import CheckpointStore, CommitPointer, StoredSnapshot
from streamiter.testing.simulation.network import NetworkConnection, SimulatedStorageFull
from streamiter.topics.memory import MemoryBroker, MemoryTopic
from streamiter.topics.topic import (
    Decoder,
    OutgoingBatch,
    ReadRequest,
    SizeLimit,
    Topic,
    TopicBatch,
    TopicDescription,
    TopicReader,
    TopicWriter,
    Transactions,
)

__all__ = [
    "SimulatedStore",
    "SimulatedTopic",
    "SimulatedTopics",
]


class SimulatedReader(TopicReader):
    """Gives what another reader gives, in smaller pieces and later."""

    def __init__(
        self,
        stored: TopicReader,
        connection: NetworkConnection,
        name: str,
        on_close: Callable[[SimulatedReader], None],
    ) -> None:
        self._stored = stored
        self._connection = connection
        self._name = name
        self._on_close: Callable[[SimulatedReader], None] | None = on_close
        self._rest: TopicBatch | None = None

    async def read(self) -> TopicBatch | None:
        if self._rest is None:
            await self._connection.on_the_way(f"read {self._name}")
            # Kept before there is another wait: a read that is cancelled must lose nothing.
            self._rest = await self._stored.read()
        await self._connection.on_the_way_back(f"read {self._name}")
        return self._piece()

    def _piece(self) -> TopicBatch | None:
        batch = self._rest
        if batch is None:
            return None
        network = self._connection.network
        size = network.random.randint(1, len(batch)) if network.levels.cuts_batches else len(batch)
        self._rest = batch[size:] if size < len(batch) else None
        return batch[:size]

    def positions(self) -> Mapping[int, int]:
        positions = dict(self._stored.positions())
        if self._rest is not None:
            positions[self._rest.partition] = self._rest.offsets[0]
        return positions

    def identities(self) -> Mapping[int, str]:
        return self._stored.identities()

    def lag(self) -> Mapping[int, int]:
        lag = dict(self._stored.lag())
        if self._rest is not None:
            lag[self._rest.partition] += len(self._rest)
        return lag

    async def close(self) -> None:
        self._connection.check()
        if self._on_close is not None:
            self._on_close(self)
            self._on_close = None
        await self._stored.close()


class SimulatedWriter(TopicWriter):
    """Hands on what another writer is to write: late, twice, or although it says that it failed.

    Writing outside transactions, behind a network with faults.
    """

    def __init__(self, stored: TopicWriter, connection: NetworkConnection, name: str) -> None:
        self._stored = stored
        self._connection = connection
        self._name = name

    async def write(self, batch: OutgoingBatch) -> None:
        await self._connection.call(f"write to {self._name}", lambda: self._write(batch))

    async def _write(self, batch: OutgoingBatch) -> None:
        await self._stored.write(batch)
        network = self._connection.network
        if network.draws(network.levels.duplicates):
            network.event(f"written twice: {len(batch)} records to {self._name}")
            await self._stored.write(batch)

    async def flush(self) -> None:
        await self._connection.call(f"flush {self._name}", self._stored.flush)

    async def close(self) -> None:
        await self._connection.slow_call(f"close the writer of {self._name}", self._stored.close)


class SimulatedTransactions(Transactions):
    """Those of the memory topics; each call may be late, fail, or fail although it took effect.

    Transactions behind a network with faults.
    """

    def __init__(
        self,
        stored: Transactions,
        connection: NetworkConnection,
        broker: MemoryBroker,
        on_commit: Callable[[], None],
    ) -> None:
        self._stored = stored
        self._connection = connection
        self._broker = broker
        self._on_commit = on_commit

    async def begin(self) -> None:
        await self._connection.call("begin a transaction", self._stored.begin)

    async def write(self, topic: Topic, batch: OutgoingBatch) -> None:
        stored = self._broker.topic(topic.name)
        await self._connection.call(
            f"write to {topic.name} in the transaction", lambda: self._stored.write(stored, batch)
        )

    async def commit(self) -> None:
        await self._connection.call("commit", self._commit)

    async def _commit(self) -> None:
        await self._stored.commit()
        self._connection.network.event("committed")
        self._on_commit()

    async def abort(self) -> None:
        await self._connection.call("abort the transaction", self._stored.abort)

    async def close(self) -> None:
        await self._connection.slow_call("close the transactions", self._stored.close)


# What one read gives at most: small, so that few records already come in several batches.
_READ_RECORDS_MAX = 16


class SimulatedTopics:
    """The topics of a simulation as one run of the job sees them.

    A memory topic behind a network with faults.
    """

    def __init__(
        self, broker: MemoryBroker, connection: NetworkConnection, on_commit: Callable[[], None]
    ) -> None:
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

    def __init__(self, cluster: SimulatedTopics, name: str) -> None:
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


class SimulatedStore(CheckpointStore):
    """What one run of the job sees of a store that survives it: late, full, or failing although it has saved.

    A checkpoint store with faults.
    """

    def __init__(self, stored: CheckpointStore, connection: NetworkConnection) -> None:
        self._stored = stored
        self._connection = connection

    async def claim(self, flow: str, run: str, *, begin_anew: bool = False) -> CommitPointer | None:
        return await self._connection.call(
            "claim the store", lambda: self._stored.claim(flow, run, begin_anew=begin_anew)
        )

    async def pointer(self, flow: str) -> CommitPointer | None:
        return await self._connection.call(
            "ask the store for its pointer", lambda: self._stored.pointer(flow)
        )

    async def save(self, header: SnapshotHeader, parts: Iterable[SnapshotPart]) -> int:
        network = self._connection.network
        await self._connection.on_the_way("save a snapshot")
        if network.draws(network.levels.storage_full):
            network.event(f"no room for snapshot {header.id.number}")
            raise SimulatedStorageFull("the store is full (simulated)")
        size_bytes = await self._stored.save(header, parts)
        network.event(f"saved snapshot {header.id.number}")
        await self._connection.on_the_way_back("save a snapshot")
        return size_bytes

    async def commit(self, flow: str, checkpoint: CheckpointId) -> None:
        await self._connection.call(
            "set the pointer of the store", lambda: self._stored.commit(flow, checkpoint)
        )

    async def prune(self, flow: str, *, keep: int) -> list[CheckpointId]:
        return await self._connection.call("prune the store", lambda: self._stored.prune(flow, keep=keep))

    async def list(self, flow: str | None = None) -> Sequence[SnapshotHeader]:
        return await self._connection.call("list the store", lambda: self._stored.list(flow))

    async def open(self, flow: str, checkpoint: CheckpointId) -> StoredSnapshot:
        return await self._connection.call("open a snapshot", lambda: self._stored.open(flow, checkpoint))

    async def close(self) -> None:
        await self._connection.slow_call("close the store", self._stored.close)
