"""What SQLite's errors mean for a topic."""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Final

from streamiter.errors import StorageFull, TopicDenied, TopicError, TopicUnavailable

__all__ = ["DamagedFile", "checked_numbers", "translated"]


class DamagedFile(Exception):
    """The file has what no writer of topics stores. Never leaves this package."""


def checked_numbers(row: Sequence[object], table: str) -> Sequence[int]:
    """The same row; raises ``DamagedFile`` unless all of it is whole numbers, which SQLite does not see to."""
    for value in row:
        if not isinstance(value, int):
            raise DamagedFile(f"a row of the table {table} has {value!r:.40} in place of a number")
    return row  # type: ignore[return-value]


def translated(
    error: sqlite3.Error | DamagedFile | UnicodeDecodeError, path: Path, topic: str | None = None
) -> TopicError:
    """The topic error that ``error`` stands for; it names the topic, where one is given.

    >>> error = sqlite3.OperationalError("database or disk is full")
    >>> error.sqlite_errorcode = sqlite3.SQLITE_FULL
    >>> type(translated(error, Path("clicks.db"))).__name__
    'StorageFull'
    """
    meant = _translated(error, path)
    return meant if topic is None else type(meant)(f"topic {topic!r}: {meant}")


def _translated(error: sqlite3.Error | DamagedFile | UnicodeDecodeError, path: Path) -> TopicError:
    if not isinstance(
        error, sqlite3.Error
    ):  # SQLite's own message may have bytes of the file that are no text
        return _damaged(error, path)
    code = getattr(error, "sqlite_errorcode", None)
    if code is None and str(error).startswith(_NOT_TEXT):
        return _damaged(error, path)
    if code is None:
        return TopicError(f"{path}: {error}")
    make = _BY_CODE.get(code) or _BY_CODE.get(code & 0xFF)  # the low byte is the kind, the rest says more
    return make(error, path) if make is not None else TopicError(f"{path}: {error} ({_name(error)})")


# How Python's sqlite3 begins what it says of a text that is none; it has no code.
_NOT_TEXT: Final = "Could not decode to UTF-8"


def _name(error: sqlite3.Error) -> str:
    return getattr(error, "sqlite_errorname", "unknown error")


def _full(error: sqlite3.Error, path: Path) -> TopicError:
    return StorageFull(
        f"{path}: no room left to write ({_name(error)}); nothing of this write was stored. Make room on the "
        "disk (or raise the quota or file size limit), or create topics with retention_records, "
        "retention_bytes or retention_ms; then write again"
    )


def _input_output(error: sqlite3.Error, path: Path) -> TopicError:
    if _free_bytes(path) < 1 << 20:  # the shared memory beside the file could not grow, for instance
        return _full(error, path)
    return TopicError(f"{path}: the disk failed ({_name(error)}: {error})")


def _free_bytes(path: Path) -> int:
    try:
        status = os.statvfs(path.parent)
    except OSError:
        return 1 << 62  # not known; then it is not the reason either
    return status.f_bavail * status.f_frsize


def _busy(error: sqlite3.Error, path: Path) -> TopicError:
    return TopicUnavailable(
        f"{path}: another writer has kept the file locked for longer than lock_timeout_s ({_name(error)}); "
        f"find it, for example with `fuser {path}`, and end it"
    )


def _denied(error: sqlite3.Error, path: Path) -> TopicError:
    return TopicDenied(
        f"{path}: not allowed to open it for reading and writing ({error}); the file and its folder must be "
        "writable, for readers too"
    )


_WHAT_TO_DO: Final = (
    "restore it from a copy (with its -wal file, if the copy has one), or save what can be read of it: "
    "`sqlite3 FILE .recover`"
)


def _not_topics(error: sqlite3.Error, path: Path) -> TopicError:
    return TopicError(
        f"{path}: expected a file of topics, given something else, or a file that is damaged at its beginning "
        f"({error}); use another path, or {_WHAT_TO_DO}"
    )


def _damaged(error: Exception, path: Path) -> TopicError:
    found = " ".join(str(error).split())  # SQLite's check of a table writes several lines
    return TopicError(f"{path}: the file is damaged ({found}); {_WHAT_TO_DO}")


_BY_CODE: Final[Mapping[int, Callable[[sqlite3.Error, Path], TopicError]]] = MappingProxyType(
    {
        sqlite3.SQLITE_FULL: _full,
        # write() failed, and not with "no space", which is SQLITE_FULL: a quota or a limit on file sizes.
        sqlite3.SQLITE_IOERR_WRITE: _full,
        sqlite3.SQLITE_IOERR: _input_output,
        sqlite3.SQLITE_BUSY: _busy,
        sqlite3.SQLITE_LOCKED: _busy,
        sqlite3.SQLITE_CANTOPEN: _denied,
        sqlite3.SQLITE_READONLY: _denied,
        sqlite3.SQLITE_PERM: _denied,
        sqlite3.SQLITE_AUTH: _denied,
        sqlite3.SQLITE_NOTADB: _not_topics,
        sqlite3.SQLITE_CORRUPT: _damaged,
        sqlite3.SQLITE_IOERR_SHORT_READ: _damaged,  # a file that was cut
        # No statement here is wrong for tables as they were made, and none violates their constraints.
        sqlite3.SQLITE_ERROR: _damaged,
        sqlite3.SQLITE_CONSTRAINT: _damaged,
        sqlite3.SQLITE_MISMATCH: _damaged,
        sqlite3.SQLITE_TOOBIG: _damaged,
    }
)
