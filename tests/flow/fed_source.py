"""A source that a test feeds by hand."""

from __future__ import annotations

import asyncio
from typing import Any

from streamiter.operators.operator import Context
from streamiter.operators.source import Positions, Source, SourceBatch


class Fed(Source):
    """Brings what ``give`` was given, a batch for each call; ends with ``end``. Its position is a count."""

    bounded = False

    def __init__(self) -> None:
        self._batches: asyncio.Queue[list[Any] | None] = asyncio.Queue()
        self.brought = 0
        self.closed = 0

    def open(self, context: Context, positions: Positions | None) -> None:
        self.began_at = dict(positions) if positions is not None else None

    async def read(self) -> SourceBatch | None:
        batch = await self._batches.get()
        if batch is None:
            return None
        self.brought += len(batch)
        return SourceBatch(batch, {"brought": self.brought})

    def close(self) -> None:
        self.closed += 1

    def give(self, *records: Any) -> None:
        """One batch of these records."""
        self._batches.put_nowait(list(records))

    def end(self) -> None:
        """Nothing more."""
        self._batches.put_nowait(None)
