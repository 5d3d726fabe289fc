"""A log of batches in memory up to a limit, and on disk above it; and the queue that reads it once.

:class:`SpillLog` is the base of :class:`SpillQueue` and of :mod:`~streamiter.engine.storage.replay_cache`, which reads
its log again and again. It writes the batches above the limit to temporary files, by means of
:mod:`~streamiter.engine.storage.disk_batches`. The engine uses a queue wherever a producer must never wait, above all
on the feedback edge of a loop.
"""

from __future__ import annotations

import abc
import os
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from dataclasses import dataclass
from typing import ClassVar, Final, final

from streamiter.engine.storage.disk_batches import DiskBatches, EncodedBatch, errors_with_name
from streamiter.errors import ConfigurationError, InternalError
from streamiter.values.deferred import Deferred, DeferredEntries, PlainValue, entries_of
from streamiter.values.plain_data import PlainData
from streamiter.values.records import Batch, Control, DataBatch, control_from_plain, control_to_plain, estimated_bytes

QueuedItem = DataBatch | Control

_INT64: Final = range(-(2**63), 2**63)
_COUNTS: Final = range(2**63)

# A batch and its place in a log: a DataBatch (48 bytes), its list (56 and a pointer) or an array without its content,
# rounded up. Without this number, batches of no bytes (empty lists, arrays of no columns) could fill the memory without
# being counted.
BATCH_PLACE_BYTES: Final = 128


def memory_bytes(batch: Batch) -> int:
    """Return the estimated bytes of memory that a batch takes."""
    return BATCH_PLACE_BYTES + estimated_bytes(batch)


@dataclass(frozen=True, slots=True)
class SpillStatistics:
    """The numbers of a spill queue now, and their highest values."""

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


class SpillLog(abc.ABC):
    """Batches with their epochs, and control records between them, in the order in which they were added.

    Batches stay in memory, as the objects they are, up to ``memory_limit_bytes``. Further batches are encoded as plain
    data and written to temporary files in ``directory``, which is created when it is first needed. While a batch is on
    disk, all later ones go there. Control records stay in memory, also between batches on disk; each takes some 100
    bytes, which no limit counts. ``name`` (the step) begins the message of every error. The object belongs to one task,
    and waits for nothing but the disk. Its owner closes it.
    """

    contents: ClassVar[str]
    """The name of the batches in the message of ``LoopOverflow``."""
    segments: ClassVar[int | None] = None
    """The number of files that share the disk limit; None for one file, from which any batch can be read."""
    keeps_one: ClassVar[bool] = False
    """Whether a batch stays in memory, however large it is, if no other is there."""
    is_cut: ClassVar[bool] = False
    """Whether batches are cut and joined when they are added; then a snapshot has their size in memory, too."""
    on_limit: Callable[[], None] | None = None
    """Called when the first batch has gone to disk, and when the last one has been read back."""

    _bytes_in_memory_peak = 0

    def __init__(
        self,
        *,
        name: str,
        directory: str | os.PathLike[str],
        memory_limit_bytes: int,
        disk_limit_bytes: int,
        plain_data: PlainData | None = None,
    ) -> None:
        if memory_limit_bytes < 0 or disk_limit_bytes < 0:
            raise ConfigurationError(
                f"{name}: expected limits of 0 bytes or more, given memory_limit_bytes={memory_limit_bytes} "
                f"and disk_limit_bytes={disk_limit_bytes}; a disk limit of 0 means that nothing is written to disk"
            )
        self._name = name
        self.memory_limit_bytes = memory_limit_bytes
        """It holds for items that are added from now on."""
        self._plain_data = plain_data if plain_data is not None else PlainData()
        self._disk = DiskBatches(
            name=name,
            directory=directory,
            limit_bytes=disk_limit_bytes,
            plain_data=self._plain_data,
            contents=self.contents,
            explain_overflow=self._explain_overflow,
            segment_bytes=None if self.segments is None else max(1, disk_limit_bytes // self.segments),
        )
        self._is_closed = False
        self._clear()

    def _clear(self) -> None:
        """Drop all items."""
        self._disk.close()
        self._bytes_in_memory = self._records = 0
        self.memory: deque[tuple[QueuedItem, int]] = deque()
        """The front of the log, each item with the bytes counted for it. All of these items are older than the batches
        on disk. Others only read it."""
        # Control records behind batches on disk, each with the number of the batch it follows: the control record
        # moves to memory when that many batches have been read back.
        self._markers: deque[tuple[Control, int]] = deque()

    def close(self) -> None:
        """Drop all items and remove the files. May be called more than once."""
        self._is_closed = True
        self._clear()

    def __len__(self) -> int:
        """Return the number of batches and control records that it has."""
        return len(self.memory) + len(self._markers) + self._disk.count

    @property
    def records(self) -> int:
        """Records in all batches."""
        return self._records

    @property
    def bytes_in_memory(self) -> int:
        """Estimated bytes of the batches that are in memory."""
        return self._bytes_in_memory

    @property
    def bytes_on_disk(self) -> int:
        """Size of the files, including batches that are already read; never above the disk limit."""
        return self._disk.size_bytes

    def snapshot(self) -> Deferred:
        """Return all items in order, for a checkpoint; later changes of the log do not affect them.

        Pass the decoded frames to :meth:`refill`. Batches in memory are encoded one at a time, when the frames are
        read, and batches on disk are copied without being decoded. The snapshot keeps its unread items, which no
        limit counts, until it is released.
        """
        entries = _entries(
            self._disk.encode,
            memory=deque(self.memory),
            held=self._disk.hold(),
            markers=deque(self._markers),
            first_on_disk=self._disk.batches_written - self._disk.count + 1,
            last=self._last(),
            has_sizes=self.is_cut,
        )
        return DeferredEntries(self._name, self._plain_data.encode, entries)

    def _last(self) -> deque[tuple[QueuedItem, int]]:
        """Return the items behind all others, each with the bytes counted for it."""
        return deque()

    def refill(self, frames: Iterable[PlainValue]) -> None:
        """Add the items of a snapshot at the end. Items added before stay.

        Raises ``LoopOverflow`` above the disk limit, ``StorageFull`` when the disk itself is full, and
        ``PlainDataError`` for other entries. ``frames`` are the decoded frames of the snapshot; only one of them is in
        memory at a time. The snapshot of a log fits into an empty log with the same limits.
        """
        if self._is_closed:
            raise self._closed("a snapshot")
        for entry in entries_of(frames):
            self.put_plain(entry)

    def put_plain(self, entry: PlainValue) -> None:
        """Add an item as a snapshot has it."""
        match entry:
            case ["data", int() as epoch, int() as records, bytes() as content, *sizes] if (
                epoch in _INT64 and records in _COUNTS and _is_size(*sizes)
            ):
                self._add_encoded(EncodedBatch(epoch, records, content), *sizes)
            case _:
                with errors_with_name(self._name):
                    control = control_from_plain(entry)
                self._add_control(control)

    @abc.abstractmethod
    def _explain_overflow(self) -> str:
        """Return the end of the message of ``LoopOverflow``: the present state, and what to do."""

    def _closed(self, given: object) -> InternalError:
        return InternalError(f"{self._name}: {given} was added to a {type(self).__name__} that is closed")

    # -- adding ----------------------------------------------------------------------------------------------

    def _fits(self, size_bytes: int) -> bool:
        """Return whether this many bytes more may be in memory."""
        is_first = self.keeps_one and not self._bytes_in_memory
        return is_first or self._bytes_in_memory + size_bytes <= self.memory_limit_bytes

    def _add_encoded(self, encoded: EncodedBatch, size_bytes: int | None = None) -> None:
        """Add a batch that is encoded; if one is on disk, it is not decoded. ``size_bytes`` were counted for it."""
        if self._disk.count:
            self._spill(encoded)
        else:
            batch = DataBatch(self._disk.decode(encoded), encoded.epoch)
            size_bytes = memory_bytes(batch.records) if size_bytes is None else size_bytes
            if self._fits(size_bytes):
                self._keep(batch, size_bytes)
            else:
                self._spill(encoded)
        self._records += encoded.records

    def _add_control(self, control: Control) -> None:
        if self._disk.count:
            self._markers.append((control, self._disk.batches_written))
        else:
            self.memory.append((control, 0))

    def _keep(self, batch: DataBatch, size_bytes: int) -> None:
        """Add a batch in memory."""
        self.memory.append((batch, size_bytes))
        self._bytes_in_memory += size_bytes
        if self._bytes_in_memory > self._bytes_in_memory_peak:
            self._bytes_in_memory_peak = self._bytes_in_memory

    def _spill(self, encoded: EncodedBatch) -> None:
        """Add a batch on disk."""
        self._disk.append(encoded)
        if self._disk.count == 1 and self.on_limit is not None:
            self.on_limit()


@final
class SpillQueue(SpillLog):
    """A first-in, first-out queue of batches with their epochs, and of control records between them.

    A batch stays in memory up to ``memory_limit_bytes``, and always if no batch waits before it. Above the limit the
    queue *spills*: batches go to disk until all of them are read back, one at a time. So memory holds at most the limit
    or one batch. If ``put`` raises, the queue is unchanged.

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

    keeps_one = True

    def put(self, item: QueuedItem, size_bytes: int = 0) -> None:
        """Add a batch or a control record at the end. ``size_bytes`` were counted for the batch, if they are known.

        Raises ``LoopOverflow`` above the disk limit, ``StorageFull`` when the disk itself is full, and
        ``PlainDataError`` for a batch that must be written and is not plain data.
        """
        if self._is_closed:
            raise self._closed(item)
        if isinstance(item, DataBatch):
            size_bytes = size_bytes or BATCH_PLACE_BYTES + estimated_bytes(item.records)
            in_memory = self._bytes_in_memory + size_bytes
            # As _fits and _keep do, in fewer calls: each round of a loop comes here.
            if not self._disk.count and (in_memory <= self.memory_limit_bytes or in_memory == size_bytes):
                self.memory.append((item, size_bytes))
                self._bytes_in_memory = in_memory
                if in_memory > self._bytes_in_memory_peak:
                    self._bytes_in_memory_peak = in_memory
            else:
                self._spill(self._disk.encode(item.records, item.epoch))
            self._records += len(item.records)
        elif self._disk.count:
            self._add_control(item)
        else:
            self.memory.append((item, 0))

    def peek(self) -> QueuedItem:
        """Return the first item without removing it; raise ``IndexError`` if the queue is empty."""
        if not self.memory:
            self._read_back()
        return self.memory[0][0]

    def take(self) -> QueuedItem:
        """Remove and return the first item; raise ``IndexError`` if the queue is empty."""
        if not self.memory:
            self._read_back()
        item, size_bytes = self.memory.popleft()
        self._bytes_in_memory -= size_bytes
        if isinstance(item, DataBatch):
            self._records -= len(item.records)
        return item

    def put_plain(self, entry: PlainValue) -> None:
        """Add an item as a snapshot has it, as :meth:`put` does; the batch need not be encoded."""
        match entry:
            case ["data", int() as epoch, int(), content] if epoch in _INT64 and not isinstance(content, bytes):
                self.put(DataBatch(content, epoch))
            case _:
                super().put_plain(entry)

    def statistics(self) -> SpillStatistics:
        """Return the numbers of the queue as they are now."""
        return SpillStatistics(
            records=self._records,
            bytes_in_memory=self._bytes_in_memory,
            bytes_in_memory_peak=self._bytes_in_memory_peak,
            bytes_on_disk=self._disk.size_bytes,
            bytes_on_disk_peak=self._disk.size_bytes_peak,
            batches_on_disk=self._disk.count,
            batches_spilled=self._disk.batches_written,
        )

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
            self.memory.append((self._markers.popleft()[0], 0))
        if not self._disk.count and self.on_limit is not None:
            self.on_limit()

    def _explain_overflow(self) -> str:
        return (
            f"({self._disk.count} batches there, {self._bytes_in_memory} of {self.memory_limit_bytes} bytes in "
            "memory); the consumer of the queue is slower than its producer: emit less, make the consumer faster, "
            "or raise the disk limit (of a loop: IterationConfig(feedback_limits=FeedbackLimits(disk_bytes=…)))"
        )


def _is_size(size: object = 0, *others: object) -> bool:
    """Return whether what an entry has behind its batch is a size, or nothing."""
    return isinstance(size, int) and size >= 0 and not others


def _entries(
    encode: Callable[[Batch, int], EncodedBatch],
    *,
    memory: deque[tuple[QueuedItem, int]],
    held: Iterator[EncodedBatch],
    markers: deque[tuple[Control, int]],
    first_on_disk: int,
    last: deque[tuple[QueuedItem, int]],
    has_sizes: bool,
) -> Generator[tuple[PlainValue, ...], None, None]:
    """Give the items in memory, then the batches on disk with the control records between them, then the last ones.

    An entry is ``("data", epoch, records, encoded batch)``, or a control record as plain data. With ``has_sizes``, that
    of a batch in memory has the bytes counted for it, too. ``markers`` has each control record with the number of the
    batch on disk that it follows; ``first_on_disk`` is the number of the first batch on disk. Each item is forgotten as
    soon as it is given.
    """

    def in_memory(items: deque[tuple[QueuedItem, int]]) -> Generator[tuple[PlainValue, ...], None, None]:
        while items:
            item, size_bytes = items.popleft()
            if isinstance(item, DataBatch):
                yield "data", *encode(item.records, item.epoch), *([size_bytes] if has_sizes else [])
            else:
                yield control_to_plain(item)

    yield from in_memory(memory)
    for number, encoded in enumerate(held, start=first_on_disk):
        yield "data", *encoded
        while markers and markers[0][1] == number:
            yield control_to_plain(markers.popleft()[0])
    yield from in_memory(last)
