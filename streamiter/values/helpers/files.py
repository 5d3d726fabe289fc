"""Locks of files, files that are replaced, names that the disk has stored, and work that no cancellation interrupts.

:func:`alone`, :func:`shared`, :func:`is_free` and :func:`locked` lock files, so that several processes can use them. On
Windows, which has no such locks, the package works without checkpoints in a folder.
"""

from __future__ import annotations

import asyncio
import errno
import os
import shutil
import tempfile
import time
import weakref
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import IO, Final, ParamSpec, TypeVar

from streamiter.errors import CheckpointError, ConfigurationError, StorageFull
from streamiter.values.helpers.closing import undone_on_failure

# A full disk, a full quota, a limit on the size of files (RLIMIT_FSIZE).
FULL_DISK: Final = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})


def says_full(reason: str) -> bool:
    """Return whether an error, of which a database gives the text only, is that the disk is full.

    >>> says_full("IO error: No space left on device: While appending to file"), says_full("Input/output error")
    (True, False)
    """
    return any(text in reason for text in (*map(os.strerror, FULL_DISK), "Max allowed space"))


# A wrong folder or a wrong user: errors that do not go away with time.
NOT_ALLOWED: Final = frozenset(
    {errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EEXIST, errno.EISDIR, errno.ENAMETOOLONG}
)


def advice_for(reason: str, otherwise: str = "check that disk") -> str:
    """Return what to do about an error of the system, by its text: databases give no number.

    >>> advice_for("IO error: Too many open files: While open a file"), advice_for("Input/output error")
    ('raise the limit on open files of this process (ulimit -n)', 'check that disk')
    """
    return next((advice for text, advice in _ADVICE.items() if text in reason), otherwise)


@contextmanager
def errors_of_writing(what: str, place: str, advice: str) -> Iterator[None]:
    """Convert errors of the system to errors that say what to do, while files in ``place`` are written.

    ``what`` (the flow) begins the message; ``advice`` says how to need less space on the disk.
    """
    try:
        yield
    except OSError as error:
        reason = os.strerror(error.errno) if error.errno else str(error)
        if error.errno in FULL_DISK:
            raise StorageFull(
                f"{what}: expected room for checkpoints in {place}, given {reason}; what was committed before is as "
                f"it was: free space on that disk, or {advice}"
            ) from error
        if error.errno in NOT_ALLOWED:
            raise ConfigurationError(
                f"{what}: expected a directory for checkpoints that this process may write to, given {place} "
                f"({error.filename or place}: {reason}); choose another, or give it to this process's user"
            ) from error
        raise CheckpointError(
            f"{what}: expected to write checkpoints to {place}, given an error of the system "
            f"({error.filename or place}: {reason}); {advice_for(reason)}, or choose another directory"
        ) from error


_ADVICE: Final[Mapping[str, str]] = MappingProxyType(
    {
        os.strerror(errno.EMFILE): "raise the limit on open files of this process (ulimit -n)",
        os.strerror(errno.ENFILE): "raise the limit on open files of this machine (fs.file-max)",
        os.strerror(errno.ENOMEM): "give this process more memory",
    }
)

# `fcntl` is imported where it is used: Windows does not have it, and everything else works there.

# A process needs the lock for some milliseconds, on a slow disk for a second; a stopped process keeps it forever.
_TRIES: Final = 1000
_TRY_S: Final = 0.01


@contextmanager
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
    with undone_on_failure(handle.close):
        fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
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


# File systems without locks, such as some network file systems, answer with one of these.
_WITHOUT_LOCKS: Final = frozenset({errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS, errno.EINVAL})


@contextmanager
def locked(handle: int, *, shared: bool = False) -> Iterator[None]:
    """Hold the lock of an open file, alone or together with other readers; wait for it. No effect on Windows.

    A shared lock has no effect on a file system without locks.
    """
    try:
        import fcntl
    except ImportError:
        yield
        return
    try:
        fcntl.flock(handle, fcntl.LOCK_SH if shared else fcntl.LOCK_EX)
    except OSError as error:
        if not shared or error.errno not in _WITHOUT_LOCKS:
            raise
    try:
        yield
    finally:
        with suppress(OSError):
            fcntl.flock(handle, fcntl.LOCK_UN)


class RunFolder:
    """A folder for the files of one run, in a place that runs share; the folders of runs that are dead are deleted.

    It is made by the first use, and deleted by ``close``, with the last reference to this object, or at the end of the
    process.
    """

    def __init__(self, place: Path) -> None:
        self._place = place
        self._delete: Callable[[], object] | None = None

    @cached_property
    def path(self) -> Path:
        """The folder, which is locked as long as it exists. Raises ``OSError``."""
        self._place.mkdir(parents=True, exist_ok=True)
        with alone(self._place / _LOCK):
            for folder in sorted(self._place.glob(f"{_RUN}*")):
                if is_free(folder / _IN_USE):
                    shutil.rmtree(folder, ignore_errors=True)
            made = Path(tempfile.mkdtemp(prefix=_RUN, dir=self._place))
            self._delete = weakref.finalize(self, _delete_folder, made, shared(made / _IN_USE), os.getpid())
            return made

    def close(self) -> None:
        """Delete the folder. May be called more than once."""
        if self._delete is not None:
            self._delete()


def _delete_folder(folder: Path, in_use: IO[bytes], process: int) -> None:
    if os.getpid() == process:  # A fork has the object as well.
        shutil.rmtree(folder, ignore_errors=True)
    in_use.close()


_LOCK: Final = "lock"
_IN_USE: Final = "in-use"
_RUN: Final = "run-"


def sync_folder(path: Path) -> None:
    """Make the disk store the names in a folder."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def replace_file(path: Path, content: bytes) -> None:
    """Write a file, or replace it; it is complete at any time."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        temporary.write_bytes(content)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


P = ParamSpec("P")
T = TypeVar("T")


async def uninterrupted(work: Awaitable[T]) -> T:
    """Await ``work``; a cancellation is raised only when ``work`` has ended, so its effect on files is known."""
    working = asyncio.ensure_future(work)
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


async def in_thread(call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Run ``call(*args, **kwargs)`` in a thread of the event loop's pool, uninterrupted, and return its result."""
    return await uninterrupted(asyncio.to_thread(call, *args, **kwargs))
