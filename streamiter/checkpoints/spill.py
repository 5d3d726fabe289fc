"""A queue with a limit in memory that goes on on disk: what lies between the ends of a feedback loop."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from struct import Struct
from types import TracebackType
from typing import Any, Final, final

from streamiter.checkpoints.files import FileHold, TemporaryFile, errors_of_a_full_disk
from streamiter.checkpoints.pieces import DeferredEntries, entries_of
from streamiter.checkpoints.plain_data import PlainData, control_from_plain, control_to_plain
from streamiter.deferred import Deferred
from streamiter.errors import ConfigurationError, InternalError, LoopOverflow, PlainDataError
from streamiter.records import Control, DataBatch, estimated_bytes

__all__ = [
    "SpillFile",
    "SpillQueue",
    "SpillStatistics",
]


Item = DataBatch | Control

# A DataBatch (48 bytes), its list (56 and a pointer) and its place in the queue, rounded up: without it
# batches of no bytes (empty lists, arrays of no columns) could be queued without end.
_BATCH_BYTES: Final = 128

# So many segments share the disk limit: what has been read and not yet given back is at most a sixteenth
# of it, and a queue holds at most some 17 files open (processes are often allowed 1024).
_SEGMENTS: Final = 16

_INT64: Final = range(-(2**63), 2**63)


@dataclass(frozen=True, slots=True)
class SpillStatistics:
    """What a spill queue holds and has held."""

    items: int
    """Batches and control records that wait."""
    items_peak: int
    """The most that ever waited."""
    records: int
    """Records in the batches that wait."""
    bytes_in_memory: int
    """Estimated bytes of the batches that wait in memory."""
    bytes_in_memory_peak: int
    """The most that ever was: above the limit only where a single batch is."""
    bytes_on_disk: int
    """Size of the files, with what has been read of the first of them."""
    bytes_on_disk_peak: int
    """The most that ever was."""
    batches_on_disk: int
    """Batches that wait on disk."""
    batches_spilled: int
    """Batches ever written to disk."""
    bytes_spilled: int
    """Bytes ever written to disk."""


class SpillQueue:
    """First in, first out: batches with their epochs, and control records in order with them.

    Up to ``memory_limit_bytes``, and always where none waits before it, a batch waits as the object it is.
    Past it batches are encoded as plain data and appended to temporary files in ``directory`` (made when
    first needed), until all of those have been read back, one batch at a time. So memory holds at most the
    limit or one batch. Control records stay in memory wherever the data around them lies, at some 100 bytes
    each that no limit counts.

    ``name`` (the step) begins the message of every error. A ``put`` that raises has changed nothing. For one
    task; never waits but for the disk. To be closed by its owner: ``close()`` or ``with``.

    >>> from tempfile import gettempdir
    >>> import numpy as np
    >>> limits = {"memory_limit_bytes": 1000, "disk_limit_bytes": 10_000}
    >>> with SpillQueue(name="train", directory=gettempdir(), **limits) as queue:
    ...     for epoch in range(3):
    ...         queue.put(DataBatch(np.zeros(100), epoch))
    ...     spilled = queue.statistics().batches_on_disk
    ...     [queue.take() for _ in range(3)]
    [DataBatch(100 records, epoch 0), DataBatch(100 records, epoch 1), DataBatch(100 records, epoch 2)]
    >>> spilled
    2
    """

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
                f"and disk_limit_bytes={disk_limit_bytes}; with 0 on disk nothing is ever spilled"
            )
        self._name = name
        self._memory_limit_bytes = memory_limit_bytes
        self._disk_limit_bytes = disk_limit_bytes
        self._plain_data = plain_data if plain_data is not None else PlainData()
        segment_bytes = max(1, disk_limit_bytes // _SEGMENTS)
        self._spilled = SpillFile(directory, segment_bytes=segment_bytes, name=name)
        # The front of the queue, each item with the bytes counted for it. All of it is older than what is
        # on disk, so while anything is on disk, batches go there.
        self._memory: deque[tuple[Item, int]] = deque()
        # Control records that lie behind batches on disk, each with the number of the batch it waits for:
        # as many batches must have been read back.
        self._markers: deque[tuple[Control, int]] = deque()
        self._batches_spilled = 0
        self._records = 0
        self._bytes_in_memory = 0
        self._bytes_spilled = 0
        self._items_peak = 0
        self._bytes_in_memory_peak = 0
        self._bytes_on_disk_peak = 0
        self._is_closed = False

    def __len__(self) -> int:
        """Batches and control records that wait."""
        if not self._batches_spilled:
            return len(self._memory)
        return len(self._memory) + len(self._markers) + len(self._spilled)

    def __enter__(self) -> SpillQueue:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    @property
    def bytes_in_memory(self) -> int:
        """Estimated bytes of the batches that wait in memory."""
        return self._bytes_in_memory

    @property
    def bytes_on_disk(self) -> int:
        """Size of the files, with what has been read of the first of them; never above the disk limit."""
        return self._spilled.size_bytes

    def put(self, item: Item) -> None:
        """Add a batch or a control record at the end.

        Raises ``LoopOverflow`` past the disk limit, ``StorageFull`` when the disk itself is full, and
        ``PlainDataError`` for a batch that has to be written and is not plain data.
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
        """The first item, which stays; ``IndexError`` where nothing waits."""
        if not self._memory:
            self._read_back()
        return self._memory[0][0]

    def take(self) -> Item:
        """The first item, which leaves the queue; ``IndexError`` where nothing waits."""
        if not self._memory:
            self._read_back()
        item, size_bytes = self._memory.popleft()
        self._bytes_in_memory -= size_bytes
        if isinstance(item, DataBatch):
            self._records -= len(item.records)
        return item

    def snapshot(self) -> Deferred:
        """All items in order, for a checkpoint, whatever becomes of the queue; they stay. :meth:`refill` takes it back.

        Batches in memory are encoded as its frames are asked for, and those on disk copied without being
        decoded, one at a time. Until it is released it keeps what it has not given yet, which no limit counts.
        """
        return SpillSnapshot(
            self._name,
            self._plain_data,
            encode=self._content,
            memory=deque(item for item, _ in self._memory),
            disk=self._spilled.hold(),
            markers=deque(self._markers),
            first_on_disk=self._batches_spilled - len(self._spilled) + 1,
        )

    def refill(self, frames: Iterable[Any]) -> None:
        """Add the items of a snapshot at the end. Raises as :meth:`put` does; what was added before stays.

        ``frames``: those of the snapshot, decoded; one of them is in memory at a time. The snapshot of a queue
        fits into an empty one with the same limits.
        """
        for entry in entries_of(frames):
            match entry:
                case ["data", int() as epoch, int() as records, bytes() as content] if (
                    epoch in _INT64 and records in _INT64
                ):
                    self._put_encoded((HEAD.pack(epoch, records), content))
                case _:
                    self.put(self._control(entry))

    def statistics(self) -> SpillStatistics:
        """What the queue holds now and has held."""
        return SpillStatistics(
            items=len(self),
            items_peak=self._items_peak,
            records=self._records,
            bytes_in_memory=self._bytes_in_memory,
            bytes_in_memory_peak=self._bytes_in_memory_peak,
            bytes_on_disk=self._spilled.size_bytes,
            bytes_on_disk_peak=self._bytes_on_disk_peak,
            batches_on_disk=len(self._spilled),
            batches_spilled=self._batches_spilled,
            bytes_spilled=self._bytes_spilled,
        )

    def close(self) -> None:
        """Drop all items and remove the files. May be called more than once."""
        self._is_closed = True
        self._spilled.close()
        self._memory.clear()
        self._markers.clear()
        self._bytes_in_memory = self._records = 0

    def _put_batch(self, batch: DataBatch) -> None:
        size_bytes = _size_bytes(batch)
        fits = self._bytes_in_memory + size_bytes <= self._memory_limit_bytes
        is_all_in_memory = not self._batches_spilled or not len(self._spilled)
        if is_all_in_memory and (fits or not self._bytes_in_memory):
            self._keep(batch, size_bytes)
        else:
            self._spill(self._encode(batch))

    def _put_encoded(self, entry: Entry) -> None:
        """:meth:`put` for a batch that is encoded: it stays so where it goes to disk."""
        if len(self._spilled):
            self._spill(entry)
            self._count_put(_records_of(entry))
        else:
            self.put(self._decode(entry))

    def _put_control(self, control: Control) -> None:
        if self._batches_spilled and len(self._spilled):
            self._markers.append((control, self._batches_spilled))
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

    def _spill(self, entry: Entry) -> None:
        size_bytes = entry_bytes(entry)
        if self._spilled.size_bytes + size_bytes > self._disk_limit_bytes:
            raise self._overflow(size_bytes)
        self._spilled.append(entry)
        self._batches_spilled += 1
        self._bytes_spilled += size_bytes
        self._bytes_on_disk_peak = max(self._bytes_on_disk_peak, self._spilled.size_bytes)

    def _read_back(self) -> None:
        """Move the first batch on disk to memory, and the control records that follow it."""
        if not len(self._spilled):
            raise IndexError(f"{self._name}: nothing waits in the spill queue")
        entry = self._spilled.first()
        batch = self._decode(entry)
        self._spilled.drop_first(entry)
        self._keep(batch, _size_bytes(batch))
        read_back = self._batches_spilled - len(self._spilled)
        while self._markers and self._markers[0][1] == read_back:
            self._memory.append((self._markers.popleft()[0], 0))

    def _encode(self, batch: DataBatch) -> Entry:
        return HEAD.pack(batch.epoch, len(batch.records)), self._content(batch)

    def _content(self, batch: DataBatch) -> bytes:
        with self._named_errors():
            return self._plain_data.encode_batch(batch.records)

    def _decode(self, entry: Entry) -> DataBatch:
        head, content = entry
        epoch, _ = HEAD.unpack(head)
        with self._named_errors():
            return DataBatch(self._plain_data.decode_batch(content), epoch)

    def _control(self, entry: Any) -> Control:
        with self._named_errors():
            return control_from_plain(entry)

    @contextmanager
    def _named_errors(self) -> Iterator[None]:
        try:
            yield
        except PlainDataError as error:
            raise PlainDataError(f"{self._name}: {error}") from error

    def _overflow(self, size_bytes: int) -> LoopOverflow:
        return LoopOverflow(
            f"{self._name}: expected at most {self._disk_limit_bytes} bytes of batches waiting on disk, "
            f"given {self._spilled.size_bytes + size_bytes} with the next batch ({len(self._spilled)} batches "
            f"there, {self._bytes_in_memory} of {self._memory_limit_bytes} bytes in memory); what reads the "
            "queue is slower than what fills it: emit less, speed the reader up, or raise the disk limit "
            "(of a loop: IterationConfig(feedback_limits=FeedbackLimits(disk_bytes=…)))"
        )


def _records_of(entry: Entry) -> int:
    _, records = HEAD.unpack(entry[0])
    return int(records)


def _size_bytes(batch: DataBatch) -> int:
    return _BATCH_BYTES + estimated_bytes(batch.records)


Entry = tuple[bytes, bytes]
"""Head and content."""

# What lies before each entry: the lengths of its two parts.
_LENGTHS: Final = Struct("<IQ")


def entry_bytes(entry: Entry) -> int:
    """Bytes that an entry takes in a spill file."""
    head, content = entry
    return _LENGTHS.size + len(head) + len(content)


class _Segment:
    """One temporary file: entries are appended at the end and read from the front."""

    __slots__ = ("_file", "read_position")

    def __init__(self, file: TemporaryFile) -> None:
        self._file = file
        self.read_position = 0

    @property
    def size_bytes(self) -> int:
        return self._file.size_bytes

    @property
    def is_read(self) -> bool:
        return self.read_position == self.size_bytes

    @property
    def is_held(self) -> bool:
        return self._file.is_held

    def append(self, entry: Entry) -> None:
        """Add one; where that fails, the segment is as before."""
        head, content = entry
        # The content by itself: joining it to what is before it would copy it.
        self._file.append(_LENGTHS.pack(len(head), len(content)) + head, content)

    def first(self) -> Entry:
        """The first that was not read."""
        return _read_entry(self._file, self.read_position)

    def hold(self) -> _HeldSegment:
        return _HeldSegment(self._file.hold(), self.read_position, self.size_bytes)

    def empty(self) -> None:
        """Begin anew, with the disk's space given back."""
        self._file.cut(0)
        self.read_position = 0

    def close(self) -> None:
        self._file.close()


@final
class _HeldSegment:
    """What was not read of a segment at one moment."""

    __slots__ = ("_end", "_file", "_start")

    def __init__(self, file: FileHold, start: int, end: int) -> None:
        self._file = file
        self._start = start
        self._end = end

    def __iter__(self) -> Iterator[Entry]:
        position = self._start
        while position < self._end:
            entry = _read_entry(self._file, position)
            yield entry
            position += entry_bytes(entry)

    def release(self) -> None:
        self._file.release()


@final
class HeldEntries:
    """The entries that a spill file had at one moment; gone through once, each segment is released behind itself."""

    __slots__ = ("_segments",)

    def __init__(self, segments: Iterable[_HeldSegment]) -> None:
        self._segments = deque(segments)

    def __iter__(self) -> Iterator[Entry]:
        while self._segments:
            yield from self._segments[0]
            if self._segments:  # Otherwise all of it was released meanwhile.
                self._segments.popleft().release()

    def release(self) -> None:
        """Let go of the files. May be called more than once."""
        while self._segments:
            self._segments.popleft().release()


class SpillFile:
    """Entries on disk, first in, first out; nothing is opened before the first is appended.

    ``segment_bytes`` is the size from which the next segment begins: what has been read is given back in
    such portions. ``name`` begins the messages of errors.

    A first-in, first-out file of entries whose disk use follows what it holds.

    An entry is a short head and a content, both bytes. Entries lie in *segments*, temporary files of about one
    size: writing goes to the last, reading to the first, and a segment that has been read goes away. So a queue
    that is never quite empty does not grow without end, and no byte is copied to make room.
    """

    __slots__ = ("_count", "_directory", "_name", "_segment_bytes", "_segments", "_size_bytes")

    def __init__(self, directory: str | os.PathLike[str], *, segment_bytes: int, name: str) -> None:
        self._directory = directory
        self._segment_bytes = segment_bytes
        self._name = name
        self._segments: deque[_Segment] = deque()
        self._count = 0
        self._size_bytes = 0

    def __len__(self) -> int:
        return self._count

    @property
    def size_bytes(self) -> int:
        """Size of all segments, with what has been read of the first."""
        return self._size_bytes

    def append(self, entry: Entry) -> None:
        """Add one at the end. Raises ``StorageFull``, and ``ConfigurationError`` where no file can be made.

        After an error the entries are the same as before.
        """
        size_bytes = entry_bytes(entry)
        with errors_of_a_full_disk(
            self._name, self._directory, wanted_bytes=size_bytes, kept_bytes=self._size_bytes
        ):
            self._last_segment().append(entry)
        self._count += 1
        self._size_bytes += size_bytes

    def first(self) -> Entry:
        """The first entry, which stays; ``IndexError`` where there is none."""
        if not self._count:
            raise IndexError(f"{self._name}: nothing is spilled")
        return self._segments[0].first()

    def drop_first(self, entry: Entry) -> None:
        """Forget the first entry, which is ``entry``; gives its segment back when that has been read."""
        segment = self._segments[0]
        segment.read_position += entry_bytes(entry)
        self._count -= 1
        if segment.is_read:
            self._give_back(segment)

    def hold(self) -> HeldEntries:
        """All entries in order, to be read whatever becomes of the file; they stay."""
        return HeldEntries(segment.hold() for segment in self._segments)

    def close(self) -> None:
        """Let go of the files and all they hold. May be called more than once."""
        while self._segments:
            self._segments.popleft().close()
        self._count = self._size_bytes = 0

    def _last_segment(self) -> _Segment:
        if not self._segments or self._segments[-1].size_bytes >= self._segment_bytes:
            self._segments.append(_Segment(TemporaryFile(self._directory, name=self._name)))
        return self._segments[-1]

    def _give_back(self, segment: _Segment) -> None:
        """The last segment is kept, empty, for what comes next, unless somebody reads it."""
        self._size_bytes -= segment.size_bytes
        if len(self._segments) > 1 or segment.is_held:
            self._segments.popleft().close()
        else:
            segment.empty()


def _read_entry(file: TemporaryFile | FileHold, position: int) -> Entry:
    head_length, length = _LENGTHS.unpack(file.read(position, _LENGTHS.size))
    position += _LENGTHS.size
    return file.read(position, head_length), file.read(position + head_length, length)


HEAD: Final = Struct("<qq")
"""The head of each batch on disk: its epoch and number of records."""


@final
class SpillSnapshot(DeferredEntries):
    """Items in memory, then batches on disk with control records among them.

    An entry is ``("data", epoch, records, encoded batch)``, or a control record as plain data. ``markers`` has
    each control record with the number of the batch on disk that it follows; that of the first is
    ``first_on_disk``.

    What waits in a spill queue at one moment, for a checkpoint.
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
