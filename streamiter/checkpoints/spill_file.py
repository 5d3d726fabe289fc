"""A first-in, first-out file of entries whose disk use follows what it holds.

An entry is a short head and a content, both bytes. Entries lie in *segments*, temporary files of about one
size: writing goes to the last, reading to the first, and a segment that has been read goes away. So a queue
that is never quite empty does not grow without end, and no byte is copied to make room.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Iterable, Iterator
from struct import Struct
from typing import Final, final

from streamiter.checkpoints.temporary_file import FileHold, TemporaryFile, errors_of_a_full_disk

__all__ = ["Entry", "HeldEntries", "SpillFile", "entry_bytes"]

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
