"""Transactions behind a network with faults."""

from __future__ import annotations

from collections.abc import Callable

from streamiter.testing.simulation.network import Connection
from streamiter.topics.memory import MemoryBroker
from streamiter.topics.topic import OutgoingBatch, Topic, Transactions

__all__ = ["SimulatedTransactions"]


class SimulatedTransactions(Transactions):
    """Those of the memory topics; each call may be late, fail, or fail although it took effect."""

    def __init__(
        self,
        stored: Transactions,
        connection: Connection,
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
