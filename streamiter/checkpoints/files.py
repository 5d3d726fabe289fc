"""Files that are written whole or not at all, and locked."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from io import FileIO
from pathlib import Path
from typing import IO, Final, ParamSpec, TypeAlias, TypeVar, final

from streamiter.errors import CheckpointError, ConfigurationError, InternalError, StorageFull

__all__ = [
    "FULL_DISK",
    "Content",
    "FileHold",
    "TemporaryFile",
    "alone",
    "errors_of_a_full_disk",
    "in_thread",
    "is_free",
    "shared",
    "sync_folder",
]


Content: TypeAlias = bytes | memoryview

# A full disk, a full quota, a limit on the size of files (RLIMIT_FSIZE).
FULL_DISK: Final = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})


class TemporaryFile:
    """Bytes that are appended at the end and read anywhere; ``name`` (the step) begins what it raises.

    Made in ``directory``, which is made, too; ``ConfigurationError`` where that cannot be.

    A temporary file: what does not fit into memory is appended to it and read back from anywhere in it.

    The file has no name (where the system allows it), so a process that is killed leaves nothing behind;
    nothing here is meant to outlive the process, what must is in checkpoints.
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


# `fcntl` is imported where it is used: there is none on Windows, where all but this works.

# Whoever has the lock needs some milliseconds, on a bad disk a second; one that is stopped has it for ever.
_TRIES: Final = 1000
_TRY_S: Final = 0.01


@contextlib.contextmanager
def alone(path: Path) -> Iterator[None]:
    """Holds the lock that the file is. Raises ``CheckpointError`` where another process does not let go of it.

    Locks of files, which the system takes from whoever is killed, and names that outlast a crash.
    """
    import fcntl

    with open(path, "ab") as handle:
        for _ in range(_TRIES):
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                time.sleep(_TRY_S)
        else:
            raise CheckpointError(
                f"{path}: expected it to be free for a moment, given a process that has locked it for "
                f"{_TRIES * _TRY_S:.0f} s; is it stopped? `fuser {path}` names it: end it"
            )
        yield


def shared(path: Path) -> IO[bytes]:
    """A handle that keeps the file locked, together with others, until it is closed or its process dies.

    Nobody may ask ``is_free`` at the same time.
    """
    import fcntl

    handle = open(path, "ab")  # noqa: SIM115 the caller closes it
    try:
        fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BaseException:
        handle.close()
        raise
    return handle


def is_free(path: Path) -> bool:
    """Whether nobody has locked the file, or there is none."""
    import fcntl

    try:
        with open(path, "rb") as handle:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except FileNotFoundError:
        pass
    return True


def sync_folder(path: Path) -> None:
    """Have the disk keep the names in a folder."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


P = ParamSpec("P")
T = TypeVar("T")


async def in_thread(call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """``call(*args, **kwargs)`` in a thread, to its end also when cancelled, which then takes effect.

    So whoever cancels finds nothing under way afterwards: files can be closed and removed.

    Work that blocks, done in a thread of the event loop's pool.
    """
    working = asyncio.ensure_future(asyncio.to_thread(call, *args, **kwargs))
    cancelled: asyncio.CancelledError | None = None
    while not working.done():
        try:
            await asyncio.wait([working])
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is not None:
        if not working.cancelled():
            working.exception()  # so that nobody complains that it was not looked at
        raise cancelled
    return working.result()
