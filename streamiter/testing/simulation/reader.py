"""Reading a topic behind a network with faults, in batches that are cut at random."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from streamiter.testing.simulation.network import Connection
from streamiter.topics.topic import TopicBatch, TopicReader

__all__ = ["SimulatedReader"]


class SimulatedReader(TopicReader):
    """Gives what another reader gives, in smaller pieces and later."""

    def __init__(
        self,
        stored: TopicReader,
        connection: Connection,
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
