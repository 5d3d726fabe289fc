"""A checkpoint store with faults."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from streamiter.checkpoints.snapshot import CheckpointId, Part, SnapshotHeader
from streamiter.checkpoints.store import CheckpointStore, CommitPointer, StoredSnapshot
from streamiter.testing.simulation.faults import SimulatedStorageFull
from streamiter.testing.simulation.network import Connection

__all__ = ["SimulatedStore"]


class SimulatedStore(CheckpointStore):
    """What one run of the job sees of a store that survives it: late, full, or failing although it has saved."""

    def __init__(self, stored: CheckpointStore, connection: Connection) -> None:
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

    async def save(self, header: SnapshotHeader, parts: Iterable[Part]) -> int:
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
