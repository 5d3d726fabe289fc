"""What the operating system says about a file, told as an error of the tree, with what to do."""

from __future__ import annotations

import difflib
import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from streamiter.errors import StorageFull, TopicDenied, TopicError, TopicNotFound

__all__ = ["file_errors", "nearby", "not_found", "translated"]

# EFBIG is a limit on the file's size (ulimit -f, or what the file system can hold): no room either.
_FULL: Final = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
_DENIED: Final = frozenset({errno.EACCES, errno.EPERM, errno.EROFS})
_MISSING: Final = frozenset({errno.ENOENT, errno.ENOTDIR})

# Names listed in an error message: a reader takes in about as many at a glance.
_NAMES_SHOWN: Final = 3


@contextmanager
def file_errors(path: str | Path) -> Iterator[None]:
    """Turn an ``OSError`` of the body into the error of the tree that fits."""
    try:
        yield
    except OSError as error:
        raise translated(error, path) from error


def translated(error: OSError, path: str | Path) -> TopicError:
    """The error of the tree for an ``OSError`` about ``path``."""
    reason = error.strerror or str(error)
    if error.errno in _MISSING:
        return not_found(path)
    if error.errno in _DENIED:
        return TopicDenied(
            f"file {str(path)!r}: {reason}; the process runs as user {os.geteuid()}, which needs the right "
            "to read (a source) or write (a sink) the file and to enter its folders"
        )
    if error.errno in _FULL:
        return StorageFull(
            f"file {str(path)!r}: {reason}; what was stored before is whole, the rest was not written. "
            "Make room, then run again"
        )
    return TopicError(f"file {str(path)!r}: {reason} ({errno.errorcode.get(error.errno or 0, '?')})")


def not_found(path: str | Path) -> TopicNotFound:
    """A ``TopicNotFound`` that names the files of similar names, or the first folder that is missing."""
    path = Path(path)
    folder = path.parent
    if not folder.is_dir():
        existing = next((parent for parent in folder.parents if parent.is_dir()), Path("/"))
        missing = existing / folder.relative_to(existing).parts[0]
        return TopicNotFound(f"file {str(path)!r}: there is no folder {str(missing)!r}{nearby(missing)}")
    return TopicNotFound(f"file {str(path)!r}: there is no such file{nearby(path)}")


def nearby(path: Path) -> str:
    """Names beside ``path`` that resemble its own, as the end of a message."""
    try:
        siblings = sorted(entry.name for entry in path.parent.iterdir())
    except OSError:
        return ""
    close = difflib.get_close_matches(path.name, siblings, n=_NAMES_SHOWN, cutoff=0.5)
    return f"; near it are {', '.join(map(repr, close))}" if close else f" in {str(path.parent)!r}"
