"""The bounded channel between two tasks, and the intake of a source.

A task puts batches and control records into a :class:`Channel`; another task takes them in the same order. A full
channel refuses batches, so that a slow task slows down the tasks before it. An :class:`Intake` stops a source that
reads faster than a task further downstream can handle.

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
from streamiter.values.records import BATCH_RECORDS, WATERMARKS, Control, DataBatch, estimated_bytes

# One of the largest batches of a topic reader waits while the task handles the batch before it. A larger limit would
# make jobs slower: each full garbage collection visits all waiting records.
LIMIT_RECORDS: Final = BATCH_RECORDS
# Room for this many records of 512 bytes. A channel holds fewer records if they are larger.
LIMIT_BYTES: Final = 4 << 20


@dataclass(frozen=True, slots=True)
class ChannelStatistics:
    """The state of a channel at one moment. In a channel between two processes, records on their way wait in it."""

    name: str
    """The upstream and the downstream subtask."""
    records: int
    """Records that wait in the channel."""
    size_bytes: int
    """The estimated size of the waiting records."""
    peak_records: int
    """The largest number of records that have waited at one time."""
    peak_bytes: int
    """The largest size of the records that have waited at one time."""
    total_records: int
    """Records that were put into the channel since the start."""
    total_batches: int
    """Batches that were put into the channel since the start."""
    total_bytes: int
    """The estimated size of all records since the start."""
    aside_records: int
    """Records that the reading task has taken and not handled. They count toward the limits of the channel."""
    aside_bytes: int
    """The estimated size of these records."""


class Intake:
    """Decides whether a source may read. A channel downstream shuts it while the channel's reader holds too much."""

    def __init__(self) -> None:
        self._overfull = 0
        """The number of channels that have shut it."""
        self._is_open = asyncio.Event()
        self._is_open.set()

    @property
    def is_shut(self) -> bool:
        """Whether the source must not read."""
        return self._overfull > 0

    async def wait(self) -> None:
        """Wait until the intake is open."""
        await self._is_open.wait()

    def shut(self) -> None:
        """Stop the source on behalf of one channel."""
        self._overfull += 1
        self._is_open.clear()

    def open(self) -> None:
        """Undo one call of ``shut``; the source reads again when all are undone."""
        self._overfull -= 1
        if not self._overfull:
            self._is_open.set()


class Channel:
    """A queue of batches and control records, bounded in records and in bytes.

    One task puts (the producer), another one takes (the consumer); both run in the same event loop. The channel admits
    a batch while the limits hold. An empty channel admits any batch, so that a batch above the limit passes alone. The
    channel admits all control records; the protocol bounds their number.

    Records that the consumer has taken and set aside count toward the limits until it releases them: they are in
    memory, and in each snapshot, just as the records in the channel. They do not count while the consumer needs the
    next item in any case (``make_way``).
    """

    def __init__(self, name: str, *, limit_records: int = LIMIT_RECORDS, limit_bytes: int = LIMIT_BYTES) -> None:
        self.name = name
        self.limit_records = limit_records
        self.limit_bytes = limit_bytes
        self.records = 0
        self.waiting = 0
        """Batches and control records that wait. Others only read it."""
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
        self._is_overfull = self._is_overfull_downstream = False

    def attach(self, on_ready: Callable[[], None]) -> None:
        """Call ``on_ready`` whenever an item is put into the empty channel (for the consumer)."""
        self._on_ready = on_ready

    def try_put(self, batch: DataBatch) -> bool:
        """Put a batch if the channel has room; return whether it was put (for the producer)."""
        count = len(batch.records)
        occupied, occupied_bytes = self.records, self._size_bytes
        if not self._makes_way:
            occupied += self._aside_records
            occupied_bytes += self._aside_bytes
        if occupied and occupied + count > self.limit_records:
            return False
        size_bytes = estimated_bytes(batch.records)
        if occupied and occupied_bytes + size_bytes > self.limit_bytes:
            return False
        self._admit(batch, count, size_bytes)
        return True

    def put_control(self, control: Control) -> None:
        """Put a control record at the end of the channel (for the producer).

        A watermark replaces a watermark of its kind that is last in the channel. It has the same meaning as both
        together, and a consumer that is late does not find one for each epoch.
        """
        items = self._items
        if items and type(items[-1]) is type(control) and isinstance(control, WATERMARKS):
            items[-1] = control
            return
        items.append(control)
        self.waiting += 1
        if self.waiting == 1 and self._on_ready is not None:
            self._on_ready()

    async def wait_for_room(self) -> None:
        """Wait until the consumer takes or releases something (for the producer; one task at a time)."""
        if not self.records and (self._makes_way or not self._aside_records):
            return
        if self._room is not None:
            raise InternalError(f"channel {self.name}: expected one producer, but a second task waits for room")
        self._room = asyncio.get_running_loop().create_future()
        try:
            await self._room
        finally:
            self._room = None

    def peek(self) -> DataBatch | Control | None:
        """Return the next item without taking it, or None (for the consumer)."""
        return self._items[0] if self._items else None

    def take(self) -> DataBatch | Control:
        """Take the next item (for the consumer)."""
        item = self._items.popleft()
        self.waiting -= 1
        if not isinstance(item, Control):
            self.records -= len(item.records)
            self._size_bytes -= self._sizes.popleft()
        if self._room is not None:
            self._wake_producer()
        return item

    def set_aside(self, records: int, size_bytes: int) -> None:
        """Count records that were taken and are not handled yet (for the consumer)."""
        self._aside_records += records
        self._aside_bytes += size_bytes
        self._check_intakes()

    def release(self, records: int, size_bytes: int) -> None:
        """Count records no more that were set aside and are handled now (for the consumer)."""
        self._aside_records -= records
        self._aside_bytes -= size_bytes
        self._check_intakes()
        self._wake_producer()

    def make_way(self, makes_way: bool) -> None:
        """Choose whether to admit batches as if nothing were set aside (for the consumer, which expects a barrier)."""
        self._makes_way = makes_way
        self._wake_producer()

    def shut_intakes(self, intakes: Sequence[Intake], way: int) -> None:
        """Shut these intakes while the consumer holds more than fits into the ``way`` channels between them and it."""
        self._intakes = intakes
        self._way = way

    def statistics(self) -> ChannelStatistics:
        """Return the state of the channel."""
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

    def _admit(self, batch: DataBatch, count: int, size_bytes: int) -> None:
        self.records = records = self.records + count
        self._size_bytes = waiting_bytes = self._size_bytes + size_bytes
        if records > self._peak_records:
            self._peak_records = records
        if waiting_bytes > self._peak_bytes:
            self._peak_bytes = waiting_bytes
        self._total_records += count
        self._total_batches += 1
        self._total_bytes += size_bytes
        self._sizes.append(size_bytes)
        self._append(batch)

    def _wake_producer(self) -> None:
        if self._room is not None and not self._room.done():
            self._room.set_result(None)

    def _check_intakes(self) -> None:
        is_overfull = (
            self._is_overfull_downstream
            or self._aside_records > self._way * self.limit_records
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
        self.waiting += 1
        if self.waiting == 1 and self._on_ready is not None:
            self._on_ready()
