"""The file of a snapshot: reading it, and writing it piece by piece.

:class:`SnapshotFile` compares all bytes with their checksum before it returns them. :class:`SnapshotWriter` collects
frames in the event loop and writes them in a thread, since writing blocks.
"""

from __future__ import annotations

import contextlib
import os
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from io import FileIO
from pathlib import Path
from typing import BinaryIO, Final

from streamiter.checkpoints.files import in_thread
from streamiter.checkpoints.snapshot import (
    FORMAT,
    FRAME_HEAD,
    PREAMBLE_BYTES,
    TRAILER_BYTES,
    CheckpointId,
    Damage,
    Manifest,
    OtherFormat,
    PartEntry,
    Section,
    SnapshotHeader,
    check_preamble,
    errors_of_reading,
    frame_crc32,
    frame_head,
    manifest_of,
    pack_manifest,
    pack_preamble,
    pack_trailer,
    unpack_manifest,
    unpack_trailer,
)
from streamiter.checkpoints.store import StoredSnapshot
from streamiter.errors import CheckpointError, InternalError

# Many small frames are read at once; of a larger frame, at most this many bytes are read twice.
_AHEAD_BYTES: Final = 1 << 16

# Frames are checked in pieces: a frame may be larger than the memory that is left.
_CHECKED_BYTES: Final = 1 << 20

# Checking this many bytes takes about 10 ms; then the check can be cancelled.
_CHECK_PAUSE_BYTES: Final = 1 << 24


class SnapshotFile(StoredSnapshot):
    """One snapshot file, open for reading. It stays readable if another process removes it.

    Raises ``CheckpointError`` if the file is missing, damaged, or of another version of the format. Content and frames
    may be read in any order, also alternately.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        with errors_of_reading(path):
            self._file = FileIO(path)
        try:
            with self._explained_errors():
                self._manifest = self._read_manifest()
        except BaseException:
            self._file.close()
            raise
        self.header: SnapshotHeader = self._manifest.header
        self._parts = {part.name: part for part in self._manifest.parts}

    @property
    def size_bytes(self) -> int:
        """Size of the whole file."""
        return os.fstat(self._file.fileno()).st_size

    def check_identity(self, flow: str, checkpoint: CheckpointId) -> None:
        """Raise ``CheckpointError`` if it is another snapshot than its name says."""
        if (self.header.flow, self.header.id) != (flow, checkpoint):
            raise CheckpointError(
                f"{self.path}: expected checkpoint {checkpoint} of flow {flow!r}, given checkpoint {self.header.id} "
                f"of flow {self.header.flow!r}; somebody has renamed or copied it: put it back where it was"
            )

    def part_names(self) -> Sequence[str]:
        return list(self._parts)

    def part_bytes(self, part: str) -> int:
        """Return the bytes of a part with its deferred pieces."""
        entry = self._part(part)
        return sum(section.bytes for section in (entry.content, *entry.deferred))

    async def content(self, part: str) -> bytes:
        return await in_thread(self._content, part)

    def frames(self, part: str, deferred: int) -> Iterator[bytes]:
        sections = self._part(part).deferred
        if not 0 <= deferred < len(sections):
            raise CheckpointError(
                f"{self.path}: expected deferred piece {deferred} of part {part!r}, given {len(sections)} of them; "
                "it was written by another version of the program"
            )
        return self._frames(part, sections[deferred])

    async def verify(self) -> None:
        checking = self._check()
        while await in_thread(next, checking, None):
            pass

    async def close(self) -> None:
        self.close_now()

    def close_now(self) -> None:
        """Close the file without an event loop."""
        self._file.close()

    def verify_now(self) -> None:
        """Verify the file without an event loop."""
        for _ in self._check():
            pass

    # ---- reading

    def _read_manifest(self) -> Manifest:
        size_bytes = self.size_bytes
        check_preamble(self._read(0, min(size_bytes, PREAMBLE_BYTES)))
        if size_bytes < PREAMBLE_BYTES + TRAILER_BYTES:
            raise Damage(
                f"expected at least {PREAMBLE_BYTES + TRAILER_BYTES} bytes, given {size_bytes}: it is cut off"
            )
        end = size_bytes - TRAILER_BYTES
        offset, length, crc32 = unpack_trailer(self._read(end, TRAILER_BYTES))
        if offset + length != end or offset < PREAMBLE_BYTES:
            raise Damage(f"expected a file of {offset + length + TRAILER_BYTES} bytes, given {size_bytes}")
        return unpack_manifest(self._read(offset, length), crc32, offset=offset)

    def _content(self, part: str) -> bytes:
        [content] = self._frames(part, self._part(part).content)
        return content

    def _part(self, name: str) -> PartEntry:
        try:
            return self._parts[name]
        except KeyError:
            raise InternalError(f"{self.path}: it has no part {name!r}") from None

    def _frames(self, part: str, section: Section) -> Iterator[bytes]:
        reader = _SectionReader(self._read, section)
        for number in range(section.frames):
            with self._explained_errors(part):
                place = reader.position
                length, crc32 = FRAME_HEAD.unpack(reader.take(FRAME_HEAD.size))
                content = reader.take(length)
                _compare(number, zlib.crc32(content, frame_crc32(place, length)), crc32)
            yield content
        with self._explained_errors(part):
            reader.check_end()

    def _check(self) -> Iterator[bool]:
        """Read and check everything; yield True from time to time."""
        checked_bytes = 0
        for part in self._manifest.parts:
            for section in (part.content, *part.deferred):
                for length in self._check_section(part.name, section):
                    checked_bytes += length
                    if checked_bytes >= _CHECK_PAUSE_BYTES:
                        checked_bytes = 0
                        yield True

    def _check_section(self, part: str, section: Section) -> Iterator[int]:
        """Check the frames of a section with one piece of a frame in memory; yield the lengths of the pieces."""
        reader = _SectionReader(self._read, section)
        for number in range(section.frames):
            with self._explained_errors(part):
                place = reader.position
                rest, expected = FRAME_HEAD.unpack(reader.take(FRAME_HEAD.size))
                reader.check_length(rest)
                crc32 = frame_crc32(place, rest)
            while rest:
                length = min(rest, _CHECKED_BYTES)
                with self._explained_errors(part):
                    crc32 = zlib.crc32(reader.take(length), crc32)
                rest -= length
                yield length
            with self._explained_errors(part):
                _compare(number, crc32, expected)
        with self._explained_errors(part):
            reader.check_end()

    def _read(self, offset: int, length: int) -> bytes:
        """Return exactly these bytes. Raises ``Damage`` if the file ends before."""
        pieces: list[bytes] = []
        while length:
            # fileno() is called each time: the number of a closed file may belong to another file now.
            piece = os.pread(self._file.fileno(), length, offset)
            if not piece:
                raise Damage(
                    f"expected {length} more bytes from byte {offset} on, given its end: it is cut off"
                )
            pieces.append(piece)
            offset += len(piece)
            length -= len(piece)
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    @contextmanager
    def _explained_errors(self, part: str | None = None) -> Iterator[None]:
        """Convert damage and errors of the system to ``CheckpointError``: which file, what is wrong, what to do."""
        where = f"{self.path}: " if part is None else f"{self.path}, part {part!r}: "
        root = self.path.parent.parent
        try:
            with errors_of_reading(self.path):
                yield
        except Damage as damage:
            raise CheckpointError(
                f"{where}the checkpoint is damaged: {damage}; start from an older one "
                f"(`streamiter checkpoints list {root}` shows them), or put the file back from a backup"
            ) from damage
        except OtherFormat as other:
            by = "a newer" if other.given > FORMAT else "another"
            raise CheckpointError(
                f"{where}written by {by} streamiter (format {other.given}), expected format {FORMAT}; use that "
                f"version, or start from an older one (`streamiter checkpoints list {root}` shows them)"
            ) from other


class _SectionReader:
    """Reads a section from start to end; several small pieces are read from the file at once."""

    __slots__ = ("_buffer", "_buffer_start", "_end", "_read", "position")

    def __init__(self, read: Callable[[int, int], bytes], section: Section) -> None:
        self._read = read
        self._end = section.offset + section.bytes
        self._buffer = b""
        self._buffer_start = section.offset
        self.position = section.offset

    def take(self, length: int) -> bytes:
        """Return the next ``length`` bytes."""
        self.check_length(length)
        start = self.position - self._buffer_start
        if start + length > len(self._buffer):
            # The rest of the buffer is read again, so that a large frame is one object and is not copied.
            wanted = min(max(length, _AHEAD_BYTES), self._end - self.position)
            self._buffer = self._read(self.position, wanted)
            self._buffer_start, start = self.position, 0
        self.position += length
        return self._buffer[start : start + length]

    def check_length(self, length: int) -> None:
        """Raise ``Damage`` if the section ends before ``length`` bytes; called before memory is allocated."""
        left = self._end - self.position
        if length > left:
            raise Damage(f"expected {length} more bytes of it, given {left}")

    def check_end(self) -> None:
        """Raise ``Damage`` if bytes are left over."""
        if self.position != self._end:
            raise Damage(f"{self._end - self.position} bytes at its end belong to no frame")


def _compare(number: int, given: int, expected: int) -> None:
    if given != expected:
        raise Damage(
            f"frame {number} does not match its checksum (expected {expected:08x}, given {given:08x})"
        )


BATCH_BYTES: Final = 1 << 20
"""Frames are collected up to this size, so that the 50 µs of a call in a thread are well spent."""


class SnapshotWriter:
    """Writes a snapshot file piece by piece.

    ``add_part``, ``begin_deferred`` and ``add_frame`` only collect frames, in the event loop. The other methods block,
    so call them in a thread. One call at a time.
    """

    __slots__ = ("_contents", "_file", "_names", "_parts", "_position", "_written", "path", "pending_bytes")

    def __init__(self, path: Path) -> None:
        self.path = path
        self.pending_bytes = 0
        self._file: BinaryIO | None = None
        self._contents: list[bytes] = []
        self._position = self._written = PREAMBLE_BYTES
        self._parts: list[PartEntry] = []
        self._names: set[str] = set()

    # ---- in the event loop

    def add_part(self, name: str, content: bytes) -> None:
        """Start a part; its deferred pieces follow."""
        if name in self._names:
            raise InternalError(f"{self.path.name}: two parts are called {name!r}")
        self._names.add(name)
        start = self._position
        self._add(content)
        self._parts.append(PartEntry(name, Section(start, self._position - start, 1), []))

    def begin_deferred(self) -> None:
        """Start the next deferred piece of the part; its frames follow."""
        self._parts[-1].deferred.append(Section(self._position, 0, 0))

    def add_frame(self, content: bytes) -> None:
        """Add a frame to the deferred piece."""
        self._add(content)
        deferred = self._parts[-1].deferred
        section = deferred[-1]
        deferred[-1] = Section(section.offset, self._position - section.offset, section.frames + 1)

    def _add(self, content: bytes) -> None:
        self._contents.append(content)
        length = FRAME_HEAD.size + len(content)
        self._position += length
        self.pending_bytes += length

    # ---- in a thread: these calls block

    def open(self) -> None:
        """Create the file and lock it; a file without a lock has no living writer. Raises ``OSError``."""
        import fcntl  # Windows does not have it; everything else works there

        # Emptied only after it is locked, so that the file of another writer is not changed.
        handle = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.ftruncate(handle, 0)
            self._file = open(handle, "wb", buffering=BATCH_BYTES)  # noqa: SIM115 close and abandon do
        except BaseException:
            os.close(handle)
            raise
        self._file.write(pack_preamble())

    def write(self) -> None:
        """Write the collected frames. Raises ``OSError``."""
        contents, self._contents, self.pending_bytes = self._contents, [], 0
        file = self._opened()
        for content in contents:
            head = frame_head(self._written, content)
            file.write(head)
            file.write(content)
            self._written += len(head) + len(content)

    def finish(self, header: SnapshotHeader) -> int:
        """Write the end of the file and make the disk store it; return its size in bytes. Raises ``OSError``."""
        self.write()
        file = self._opened()
        manifest = pack_manifest(manifest_of(header, self._parts))
        file.write(manifest + pack_trailer(self._position, manifest))
        file.flush()
        os.fsync(file.fileno())
        return file.tell()

    def rename(self, path: Path) -> None:
        """Give the file its final name. Raises ``OSError``."""
        os.rename(self.path, path)
        self.path = path

    def close(self) -> None:
        """Close the file, which stays. May be called more than once."""
        if self._file is not None:
            with contextlib.suppress(OSError):  # a full disk, for the bytes in the buffer
                self._file.close()
            self._file = None

    def abandon(self) -> None:
        """Remove the file under its present name, unless it was closed."""
        self._contents.clear()
        if self._file is not None:
            with contextlib.suppress(OSError):
                self.path.unlink(missing_ok=True)
            self.close()

    def _opened(self) -> BinaryIO:
        if self._file is None:
            raise InternalError(f"{self.path.name}: written before it was opened")
        return self._file
