"""A file to append lines to. All of it blocks: it runs in threads."""

from __future__ import annotations

import gzip
import os
from collections.abc import Callable
from pathlib import Path
from stat import S_ISREG

from streamiter.errors import TopicError, TopicNotFound
from streamiter_files.file_errors import file_errors
from streamiter_files.formats import is_gzip
from streamiter_files.locking import exclusive_lock
from streamiter_files.torn_lines import mend_lines, mend_members

__all__ = ["AppendFile"]


class AppendFile:
    """Appends whole lines, as plain text or as one gzip member each time.

    Several of them, in one process or several, may append to one file: each append holds a lock, sets
    right what a crashed writer may have left, and is taken back where it does not succeed.
    ``header`` (a line) goes into an empty file first; ``is_whole`` tells a last line that only lacks its
    line feed from a torn one.
    """

    def __init__(
        self, path: Path, *, header: bytes | None = None, is_whole: Callable[[bytes], bool] | None = None
    ) -> None:
        self._path = path
        self._gzip = is_gzip(path.name)
        self._header = header
        self._is_whole = is_whole
        self._mended_bytes = 0
        self._folder_synced = False
        flags = os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NONBLOCK
        with file_errors(path):
            self._handle = os.open(path, flags, 0o666)
        try:
            self._begin()
        except BaseException:
            os.close(self._handle)
            raise

    def _begin(self) -> None:
        with file_errors(self._path):
            if not S_ISREG(os.fstat(self._handle).st_mode):
                raise TopicError(f"file {str(self._path)!r}: expected a regular file, not a pipe or device")
        self.append(b"")

    def append(self, lines: bytes) -> None:
        """Add lines (each with its line feed) behind all that is there; all or nothing."""
        with file_errors(self._path), exclusive_lock(self._handle):
            lacks_line_feed = self._mend()
            if self._header is not None and os.fstat(self._handle).st_size == 0:
                self._write(self._header)
            if lines:
                self._write(b"\n" + lines if lacks_line_feed else lines)

    def _mend(self) -> bool:
        """Set right what another writer left since the last append; True where a line feed is missing."""
        size_bytes = os.fstat(self._handle).st_size
        if size_bytes == self._mended_bytes:
            return False
        if self._gzip:
            begin = self._mended_bytes if self._mended_bytes < size_bytes else 0
            if mend_members(self._handle, self._path, size_bytes, begin):
                return True
        else:
            mend_lines(self._handle, self._path, size_bytes, self._is_whole)
        self._mended_bytes = os.fstat(self._handle).st_size
        return False

    def _write(self, lines: bytes) -> None:
        before_bytes = os.fstat(self._handle).st_size
        left = memoryview(gzip.compress(lines, mtime=0) if self._gzip else lines)
        try:
            while left:
                left = left[os.write(self._handle, left) :]
        except OSError:
            os.ftruncate(self._handle, before_bytes)
            raise
        self._mended_bytes = os.fstat(self._handle).st_size

    def sync(self) -> None:
        """Make durable what was appended; raises ``TopicNotFound`` where the file is no longer there."""
        with file_errors(self._path):
            os.fsync(self._handle)
            self._sync_folder()
            if not self._is_in_place():
                raise TopicNotFound(
                    f"file {str(self._path)!r}: it was deleted or replaced while it was written to; "
                    "what was appended since is lost with it. Open a new writer and write that again"
                )

    def _sync_folder(self) -> None:
        """A new file's name is durable only with its folder, see fsync(2)."""
        if self._folder_synced:
            return
        folder = os.open(self._path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
        self._folder_synced = True

    def _is_in_place(self) -> bool:
        try:
            return os.path.samestat(os.stat(self._path), os.fstat(self._handle))
        except FileNotFoundError:
            return False

    def close(self) -> None:
        """Let go of the file; what was appended and not synced is left to the system."""
        if self._handle >= 0:
            os.close(self._handle)
            self._handle = -1
