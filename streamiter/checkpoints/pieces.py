"""Large state in pieces, encoded after its barrier."""

from __future__ import annotations

import abc
import os
from array import array
from collections.abc import Container, Iterable, Iterator
from typing import TYPE_CHECKING, Any, Final, final

import msgspec
import numpy as np
import numpy.typing as npt

from streamiter.checkpoints.files import Content, FileHold, TemporaryFile, errors_of_a_full_disk
from streamiter.deferred import Deferred
from streamiter.errors import InternalError
from streamiter.records import Batch, Columns, can_concatenate, concatenate, estimated_bytes, slice_batch

if TYPE_CHECKING:
    from streamiter.checkpoints.plain_data import PlainData

__all__ = [
    "DeferredEntries",
    "DeferredFrames",
    "HeldPieces",
    "OpenPiece",
    "PieceFile",
    "entries_of",
    "is_small",
    "piece_bytes",
    "pieces_of",
    "release_all",
]


PIECE_BYTES_MAX: Final = 4 << 20
"""What a batch is cut above: a few of these under way at once are nothing beside a limit in memory."""

# Joined up to there: by then the cost of a batch is spread over enough, and more would only be copied more.
_JOINED_RECORDS_MAX: Final = 4096
_JOINED_BYTES_MAX: Final = 1 << 20

# An array or a list without its content, and its places in lists, rounded up.
_OBJECT_BYTES: Final = 128


def piece_bytes(batch: Batch) -> int:
    """Estimated bytes of memory that keeping a batch takes.

    Batches brought to a sensible size: small neighbours joined, large ones cut.

    Where batches are cut carries no meaning. But each batch costs some objects and calls wherever it goes,
    and as much memory at once as it has bytes.
    """
    return _OBJECT_BYTES + estimated_bytes(batch)


def is_small(batch: Batch) -> bool:
    """Whether a batch is to be joined; so that no piece but the last of its kind in a row is below a half."""
    return len(batch) < _JOINED_RECORDS_MAX // 2 and estimated_bytes(batch) < _JOINED_BYTES_MAX // 2


def pieces_of(batch: Batch) -> Iterator[Batch]:
    """The batch itself, or its parts where it is above ``PIECE_BYTES_MAX`` (arrays are views, not copies)."""
    size_bytes = estimated_bytes(batch)
    if size_bytes <= PIECE_BYTES_MAX:
        yield batch
        return
    records_max = max(1, len(batch) * PIECE_BYTES_MAX // size_bytes)
    count = -(-len(batch) // records_max)
    step = -(-len(batch) // count)
    for start in range(0, len(batch), step):
        yield slice_batch(batch, start, start + step)


class OpenPiece:
    """Small batches that come one after another and are to be one; begins with ``first``.

    They are joined once, when they are asked for, so each record is copied once; what has been asked for
    takes no more.
    """

    __slots__ = ("_joined_bytes", "_parts", "_record_bytes", "_was_read", "records")

    def __init__(self, first: Batch) -> None:
        self._parts = [first]
        self._record_bytes = _record_bytes(first)
        self._joined_bytes = estimated_bytes(first)
        self._was_read = False
        self.records = len(first)

    @property
    def size_bytes(self) -> int:
        """Estimated bytes of memory it takes, or will take once joined where that is more."""
        return _OBJECT_BYTES * len(self._parts) + self._joined_bytes

    def add(self, batch: Batch, *, bytes_max: int | None = None) -> bool:
        """Take a batch in and say so; where it cannot be joined or would be too much, nothing changes.

        ``bytes_max`` is what ``size_bytes`` may become.
        """
        if self._was_read or self.records + len(batch) > _JOINED_RECORDS_MAX:
            return False
        if not can_concatenate(self._parts[0], batch):
            return False
        record_bytes = tuple(map(max, self._record_bytes, _record_bytes(batch)))
        joined_bytes = self._joined_bytes + estimated_bytes(batch)
        if record_bytes:
            # Texts take the width of the longest.
            joined_bytes = (self.records + len(batch)) * sum(record_bytes)
        if joined_bytes > _JOINED_BYTES_MAX:
            return False
        if bytes_max is not None and _OBJECT_BYTES * (len(self._parts) + 1) + joined_bytes > bytes_max:
            return False
        self._parts.append(batch)
        self._record_bytes = record_bytes
        self._joined_bytes = joined_bytes
        self.records += len(batch)
        return True

    def joined(self) -> Batch:
        """All of it as one batch, the same object each time; from now on nothing can be added."""
        if len(self._parts) > 1:
            self._parts = [concatenate(self._parts)]
        self._was_read = True
        return self._parts[0]


def _record_bytes(batch: Batch) -> tuple[int, ...]:
    """Bytes of a record in each array of the batch; of a list none."""
    if isinstance(batch, Columns):
        return tuple(map(_row_bytes, batch.arrays.values()))
    if isinstance(batch, np.ndarray):
        return (_row_bytes(batch),)
    return ()


def _row_bytes(array: npt.NDArray[Any]) -> int:
    return array.nbytes // len(array)


class PieceFile:
    """Contents in the order they came; nothing is opened before the first is appended.

    ``name`` begins the messages of errors. Memory holds 8 bytes for each content.

    Encoded pieces of data on disk, to be read by number as often as wanted.
    """

    __slots__ = ("_directory", "_ends", "_file", "_name")

    def __init__(self, directory: str | os.PathLike[str], *, name: str) -> None:
        self._directory = directory
        self._name = name
        self._file: TemporaryFile | None = None
        self._ends = array("q", [0])
        """Where content i ends is at i + 1."""

    def __len__(self) -> int:
        return len(self._ends) - 1

    @property
    def size_bytes(self) -> int:
        """Size of the file."""
        return self._ends[-1]

    def append(self, content: Content) -> None:
        """Add one at the end. Raises ``StorageFull``, and ``ConfigurationError`` where no file can be made.

        After an error the contents are the same as before.
        """
        with errors_of_a_full_disk(
            self._name, self._directory, wanted_bytes=len(content), kept_bytes=self.size_bytes
        ):
            if self._file is None:
                self._file = TemporaryFile(self._directory, name=self._name)
            self._file.append(content)
        self._ends.append(self._file.size_bytes)

    def read_to_own(self, index: int) -> memoryview:
        """The content at ``index`` in memory of its own, which begins at a multiple of 16 and may be written to."""
        assert self._file is not None
        start, end = self._ends[index], self._ends[index + 1]
        room = np.empty(end - start, np.uint8).data
        self._file.read_into(start, room)
        return room

    def hold(self) -> HeldPieces:
        """The contents that are there now, to be read whatever is appended, cut behind them, or closed."""
        # No copy of the ends: these ones do not change, and after ``close`` it has others.
        return HeldPieces(None if self._file is None else self._file.hold(), self._ends, len(self))

    def cut(self, count: int) -> None:
        """Forget all but the first ``count`` contents, and give the disk's space back."""
        if self._file is not None and count < len(self):
            self._file.cut(self._ends[count])
            del self._ends[count + 1 :]

    def close(self) -> None:
        """Let go of the file and all it holds. May be called more than once."""
        if self._file is not None:
            self._file.close()
            self._file = None
        self._ends = array("q", [0])


@final
class HeldPieces:
    """The contents that a piece file had at one moment, in order."""

    __slots__ = ("_count", "_ends", "_file")

    def __init__(self, file: FileHold | None, ends: array[int], count: int) -> None:
        self._file = file
        self._ends = ends
        self._count = count

    def __iter__(self) -> Iterator[bytes]:
        if self._file is None:
            return
        for index in range(self._count):
            start, end = self._ends[index], self._ends[index + 1]
            yield self._file.read(start, end - start)

    def release(self) -> None:
        """Let go of the file. May be called more than once."""
        if self._file is not None:
            self._file.release()


@final
class DeferredFrames(Deferred):
    """Frames that are in memory, already encoded: for state that is small, or has been read from elsewhere.

    >>> list(DeferredFrames([b"first", b"second"]).frames())
    [b'first', b'second']

    Small deferred state, and letting go of all that some state holds.
    """

    def __init__(self, frames: Iterable[bytes]) -> None:
        self._frames = list(frames)

    def frames(self) -> Iterator[bytes]:
        return iter(self._frames)

    def release(self) -> None:
        self._frames = []


def release_all(state: Any, structs: Container[type[Any]] = ()) -> None:
    """Release what is ``Deferred`` anywhere in ``state``, which may also hold what is not plain data, or itself."""
    waiting, seen = [state], set[int]()
    while waiting:
        part = waiting.pop()
        if isinstance(part, Deferred):
            part.release()
        elif id(part) not in seen:
            inside = _parts(part, structs)
            if inside:
                seen.add(id(part))
                waiting += inside


def _parts(part: Any, structs: Container[type[Any]]) -> list[Any]:
    if isinstance(part, dict):
        return [*part.keys(), *part.values()]
    if isinstance(part, (list, tuple, set, frozenset)):
        return list(part)
    return list(msgspec.structs.astuple(part)) if type(part) in structs else []


# Entries go into one frame up to there: a frame costs its writer a checksum and a turn of the event loop, and
# a megabyte, or so many batches of a record each, are one or two milliseconds of work.
_FRAME_BYTES: Final = 1 << 20
_FRAME_ENTRIES: Final = 256


class DeferredEntries(Deferred):
    """Base for state that is a row of entries of plain data, mostly tuples with the bytes of a batch in them.

    Derived classes give the entries as a generator, and let go of everything in ``let_go``.

    Large state as a row of entries, some to a frame: each made when it is written, and let go of when it was.
    """

    def __init__(self, name: str, plain_data: PlainData) -> None:
        self.name = name
        self._plain_data = plain_data
        self._is_released = False
        self._was_read = False

    @abc.abstractmethod
    def entries(self) -> Iterator[tuple[Any, ...]]:
        """The entries in order; gone through once."""

    @abc.abstractmethod
    def let_go(self) -> None:
        """Drop what is held; called once."""

    def frames(self) -> Iterator[bytes]:
        self._check(not self._was_read)
        self._was_read = True
        return self._frames()

    def release(self) -> None:
        if not self._is_released:
            self._is_released = True
            self.let_go()

    def _frames(self) -> Iterator[bytes]:
        gathered: list[tuple[Any, ...]] = []
        size_bytes = 0
        try:
            for entry in self.entries():
                entry_bytes = _bytes_in(entry)
                if gathered and size_bytes + entry_bytes > _FRAME_BYTES:
                    yield self._frame(gathered)
                    size_bytes = 0
                gathered.append(entry)
                size_bytes += entry_bytes
                if len(gathered) == _FRAME_ENTRIES:
                    yield self._frame(gathered)
                    size_bytes = 0
                self._check(not self._is_released)
            if gathered:
                yield self._frame(gathered)
        finally:
            self.release()

    def _frame(self, gathered: list[tuple[Any, ...]]) -> bytes:
        frame = self._plain_data.encode(gathered, name=f"deferred state of {self.name}")
        gathered.clear()
        return frame

    def _check(self, is_there: bool) -> None:
        """What has been released would look like less state, or none."""
        if self._is_released or not is_there:
            raise InternalError(f"{self.name}: deferred state is read that was read before, or was released")


def entries_of(frames: Iterable[Any]) -> Iterator[Any]:
    """The entries of decoded frames, in order; a frame that is none is given as it is, for its reader to refuse."""
    for frame in frames:
        yield from frame if type(frame) is list else (frame,)


def _bytes_in(entry: tuple[Any, ...]) -> int:
    return sum(len(part) for part in entry if type(part) is bytes)
