"""Locks of files, calls that block, and errors of the system in files of checkpoints.

:func:`alone`, :func:`shared` and :func:`is_free` lock files, so that several processes can use one directory.
:func:`in_thread` runs a call that blocks without blocking the event loop. :func:`errors_of_writing` and
:func:`errors_of_reading` convert errors of the system to errors that say what to do.
"""

from __future__ import annotations

import asyncio
import errno
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Final, ParamSpec, TypeVar

from streamiter.errors import CheckpointError, ConfigurationError, StorageFull

# A full disk, a full quota, a limit on the size of files (RLIMIT_FSIZE).
FULL_DISK: Final = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})

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


# A wrong folder or a wrong user: errors that do not go away with time.
_NOT_ALLOWED: Final = frozenset(
    {errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EEXIST, errno.EISDIR, errno.ENAMETOOLONG}
)


@contextmanager
def errors_of_writing(what: str, root: Path) -> Iterator[None]:
    """Convert errors of the system to errors that say what to do, while the store in ``root`` is written.

    ``what`` (the flow) begins the message.
    """
    try:
        yield
    except OSError as error:
        reason = os.strerror(error.errno) if error.errno else str(error)
        if error.errno in FULL_DISK:
            raise StorageFull(
                f"{what}: expected room for checkpoints in {root}, given {reason}; what was committed before is as "
                f"it was: free space on that disk, or keep fewer (`streamiter checkpoints prune {root}`)"
            ) from error
        if error.errno in _NOT_ALLOWED:
            raise ConfigurationError(
                f"{what}: expected a directory for checkpoints that this process may write to, given {root} "
                f"({error.filename or root}: {reason}); choose another, or give it to this process's user"
            ) from error
        raise CheckpointError(
            f"{what}: expected to write checkpoints to {root}, given an error of the system "
            f"({error.filename or root}: {reason}); check that disk, or choose another directory"
        ) from error


@contextmanager
def errors_of_reading(path: Path) -> Iterator[None]:
    """Convert errors of the system to ``CheckpointError``, while a file is read."""
    try:
        yield
    except OSError as error:
        reason = os.strerror(error.errno) if error.errno else str(error)
        raise CheckpointError(
            f"{path}: expected a file that can be read, given an error of the system ({reason}); check that "
            "disk and the file's owner, or start from another checkpoint"
        ) from error
