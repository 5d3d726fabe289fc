"""A store of checkpoints that waits until it may save."""

import asyncio
from collections.abc import Iterable
from pathlib import Path

from streamiter.engine.storage.snapshot import SnapshotHeader, SnapshotPart
from streamiter.engine.storage.store import CheckpointStore, OtherFiles, blobs_at

__all__ = ["HeldStore"]


class HeldStore(CheckpointStore):
    """Saves a snapshot only when a test allows it."""

    def __init__(self, folder: Path) -> None:
        super().__init__(blobs_at(folder))
        self.saves = asyncio.Event()
        self.may_save = asyncio.Event()

    async def save(
        self, header: SnapshotHeader, parts: Iterable[SnapshotPart], others: OtherFiles | None = None
    ) -> int:
        self.saves.set()
        await self.may_save.wait()
        return await super().save(header, parts, others)
