"""A temporary file: what does not fit into memory is appended to it and read back from anywhere in it.

The file has no name (where the system allows it), so a process that is killed leaves nothing behind;
nothing here is meant to outlive the process, what must is in checkpoints.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from io import FileIO
from typing import Final, TypeAlias, final

from streamiter.errors import ConfigurationError, InternalError, StorageFull

__all__ = ["FULL_DISK", "Content", "FileHold", "TemporaryFile", "errors_of_a_full_disk"]

Content: TypeAlias = bytes | memoryview

# A full disk, a full quota, a limit on the size of files (RLIMIT_FSIZE).
FULL_DISK: Final = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})


class TemporaryFile:
    """Bytes that are appended at the end and read anywhere; ``name`` (the step) begins what it raises.

    Made in ``directory``, which is made, too; ``ConfigurationError`` where that cannot be.
    """

    __slots__ = ("_file", "_holds", "_is_closed", "_name", "size_bytes")

    def __init__(self, directory: str | os.PathLike[str], *, name: str) -> None:
        self._file = _open(os.fspath(directory), name)
        self._name = name
        self._holds = 0
        self._is_closed = False
        self.size_bytes = 0

    @property
    def is_held(self) -> bool:
        """Whether somebody reads it who must not notice that it is closed: what they read must not be cut off."""
        return self._holds > 0

    def append(self, *parts: Content) -> None:
        """Add the parts one after another; where that fails, the file is as before."""
        try:
            self._file.seek(self.size_bytes)
            for part in parts:
                self._write_all(part)
        except OSError:
            # Gives back what fitted; the next one is written at the same place in any case.
            with suppress(OSError):
                self._file.truncate(self.size_bytes)
            raise
        self.size_bytes += sum(map(len, parts))

    def read(self, position: int, length: int) -> bytes:
        """``length`` bytes from ``position``."""
        self._file.seek(position)
        content = self._file.read(length)
        while len(content) < length:
            more = self._file.read(length - len(content))
            if not more:
                raise self._ends_early(length - len(content))
            content += more
        return content

    def read_into(self, position: int, room: memoryview) -> None:
        """Fill ``room`` with the bytes from ``position``."""
        self._file.seek(position)
        while room:
            length = self._file.readinto(room)
            if not length:
                raise self._ends_early(len(room))
            room = room[length:]

    def cut(self, size_bytes: int) -> None:
        """Forget what lies behind ``size_bytes`` and give the disk's space back."""
        self._file.truncate(size_bytes)
        self.size_bytes = size_bytes

    def hold(self) -> FileHold:
        """Have what is in it now stay there, also when it is closed, until the hold is released."""
        self._holds += 1
        return FileHold(self)

    def let_go(self) -> None:
        """A hold is released; for holds only."""
        self._holds -= 1
        if self._is_closed and not self._holds:
            self._file.close()

    def close(self) -> None:
        """Let go of the file and all it holds. May be called more than once."""
        if self._is_closed:
            return
        self._is_closed = True
        if self._holds:
            self._file = _left_to_holds(self._file)
        else:
            self._file.close()

    def _write_all(self, content: Content) -> None:
        rest = memoryview(content)
        while rest:
            rest = rest[self._file.write(rest) :]

    def _ends_early(self, missing_bytes: int) -> OSError:
        return OSError(
            errno.EIO,
            f"{self._name}: a temporary file of this step ends {missing_bytes} bytes early; something else has "
            "cut it, or its disk is failing",
        )


class _QuietFile(FileIO):
    """A file that nobody has to close: where a failed checkpoint was left to the garbage collector."""

    def __del__(self) -> None:
        self.close()


def _left_to_holds(file: FileIO) -> FileIO:
    with file:
        return _QuietFile(os.dup(file.fileno()))


@final
class FileHold:
    """Reads a temporary file whatever its owner does; one that nobody refers to any more is released."""

    __slots__ = ("_file",)

    def __init__(self, file: TemporaryFile) -> None:
        self._file: TemporaryFile | None = file

    def read(self, position: int, length: int) -> bytes:
        """``length`` bytes from ``position``."""
        if self._file is None:
            raise InternalError("a temporary file is read through a hold that was released")
        return self._file.read(position, length)

    def release(self) -> None:
        """Let go of it. May be called more than once."""
        file, self._file = self._file, None
        if file is not None:
            file.let_go()

    def __del__(self) -> None:
        self.release()


@contextmanager
def errors_of_a_full_disk(
    name: str, directory: str | os.PathLike[str], *, wanted_bytes: int, kept_bytes: int
) -> Iterator[None]:
    """Tells of a full disk as ``StorageFull``, with what was to be written and what the step keeps there."""
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


def _open(directory: str, name: str) -> FileIO:
    import tempfile  # 4 ms with what it imports, which only a job needs

    try:
        os.makedirs(directory, exist_ok=True)
        return tempfile.TemporaryFile(prefix="streamiter-spill-", dir=directory, buffering=0)
    except OSError as error:
        if error.errno in FULL_DISK:
            raise
        raise ConfigurationError(
            f"{name}: expected a directory for files of what does not fit into memory, given "
            f"{directory} ({error.strerror}); choose one that this process may write to"
        ) from error
