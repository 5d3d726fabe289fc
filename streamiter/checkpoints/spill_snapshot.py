"""What waits in a spill queue at one moment, for a checkpoint."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from struct import Struct
from typing import TYPE_CHECKING, Any, Final, final

from streamiter.checkpoints.control_data import control_to_plain
from streamiter.checkpoints.deferred_entries import DeferredEntries
from streamiter.checkpoints.spill_file import HeldEntries
from streamiter.records import Control, DataBatch

if TYPE_CHECKING:
    from streamiter.checkpoints.plain_data import PlainData

__all__ = ["HEAD", "SpillSnapshot"]

HEAD: Final = Struct("<qq")
"""The head of each batch on disk: its epoch and number of records."""


@final
class SpillSnapshot(DeferredEntries):
    """Items in memory, then batches on disk with control records among them.

    An entry is ``("data", epoch, records, encoded batch)``, or a control record as plain data. ``markers`` has
    each control record with the number of the batch on disk that it follows; that of the first is
    ``first_on_disk``.
    """

    def __init__(
        self,
        name: str,
        plain_data: PlainData,
        *,
        encode: Callable[[DataBatch], bytes],
        memory: deque[DataBatch | Control],
        disk: HeldEntries,
        markers: deque[tuple[Control, int]],
        first_on_disk: int,
    ) -> None:
        super().__init__(name, plain_data)
        self._encode = encode
        self._memory = memory
        self._disk = disk
        self._markers = markers
        self._first_on_disk = first_on_disk

    def entries(self) -> Iterator[tuple[Any, ...]]:
        while self._memory:
            yield self._entry(self._memory.popleft())
        for number, (head, content) in enumerate(self._disk, start=self._first_on_disk):
            yield ("data", *HEAD.unpack(head), content)
            while self._markers and self._markers[0][1] == number:
                yield control_to_plain(self._markers.popleft()[0])

    def let_go(self) -> None:
        self._memory.clear()
        self._markers.clear()
        self._disk.release()

    def _entry(self, item: DataBatch | Control) -> tuple[Any, ...]:
        if not isinstance(item, DataBatch):
            return control_to_plain(item)
        return ("data", item.epoch, len(item.records), self._encode(item))
