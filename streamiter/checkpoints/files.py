"""Temporary files, locks of files, and calls that block.

:class:`TemporaryFile` keeps data that does not fit into memory; a :class:`FileHold` keeps it readable for a checkpoint.
:func:`alone`, :func:`shared` and :func:`is_free` lock files, so that several processes can use one directory.
:func:`in_thread` runs a call that blocks without blocking the event loop.
"""

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

Content: TypeAlias = bytes | memoryview

# A full disk, a full quota, a limit on the size of files (RLIMIT_FSIZE).
FULL_DISK: Final = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})


class TemporaryFile:
    """A file without a name: bytes are appended at the end and read anywhere.

    It is created in ``directory``, which is created if it is missing; ``ConfigurationError`` if that fails. ``name``
    (the step) begins the message of every error. Where the system allows it, the file has no name, so a process
    that is killed leaves nothing behind; data that must outlive the process is in checkpoints.
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
        """Whether a hold is not yet released: the bytes it reads must not be cut off."""
        return self._holds > 0

    def append(self, *parts: Content) -> None:
        """Add the parts one after another; if that fails, the file is unchanged."""
        try:
            self._file.seek(self.size_bytes)
            for part in parts:
                self._write_all(part)
        except OSError:
            # Free the space of the bytes that did fit. The next part is written at the same position in any case.
            with suppress(OSError):
                self._file.truncate(self.size_bytes)
            raise
        self.size_bytes += sum(map(len, parts))

    def read(self, position: int, length: int) -> bytes:
        """Return ``length`` bytes from ``position`` on."""
        self._file.seek(position)
        content = self._file.read(length)
        while len(content) < length:
            more = self._file.read(length - len(content))
            if not more:
                raise self._ends_early(length - len(content))
            content += more
        return content

    def read_into(self, position: int, room: memoryview) -> None:
        """Fill ``room`` with the bytes from ``position`` on."""
        self._file.seek(position)
        while room:
            length = self._file.readinto(room)
            if not length:
                raise self._ends_early(len(room))
            room = room[length:]

    def cut(self, size_bytes: int) -> None:
        """Keep the first ``size_bytes`` bytes only, and free the rest of the space."""
        self._file.truncate(size_bytes)
        self.size_bytes = size_bytes

    def hold(self) -> FileHold:
        """Keep the present bytes readable, also when the file is closed, until the hold is released."""
        self._holds += 1
        return FileHold(self)

    def end_hold(self) -> None:
        """Count a hold as released; only holds call this."""
        self._holds -= 1
        if self._is_closed and not self._holds:
            self._file.close()

    def close(self) -> None:
        """Close the file, which removes its bytes. May be called more than once."""
        if self._is_closed:
            return
        self._is_closed = True
        if self._holds:
            self._file = _copy_for_holds(self._file)
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
    """A file that is closed by the garbage collector without a warning: after a failed checkpoint."""

    def __del__(self) -> None:
        self.close()


def _copy_for_holds(file: FileIO) -> FileIO:
    with file:
        return _QuietFile(os.dup(file.fileno()))


@final
class FileHold:
    """Reads a temporary file, also after its owner has closed it. A hold without references is released."""

    __slots__ = ("_file",)

    def __init__(self, file: TemporaryFile) -> None:
        self._file: TemporaryFile | None = file

    def read(self, position: int, length: int) -> bytes:
        """Return ``length`` bytes from ``position`` on."""
        if self._file is None:
            raise InternalError("a temporary file is read through a hold that was released")
        return self._file.read(position, length)

    def release(self) -> None:
        """Release the file. May be called more than once."""
        file, self._file = self._file, None
        if file is not None:
            file.end_hold()

    def __del__(self) -> None:
        self.release()


@contextmanager
def errors_of_a_full_disk(
    name: str, directory: str | os.PathLike[str], *, wanted_bytes: int, kept_bytes: int
) -> Iterator[None]:
    """Raise ``StorageFull`` for a full disk, with the bytes to be written and the bytes that the step keeps there."""
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
    import tempfile  # imported only by jobs: it takes 4 ms

    try:
        os.makedirs(directory, exist_ok=True)
        return tempfile.TemporaryFile(prefix="streamiter-spill-", dir=directory, buffering=0)
    except OSError as error:
        if error.errno in FULL_DISK:
            raise
        raise ConfigurationError(
            f"{name}: expected a directory for data that does not fit into memory, given "
            f"{directory} ({error.strerror}); choose one that this process may write to"
        ) from error


# `fcntl` is imported where it is used: Windows does not have it, and everything else works there.

# A process needs the lock for some milliseconds, on a slow disk for a second; a stopped process keeps it forever.
_TRIES: Final = 1000
_TRY_S: Final = 0.01


@contextlib.contextmanager
def alone(path: Path) -> Iterator[None]:
    """Hold the exclusive lock of a file. Raises ``CheckpointError`` if another process does not release it.

    The system releases the lock of a process that is killed.
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
    """Return a handle that shares a lock of the file with others, until it is closed or its process ends.

    ``is_free`` must not be called at the same time.
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
    """Return whether no process has locked the file, or the file does not exist."""
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
    """Make the disk store the names in a folder."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


P = ParamSpec("P")
T = TypeVar("T")


async def in_thread(call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Run ``call(*args, **kwargs)`` in a thread of the event loop's pool, and return its result.

    A cancellation takes effect when the call has ended; so files can be closed and removed after it.
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
            working.exception()  # marks it as retrieved, so that asyncio logs nothing
        raise cancelled
    return working.result()
