"""Writing a snapshot file, piece by piece."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import BinaryIO, Final

from streamiter.checkpoints.snapshot import SnapshotHeader
from streamiter.checkpoints.snapshot_format import (
    FRAME_HEAD,
    PREAMBLE_BYTES,
    PartEntry,
    Section,
    frame_head,
    manifest_of,
    pack_manifest,
    pack_preamble,
    pack_trailer,
)
from streamiter.errors import InternalError

__all__ = ["BATCH_BYTES", "SnapshotWriter"]

BATCH_BYTES: Final = 1 << 20
"""What is collected before it is worth the 50 µs of a thread; small beside any state that needs it."""


class SnapshotWriter:
    """Collects frames in the event loop, and writes them where it may block.

    ``add`` and the like only collect; the others block. One call at a time.
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
        """Begin a part; its deferred pieces follow."""
        if name in self._names:
            raise InternalError(f"{self.path.name}: two parts are called {name!r}")
        self._names.add(name)
        start = self._position
        self._add(content)
        self._parts.append(PartEntry(name, Section(start, self._position - start, 1), []))

    def begin_deferred(self) -> None:
        """Begin the next deferred piece of the part; its frames follow."""
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

    # ---- what blocks

    def open(self) -> None:
        """Make the file, and lock it: one that is not locked is nobody's any more. Raises ``OSError``."""
        import fcntl  # there is none on Windows, where all but this works

        # Emptied once it is locked: whoever writes to one of that name, against all rules, is not disturbed.
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
        """Write what was collected. Raises ``OSError``."""
        contents, self._contents, self.pending_bytes = self._contents, [], 0
        file = self._opened()
        for content in contents:
            head = frame_head(self._written, content)
            file.write(head)
            file.write(content)
            self._written += len(head) + len(content)

    def finish(self, header: SnapshotHeader) -> int:
        """Write the rest, and have the disk keep it; gives the size in bytes. Raises ``OSError``."""
        self.write()
        file = self._opened()
        manifest = pack_manifest(manifest_of(header, self._parts))
        file.write(manifest + pack_trailer(self._position, manifest))
        file.flush()
        os.fsync(file.fileno())
        return file.tell()

    def rename(self, path: Path) -> None:
        """Give the file the name under which it counts. Raises ``OSError``."""
        os.rename(self.path, path)
        self.path = path

    def close(self) -> None:
        """Let go of the file, which stays. May be called more than once."""
        if self._file is not None:
            with contextlib.suppress(OSError):  # a full disk again, for what is still in the buffer
                self._file.close()
            self._file = None

    def abandon(self) -> None:
        """Remove the file, unless it was closed, whatever its name is by now."""
        self._contents.clear()
        if self._file is not None:
            with contextlib.suppress(OSError):
                self.path.unlink(missing_ok=True)
            self.close()

    def _opened(self) -> BinaryIO:
        if self._file is None:
            raise InternalError(f"{self.path.name}: written before it was opened")
        return self._file
