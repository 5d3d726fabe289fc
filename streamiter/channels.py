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
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from streamiter.errors import InternalError
from streamiter.records import Control, DataBatch, EpochWatermark, estimated_bytes

__all__ = ["LIMIT_BYTES", "LIMIT_RECORDS", "Channel", "ChannelStatistics", "Intake"]

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
    aside_records: int
    """Records that its reader has taken and not handled; they count toward its limits."""
    aside_bytes: int
    """Their estimated size."""


class Intake:
    """Whether a source may read on. It is shut while a channel behind it has more set aside than it allows."""

    __slots__ = ("_is_open", "_overfull")

    def __init__(self) -> None:
        self._overfull = 0
        """Channels behind it that shut it."""
        self._is_open = asyncio.Event()
        self._is_open.set()

    @property
    def is_shut(self) -> bool:
        """Whether nothing more is to be read."""
        return self._overfull > 0

    async def wait(self) -> None:
        """Return when it is open."""
        await self._is_open.wait()

    def shut(self) -> None:
        """A channel behind it is overfull."""
        self._overfull += 1
        self._is_open.clear()

    def open(self) -> None:
        """A channel that has shut it is not overfull any more."""
        self._overfull -= 1
        if not self._overfull:
            self._is_open.set()


class Channel:
    """A queue of batches and control records, bounded in records and in bytes.

    One task puts, one takes, both in the same event loop. A batch is admitted while the limits hold, and
    always into an empty channel, so a batch above the limit passes alone. Control records are always
    admitted: the protocol bounds their number.

    What the consumer has taken and not handled counts toward the limits until it is released: it is in memory, and
    in each snapshot, as what is in the channel. Only while the consumer needs what comes next whatever it has set
    aside (``make_way``) does it not count.
    """

    __slots__ = (
        "_aside_bytes",
        "_aside_records",
        "_intakes",
        "_is_overfull",
        "_items",
        "_makes_way",
        "_on_ready",
        "_peak_bytes",
        "_peak_records",
        "_room",
        "_size_bytes",
        "_sizes",
        "_total_batches",
        "_total_bytes",
        "_total_records",
        "_way",
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
        self._aside_records = self._aside_bytes = 0
        self._makes_way = False
        self._intakes: Sequence[Intake] = ()
        self._way = 1
        self._is_overfull = False

    def attach(self, on_ready: Callable[[], None]) -> None:
        """Have ``on_ready`` called whenever the empty channel gets something (the consumer's side)."""
        self._on_ready = on_ready

    def try_put(self, batch: DataBatch) -> bool:
        """Put a batch if there is room; says whether it was put (the producer's side)."""
        count = len(batch.records)
        size_bytes = estimated_bytes(batch.records)
        occupied, occupied_bytes = self.records, self._size_bytes
        if not self._makes_way:
            occupied += self._aside_records
            occupied_bytes += self._aside_bytes
        if occupied and (
            occupied + count > self.limit_records or occupied_bytes + size_bytes > self.limit_bytes
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
        """Return once something has been taken or released (the producer's side, one waiter)."""
        if not self._items and (self._makes_way or not self._aside_records):
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
        self._tell_of_room()
        return item

    def set_aside(self, records: int, size_bytes: int) -> None:
        """So much is taken and waits to be handled (the consumer's side)."""
        self._aside_records += records
        self._aside_bytes += size_bytes
        self._check_intakes()

    def release(self, records: int, size_bytes: int) -> None:
        """So much of what was set aside is handled now (the consumer's side)."""
        self._aside_records -= records
        self._aside_bytes -= size_bytes
        self._check_intakes()
        self._tell_of_room()

    def make_way(self, makes_way: bool) -> None:
        """Whether batches are admitted as if nothing were set aside: a barrier is behind them (the consumer's side)."""
        self._makes_way = makes_way
        if makes_way:
            self._tell_of_room()

    def shut_intakes(self, intakes: Sequence[Intake], way: int) -> None:
        """Shut these while more is set aside than the ``way`` channels hold that are between them and the consumer."""
        self._intakes = intakes
        self._way = way

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
            aside_records=self._aside_records,
            aside_bytes=self._aside_bytes,
        )

    def _tell_of_room(self) -> None:
        if self._room is not None and not self._room.done():
            self._room.set_result(None)

    def _check_intakes(self) -> None:
        is_overfull = (
            self._aside_records > self._way * self.limit_records
            or self._aside_bytes > self._way * self.limit_bytes
        )
        if is_overfull is not self._is_overfull:
            self._is_overfull = is_overfull
            for intake in self._intakes:
                if is_overfull:
                    intake.shut()
                else:
                    intake.open()

    def _append(self, item: DataBatch | Control) -> None:
        self._items.append(item)
        if len(self._items) == 1 and self._on_ready is not None:
            self._on_ready()
