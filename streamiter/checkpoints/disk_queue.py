"""A queue of batches in memory up to a limit, and on disk above it.

:class:`SpillQueue` is a first-in, first-out queue of batches and control records: the engine uses it wherever a
producer must never wait, above all on the feedback edge of a loop. It writes the batches above the limit to temporary
files, by means of :mod:`~streamiter.checkpoints.disk_batches`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterable
from dataclasses import dataclass
from typing import Final

from streamiter.checkpoints.disk_batches import (
    EncodedBatch,
    HeldDiskBatches,
    LimitedBatches,
    errors_with_name,
    memory_bytes,
)
from streamiter.deferred import Deferred, PlainValue, entries_of
from streamiter.errors import InternalError
from streamiter.records import Batch, Control, DataBatch, control_from_plain, control_to_plain

Item = DataBatch | Control

_INT64: Final = range(-(2**63), 2**63)


@dataclass(frozen=True, slots=True)
class SpillStatistics:
    """The items in a spill queue now, and the most it has held."""

    items: int
    """Batches and control records that wait."""
    items_peak: int
    """The most that ever waited."""
    records: int
    """Records in the batches that wait."""
    bytes_in_memory: int
    """Estimated bytes of the batches that wait in memory."""
    bytes_in_memory_peak: int
    """The highest ``bytes_in_memory``; above the limit only where a single batch is."""
    bytes_on_disk: int
    """Size of the files, including the part of the first file that is already read."""
    bytes_on_disk_peak: int
    """The highest ``bytes_on_disk``."""
    batches_on_disk: int
    """Batches that wait on disk."""
    batches_spilled: int
    """Batches ever written to disk."""
    bytes_spilled: int
    """Bytes ever written to disk."""


class SpillQueue(LimitedBatches):
    """A first-in, first-out queue of batches with their epochs, and of control records between them.

    A batch stays in memory up to ``memory_limit_bytes``, and always if no batch waits before it. Above the limit the
    queue *spills*: batches go to disk until all of them are read back, one at a time. So memory holds at most the limit
    or one batch. Control records stay in memory, also between batches on disk; each takes some 100 bytes, which no
    limit counts. If ``put`` raises, the queue is unchanged.

    >>> from tempfile import gettempdir
    >>> import numpy as np
    >>> limits = {"memory_limit_bytes": 1000, "disk_limit_bytes": 10_000}
    >>> queue = SpillQueue(name="train", directory=gettempdir(), **limits)
    >>> for epoch in range(3):
    ...     queue.put(DataBatch(np.zeros(100), epoch))
    >>> spilled = queue.statistics().batches_on_disk
    >>> [queue.take() for _ in range(3)]
    [DataBatch(100 records, epoch 0), DataBatch(100 records, epoch 1), DataBatch(100 records, epoch 2)]
    >>> spilled
    2
    >>> queue.close()
    """

    contents = "batches waiting"
    # Space that is read and not yet freed is at most a sixteenth of the limit, and a queue opens at most some 17 files
    # (processes are often allowed 1024).
    segments = 16

    on_limit: Callable[[], None] | None = None
    """Called when the first batch has gone to disk, and when the last one has been read back."""

    _items_peak = 0
    _bytes_in_memory_peak = 0

    def _clear(self) -> None:
        super()._clear()
        # The front of the queue, each item with the bytes counted for it. All of these items are older than the
        # batches on disk. So while a batch is on disk, further batches go there.
        self._memory: deque[tuple[Item, int]] = deque()
        # Control records behind batches on disk, each with the number of the batch it follows: the control record
        # moves to memory when that many batches have been read back.
        self._markers: deque[tuple[Control, int]] = deque()

    def __len__(self) -> int:
        """Return the number of batches and control records that wait."""
        return len(self._memory) + len(self._markers) + self._disk.count

    @property
    def bytes_in_memory(self) -> int:
        """Estimated bytes of the batches that wait in memory."""
        return self._bytes_in_memory

    def put(self, item: Item) -> None:
        """Add a batch or a control record at the end.

        Raises ``LoopOverflow`` above the disk limit, ``StorageFull`` when the disk itself is full, and
        ``PlainDataError`` for a batch that must be written and is not plain data.
        """
        if self._is_closed:
            raise InternalError(f"{self._name}: {item!r} was put into a spill queue that is closed")
        if isinstance(item, DataBatch):
            self._put_batch(item)
            self._count_put(len(item.records))
        else:
            self._put_control(item)
            self._count_put(0)

    def peek(self) -> Item:
        """Return the first item without removing it; raise ``IndexError`` if the queue is empty."""
        if not self._memory:
            self._read_back()
        return self._memory[0][0]

    def take(self) -> Item:
        """Remove and return the first item; raise ``IndexError`` if the queue is empty."""
        if not self._memory:
            self._read_back()
        item, size_bytes = self._memory.popleft()
        self._bytes_in_memory -= size_bytes
        if isinstance(item, DataBatch):
            self._records -= len(item.records)
        return item

    def snapshot(self) -> Deferred:
        """Return all items in order, for a checkpoint; later changes of the queue do not affect them.

        Pass the decoded frames to :meth:`refill`. Batches in memory are encoded one at a time, when the frames are
        read, and batches on disk are copied without being decoded. The snapshot keeps its unread items, which no
        limit counts, until it is released.
        """
        held = self._disk.hold()
        entries = _queue_entries(
            self._disk.encode,
            memory=deque(item for item, _ in self._memory),
            held=held,
            markers=deque(self._markers),
            first_on_disk=self._disk.batches_written - self._disk.count + 1,
        )
        return self._snapshot(entries, held)

    def refill(self, frames: Iterable[PlainValue]) -> None:
        """Add the items of a snapshot at the end. Raises as :meth:`put` does; items added before stay.

        ``frames`` are the decoded frames of the snapshot; only one of them is in memory at a time. The snapshot of
        a queue fits into an empty queue with the same limits.
        """
        for entry in entries_of(frames):
            self.put_plain(entry)

    def put_plain(self, entry: PlainValue) -> None:
        """Add an item as a snapshot has it, as :meth:`put` does; the batch need not be encoded."""
        match entry:
            case ["data", int() as epoch, int() as records, content] if epoch in _INT64 and records in _INT64:
                if isinstance(content, bytes):
                    self._put_encoded(EncodedBatch(epoch, records, content))
                else:
                    self.put(DataBatch(content, epoch))
            case _:
                with errors_with_name(self._name):
                    control = control_from_plain(entry)
                self.put(control)

    def statistics(self) -> SpillStatistics:
        """Return the numbers of the queue as they are now."""
        return SpillStatistics(
            items=len(self),
            items_peak=self._items_peak,
            records=self._records,
            bytes_in_memory=self._bytes_in_memory,
            bytes_in_memory_peak=self._bytes_in_memory_peak,
            bytes_on_disk=self._disk.size_bytes,
            bytes_on_disk_peak=self._disk.size_bytes_peak,
            batches_on_disk=self._disk.count,
            batches_spilled=self._disk.batches_written,
            bytes_spilled=self._disk.bytes_written,
        )

    def _put_batch(self, batch: DataBatch) -> None:
        size_bytes = memory_bytes(batch.records)
        fits = self._bytes_in_memory + size_bytes <= self._memory_limit_bytes
        if not self._disk.count and (fits or not self._bytes_in_memory):
            self._keep(batch, size_bytes)
        else:
            self._disk.append(self._disk.encode(batch.records, batch.epoch))
            if self._disk.count == 1 and self.on_limit is not None:
                self.on_limit()

    def _put_encoded(self, encoded: EncodedBatch) -> None:
        """Add a batch that is encoded; if it goes to disk, it is not decoded."""
        if self._disk.count:
            self._disk.append(encoded)
            self._count_put(encoded.records)
        else:
            self.put(DataBatch(self._disk.decode(encoded), encoded.epoch))

    def _put_control(self, control: Control) -> None:
        if self._disk.count:
            self._markers.append((control, self._disk.batches_written))
        else:
            self._memory.append((control, 0))

    def _count_put(self, records: int) -> None:
        self._records += records
        if (items := len(self)) > self._items_peak:
            self._items_peak = items

    def _keep(self, batch: DataBatch, size_bytes: int) -> None:
        self._memory.append((batch, size_bytes))
        self._bytes_in_memory += size_bytes
        if self._bytes_in_memory > self._bytes_in_memory_peak:
            self._bytes_in_memory_peak = self._bytes_in_memory

    def _read_back(self) -> None:
        """Move the first batch on disk to memory, and the control records that follow it."""
        if not self._disk.count:
            raise IndexError(f"{self._name}: the spill queue is empty")
        encoded = self._disk.first()
        batch = DataBatch(self._disk.decode(encoded), encoded.epoch)
        self._disk.drop_first(encoded)
        self._keep(batch, memory_bytes(batch.records))
        read_back = self._disk.batches_written - self._disk.count
        while self._markers and self._markers[0][1] == read_back:
            self._memory.append((self._markers.popleft()[0], 0))
        if not self._disk.count and self.on_limit is not None:
            self.on_limit()

    def _explain_overflow(self) -> str:
        return (
            f"({self._disk.count} batches there, {self._bytes_in_memory} of {self._memory_limit_bytes} bytes in "
            "memory); the consumer of the queue is slower than its producer: emit less, make the consumer faster, "
            "or raise the disk limit (of a loop: IterationConfig(feedback_limits=FeedbackLimits(disk_bytes=…)))"
        )


def _queue_entries(
    encode: Callable[[Batch, int], EncodedBatch],
    *,
    memory: deque[Item],
    held: HeldDiskBatches,
    markers: deque[tuple[Control, int]],
    first_on_disk: int,
) -> Generator[tuple[PlainValue, ...], None, None]:
    """Give the items in memory, then the batches on disk with the control records between them.

    An entry is ``("data", epoch, records, encoded batch)``, or a control record as plain data. ``markers`` has
    each control record with the number of the batch on disk that it follows; ``first_on_disk`` is the number of
    the first batch on disk. Each item is forgotten as soon as it is given.
    """
    while memory:
        item = memory.popleft()
        if isinstance(item, DataBatch):
            yield "data", *encode(item.records, item.epoch)
        else:
            yield control_to_plain(item)
    for number, encoded in enumerate(held, start=first_on_disk):
        yield "data", *encoded
        while markers and markers[0][1] == number:
            yield control_to_plain(markers.popleft()[0])
