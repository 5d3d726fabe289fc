"""Writing outside transactions, behind a network with faults."""

from __future__ import annotations

from streamiter.testing.simulation.network import Connection
from streamiter.topics.topic import OutgoingBatch, TopicWriter

__all__ = ["SimulatedWriter"]


class SimulatedWriter(TopicWriter):
    """Hands on what another writer is to write: late, twice, or although it says that it failed."""

    def __init__(self, stored: TopicWriter, connection: Connection, name: str) -> None:
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
