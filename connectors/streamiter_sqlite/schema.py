"""What lies in the file, and opening it.

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

from __future__ import annotations

import sqlite3
from pathlib import Path
from typing import Final, Literal
from urllib.parse import quote

from streamiter.errors import TopicError, TopicNotFound
from streamiter_sqlite.failures import DamagedFile
from streamiter_sqlite.locking import read_transaction, write_transaction

__all__ = ["Synchronous", "connect", "set_synchronous"]

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
