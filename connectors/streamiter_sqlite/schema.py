"""What SQLite's errors mean for a topic."""

from __future__ import annotations

import contextlib
import os
import sqlite3
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Final, Literal
from urllib.parse import quote

from streamiter.errors import StorageFull, TopicDenied, TopicError, TopicNotFound, TopicUnavailable

__all__ = [
    "DamagedFile",
    "Synchronous",
    "checked_numbers",
    "connect",
    "read_transaction",
    "translated",
    "write_transaction",
]


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


@contextlib.contextmanager
def write_transaction(connection: sqlite3.Connection) -> Iterator[None]:
    """All statements within take effect together, or none does. Waits for other writers of the file.

    Transactions of the file: many statements that take effect together, or see the same state.
    """
    connection.execute("BEGIN IMMEDIATE")
    try:
        yield
        connection.execute("COMMIT")
    except BaseException:
        if connection.in_transaction:  # some errors, a full disk among them, have rolled back already
            connection.execute("ROLLBACK")
        raise


@contextlib.contextmanager
def read_transaction(connection: sqlite3.Connection) -> Iterator[None]:
    """All statements within see the same state of the file."""
    connection.execute("BEGIN")
    try:
        yield
    finally:
        if connection.in_transaction:  # some errors have ended it already
            connection.execute("COMMIT")


Synchronous = Literal["FULL", "NORMAL"]

# "Stit" in ASCII, so that `file` and we ourselves can tell the file from other applications' databases.
_APPLICATION_ID: Final = 0x53746974
_FORMAT_VERSION: Final = 1

# The WAL is copied into the file each time it has this many pages (of 4 KiB): 16 MiB, so that bulk writing
# is not slowed down by a copy and two fsyncs for each block of 1 MiB or so.
_CHECKPOINT_PAGES: Final = 4096

# Each failed attempt means that another process was at the file at that moment; a new file is made once.
_SWITCH_ATTEMPTS: Final = 1_000

_TABLES: Final = (
    # AUTOINCREMENT: a topic that is created anew has another id, so that its readers notice. identity: tells it from
    # topics in other files, too; NULL where it was created before topics had one.
    "CREATE TABLE topics (id INTEGER PRIMARY KEY AUTOINCREMENT, name TEXT NOT NULL UNIQUE,"
    " settings TEXT NOT NULL, identity TEXT)",
    # size_bytes: of the payloads that are in entries.
    "CREATE TABLE partitions (topic_id INTEGER NOT NULL, number INTEGER NOT NULL,"
    " start_offset INTEGER NOT NULL DEFAULT 0, end_offset INTEGER NOT NULL DEFAULT 0,"
    " size_bytes INTEGER NOT NULL DEFAULT 0, PRIMARY KEY (topic_id, number)) WITHOUT ROWID",
    # SQLite has checksums for nothing but its journal. crc32: of the payload; NULL where it was stored before blocks
    # had one.
    "CREATE TABLE blocks (id INTEGER PRIMARY KEY, payload BLOB NOT NULL, crc32 INTEGER)",
    "CREATE TABLE entries (topic_id INTEGER NOT NULL, partition INTEGER NOT NULL,"
    " first_offset INTEGER NOT NULL, end_offset INTEGER NOT NULL, block_id INTEGER NOT NULL,"
    " size_bytes INTEGER NOT NULL, latest_ms INTEGER NOT NULL,"
    " PRIMARY KEY (topic_id, partition, first_offset)) WITHOUT ROWID",
    # run: the newest owner of the id; deadline_ms: when staged blocks may be thrown away by anybody, -1 once
    # that was done.
    "CREATE TABLE transactional_ids (id TEXT PRIMARY KEY, run INTEGER NOT NULL, deadline_ms INTEGER)"
    " WITHOUT ROWID",
    # Blocks of open transactions; they get their offsets at the commit, in the order of their ids.
    "CREATE TABLE staged (block_id INTEGER PRIMARY KEY, transactional_id TEXT NOT NULL,"
    " topic_id INTEGER NOT NULL, partition INTEGER NOT NULL, records INTEGER NOT NULL,"
    " size_bytes INTEGER NOT NULL, latest_ms INTEGER NOT NULL)",
    "CREATE INDEX staged_by_id ON staged (transactional_id)",
)

# Table, name and type of those that came after format 1 was in use. All may be NULL, and no statement counts columns,
# so the format is the same.
_ADDED_COLUMNS: Final = (("topics", "identity", "TEXT"), ("blocks", "crc32", "INTEGER"))


def connect(
    path: Path, *, create: bool, synchronous: Synchronous, lock_timeout_s: float
) -> sqlite3.Connection:
    """A connection to the file, for use by the calling thread only.

    Without ``create`` a file that is not there, or is empty, is ``TopicNotFound``.
    Raises ``sqlite3.Error`` and ``DamagedFile`` as they come: `failures.translated` makes a ``TopicError`` of them.

    What lies in the file, and opening it.

    Records are stored as *blocks*: the records of one partition that were committed together, packed into one
    BLOB (see `blocks`). A row for each record would be readable with any SQLite tool, but Python's sqlite3 lets
    go of the interpreter lock once for each row: measured here, 65,000 records a second are written that way
    beside a busy event loop, against 1,600,000 as blocks.

    ``blocks`` holds the bytes and ``entries`` says where they lie in a topic. They are apart so that a commit
    can give offsets to gigabytes of staged blocks by writing a few entries: SQLite rewrites a whole row, BLOB
    included, when any column of it changes.

    WAL journal: readers and the one writer at a time do not block each other. With ``synchronous=FULL`` a
    commit is on the disk when it returns, so it survives a power cut; with ``NORMAL`` it survives ``kill -9``
    and a power cut may take the last commits, but never leaves anything half written. WAL needs shared memory:
    the file must not lie on a network file system.
    """
    _check_path(path, create=create)
    connection = sqlite3.connect(
        f"file:{quote(str(path))}?mode={'rwc' if create else 'rw'}",
        uri=True,
        timeout=lock_timeout_s,
        isolation_level=None,  # transactions begin where we say so
    )
    try:
        _prepare(connection, path, create=create)
        set_synchronous(connection, synchronous)
    except BaseException:
        connection.close()
        raise
    return connection


def set_synchronous(connection: sqlite3.Connection, synchronous: Synchronous) -> None:
    """What the commits to come survive: FULL a power cut, NORMAL the end of the process."""
    connection.execute(f"PRAGMA synchronous = {synchronous}")


def _check_path(path: Path, *, create: bool) -> None:
    if not path.parent.is_dir():
        raise TopicError(f"{path}: the folder {path.parent} is not there; make it first")
    if not create and not path.exists():
        raise TopicNotFound(no_topics_message(path))


def no_topics_message(path: Path) -> str:
    """What to do where there is no file yet."""
    return f"{path}: no topics there; create one with `await topic.create(partitions=...)`"


def _prepare(connection: sqlite3.Connection, path: Path, *, create: bool) -> None:
    with read_transaction(connection):  # in one, as another process may be creating the tables right now
        has_tables = _has_tables(connection, path)
        lacking = _lacking_columns(connection) if has_tables else []
    if not has_tables:
        if not create:
            raise TopicNotFound(no_topics_message(path))
        _create_tables(connection, path)
    elif lacking:
        _add_columns(connection)
    connection.execute(f"PRAGMA wal_autocheckpoint = {_CHECKPOINT_PAGES:d}")


def _has_tables(connection: sqlite3.Connection, path: Path) -> bool:
    [application_id] = connection.execute("PRAGMA application_id").fetchone()
    [version] = connection.execute("PRAGMA user_version").fetchone()
    if application_id == 0 and not connection.execute("SELECT 1 FROM sqlite_schema").fetchone():
        return False
    if application_id != _APPLICATION_ID:
        if _has_our_tables(connection):
            raise DamagedFile(f"it has the tables of topics, and the application id {application_id}")
        raise TopicError(
            f"{path}: expected a file of topics, given an SQLite database of something else; use another path"
        )
    if version != _FORMAT_VERSION:
        raise TopicError(
            f"{path}: expected format {_FORMAT_VERSION}, given format {version}: written by another release "
            "of streamiter, so read it with that one; or it is damaged at its beginning, so restore it from a copy"
        )
    return True


def _has_our_tables(connection: sqlite3.Connection) -> bool:
    names = {name for (name,) in connection.execute("SELECT name FROM sqlite_schema WHERE type = 'table'")}
    return {"topics", "partitions", "blocks", "entries", "transactional_ids", "staged"} <= names


def _lacking_columns(connection: sqlite3.Connection) -> list[tuple[str, str, str]]:
    """The columns that the file was made without."""
    return [
        (table, column, kind)
        for table, column, kind in _ADDED_COLUMNS
        if column not in [name for _, name, *_ in connection.execute(f"PRAGMA table_info ({table})")]
    ]


def _add_columns(connection: sqlite3.Connection) -> None:
    """Add the columns that are missing. The file can still be used by a release that does not know them."""
    with write_transaction(connection):
        for table, column, kind in _lacking_columns(connection):  # none if another process was faster
            connection.execute(f"ALTER TABLE {table} ADD COLUMN {column} {kind}")


def _switch_to_write_ahead_log(connection: sqlite3.Connection) -> None:
    """Unlike a transaction this does not wait for others that are at the file: it fails at once."""
    for _ in range(_SWITCH_ATTEMPTS):
        try:
            connection.execute("PRAGMA journal_mode = WAL")
            return
        except sqlite3.OperationalError as error:
            if error.sqlite_errorcode != sqlite3.SQLITE_BUSY:
                raise
        with write_transaction(connection):
            pass  # This waits, and fails when its time is over.
    connection.execute("PRAGMA journal_mode = WAL")


def _create_tables(connection: sqlite3.Connection, path: Path) -> None:
    _switch_to_write_ahead_log(connection)
    with write_transaction(connection):
        if _has_tables(connection, path):  # another process was faster
            return
        for statement in _TABLES:
            connection.execute(statement)
        connection.execute(f"PRAGMA application_id = {_APPLICATION_ID:d}")
        connection.execute(f"PRAGMA user_version = {_FORMAT_VERSION:d}")
