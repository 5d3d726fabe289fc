"""Reading a file in large chunks, unpacked where it is compressed. All of it blocks: it runs in threads."""

from __future__ import annotations

import hashlib
import os
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from stat import S_ISREG
from typing import Final, Protocol

from streamiter.errors import TopicError
from streamiter_files.file_errors import file_errors
from streamiter_files.formats import is_gzip
from streamiter_files.locking import shared_lock

__all__ = [
    "ByteSource",
    "FileState",
    "GzipChunks",
    "PlainChunks",
    "TornMember",
    "file_state",
    "has_identity",
    "identity_of",
    "open_chunks",
]

# zlib's window bits for the largest window and a gzip header (zlib manual, inflateInit2).
_GZIP: Final = 16 + zlib.MAX_WBITS


# Of a file's beginning, by which it is told from a file that takes its place: some tens of lines, in one page.
_BEGINNING_BYTES: Final = 4096


@dataclass(frozen=True, slots=True)
class FileState:
    """A file as it is found when a reader is opened: what comes later is not read."""

    path: Path
    size_bytes: int
    mtime_ms: int


def file_state(path: Path) -> FileState:
    """Look at a file between two appends of any writer of ours; checks that it can be read."""
    with file_errors(path):
        handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)  # a pipe must not block here
        try:
            if not S_ISREG(os.fstat(handle).st_mode):
                raise TopicError(f"file {str(path)!r}: expected a regular file, not a folder, pipe or device")
            with shared_lock(handle):
                status = os.fstat(handle)
        finally:
            os.close(handle)
    return FileState(path, status.st_size, status.st_mtime_ns // 1_000_000)


def identity_of(path: Path) -> str | None:
    """What tells a file from one that takes its place: the length and checksum of its beginning.

    It has whole lines, or a whole member of gzip, only: a torn end is cut off by the next writer. None where there is
    none yet, which is so of an empty file.
    """
    with file_errors(path), path.open("rb") as file:
        beginning = file.read(_BEGINNING_BYTES)
    whole = _whole_member(beginning) if is_gzip(path.name) else _whole_lines(beginning)
    return _identity(whole) if whole else None


def has_identity(identity: str, beginning: Callable[[int], bytes]) -> bool:
    """Whether it is that of a file, of which ``beginning`` gives so many bytes (or less, where it has no more)."""
    return _identity(beginning(int(identity.split()[1]))) == identity


def _identity(beginning: bytes) -> str:
    return f"first {len(beginning)} bytes={hashlib.sha256(beginning).hexdigest()}"


def _whole_lines(beginning: bytes) -> bytes:
    end = beginning.rfind(b"\n") + 1
    return beginning if len(beginning) == _BEGINNING_BYTES and not end else beginning[:end]


def _whole_member(beginning: bytes) -> bytes:
    member = zlib.decompressobj(_GZIP)
    try:
        member.decompress(beginning)
    except zlib.error:
        return b""  # reading it says what is wrong
    if member.eof:
        return beginning[: len(beginning) - len(member.unused_data)]
    return beginning if len(beginning) == _BEGINNING_BYTES else b""


class ByteSource(Protocol):
    """Chunks of a file's contents, one after the other."""

    @property
    def left_bytes(self) -> int:
        """Bytes of the file (as stored) that are still to be read."""

    def read(self) -> bytes:
        """The next chunk; empty at the end."""

    def beginning(self, count: int) -> bytes:
        """The first ``count`` bytes of the file as they are stored now."""

    def close(self) -> None:
        """Let go of the file."""


def open_chunks(state: FileState, chunk_bytes: int) -> ByteSource:
    """The contents of the file, up to the size it had when its state was taken."""
    plain = PlainChunks(state, chunk_bytes)
    return GzipChunks(plain, state.path, chunk_bytes) if is_gzip(state.path.name) else plain


class TornMember(TopicError):
    """A gzip file ends within a member, as after a crash; what lies before ``whole_bytes`` is good."""

    def __init__(self, message: str, whole_bytes: int) -> None:
        self.whole_bytes = whole_bytes
        super().__init__(message)


class PlainChunks:
    """A file's bytes as they are stored, from byte ``begin``."""

    def __init__(self, state: FileState, chunk_bytes: int, *, begin: int = 0) -> None:
        self._state = state
        self._chunk_bytes = chunk_bytes
        self.left_bytes = state.size_bytes - begin
        with file_errors(state.path):
            self._file = state.path.open("rb", buffering=0)
            self._file.seek(begin)

    @property
    def position(self) -> int:
        """The byte that is read next."""
        return self._state.size_bytes - self.left_bytes

    def read(self) -> bytes:
        if self.left_bytes == 0:
            return b""
        with file_errors(self._state.path):
            chunk = self._file.read(min(self._chunk_bytes, self.left_bytes)) or b""
        if not chunk:
            raise TopicError(
                f"file {str(self._state.path)!r}: expected {self._state.size_bytes} bytes as when it was "
                f"opened, found {self.position}: it was cut while it was read"
            )
        self.left_bytes -= len(chunk)
        return chunk

    def beginning(self, count: int) -> bytes:
        with file_errors(self._state.path):
            return os.pread(self._file.fileno(), count, 0)

    def close(self) -> None:
        self._file.close()


class GzipChunks:
    """What a gzip file of one or more members holds, unpacked; at most ``chunk_bytes`` at a time."""

    def __init__(self, packed: PlainChunks, path: Path, chunk_bytes: int) -> None:
        self._packed = packed
        self._path = path
        self._chunk_bytes = chunk_bytes
        self._input = b""
        self._member: zlib._Decompress | None = None
        self._whole_bytes = packed.position  # up to the end of the last member that was read whole

    @property
    def left_bytes(self) -> int:
        """Bytes of the file (as stored) that are still to be read."""
        return self._packed.left_bytes + len(self._input)

    def read(self) -> bytes:
        while self._has_input() or self._member is not None:
            chunk = self._unpack()
            if chunk:
                return chunk
        return b""

    def beginning(self, count: int) -> bytes:
        return self._packed.beginning(count)

    def _has_input(self) -> bool:
        self._input = self._input or self._packed.read()
        if self._member is None:  # zeros between members are padding (gzip manual, "tape")
            self._input = self._input.lstrip(b"\0")
            while not self._input and self._packed.left_bytes:
                self._input = self._packed.read().lstrip(b"\0")
        return bool(self._input)

    def _unpack(self) -> bytes:
        member = self._member = self._member or zlib.decompressobj(_GZIP)
        at_end = not self._input
        try:
            chunk = member.decompress(self._input, self._chunk_bytes)
        except zlib.error as error:
            raise TopicError(self._message(str(error))) from None
        if member.eof:
            self._input, self._member = member.unused_data, None
            self._whole_bytes = self._packed.position - len(self._input)
            return chunk
        self._input = member.unconsumed_tail
        if at_end and not chunk:
            raise TornMember(self._message("the end of the file within compressed data"), self._whole_bytes)
        return chunk

    def _message(self, given: str) -> str:
        return (
            f"file {str(self._path)!r}: expected gzip data, given {given}; the member that begins at byte "
            f"{self._whole_bytes} is broken before byte {self._packed.position}, all before it is good"
        )

    def close(self) -> None:
        self._packed.close()
