"""The bounded channel between two tasks.

>>> channel = Channel("source → train", limit_records=2, limit_bytes=1 << 20)
>>> channel.try_put(DataBatch([1, 2])), channel.try_put(DataBatch([3]))
(True, False)
>>> channel.take()
DataBatch(2 records, epoch 0)
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from streamiter.errors import InternalError
from streamiter.records import Control, DataBatch, EpochWatermark, estimated_bytes

__all__ = ["LIMIT_BYTES", "LIMIT_RECORDS", "Channel", "ChannelStatistics"]

# One of a topic reader's largest batches waits while the one before it is worked on. More would be no faster
# but slower: whatever waits is gone through at each full garbage collection.
LIMIT_RECORDS: Final = 8_192
# Enough for those at 512 bytes a record; a channel of larger records holds fewer.
LIMIT_BYTES: Final = 4 << 20


@dataclass(frozen=True, slots=True)
class ChannelStatistics:
    """A channel at one moment."""

    name: str
    """Upstream and downstream subtask."""
    records: int
    """Records waiting in it."""
    size_bytes: int
    """Their estimated size."""
    peak_records: int
    """The most records that ever waited."""
    peak_bytes: int
    """The most bytes that ever waited."""
    total_records: int
    """Records that were put into it since the start."""
    total_batches: int
    """Batches they came in."""
    total_bytes: int
    """Their estimated size."""


class Channel:
    """A queue of batches and control records, bounded in records and in bytes.

    One task puts, one takes, both in the same event loop. A batch is admitted while the limits hold, and
    always into an empty channel, so a batch above the limit passes alone. Control records are always
    admitted: the protocol bounds their number.
    """

    __slots__ = (
        "_items",
        "_on_ready",
        "_peak_bytes",
        "_peak_records",
        "_room",
        "_size_bytes",
        "_sizes",
        "_total_batches",
        "_total_bytes",
        "_total_records",
        "limit_bytes",
        "limit_records",
        "name",
        "records",
    )

    def __init__(
        self, name: str, *, limit_records: int = LIMIT_RECORDS, limit_bytes: int = LIMIT_BYTES
    ) -> None:
        self.name = name
        self.limit_records = limit_records
        self.limit_bytes = limit_bytes
        self.records = 0
        self._items: deque[DataBatch | Control] = deque()
        self._sizes: deque[int] = deque()
        self._size_bytes = 0
        self._on_ready: Callable[[], None] | None = None
        self._room: asyncio.Future[None] | None = None
        self._peak_records = self._peak_bytes = 0
        self._total_records = self._total_batches = self._total_bytes = 0

    def attach(self, on_ready: Callable[[], None]) -> None:
        """Have ``on_ready`` called whenever the empty channel gets something (the consumer's side)."""
        self._on_ready = on_ready

    def try_put(self, batch: DataBatch) -> bool:
        """Put a batch if there is room; says whether it was put (the producer's side)."""
        count = len(batch.records)
        size_bytes = estimated_bytes(batch.records)
        if self.records and (
            self.records + count > self.limit_records or self._size_bytes + size_bytes > self.limit_bytes
        ):
            return False
        self.records += count
        self._size_bytes += size_bytes
        self._peak_records = max(self._peak_records, self.records)
        self._peak_bytes = max(self._peak_bytes, self._size_bytes)
        self._total_records += count
        self._total_batches += 1
        self._total_bytes += size_bytes
        self._sizes.append(size_bytes)
        self._append(batch)
        return True

    def put_control(self, control: Control) -> None:
        """Put a control record behind all that is there (the producer's side).

        An epoch watermark takes the place of one that nothing has followed: it says all that one said, and
        a consumer that does not come to take them would find one for each epoch.
        """
        if (
            self._items
            and isinstance(control, EpochWatermark)
            and isinstance(self._items[-1], EpochWatermark)
        ):
            self._items[-1] = control
            return
        self._append(control)

    async def wait_for_room(self) -> None:
        """Return once something has been taken (the producer's side, one waiter)."""
        if not self._items:
            return
        if self._room is not None:
            raise InternalError(f"channel {self.name}: a second task waits for room")
        self._room = asyncio.get_running_loop().create_future()
        try:
            await self._room
        finally:
            self._room = None

    def peek(self) -> DataBatch | Control | None:
        """What comes next, or None (the consumer's side)."""
        return self._items[0] if self._items else None

    def take(self) -> DataBatch | Control:
        """Take what comes next (the consumer's side)."""
        item = self._items.popleft()
        if not isinstance(item, Control):
            self.records -= len(item.records)
            self._size_bytes -= self._sizes.popleft()
        if self._room is not None and not self._room.done():
            self._room.set_result(None)
        return item

    def clear(self) -> None:
        """Drop all that waits (the consumer's side)."""
        while self._items:
            self.take()

    def statistics(self) -> ChannelStatistics:
        """The channel now."""
        return ChannelStatistics(
            name=self.name,
            records=self.records,
            size_bytes=self._size_bytes,
            peak_records=self._peak_records,
            peak_bytes=self._peak_bytes,
            total_records=self._total_records,
            total_batches=self._total_batches,
            total_bytes=self._total_bytes,
        )

    def _append(self, item: DataBatch | Control) -> None:
        self._items.append(item)
        if len(self._items) == 1 and self._on_ready is not None:
            self._on_ready()
