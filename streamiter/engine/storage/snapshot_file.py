"""The file of a snapshot: :class:`StoredSnapshot` reads it, and :class:`SnapshotWriter` writes it piece by piece."""

from __future__ import annotations

import contextlib
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO, Final, ParamSpec, TypeVar

from streamiter.engine.storage.blobs import BlobReader, Blobs, run_call
from streamiter.engine.storage.snapshot import (
    FORMAT,
    FRAME_HEAD,
    PREAMBLE_BYTES,
    TRAILER_BYTES,
    CheckpointId,
    Damage,
    Manifest,
    OtherFormat,
    PartEntry,
    PartsFile,
    Section,
    SharedFile,
    SnapshotHeader,
    check_preamble,
    frame_crc32,
    frame_head,
    pack_manifest,
    pack_preamble,
    pack_trailer,
    unpack_manifest,
    unpack_trailer,
)
from streamiter.errors import CheckpointError, InternalError
from streamiter.values.helpers.closing import close_now, undone_on_failure

P = ParamSpec("P")
T = TypeVar("T")

# Many small frames are read at once; of a larger frame, at most this many bytes are read twice.
_AHEAD_BYTES: Final = 1 << 16

# Frames are checked in pieces: a frame may be larger than the memory that is left.
_CHECKED_BYTES: Final = 1 << 20


class StoredSnapshot:
    """One snapshot in a store, open for reading. It stays readable if another process removes it.

    All bytes are compared with their checksum before they are returned. Raises ``CheckpointError`` if the file is
    damaged, or of another version of the format. Content and frames may be read in any order.
    """

    def __init__(self, reader: BlobReader, root: str, shared: tuple[Blobs, str] | None = None) -> None:
        """``root`` is the store, for messages. If the file is damaged, the reader is closed.

        ``shared`` says where its shared files are: the blobs and their folder. None for a reader of the header alone.
        """
        self._reader = reader
        self._root = root
        self._shared = shared
        self._added: list[StoredSnapshot] = []
        with undone_on_failure(reader.close), self._explained_damage():
            self._manifest, self._manifest_crc32 = self._read_manifest()
        self.header: SnapshotHeader = self._manifest.header
        self._parts = {part.name: part for part in self._manifest.parts}

    @property
    def others(self) -> Sequence[PartsFile]:
        """The files of other processes, which :meth:`add` makes a part of this snapshot."""
        return self._manifest.others

    @property
    def size_bytes(self) -> int:
        """The bytes of all its files, shared ones included."""
        own = self._reader.size_bytes + sum(other.bytes for other in self.others)
        return own + sum(file.bytes for file in self.shared())

    def shared(self) -> Iterator[SharedFile]:
        """Give the shared files that its manifests name."""
        for each in (self, *self._added):
            for part in each._manifest.parts:
                for section in part.deferred:
                    yield from section.files or ()

    def add(self, expected: PartsFile, file: StoredSnapshot) -> None:
        """Add the parts of another process; they are closed with this snapshot."""
        self._added.append(file)
        if (file._reader.size_bytes, file._manifest_crc32) != (expected.bytes, expected.manifest_crc32):
            raise CheckpointError(
                f"{file._reader.place}: expected the {expected.bytes} bytes that process {expected.process} wrote for "
                f"checkpoint {self.header.id}, given another file; put it back from a backup, or start from another "
                "checkpoint"
            )

    def check_identity(self, flow: str, checkpoint: CheckpointId) -> None:
        """Raise ``CheckpointError`` if it is another snapshot than its name says."""
        if (self.header.flow, self.header.id) != (flow, checkpoint):
            raise CheckpointError(
                f"{self._reader.place}: expected checkpoint {checkpoint} of flow {flow!r}, given checkpoint "
                f"{self.header.id} of flow {self.header.flow!r}; the file was renamed or copied: put it back where it "
                "was"
            )

    def part_names(self) -> Sequence[str]:
        """Return the names of its parts."""
        return [name for file in (self, *self._added) for name in file._parts]

    def part_bytes(self, part: str) -> int:
        """Return the bytes of a part with its deferred pieces, shared files included."""
        entry = self._file(part)._parts[part]
        sections = (entry.content, *entry.deferred)
        return sum(section.bytes + sum(file.bytes for file in section.files or ()) for section in sections)

    async def content(self, part: str) -> bytes:
        """Return the content of a part."""
        file = self._file(part)
        return await run_call(file._reader, file._content, part)

    def frames(self, part: str, deferred: int) -> Iterator[bytes]:
        """Return the frames of a part's deferred piece number ``deferred``; each is read when it is needed."""
        file = self._file(part)
        return file._frames(part, file._piece(part, deferred))

    def files(self, part: str, deferred: int) -> Sequence[SharedFile] | None:
        """Return the shared files of a deferred piece; None if it is frames."""
        return self._file(part)._piece(part, deferred).files

    def fetch(self, file: SharedFile, path: Path) -> None:
        """Make ``path`` a copy of a shared file, or another name of it, which nobody may change. It blocks."""
        blobs, name = self._blob(file)
        with blobs.explained(f"flow {self.header.flow!r}"):
            blobs.fetch(name, path)
        size_bytes, crc32 = size_and_crc32(path)
        if size_bytes != file.bytes:
            raise CheckpointError(
                f"{blobs.place_of(name)}: expected the {file.bytes} bytes that checkpoint {self.header.id} names, "
                f"given {size_bytes}; put the file back from a backup, or start from another checkpoint"
            )
        if crc32 != file.crc32:
            raise _damaged(blobs.place_of(name), file)

    def _blob(self, file: SharedFile) -> tuple[Blobs, str]:
        """Return the blobs that have a shared file, and its full name."""
        if self._shared is None:
            raise InternalError(f"{self._reader.place}: the shared file {file.blob} is read without the store")
        blobs, folder = self._shared
        return blobs, f"{folder}/{file.blob}"

    def _piece(self, part: str, deferred: int) -> Section:
        pieces = self._parts[part].deferred
        if not 0 <= deferred < len(pieces):
            raise CheckpointError(
                f"{self._reader.place}: expected deferred piece {deferred} of part {part!r}, given {len(pieces)} of "
                "them; it was written by another version of the program"
            )
        return pieces[deferred]

    async def run_call(self, call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run a call that reads this snapshot and blocks, as ``blobs.run_call`` does."""
        return await run_call(self._reader, call, *args, **kwargs)

    def verify(self) -> None:
        """Read the whole snapshot. Raises ``CheckpointError`` if anything is damaged or missing."""
        for file in (self, *self._added):
            for part in file._manifest.parts:
                for section in (part.content, *part.deferred):
                    file._verify_section(part.name, section)
        for shared in {each.blob: each for each in self.shared()}.values():
            self._verify_shared(shared)

    def close(self) -> None:
        """Close the snapshot. May be called more than once."""
        close_now(file._reader.close for file in (self, *self._added))

    def _read_manifest(self) -> tuple[Manifest, int]:
        size_bytes = self._reader.size_bytes
        check_preamble(self._read(0, min(size_bytes, PREAMBLE_BYTES)))
        if size_bytes < PREAMBLE_BYTES + TRAILER_BYTES:
            raise Damage(f"expected at least {PREAMBLE_BYTES + TRAILER_BYTES} bytes, given {size_bytes}: it is cut off")
        end = size_bytes - TRAILER_BYTES
        offset, length, crc32 = unpack_trailer(self._read(end, TRAILER_BYTES))
        if offset + length != end or offset < PREAMBLE_BYTES:
            raise Damage(f"expected a file of {offset + length + TRAILER_BYTES} bytes, given {size_bytes}")
        return unpack_manifest(self._read(offset, length), crc32, offset=offset), crc32

    def _content(self, part: str) -> bytes:
        [content] = self._frames(part, self._parts[part].content)
        return content

    def _file(self, part: str) -> StoredSnapshot:
        for file in (self, *self._added):
            if part in file._parts:
                return file
        raise InternalError(f"{self._reader.place}: it has no part {part!r}")

    def _frames(self, part: str, section: Section) -> Iterator[bytes]:
        reader = _SectionReader(self._read, section)
        for number in range(section.frames):
            with self._explained_damage(part):
                place = reader.position
                length, crc32 = FRAME_HEAD.unpack(reader.take(FRAME_HEAD.size))
                content = reader.take(length)
                _compare(number, zlib.crc32(content, frame_crc32(place, length)), crc32)
            yield content
        with self._explained_damage(part):
            reader.check_end()

    def _verify_section(self, part: str, section: Section) -> None:
        """Check the frames of a section with one piece of a frame in memory."""
        reader = _SectionReader(self._read, section)
        with self._explained_damage(part):
            for number in range(section.frames):
                place = reader.position
                rest, expected = FRAME_HEAD.unpack(reader.take(FRAME_HEAD.size))
                reader.check_length(rest)
                crc32 = frame_crc32(place, rest)
                while rest:
                    length = min(rest, _CHECKED_BYTES)
                    crc32 = zlib.crc32(reader.take(length), crc32)
                    rest -= length
                _compare(number, crc32, expected)
            reader.check_end()

    def _verify_shared(self, file: SharedFile) -> None:
        (blobs, name), crc32, position = self._blob(file), 0, 0
        with blobs.explained(f"flow {self.header.flow!r}"), contextlib.closing(blobs.peek(name)) as reader:
            while piece := reader.read(position, _CHECKED_BYTES):
                crc32 = zlib.crc32(piece, crc32)
                position += len(piece)
        if (position, crc32) != (file.bytes, file.crc32):
            raise _damaged(blobs.place_of(name), file)

    def _read(self, offset: int, length: int) -> bytes:
        """Return exactly these bytes. Raises ``Damage`` if the file ends before."""
        pieces: list[bytes] = []
        while length:
            piece = self._reader.read(offset, length)
            if not piece:
                raise Damage(f"expected {length} more bytes from byte {offset} on, given its end: it is cut off")
            pieces.append(piece)
            offset += len(piece)
            length -= len(piece)
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    @contextmanager
    def _explained_damage(self, part: str | None = None) -> Iterator[None]:
        """Convert damage to ``CheckpointError``: which file, what is wrong, what to do."""
        where = f"{self._reader.place}: " if part is None else f"{self._reader.place}, part {part!r}: "
        try:
            yield
        except Damage as damage:
            raise CheckpointError(
                f"{where}the checkpoint is damaged: {damage}; start from an older one "
                f"(`streamiter checkpoints list {self._root}` shows them), or put the file back from a backup"
            ) from damage
        except OtherFormat as other:
            by = "a newer" if other.given > FORMAT else "another"
            raise CheckpointError(
                f"{where}written by {by} streamiter (format {other.given}), expected format {FORMAT}; use that "
                f"version, or start from an older one (`streamiter checkpoints list {self._root}` shows them)"
            ) from other


class _SectionReader:
    """Reads a section from start to end; several small pieces are read from the file at once."""

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
        raise Damage(f"frame {number} does not match its checksum (expected {expected:08x}, given {given:08x})")


def size_and_crc32(path: Path) -> tuple[int, int]:
    """Return the size of a file and the CRC-32 of its content. It blocks."""
    size_bytes = crc32 = 0
    with open(path, "rb") as file:
        while piece := file.read(_CHECKED_BYTES):
            size_bytes, crc32 = size_bytes + len(piece), zlib.crc32(piece, crc32)
    return size_bytes, crc32


def _damaged(place: str, file: SharedFile) -> CheckpointError:
    return CheckpointError(
        f"{place}: the checkpoint is damaged: a file of {file.bytes} bytes that it shares does not match its checksum; "
        "start from an older one, or put the file back from a backup"
    )


WRITE_BYTES: Final = 1 << 20
"""Frames are collected up to this size, so that the 50 µs of a call in a thread are well spent."""


class SnapshotWriter:
    """Writes a snapshot piece by piece into a file.

    ``add_part``, ``begin_deferred`` and ``add_frame`` only collect frames, in the event loop. The other methods block,
    so call them in a thread. One call at a time.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.is_published = False
        """Whether the file has become a snapshot; its owner sets it."""
        self.manifest_crc32 = 0
        """The checksum of the manifest, after ``finish``."""
        self.new_bytes = 0
        """The bytes of the shared files that were stored with it."""
        self.shared_files = 0
        """The number of its shared files."""
        self.pending_bytes = 0
        self._file: BinaryIO | None = None
        self._contents: list[bytes] = []
        self._position = self._written = PREAMBLE_BYTES
        self._parts: list[PartEntry] = []
        self._names: set[str] = set()

    def add_part(self, name: str, content: bytes) -> None:
        """Start a part; its deferred pieces follow."""
        if name in self._names:
            raise InternalError(f"{self.name}: two parts are called {name!r}")
        self._names.add(name)
        start = self._position
        self._add(content)
        self._parts.append(PartEntry(name, Section(start, self._position - start, 1), []))

    def begin_deferred(self, *, has_files: bool = False) -> None:
        """Start the next deferred piece of the part; its shared files follow, if there are any, then its frames."""
        self._parts[-1].deferred.append(Section(self._position, 0, 0, () if has_files else None))

    def add_frame(self, content: bytes) -> None:
        """Add a frame to the deferred piece."""
        self._add(content)
        deferred = self._parts[-1].deferred
        section = deferred[-1]
        deferred[-1] = Section(section.offset, self._position - section.offset, section.frames + 1, section.files)

    def add_shared(self, file: SharedFile, *, is_new: bool) -> None:
        """Add a shared file to the deferred piece, which has no frames yet; ``is_new``: it was stored just now."""
        deferred = self._parts[-1].deferred
        section = deferred[-1]
        deferred[-1] = Section(section.offset, 0, 0, (*(section.files or ()), file))
        self.new_bytes += file.bytes if is_new else 0
        self.shared_files += 1

    def _add(self, content: bytes) -> None:
        self._contents.append(content)
        length = FRAME_HEAD.size + len(content)
        self._position += length
        self.pending_bytes += length

    def begin(self, file: BinaryIO) -> None:
        """Write the start of the file. Raises ``OSError``, as the following methods do."""
        self._file = file
        file.write(pack_preamble())

    def write(self) -> None:
        """Write the collected frames."""
        contents, self._contents, self.pending_bytes = self._contents, [], 0
        for content in contents:
            head = frame_head(self._written, content)
            self.file.write(head)
            self.file.write(content)
            self._written += len(head) + len(content)

    def finish(self, header: SnapshotHeader, others: Sequence[PartsFile] = ()) -> int:
        """Write the rest of the file; return its size in bytes."""
        self.write()
        manifest = pack_manifest(header, self._parts, others)
        self.manifest_crc32 = zlib.crc32(manifest)
        self.file.write(manifest + pack_trailer(self._position, manifest))
        return self.file.tell()

    @property
    def has_begun(self) -> bool:
        return self._file is not None

    @property
    def file(self) -> BinaryIO:
        if self._file is None:
            raise InternalError(f"{self.name}: written before it was begun")
        return self._file
