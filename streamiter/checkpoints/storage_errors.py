"""What the system says of files, as errors that say what to do."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from streamiter.checkpoints.temporary_file import FULL_DISK
from streamiter.errors import CheckpointError, ConfigurationError, StorageFull

__all__ = ["errors_of_reading", "errors_of_writing"]

# Wrong folder or wrong user, nothing that time heals.
_NOT_ALLOWED: Final = frozenset(
    {errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EEXIST, errno.EISDIR, errno.ENAMETOOLONG}
)


@contextmanager
def errors_of_writing(what: str, root: Path) -> Iterator[None]:
    """``what`` (the flow) begins the message; ``root`` is the directory of the store."""
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
            f"({error.filename or root}: {reason}); look after that disk, or choose another directory"
        ) from error


@contextmanager
def errors_of_reading(path: Path) -> Iterator[None]:
    """Of a file that cannot be read, whatever is in it."""
    try:
        yield
    except OSError as error:
        reason = os.strerror(error.errno) if error.errno else str(error)
        raise CheckpointError(
            f"{path}: expected a file that can be read, given an error of the system ({reason}); look after that "
            "disk and the file's owner, or go on from another checkpoint"
        ) from error
