"""What a sink holds between its barrier and the commit: in memory, then on disk."""

from __future__ import annotations

import tempfile
from collections import deque
from typing import Final, final

from streamiter.checkpoints.plain_data import PlainData
from streamiter.checkpoints.spill import SpillQueue
from streamiter.errors import LoopOverflow, StorageFull
from streamiter.records import DataBatch
from streamiter.topics.outgoing import batch_bytes
from streamiter.topics.topic import OutgoingBatch

__all__ = ["HeldBatches"]

# Some hundred milliseconds of a fast sink, as long as most checkpoints take.
_MEMORY_BYTES: Final = 32 << 20

# A minute of a fast sink, as long as a checkpoint may take before it is given up.
_DISK_BYTES: Final = 8 << 30


@final
class HeldBatches:
    """First in, first out. Of one sink subtask; to be closed.

    >>> held = HeldBatches("clicks", PlainData(), memory_limit_bytes=3)
    >>> [held.put(OutgoingBatch([value])) for value in (b"abc", b"on disk")]
    [True, True]
    >>> held.drop_first()
    >>> held.first()
    OutgoingBatch(values=[b'on disk'], keys=None, headers=None, timestamps_ms=None, partition=None)
    >>> held.close()
    """

    def __init__(
        self,
        step: str,
        plain_data: PlainData,
        *,
        memory_limit_bytes: int = _MEMORY_BYTES,
        disk_limit_bytes: int = _DISK_BYTES,
    ) -> None:
        self._memory: deque[OutgoingBatch] = deque()
        self._bytes_in_memory = 0
        self._memory_limit_bytes = memory_limit_bytes
        # Behind all that is in memory; in its own memory it has but the batch that comes first.
        self._disk = SpillQueue(
            name=f"outputs of {step}",
            plain_data=plain_data,
            memory_limit_bytes=0,
            disk_limit_bytes=disk_limit_bytes,
            directory=tempfile.gettempdir(),
        )

    def put(self, batch: OutgoingBatch) -> bool:
        """Whether there was room for it."""
        if not len(self._disk) and self._bytes_in_memory < self._memory_limit_bytes:
            self._memory.append(batch)
            self._bytes_in_memory += batch_bytes(batch)
            return True
        try:
            self._disk.put(DataBatch([_plain(batch)]))
        except (LoopOverflow, StorageFull):
            return False
        return True

    def first(self) -> OutgoingBatch | None:
        """What was put first, which stays."""
        if self._memory:
            return self._memory[0]
        if not len(self._disk):
            return None
        item = self._disk.peek()
        assert isinstance(item, DataBatch)
        return OutgoingBatch(*item.records[0])

    def drop_first(self) -> None:
        """It is written."""
        if self._memory:
            self._bytes_in_memory -= batch_bytes(self._memory.popleft())
        else:
            self._disk.take()

    def close(self) -> None:
        """Drop everything. May be called more than once."""
        self._memory.clear()
        self._disk.close()


def _plain(batch: OutgoingBatch) -> tuple[object, ...]:
    columns = (batch.values, batch.keys, batch.headers, batch.timestamps_ms)
    return *(None if column is None else list(column) for column in columns), batch.partition
