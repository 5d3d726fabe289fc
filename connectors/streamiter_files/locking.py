"""Locks on files, so that appends of several tasks or processes follow one another.

The locks are advisory: they hold between writers and readers of this package, on systems that have ``flock``.
"""

from __future__ import annotations

import errno
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

__all__ = ["exclusive_lock", "shared_lock"]

# File systems without locks (some network ones) say so in one of these ways.
_WITHOUT_LOCKS: Final = frozenset({errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS, errno.EINVAL})

if sys.platform == "win32":  # pragma: no cover

    @contextmanager
    def exclusive_lock(_handle: int) -> Iterator[None]:
        yield

    @contextmanager
    def shared_lock(_handle: int) -> Iterator[None]:
        yield

else:
    import fcntl

    @contextmanager
    def exclusive_lock(handle: int) -> Iterator[None]:
        """Hold the open file alone."""
        fcntl.flock(handle, fcntl.LOCK_EX)
        try:
            yield
        finally:
            fcntl.flock(handle, fcntl.LOCK_UN)

    @contextmanager
    def shared_lock(handle: int) -> Iterator[None]:
        """Hold the open file together with other readers; without effect where there are no locks."""
        try:
            fcntl.flock(handle, fcntl.LOCK_SH)
        except OSError as error:
            if error.errno not in _WITHOUT_LOCKS:
                raise
            yield
            return
        try:
            yield
        finally:
            fcntl.flock(handle, fcntl.LOCK_UN)
