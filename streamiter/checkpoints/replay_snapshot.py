"""What a replay cache keeps at one moment, for a checkpoint."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, final

from streamiter.checkpoints.deferred_entries import DeferredEntries
from streamiter.checkpoints.piece_file import HeldPieces
from streamiter.records import Batch

if TYPE_CHECKING:
    from streamiter.checkpoints.plain_data import PlainData

__all__ = ["ReplaySnapshot"]


@final
class ReplaySnapshot(DeferredEntries):
    """Batches in memory, pieces on disk, and the last, small batches.

    An entry is ``(records, bytes counted in memory or None, encoded batch)``.
    """

    def __init__(
        self,
        name: str,
        plain_data: PlainData,
        *,
        encode: Callable[[Batch], bytes],
        memory: list[tuple[Batch, int]],
        disk: HeldPieces,
        records_on_disk: array[int],
        last: tuple[Batch, int | None] | None,
    ) -> None:
        """``records_on_disk`` may be appended to meanwhile, behind what is looked at here."""
        super().__init__(name, plain_data)
        self._encode = encode
        self._memory = memory
        self._disk = disk
        self._records_on_disk = records_on_disk
        self._last = last

    def entries(self) -> Iterator[tuple[int, int | None, bytes]]:
        for batch, size_bytes in self._memory:
            yield len(batch), size_bytes, self._encode(batch)
        for index, content in enumerate(self._disk):
            yield self._records_on_disk[index], None, content
        if self._last is not None:
            batch, counted_bytes = self._last
            yield len(batch), counted_bytes, self._encode(batch)

    def let_go(self) -> None:
        self._memory, self._last = [], None
        self._disk.release()
