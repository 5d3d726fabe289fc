"""Queues of batches that have a limit in memory and continue on disk.

:class:`SpillQueue` is a first-in, first-out queue of batches and control records: the engine uses it wherever a
producer must never wait, above all on the feedback edge of a loop. Batches wait in memory up to a limit. Further
batches are *spilled*: encoded as plain data and appended to temporary files, until the queue has read them back.

:class:`DiskBatches` is the part of a queue that is on disk: encoded batches in order, within a limit. The spill queue
reads its batches from the front. The other user, :class:`~streamiter.checkpoints.replay_cache.ReplayCache`, keeps all
batches and reads them by position, once in each round of an iteration.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from struct import Struct
from types import TracebackType
from typing import Final, NamedTuple, final

import numpy as np

from streamiter.checkpoints.files import Content, FileHold, TemporaryFile, errors_of_a_full_disk
from streamiter.checkpoints.plain_data import PlainData, control_from_plain, control_to_plain
from streamiter.deferred import Deferred, DeferredEntries, PlainValue, entries_of
from streamiter.errors import ConfigurationError, InternalError, LoopOverflow, PlainDataError
from streamiter.records import Batch, Control, DataBatch, estimated_bytes

Item = DataBatch | Control

# A DataBatch (48 bytes), its list (56 and a pointer) and its place in the queue, rounded up. Without this
# number, batches of no bytes (empty lists, arrays of no columns) could fill the memory without being counted.
_BATCH_BYTES: Final = 128

# The number of segments that share the disk limit: space that is read and not yet freed is at most a sixteenth
# of the limit, and a queue opens at most some 17 files (processes are often allowed 1024).
_SEGMENTS: Final = 16

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


class SpillQueue:
    """A first-in, first-out queue of batches with their epochs, and of control records between them.

    A batch stays in memory, as the object it is, up to ``memory_limit_bytes``, and always if no batch waits before
    it. Above the limit the queue spills: batches are encoded as plain data and appended to temporary files in
    ``directory`` (created when first needed), until all of them are read back, one at a time. So memory holds at
    most the limit or one batch. Control records stay in memory, also between batches on disk; each takes some
    100 bytes, which no limit counts.

    ``name`` (the step) begins the message of every error. If ``put`` raises, the queue is unchanged. The queue
    belongs to one task, and waits for nothing but the disk. Its owner closes it: ``close()`` or ``with``.

    >>> from tempfile import gettempdir
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
        check_limits(name, memory_limit_bytes, disk_limit_bytes)
        self._name = name
        self._memory_limit_bytes = memory_limit_bytes
        self._plain_data = plain_data if plain_data is not None else PlainData()
        self._disk = DiskBatches(
            name=name,
            directory=directory,
            limit_bytes=disk_limit_bytes,
            plain_data=self._plain_data,
            contents="batches waiting",
            explain_overflow=self._explain_overflow,
            segment_bytes=max(1, disk_limit_bytes // _SEGMENTS),
        )
        # The front of the queue, each item with the bytes counted for it. All of these items are older than the
        # batches on disk. So while a batch is on disk, further batches go there.
        self._memory: deque[tuple[Item, int]] = deque()
        # Control records behind batches on disk, each with the number of the batch it follows: the control record
        # moves to memory when that many batches have been read back.
        self._markers: deque[tuple[Control, int]] = deque()
        self._records = 0
        self._bytes_in_memory = 0
        self._items_peak = 0
        self._bytes_in_memory_peak = 0
        self._is_closed = False

    def __len__(self) -> int:
        """Return the number of batches and control records that wait."""
        return len(self._memory) + len(self._markers) + self._disk.count

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
        """Size of the files, including the part that is already read; never above the disk limit."""
        return self._disk.size_bytes

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
        entries = _snapshot_entries(
            self._disk.encode,
            memory=deque(item for item, _ in self._memory),
            held=held,
            markers=deque(self._markers),
            first_on_disk=self._disk.batches_written - self._disk.count + 1,
        )
        return DeferredEntries(self._name, self._plain_data.encode, entries, release=held.release)

    def refill(self, frames: Iterable[PlainValue]) -> None:
        """Add the items of a snapshot at the end. Raises as :meth:`put` does; items added before stay.

        ``frames`` are the decoded frames of the snapshot; only one of them is in memory at a time. The snapshot of
        a queue fits into an empty queue with the same limits.
        """
        for entry in entries_of(frames):
            match entry:
                case ["data", int() as epoch, int() as records, bytes() as content] if (
                    epoch in _INT64 and records in _INT64
                ):
                    self._put_encoded(EncodedBatch(epoch, records, content))
                case _:
                    self.put(self._decode_control(entry))

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

    def close(self) -> None:
        """Drop all items and remove the files. May be called more than once."""
        self._is_closed = True
        self._disk.close()
        self._memory.clear()
        self._markers.clear()
        self._bytes_in_memory = self._records = 0

    def _put_batch(self, batch: DataBatch) -> None:
        size_bytes = _memory_bytes(batch)
        fits = self._bytes_in_memory + size_bytes <= self._memory_limit_bytes
        if not self._disk.count and (fits or not self._bytes_in_memory):
            self._keep(batch, size_bytes)
        else:
            self._disk.append(self._disk.encode(batch.records, batch.epoch))

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
        self._keep(batch, _memory_bytes(batch))
        read_back = self._disk.batches_written - self._disk.count
        while self._markers and self._markers[0][1] == read_back:
            self._memory.append((self._markers.popleft()[0], 0))

    def _decode_control(self, entry: PlainValue) -> Control:
        with _errors_with_name(self._name):
            return control_from_plain(entry)

    def _explain_overflow(self) -> str:
        return (
            f"({self._disk.count} batches there, {self._bytes_in_memory} of {self._memory_limit_bytes} bytes in "
            "memory); the consumer of the queue is slower than its producer: emit less, make the consumer faster, "
            "or raise the disk limit (of a loop: IterationConfig(feedback_limits=FeedbackLimits(disk_bytes=…)))"
        )


def check_limits(name: str, memory_limit_bytes: int, disk_limit_bytes: int) -> None:
    """Raise ``ConfigurationError`` if a limit is negative."""
    if memory_limit_bytes < 0 or disk_limit_bytes < 0:
        raise ConfigurationError(
            f"{name}: expected limits of 0 bytes or more, given memory_limit_bytes={memory_limit_bytes} "
            f"and disk_limit_bytes={disk_limit_bytes}; a disk limit of 0 means that nothing is written to disk"
        )


def _memory_bytes(batch: DataBatch) -> int:
    return _BATCH_BYTES + estimated_bytes(batch.records)


def _snapshot_entries(
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


class EncodedBatch(NamedTuple):
    """A batch as plain data in bytes."""

    epoch: int
    """The epoch of the batch; 0 if its user has none."""
    records: int
    """The number of its records."""
    content: Content
    """The encoding of its records."""

    @property
    def disk_bytes(self) -> int:
        """Bytes that the batch takes in a file."""
        return _HEAD.size + len(self.content)


_HEAD: Final = Struct("<qqQ")
"""The bytes before the content of each batch in a file: its epoch, its number of records, its length in bytes."""


class DiskBatches:
    """Batches on disk in order, encoded as plain data; no file is opened before the first batch is appended.

    A batch is read and dropped at the front (:meth:`first`, :meth:`drop_first`), or read by the position that
    :meth:`append` returned (:meth:`read`).

    The batches are in *segments*: temporary files of about ``segment_bytes`` each. Batches are appended to the last
    segment and read from the first. A segment is removed as soon as its batches are dropped, so a queue that is
    never quite empty does not grow without end, and no byte is copied to free space. Without ``segment_bytes``
    there is one segment; only then batches can be read by position.

    ``contents`` ("batches waiting") and ``explain_overflow()`` complete the message of ``LoopOverflow``. ``name``
    (the step) begins the message of every error.
    """

    __slots__ = (
        "_contents",
        "_directory",
        "_explain_overflow",
        "_limit_bytes",
        "_name",
        "_plain_data",
        "_segment_bytes",
        "_segments",
        "batches_written",
        "bytes_written",
        "count",
        "size_bytes",
        "size_bytes_peak",
    )

    def __init__(
        self,
        *,
        name: str,
        directory: str | os.PathLike[str],
        limit_bytes: int,
        plain_data: PlainData,
        contents: str,
        explain_overflow: Callable[[], str],
        segment_bytes: int | None = None,
    ) -> None:
        self._name = name
        self._directory = directory
        self._limit_bytes = limit_bytes
        self._plain_data = plain_data
        self._contents = contents
        self._explain_overflow = explain_overflow
        self._segment_bytes = segment_bytes
        self._segments: deque[_Segment] = deque()
        self.count = 0
        """Batches that are on disk and not dropped. For reading only, as the other numbers."""
        self.size_bytes = 0
        """Size of all segments, including batches that are dropped from the first one."""
        self.size_bytes_peak = 0
        """The highest ``size_bytes``."""
        self.batches_written = 0
        """Batches ever appended."""
        self.bytes_written = 0
        """Bytes ever appended."""

    # ---- encoding

    def encode(self, batch: Batch, epoch: int = 0) -> EncodedBatch:
        """Encode a batch. Raises ``PlainDataError`` if it is not plain data."""
        with _errors_with_name(self._name):
            return EncodedBatch(epoch, len(batch), self._plain_data.encode_batch(batch))

    def decode(self, encoded: EncodedBatch) -> Batch:
        """Decode a batch. Raises ``PlainDataError`` if its bytes are damaged.

        Large arrays stay in the content, where that is writable memory, and keep it in use; otherwise they are copied.
        """
        content = encoded.content
        with _errors_with_name(self._name):
            if isinstance(content, bytes):
                batch = self._plain_data.decode_batch(content)
            else:
                batch = self._plain_data.decode_batch_in(content)
            if len(batch) != encoded.records:
                raise PlainDataError(
                    f"expected a batch of {encoded.records} records, given one of {len(batch)}; its bytes are damaged"
                )
        return batch

    # ---- writing

    def check_room(self, size_bytes: int) -> None:
        """Raise ``LoopOverflow`` if that many bytes more are above the limit."""
        wanted_bytes = self.size_bytes + size_bytes
        if wanted_bytes > self._limit_bytes:
            raise LoopOverflow(
                f"{self._name}: expected at most {self._limit_bytes} bytes of {self._contents} on disk, given "
                f"{wanted_bytes} with the next batch {self._explain_overflow()}"
            )

    def append(self, encoded: EncodedBatch) -> int:
        """Add a batch at the end; return its position.

        Raises ``LoopOverflow`` above the limit, ``StorageFull`` for a full disk, and ``ConfigurationError`` if no
        file can be created. After an error the batches are the same as before.
        """
        size_bytes = encoded.disk_bytes
        self.check_room(size_bytes)
        with errors_of_a_full_disk(
            self._name, self._directory, wanted_bytes=size_bytes, kept_bytes=self.size_bytes
        ):
            segment = self._last_segment()
            position = segment.size_bytes
            segment.append(encoded)
        self.count += 1
        self.size_bytes += size_bytes
        self.batches_written += 1
        self.bytes_written += size_bytes
        if self.size_bytes > self.size_bytes_peak:
            self.size_bytes_peak = self.size_bytes
        return position

    def cut(self, count: int, position: int) -> None:
        """Keep the first ``count`` batches only; ``position`` is the position of the next one. For one segment."""
        if self._segments:
            [segment] = self._segments
            segment.cut(position)
            self.count = count
            self.size_bytes = position

    # ---- reading

    def first(self) -> EncodedBatch:
        """Return the first batch without dropping it; raise ``IndexError`` if there is none."""
        if not self.count:
            raise IndexError(f"{self._name}: no batch is on disk")
        return self._segments[0].first()

    def drop_first(self, encoded: EncodedBatch) -> None:
        """Drop the first batch, which is ``encoded``; remove its segment if that was its last batch."""
        segment = self._segments[0]
        segment.read_position += encoded.disk_bytes
        self.count -= 1
        if segment.is_read:
            self._free(segment)

    def read(self, position: int) -> EncodedBatch:
        """Return the batch at a position, its content in new writable memory. For one segment."""
        [segment] = self._segments
        return segment.read(position)

    def hold(self) -> HeldDiskBatches:
        """Return all batches in order; they stay readable when batches are added or dropped, or all is closed."""
        return HeldDiskBatches(segment.hold() for segment in self._segments)

    def close(self) -> None:
        """Close the files, which removes all batches. May be called more than once."""
        while self._segments:
            self._segments.popleft().close()
        self.count = self.size_bytes = 0

    def _last_segment(self) -> _Segment:
        if not self._segments or (
            self._segment_bytes is not None and self._segments[-1].size_bytes >= self._segment_bytes
        ):
            self._segments.append(_Segment(TemporaryFile(self._directory, name=self._name)))
        return self._segments[-1]

    def _free(self, segment: _Segment) -> None:
        """Remove the first segment. The last one is emptied for the batches that follow, unless it is held."""
        self.size_bytes -= segment.size_bytes
        if len(self._segments) > 1 or segment.is_held:
            self._segments.popleft().close()
        else:
            segment.cut(0)


class _Segment:
    """One temporary file of encoded batches."""

    __slots__ = ("_file", "read_position")

    def __init__(self, file: TemporaryFile) -> None:
        self._file = file
        self.read_position = 0
        """The position of the first batch that is not dropped."""

    @property
    def size_bytes(self) -> int:
        return self._file.size_bytes

    @property
    def is_read(self) -> bool:
        return self.read_position == self.size_bytes

    @property
    def is_held(self) -> bool:
        return self._file.is_held

    def append(self, encoded: EncodedBatch) -> None:
        """Add a batch; if that fails, the segment is unchanged."""
        epoch, records, content = encoded
        # Two parts: joining the content to its head would copy the content.
        self._file.append(_HEAD.pack(epoch, records, len(content)), content)

    def first(self) -> EncodedBatch:
        return _read_batch(self._file, self.read_position)

    def read(self, position: int) -> EncodedBatch:
        epoch, records, length = _HEAD.unpack(self._file.read(position, _HEAD.size))
        start = position + _HEAD.size
        # Memory of numpy begins at a multiple of 16, so that arrays can stay in it.
        room = np.empty(min(length, self.size_bytes - start), np.uint8).data
        self._file.read_into(start, room)
        return EncodedBatch(epoch, records, room)

    def hold(self) -> _HeldSegment:
        return _HeldSegment(self._file.hold(), self.read_position, self.size_bytes)

    def cut(self, size_bytes: int) -> None:
        """Keep the first ``size_bytes`` bytes only, and free the rest of the space."""
        self._file.cut(size_bytes)
        self.read_position = min(self.read_position, size_bytes)

    def close(self) -> None:
        self._file.close()


@final
class _HeldSegment:
    """The batches of a segment that were not dropped at one moment."""

    __slots__ = ("_end", "_file", "_start")

    def __init__(self, file: FileHold, start: int, end: int) -> None:
        self._file = file
        self._start = start
        self._end = end

    def __iter__(self) -> Iterator[EncodedBatch]:
        position = self._start
        while position < self._end:
            encoded = _read_batch(self._file, position)
            yield encoded
            position += encoded.disk_bytes

    def release(self) -> None:
        self._file.release()


@final
class HeldDiskBatches:
    """The batches that were on disk at one moment; they can be read once, and each segment is released when read."""

    __slots__ = ("_segments",)

    def __init__(self, segments: Iterable[_HeldSegment]) -> None:
        self._segments = deque(segments)

    def __iter__(self) -> Iterator[EncodedBatch]:
        while self._segments:
            yield from self._segments[0]
            if self._segments:  # otherwise all of it was released during the iteration
                self._segments.popleft().release()

    def release(self) -> None:
        """Release the files. May be called more than once."""
        while self._segments:
            self._segments.popleft().release()


def _read_batch(file: TemporaryFile | FileHold, position: int) -> EncodedBatch:
    epoch, records, length = _HEAD.unpack(file.read(position, _HEAD.size))
    return EncodedBatch(epoch, records, file.read(position + _HEAD.size, length))


@contextmanager
def _errors_with_name(name: str) -> Iterator[None]:
    """Put the name of the step before the message of a ``PlainDataError``."""
    try:
        yield
    except PlainDataError as error:
        raise PlainDataError(f"{name}: {error}") from error
