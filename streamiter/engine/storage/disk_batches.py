"""Batches on disk: encoded as plain data, in temporary files.

:class:`DiskBatches` are encoded batches in order, within a limit. A :class:`_Segment` has their bytes in a temporary
file, which is closed with its last reference: so a checkpoint reads the batches that its queue has dropped meanwhile.
"""

from __future__ import annotations

import errno
import os
from array import array
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from io import FileIO
from struct import Struct
from typing import Final, NamedTuple, TypeAlias

import numpy as np

from streamiter.errors import ConfigurationError, LoopOverflow, PlainDataError, StorageFull
from streamiter.values.helpers.files import FULL_DISK, NOT_ALLOWED, advice_for
from streamiter.values.plain_data import PlainData
from streamiter.values.records import Batch

Content: TypeAlias = bytes | memoryview


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

    A batch is read and dropped at the front (:meth:`first`, :meth:`drop_first`), or read by its number (:meth:`read`).

    The batches are in *segments*: temporary files of about ``segment_bytes`` each. Batches are appended to the last
    segment and read from the first. A segment is removed as soon as its batches are dropped, so a queue that is
    never quite empty does not grow without end, and no byte is copied to free space. Without ``segment_bytes``
    there is one segment; only then batches can be read by number, and none is dropped.

    ``contents`` ("batches waiting") and ``explain_overflow()`` complete the message of ``LoopOverflow``. ``name``
    (the step) begins the message of every error.
    """

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
        self._positions = array("q")
        """The position of each batch, if there is one segment."""
        self.count = 0
        """Batches that are on disk and not dropped. For reading only, as the other numbers."""
        self.size_bytes = 0
        """Size of all segments, including batches that are dropped from the first one."""
        self.size_bytes_peak = 0
        """The highest ``size_bytes``."""
        self.batches_written = 0
        """Batches ever appended."""

    # ---- encoding

    def encode(self, batch: Batch, epoch: int = 0) -> EncodedBatch:
        """Encode a batch. Raises ``PlainDataError`` if it is not plain data."""
        with errors_with_name(self._name):
            return EncodedBatch(epoch, len(batch), self._plain_data.encode_batch(batch))

    def decode(self, encoded: EncodedBatch) -> Batch:
        """Decode a batch. Raises ``PlainDataError`` if its bytes are damaged.

        Large arrays stay in the content, where that is writable memory, and keep it in use; otherwise they are copied.
        """
        content = encoded.content
        with errors_with_name(self._name):
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

    def append(self, encoded: EncodedBatch) -> None:
        """Add a batch at the end.

        Raises ``LoopOverflow`` above the limit, ``StorageFull`` for a full disk, and ``ConfigurationError`` if no
        file can be created. After an error the batches are the same as before.
        """
        size_bytes = encoded.disk_bytes
        self.check_room(size_bytes)
        with errors_of_a_full_disk(self._name, self._directory, wanted_bytes=size_bytes, kept_bytes=self.size_bytes):
            segment = self._last_segment()
            position = segment.size_bytes
            segment.add(encoded)
        if self._segment_bytes is None:
            self._positions.append(position)
        self.count += 1
        self.size_bytes += size_bytes
        self.batches_written += 1
        if self.size_bytes > self.size_bytes_peak:
            self.size_bytes_peak = self.size_bytes

    def cut(self, count: int) -> None:
        """Keep the first ``count`` batches only. For one segment."""
        if count < self.count:
            [segment] = self._segments
            segment.cut(self._positions[count])
            del self._positions[count:]
            self.count, self.size_bytes = count, segment.size_bytes

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
        if segment.read_position == segment.size_bytes:
            self._free(segment)

    def read(self, number: int) -> EncodedBatch:
        """Return a batch by its number, its content in new writable memory. For one segment."""
        [segment] = self._segments
        return segment.batch_at(self._positions[number])

    def hold(self) -> Iterator[EncodedBatch]:
        """Return all batches in order; they stay readable when batches are added or dropped, or all is closed."""
        return _held(deque(segment.hold() for segment in self._segments))

    def close(self) -> None:
        """Remove all batches, and close the files that no checkpoint reads. May be called more than once."""
        self._segments.clear()
        del self._positions[:]
        self.count = self.size_bytes = 0

    def _last_segment(self) -> _Segment:
        if not self._segments or (
            self._segment_bytes is not None and self._segments[-1].size_bytes >= self._segment_bytes
        ):
            self._segments.append(_Segment(self._directory, name=self._name))
        return self._segments[-1]

    def _free(self, segment: _Segment) -> None:
        """Remove the first segment. The last one is emptied for the batches that follow, unless it was held."""
        self.size_bytes -= segment.size_bytes
        if len(self._segments) > 1 or segment.was_held:
            self._segments.popleft()
        else:
            segment.cut(0)


def _held(files: deque[HeldFile]) -> Iterator[EncodedBatch]:
    """Give the batches of files in order; each file is released when it is read, all of them with the iterator."""
    while files:
        file, position, end = files.popleft()
        while position < end:
            encoded = _read_batch(file, position)
            yield encoded
            position += encoded.disk_bytes


def _read_batch(file: _QuietFile, position: int) -> EncodedBatch:
    epoch, records, length = _HEAD.unpack(file.read_at(position, _HEAD.size))
    return EncodedBatch(epoch, records, file.read_at(position + _HEAD.size, length))


@contextmanager
def errors_with_name(name: str) -> Iterator[None]:
    """Put the name of the step before the message of a ``PlainDataError``."""
    try:
        yield
    except PlainDataError as error:
        raise PlainDataError(f"{name}: {error}") from error


class _Segment:
    """A temporary file of encoded batches: batches are appended at the end and read anywhere.

    It is created in ``directory``, which is created if it is missing; ``ConfigurationError`` if that fails. ``name``
    (the step) begins the message of every error. Where the system allows it, the file has no name, so a process
    that is killed leaves nothing behind; data that must outlive the process is in checkpoints.
    """

    def __init__(self, directory: str | os.PathLike[str], *, name: str) -> None:
        self._file = _open(os.fspath(directory), name)
        self.size_bytes = 0
        self.read_position = 0
        """The position of the first batch that is not dropped."""
        self.was_held = False
        """Whether a checkpoint may read the file: bytes that were written before must not be cut off."""

    def add(self, encoded: EncodedBatch) -> None:
        """Add a batch; if that fails, the file is unchanged."""
        epoch, records, content = encoded
        try:
            self._file.seek(self.size_bytes)
            # Two parts: joining the content to its head would copy the content.
            self._file.write_all(_HEAD.pack(epoch, records, len(content)))
            self._file.write_all(content)
        except OSError:
            # Free the space of the bytes that did fit. The next part is written at the same position in any case.
            with suppress(OSError):
                self._file.truncate(self.size_bytes)
            raise
        self.size_bytes += encoded.disk_bytes

    def first(self) -> EncodedBatch:
        """Return the first batch that is not dropped."""
        return _read_batch(self._file, self.read_position)

    def batch_at(self, position: int) -> EncodedBatch:
        """Return the batch at a position, its content in new writable memory."""
        epoch, records, length = _HEAD.unpack(self._file.read_at(position, _HEAD.size))
        start = position + _HEAD.size
        # Memory of numpy begins at a multiple of 16, so that arrays can stay in it.
        room = np.empty(min(length, self.size_bytes - start), np.uint8).data
        self._file.read_into(start, room)
        return EncodedBatch(epoch, records, room)

    def cut(self, size_bytes: int) -> None:
        """Keep the first ``size_bytes`` bytes only, and free the rest of the space."""
        self._file.truncate(size_bytes)
        self.size_bytes = size_bytes
        self.read_position = min(self.read_position, size_bytes)

    def hold(self) -> HeldFile:
        """Keep the batches that are not dropped readable."""
        self.was_held = True
        return self._file, self.read_position, self.size_bytes


class _QuietFile(FileIO):
    """An open file without a name. It is closed with its last reference, without a warning."""

    def __init__(self, file: FileIO, name: str) -> None:
        super().__init__(os.dup(file.fileno()), "r+")
        self._step = name

    def write_all(self, content: Content) -> None:
        rest = memoryview(content)
        while rest:
            rest = rest[self.write(rest) :]

    def read_at(self, position: int, length: int) -> bytes:
        """Return ``length`` bytes from ``position`` on."""
        self.seek(position)
        content = self.read(length)
        while len(content) < length:
            more = self.read(length - len(content))
            if not more:
                raise self._ends_early(length - len(content))
            content += more
        return content

    def read_into(self, position: int, room: memoryview) -> None:
        """Fill ``room`` with the bytes from ``position`` on."""
        self.seek(position)
        while room:
            length = self.readinto(room)
            if not length:
                raise self._ends_early(len(room))
            room = room[length:]

    def _ends_early(self, missing_bytes: int) -> OSError:
        return OSError(
            errno.EIO,
            f"{self._step}: a temporary file of this step ends {missing_bytes} bytes early; something else has "
            "cut it, or its disk is failing",
        )

    def __del__(self) -> None:
        self.close()


HeldFile: TypeAlias = tuple[_QuietFile, int, int]
"""A file, with the start and the end of the batches in it that were not dropped."""


@contextmanager
def errors_of_a_full_disk(
    name: str, directory: str | os.PathLike[str], *, wanted_bytes: int, kept_bytes: int
) -> Iterator[None]:
    """Raise ``StorageFull`` for a full disk, with the bytes to be written and the bytes that the step keeps there."""
    try:
        yield
    except OSError as error:
        if error.errno not in FULL_DISK:
            raise
        raise StorageFull(
            f"{name}: expected room for {wanted_bytes} bytes in {os.fspath(directory)}, given "
            f"{os.strerror(error.errno)} with {kept_bytes} bytes of this step there; "
            "free space on that disk or choose another directory"
        ) from error


def _open(directory: str, name: str) -> _QuietFile:
    import tempfile  # imported only by jobs: it takes 4 ms

    try:
        os.makedirs(directory, exist_ok=True)
        with tempfile.TemporaryFile(prefix="streamiter-spill-", dir=directory, buffering=0) as file:
            return _QuietFile(file, name)
    except OSError as error:
        if error.errno in FULL_DISK:
            raise
        is_denied = error.errno in NOT_ALLOWED
        raise ConfigurationError(
            f"{name}: expected a directory for data that does not fit into memory, given {directory} "
            f"({error.strerror}); "
            f"{'choose one that this process may write to' if is_denied else advice_for(str(error))}"
        ) from error
