"""Locks of files, which the system takes from whoever is killed, and names that outlast a crash."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Final

from streamiter.errors import CheckpointError

__all__ = ["alone", "is_free", "shared", "sync_folder"]

# `fcntl` is imported where it is used: there is none on Windows, where all but this works.

# Whoever has the lock needs some milliseconds, on a bad disk a second; one that is stopped has it for ever.
_TRIES: Final = 1000
_TRY_S: Final = 0.01


@contextlib.contextmanager
def alone(path: Path) -> Iterator[None]:
    """Holds the lock that the file is. Raises ``CheckpointError`` where another process does not let go of it."""
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
