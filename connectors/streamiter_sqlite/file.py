"""The SQLite file: its tables, its connection and the thread that uses it.

Records are stored as *blocks*: the records of one partition that were committed together, packed into one BLOB (see
`log`). A row for each record would be readable with any SQLite tool, but Python's sqlite3 releases the interpreter lock
once for each row. Measured with a busy event loop: 65,000 records a second as rows, 1,600,000 as blocks.

The table ``blocks`` holds the bytes; the table ``entries`` holds their offsets in a topic. They are separate so that a
commit can give offsets to gigabytes of staged blocks by writing a few entries: SQLite rewrites a whole row, BLOB
included, when any column of the row changes.

The journal is a write-ahead log (WAL): readers and the one writer at a time do not block each other. With
``synchronous=FULL`` a commit is on the disk when it returns, so it survives a power cut. With ``NORMAL`` it survives
``kill -9``; a power cut may remove the last commits but never leaves one half written. WAL needs shared memory, so the
file must not be on a network file system.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
import sqlite3
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Concatenate, Final, ParamSpec, TypeVar
from urllib.parse import quote

from streamiter.errors import StorageFull, TopicDenied, TopicError, TopicNotFound, TopicUnavailable
from streamiter.values.helpers.clock import Clock, SystemClock
from streamiter.values.helpers.closing import close_each, note_unclosed, undone_on_failure
from streamiter.values.helpers.files import advice_for


@dataclass(frozen=True, slots=True)
class SqliteOptions:
    """How topics in a file are read and written.

    A writer holds the lock of the file for the time that it takes to write some megabytes. A wait of a minute means
    that one of the writers hangs.
    """

    clock: Clock = field(default_factory=SystemClock)
    """Gives the time stamps of records that are written without one."""
    poll_interval_s: float = field(default=0.02, metadata={"above": 0})
    """A waiting reader looks for new records at this interval, and at longer ones after several empty looks."""
    poll_interval_max_s: float = field(default=0.2, metadata={"above": 0})
    """The longest interval between two looks."""
    synchronous: str = field(default="full", metadata={"choices": ("full", "normal")})
    """"full": a flush or commit survives a power cut. "normal": it survives the end of the process only."""
    lock_timeout_s: float = field(default=60.0, metadata={"least": 0})
    """How long a commit waits for other writers of the file."""


Parameters = ParamSpec("Parameters")

Result = TypeVar("Result")


class SqliteDatabase:
    """A connection to the file and the one thread that uses it, so the event loop never waits for the disk.

    Calls run one after the other, in the order of ``run``. A call whose caller is cancelled still runs to its end; only
    its result is lost.
    """

    def __init__(self, path: Path, options: SqliteOptions, topic: str | None) -> None:
        self._path = path
        self._topic = topic
        self._options = options
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix=f"sqlite {path.name}")
        self._connection: sqlite3.Connection | None = None
        self._file_id: tuple[int, int] | None = None
        self._is_closed = False

    @classmethod
    async def open(
        cls, path: Path, options: SqliteOptions, *, topic: str | None = None, create: bool = False
    ) -> SqliteDatabase:
        """Connect. Raises the errors of `connect_to_file`, and SQLite's own as ``TopicError``; they name ``topic``."""
        database = cls(path, options, topic)
        try:
            await database._in_thread(functools.partial(database._connect, create=create))
        except BaseException as error:
            note_unclosed(error, await close_each([database.close]))
            if isinstance(error, TopicNotFound) and topic is not None:
                raise TopicNotFound(f"no topic {topic!r}: {error}") from None
            raise
        return database

    async def run(
        self,
        function: Callable[Concatenate[sqlite3.Connection, Parameters], Result],
        *args: Parameters.args,
        **kwargs: Parameters.kwargs,
    ) -> Result:
        """Call ``function(connection, ...)`` in the thread; SQLite's errors are raised as ``TopicError``.

        Raises ``TopicNotFound`` after the file was deleted or replaced: the connection still has the old file, whose
        records are lost.
        """
        assert self._connection is not None
        return await self._in_thread(functools.partial(self._call, function, self._connection, *args, **kwargs))

    def _call(
        self, function: Callable[Parameters, Result], *args: Parameters.args, **kwargs: Parameters.kwargs
    ) -> Result:
        if _file_id(self._path) != self._file_id:
            subject = f"{self._path}" if self._topic is None else f"topic {self._topic!r}: {self._path}"
            raise TopicNotFound(f"{subject}: the file was deleted, or replaced by another, while it was open")
        return function(*args, **kwargs)

    async def close(self) -> None:
        """Close the connection. May be called more than once."""
        if self._is_closed:
            return
        self._is_closed = True
        try:
            await self._in_thread(self._disconnect)
        finally:
            self._thread.shutdown(wait=False)

    async def _in_thread(self, call: Callable[[], Result]) -> Result:
        try:
            return await asyncio.get_running_loop().run_in_executor(self._thread, call)
        except (sqlite3.Error, DamagedFile, UnicodeDecodeError) as error:
            raise sqlite_failure(error, self._path, self._topic) from error

    def _connect(self, *, create: bool) -> None:
        self._connection = connect_to_file(
            self._path,
            create=create,
            synchronous=self._options.synchronous,
            lock_timeout_s=self._options.lock_timeout_s,
        )
        self._file_id = _file_id(self._path)

    def _disconnect(self) -> None:
        if self._connection is not None:
            self._connection.close()


def _file_id(path: Path) -> tuple[int, int] | None:
    """Return numbers that differ for another file at the same path; None where there is no file."""
    try:
        status = os.stat(path)
    except FileNotFoundError:
        return None
    return status.st_dev, status.st_ino


# "Stit" in ASCII: tells the file from the databases of other applications, here and in the tool `file`.
_APPLICATION_ID: Final = 0x53746974

_FORMAT_VERSION: Final = 1

# SQLite copies the WAL into the file when the WAL has this many pages (of 4 KiB): 16 MiB, so that bulk writing does not
# pay a copy and two fsyncs for each block of about 1 MiB.
_CHECKPOINT_PAGES: Final = 4096

# Each failed attempt means that another process used the file at that moment; a file is created only once.
_SWITCH_ATTEMPTS: Final = 1_000


_TABLES: Final = (
    # AUTOINCREMENT: a topic that is created again has another id, so its readers notice. identity: tells the topic from
    # topics in other files.
    "CREATE TABLE topics (id INTEGER PRIMARY KEY AUTOINCREMENT, name TEXT NOT NULL UNIQUE,"
    " settings TEXT NOT NULL, identity TEXT NOT NULL)",
    # size_bytes: the size of the payloads in entries.
    "CREATE TABLE partitions (topic_id INTEGER NOT NULL, number INTEGER NOT NULL,"
    " start_offset INTEGER NOT NULL DEFAULT 0, end_offset INTEGER NOT NULL DEFAULT 0,"
    " size_bytes INTEGER NOT NULL DEFAULT 0, PRIMARY KEY (topic_id, number)) WITHOUT ROWID",
    # SQLite has checksums for its journal only. crc32: the checksum of the payload.
    "CREATE TABLE blocks (id INTEGER PRIMARY KEY, payload BLOB NOT NULL, crc32 INTEGER NOT NULL)",
    "CREATE TABLE entries (topic_id INTEGER NOT NULL, partition INTEGER NOT NULL,"
    " first_offset INTEGER NOT NULL, end_offset INTEGER NOT NULL, block_id INTEGER NOT NULL,"
    " size_bytes INTEGER NOT NULL, latest_ms INTEGER NOT NULL,"
    " PRIMARY KEY (topic_id, partition, first_offset)) WITHOUT ROWID",
    # run: the newest owner of the id. deadline_ms: from then on any process may discard the staged blocks; -1 after
    # that was done.
    "CREATE TABLE transactional_ids (id TEXT PRIMARY KEY, run INTEGER NOT NULL, deadline_ms INTEGER) WITHOUT ROWID",
    # The blocks of open transactions. The commit gives them their offsets in the order of their ids.
    "CREATE TABLE staged (block_id INTEGER PRIMARY KEY, transactional_id TEXT NOT NULL,"
    " topic_id INTEGER NOT NULL, partition INTEGER NOT NULL, records INTEGER NOT NULL,"
    " size_bytes INTEGER NOT NULL, latest_ms INTEGER NOT NULL)",
    "CREATE INDEX staged_by_id ON staged (transactional_id)",
)


def connect_to_file(path: Path, *, create: bool, synchronous: str, lock_timeout_s: float) -> sqlite3.Connection:
    """Return a connection to the file, for use by the calling thread only.

    Without ``create``, a missing or empty file raises ``TopicNotFound``. The function raises ``sqlite3.Error`` and
    ``DamagedFile``, too; `sqlite_failure` turns them into a ``TopicError``.
    """
    _check_path(path, create=create)
    connection = sqlite3.connect(
        f"file:{quote(str(path))}?mode={'rwc' if create else 'rw'}",
        uri=True,
        timeout=lock_timeout_s,
        isolation_level=None,  # transactions begin with an explicit BEGIN
    )
    with undone_on_failure(connection.close):
        _prepare(connection, path, create=create)
        connection.execute(f"PRAGMA synchronous = {synchronous}")
    return connection


def _check_path(path: Path, *, create: bool) -> None:
    if not path.parent.is_dir():
        raise TopicError(f"{path}: the folder {path.parent} does not exist; create it first")
    if not create and not path.exists():
        raise TopicNotFound(no_topics_message(path))


def no_topics_message(path: Path) -> str:
    """Return the message for a file that does not exist, or has no topics yet."""
    return f"{path}: expected a file of topics, found none; create one with `await topic.create(partitions=...)`"


def _prepare(connection: sqlite3.Connection, path: Path, *, create: bool) -> None:
    # In one transaction, because another process may create the tables now.
    with read_transaction(connection):
        has_tables = _has_tables(connection, path)
    if not has_tables:
        if not create:
            raise TopicNotFound(no_topics_message(path))
        _create_tables(connection, path)
    connection.execute(f"PRAGMA wal_autocheckpoint = {_CHECKPOINT_PAGES:d}")


def _has_tables(connection: sqlite3.Connection, path: Path) -> bool:
    [application_id] = connection.execute("PRAGMA application_id").fetchone()
    [version] = connection.execute("PRAGMA user_version").fetchone()
    if application_id == 0 and not connection.execute("SELECT 1 FROM sqlite_schema").fetchone():
        return False
    if application_id != _APPLICATION_ID:
        if _has_our_tables(connection):
            raise DamagedFile(f"it has the tables of topics, but the application id {application_id}")
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


def _switch_to_write_ahead_log(connection: sqlite3.Connection) -> None:
    """Switch the journal to WAL. Unlike a transaction, the switch fails at once while another process uses the file."""
    for _ in range(_SWITCH_ATTEMPTS):
        try:
            connection.execute("PRAGMA journal_mode = WAL")
            return
        except sqlite3.OperationalError as error:
            if error.sqlite_errorcode != sqlite3.SQLITE_BUSY:
                raise
        with write_transaction(connection):
            pass  # this waits for the others, up to the lock timeout
    connection.execute("PRAGMA journal_mode = WAL")


def _create_tables(connection: sqlite3.Connection, path: Path) -> None:
    _switch_to_write_ahead_log(connection)
    with write_transaction(connection):
        if _has_tables(connection, path):  # another process has created them
            return
        for statement in _TABLES:
            connection.execute(statement)
        connection.execute(f"PRAGMA application_id = {_APPLICATION_ID:d}")
        connection.execute(f"PRAGMA user_version = {_FORMAT_VERSION:d}")


@contextlib.contextmanager
def write_transaction(connection: sqlite3.Connection) -> Iterator[None]:
    """Run the statements of the block as one transaction: all of them take effect, or none. Waits for other writers."""
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
    """All statements in the body see the same state of the file."""
    connection.execute("BEGIN")
    try:
        yield
    finally:
        if connection.in_transaction:  # some errors have ended the transaction
            connection.execute("COMMIT")


class DamagedFile(Exception):
    """The file has content that no writer of topics stores. Callers of this package get a ``TopicError`` instead."""


def checked_numbers(row: Sequence[object], table: str) -> Sequence[int]:
    """Return the row; raise ``DamagedFile`` unless all its values are whole numbers, which SQLite does not check."""
    for value in row:
        if not isinstance(value, int):
            raise DamagedFile(f"a row of the table {table} has {value!r:.40} in place of a number")
    return row  # type: ignore[return-value]


def sqlite_failure(
    error: sqlite3.Error | DamagedFile | UnicodeDecodeError, path: Path, topic: str | None = None
) -> TopicError:
    """Return the error of the tree for ``error``; its message names the topic, where one is given.

    >>> error = sqlite3.OperationalError("database or disk is full")
    >>> error.sqlite_errorcode = sqlite3.SQLITE_FULL
    >>> type(sqlite_failure(error, Path("clicks.db"))).__name__
    'StorageFull'
    """
    meant = _translated(error, path)
    return meant if topic is None else type(meant)(f"topic {topic!r}: {meant}")


def _translated(error: sqlite3.Error | DamagedFile | UnicodeDecodeError, path: Path) -> TopicError:
    if not isinstance(error, sqlite3.Error):
        # SQLite's own message may contain bytes of the file that are no text.
        return _damaged(error, path)
    code = getattr(error, "sqlite_errorcode", None)
    if code is None and str(error).startswith(_NOT_TEXT):
        return _damaged(error, path)
    if code is None:
        return TopicError(f"{path}: {error}")
    make = _BY_CODE.get(code) or _BY_CODE.get(code & 0xFF)  # the low byte is the kind of error, the rest is its detail
    return make(error, path) if make is not None else TopicError(f"{path}: {error} ({_name(error)})")


# The beginning of the message of Python's sqlite3 for a text that is not UTF-8; the error has no code.
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
    if _free_bytes(path) < 1 << 20:  # for instance, the shared memory file could not grow
        return _full(error, path)
    return TopicError(f"{path}: the disk failed ({_name(error)}: {error})")


def _free_bytes(path: Path) -> int:
    try:
        status = os.statvfs(path.parent)
    except OSError:
        return 1 << 62  # not known, so it is not taken for the reason
    return status.f_bavail * status.f_frsize


def _busy(error: sqlite3.Error, path: Path) -> TopicError:
    return TopicUnavailable(
        f"{path}: another writer has kept the file locked for longer than lock_timeout_s ({_name(error)}); "
        f"find it, for example with `fuser {path}`, and end it"
    )


def _denied(error: sqlite3.Error, path: Path) -> TopicError:
    if reason := _lacks_open_files():
        return TopicError(
            f"{path}: expected {_FILES} more files that this process may open, given {reason}; {advice_for(reason)}, "
            "and start again"
        )
    return TopicDenied(
        f"{path}: not allowed to open it for reading and writing ({error}); the file and its folder must be "
        "writable, for readers too"
    )


# A connection opens the file, its -wal and -shm files, and now and then their folder. SQLite does not say why it could
# not: it has one error for a missing right and for too many open files.
_FILES: Final = 4


def _lacks_open_files() -> str | None:
    """Return the error of the system if this process may not open as many files as a connection needs."""
    with contextlib.ExitStack() as opened:
        try:
            for _ in range(_FILES):
                opened.callback(os.close, os.open(os.devnull, os.O_RDONLY))
        except OSError as error:
            return error.strerror
    return None


_WHAT_TO_DO: Final = (
    "restore it from a copy (with its -wal file, if the copy has one), or save its readable records: "
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
        # write() failed by a quota or a limit on file sizes; "no space" would be SQLITE_FULL.
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
        # Every statement here is valid for intact tables, and none violates their constraints.
        sqlite3.SQLITE_ERROR: _damaged,
        sqlite3.SQLITE_CONSTRAINT: _damaged,
        sqlite3.SQLITE_MISMATCH: _damaged,
        sqlite3.SQLITE_TOOBIG: _damaged,
    }
)
