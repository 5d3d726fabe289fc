"""A first-in, first-out file of byte strings whose disk use follows what it holds.

The strings lie in *segments*, temporary files of about one size: writing goes to the last, reading to the
first, and a segment that has been read goes away. So a queue that is never quite empty does not grow
without end, and no byte is copied to make room.

The files have no name (where the system allows it), so a process that is killed leaves nothing behind;
nothing here is meant to outlive the process, what must is in checkpoints.
"""

from __future__ import annotations

import errno
import os
import tempfile
from collections import deque
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from struct import Struct
from typing import IO, Final

from streamiter.errors import ConfigurationError, StorageFull

__all__ = ["SpillFile", "frame_bytes"]

_LENGTH: Final = Struct("<Q")

# A full disk, a full quota, a limit on the size of files (RLIMIT_FSIZE).
_FULL: Final = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})


def frame_bytes(content: bytes) -> int:
    """Bytes that ``content`` takes in a spill file."""
    return _LENGTH.size + len(content)


class _Segment:
    """One temporary file: strings appended at the end, read from the front."""

    __slots__ = ("_file", "read_position", "size_bytes")

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self.size_bytes = 0
        self.read_position = 0

    @property
    def is_read(self) -> bool:
        return self.read_position == self.size_bytes

    def append(self, content: bytes) -> None:
        """Add one; where that fails, the segment is as before."""
        try:
            self._file.seek(self.size_bytes)
            _write_all(self._file, _LENGTH.pack(len(content)) + content)
        except OSError:
            # Gives back what fitted; the next one is written at the same place in any case.
            with suppress(OSError):
                self._file.truncate(self.size_bytes)
            raise
        self.size_bytes += frame_bytes(content)

    def read(self, position: int) -> tuple[bytes, int]:
        """The string at ``position``, and the position behind it."""
        self._file.seek(position)
        (length,) = _LENGTH.unpack(_read_all(self._file, _LENGTH.size))
        content = _read_all(self._file, length)
        return content, position + frame_bytes(content)

    def empty(self) -> None:
        """Begin anew, with the disk's space given back."""
        self._file.truncate(0)
        self.size_bytes = self.read_position = 0

    def close(self) -> None:
        self._file.close()


class SpillFile:
    """Byte strings on disk, first in, first out; nothing is opened before the first is appended.

    ``segment_bytes`` is the size from which the next segment begins: what has been read is given back in
    such portions. ``name`` begins the messages of errors.
    """

    __slots__ = ("_count", "_directory", "_name", "_segment_bytes", "_segments", "_size_bytes")

    def __init__(self, directory: str | os.PathLike[str], *, segment_bytes: int, name: str) -> None:
        self._directory = Path(directory)
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

    def append(self, content: bytes) -> None:
        """Add one at the end. Raises ``StorageFull``, and ``ConfigurationError`` where no file can be made.

        After an error the strings are the same as before.
        """
        try:
            self._last_segment().append(content)
        except OSError as error:
            if error.errno not in _FULL:
                raise
            raise StorageFull(
                f"{self._name}: expected room for {frame_bytes(content)} bytes in {self._directory}, given "
                f"{os.strerror(error.errno)} with {self._size_bytes} bytes of this queue there; "
                "free space on that disk or choose another directory"
            ) from error
        self._count += 1
        self._size_bytes += frame_bytes(content)

    def first(self) -> bytes:
        """The first string, which stays; ``IndexError`` where there is none."""
        if not self._count:
            raise IndexError(f"{self._name}: nothing is spilled")
        content, _ = self._segments[0].read(self._segments[0].read_position)
        return content

    def drop_first(self, content: bytes) -> None:
        """Forget the first string, which is ``content``; gives its segment back when that has been read."""
        segment = self._segments[0]
        segment.read_position += frame_bytes(content)
        self._count -= 1
        if segment.is_read:
            self._give_back(segment)

    def __iter__(self) -> Iterator[bytes]:
        """All strings in order; they stay."""
        for segment in self._segments:
            position = segment.read_position
            while position < segment.size_bytes:
                content, position = segment.read(position)
                yield content

    def close(self) -> None:
        """Let go of the files and all they hold. May be called more than once."""
        while self._segments:
            self._segments.popleft().close()
        self._count = self._size_bytes = 0

    def _last_segment(self) -> _Segment:
        if not self._segments or self._segments[-1].size_bytes >= self._segment_bytes:
            self._segments.append(_Segment(self._open()))
        return self._segments[-1]

    def _open(self) -> IO[bytes]:
        try:
            self._directory.mkdir(parents=True, exist_ok=True)
            return tempfile.TemporaryFile(prefix="streamiter-spill-", dir=self._directory, buffering=0)
        except OSError as error:
            if error.errno in _FULL:
                raise
            raise ConfigurationError(
                f"{self._name}: expected a directory for files of what does not fit into memory, given "
                f"{self._directory} ({error.strerror}); choose one that this process may write to"
            ) from error

    def _give_back(self, segment: _Segment) -> None:
        """The last segment is kept, empty, for what comes next."""
        self._size_bytes -= segment.size_bytes
        if len(self._segments) > 1:
            self._segments.popleft().close()
        else:
            segment.empty()


def _write_all(file: IO[bytes], content: bytes) -> None:
    rest = memoryview(content)
    while rest:
        rest = rest[file.write(rest) :]


def _read_all(file: IO[bytes], length: int) -> bytes:
    content = file.read(length)
    while len(content) < length:
        more = file.read(length - len(content))
        if not more:
            raise OSError(errno.EIO, f"a spill file ends {length - len(content)} bytes early")
        content += more
    return content
