"""What a ``sqlite:`` URL and its options say."""

from __future__ import annotations

import asyncio
import functools
import os
import sqlite3
from collections.abc import Callable, Coroutine, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, TypeVar, cast
from urllib.parse import parse_qsl, quote, unquote, urlsplit

from streamiter.clock import Clock, SystemClock
from streamiter.errors import ConfigurationError, TopicNotFound
from streamiter.topics.secrets import shown_url
from streamiter_sqlite.schema import DamagedFile, Synchronous, connect, translated

__all__ = [
    "Database",
    "SqliteOptions",
    "SqliteUrl",
    "parse_options",
    "parse_url",
    "uninterrupted",
]


@dataclass(frozen=True, slots=True)
class SqliteUrl:
    """The file, and the topic in it where the URL names one."""

    path: Path
    topic: str | None

    def __str__(self) -> str:
        query = f"?topic={quote(self.topic, safe='')}" if self.topic is not None else ""
        return f"sqlite:///{quote(str(self.path))}{query}"


@dataclass(frozen=True, slots=True)
class SqliteOptions:
    """How topics in a file are read and written.

    ``clock``: gives the time stamps of records that come without.
    ``poll_interval_s``: how often a waiting reader looks for new records. After some empty looks it looks
    less often, down to once in ``poll_interval_max_s``.
    ``synchronous``: "full", a flush or commit survives a power cut; "normal", it survives the end of the
    process, and a power cut may take the last ones.
    ``lock_timeout_s``: how long a commit waits for other writers of the file. They hold the lock for as long
    as it takes to write some megabytes: a minute means that one of them hangs.
    """

    clock: Clock = field(default_factory=SystemClock)
    poll_interval_s: float = 0.02
    poll_interval_max_s: float = 0.2
    synchronous: str = "full"
    lock_timeout_s: float = 60.0

    @property
    def synchronous_mode(self) -> Synchronous:
        """The same as SQLite has it."""
        return "FULL" if self.synchronous == "full" else "NORMAL"


def parse_url(url: str) -> SqliteUrl:
    """Three slashes and a path: a fourth slash makes it absolute.

    >>> parse_url("sqlite:///data/log.db?topic=clicks")
    SqliteUrl(path=PosixPath('data/log.db'), topic='clicks')
    >>> print(parse_url("sqlite:////var/log.db"))
    sqlite:////var/log.db
    >>> parse_url("sqlite://log.db?topic=clicks")
    Traceback (most recent call last):
    ...
    streamiter.errors.ConfigurationError: topic 'sqlite://log.db?topic=clicks': expected three slashes before \
a relative path and four before an absolute one, as in sqlite:///relative.db?topic=clicks
    """
    parts = urlsplit(url)
    path = unquote(parts.path).removeprefix("/")
    has_slashes = url.partition(":")[2].startswith("///")
    if not has_slashes or not path or path.endswith("/"):
        raise ConfigurationError(
            f"topic {shown_url(url)!r}: expected three slashes before a relative path and four before an absolute one, "
            "as in sqlite:///relative.db?topic=clicks"
        )
    query = dict(parse_qsl(parts.query, keep_blank_values=True))
    topic = query.pop("topic", None)
    if query or parts.fragment or topic == "":
        raise ConfigurationError(
            f"topic {shown_url(url)!r}: expected ?topic=<name> and nothing else behind the path"
        )
    return SqliteUrl(Path(path), topic)


def parse_options(url: str, options: Mapping[str, object]) -> SqliteOptions:
    """Check the options of :func:`streamiter.topic`.

    >>> parse_options("sqlite:///a.db", {"poll": 1})
    Traceback (most recent call last):
    ...
    streamiter.errors.ConfigurationError: topic 'sqlite:///a.db': expected options out of clock, \
poll_interval_s, poll_interval_max_s, synchronous, lock_timeout_s, given 'poll'
    """
    known = [option.name for option in fields(SqliteOptions)]
    for name in options:
        if name not in known:
            raise ConfigurationError(
                f"topic {shown_url(url)!r}: expected options out of {', '.join(known)}, given {name!r}"
            )
    parsed = SqliteOptions(**cast(Mapping[str, Any], options))
    if parsed.synchronous not in ("full", "normal"):
        raise ConfigurationError(
            f"topic {shown_url(url)!r}: expected synchronous 'full' or 'normal', given {parsed.synchronous!r}"
        )
    if not 0 < parsed.poll_interval_s <= parsed.poll_interval_max_s:
        raise ConfigurationError(
            f"topic {shown_url(url)!r}: expected 0 < poll_interval_s <= poll_interval_max_s, "
            f"given {parsed.poll_interval_s} and {parsed.poll_interval_max_s}"
        )
    return parsed


def absolute(path: Path) -> Path:
    """The one name of a file: relative to the working directory of now, symbolic links followed."""
    return Path(os.path.realpath(path))


Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")


async def uninterrupted(work: Coroutine[Any, Any, Result]) -> Result:
    """``await work``, but a cancellation waits for its end: what it did to the file is then known here too."""
    task = asyncio.create_task(work)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait({task})
        raise


class Database:
    """A connection in a thread of its own. Calls run one after the other, in the order of ``run``.

    A call whose waiter is cancelled still runs to its end; only its result is lost.

    One connection to the file and the one thread that uses it: the event loop never waits for the disk.
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
    ) -> Database:
        """Connect; errors as in `schema.connect`, those of SQLite as ``TopicError``. They name ``topic``."""
        database = cls(path, options, topic)
        try:
            await database._in_thread(functools.partial(database._connect, create=create))
        except TopicNotFound as error:
            await database.close()
            raise TopicNotFound(str(error) if topic is None else f"no topic {topic!r}: {error}") from None
        except BaseException:
            await database.close()
            raise
        return database

    async def run(
        self,
        function: Callable[Concatenate[sqlite3.Connection, Parameters], Result],
        *args: Parameters.args,
        **kwargs: Parameters.kwargs,
    ) -> Result:
        """``function(connection, ...)`` in the thread; SQLite's errors come as ``TopicError``.

        Raises ``TopicNotFound`` where the file was deleted or replaced: the connection still has the old one, to
        which nothing is added, and of which nothing is left.
        """
        assert self._connection is not None
        return await self._in_thread(
            functools.partial(self._call, function, self._connection, *args, **kwargs)
        )

    def _call(
        self, function: Callable[Parameters, Result], *args: Parameters.args, **kwargs: Parameters.kwargs
    ) -> Result:
        if _file_id(self._path) != self._file_id:
            subject = f"{self._path}" if self._topic is None else f"topic {self._topic!r}: {self._path}"
            raise TopicNotFound(f"{subject}: the file was deleted, or replaced by another, while it was open")
        return function(*args, **kwargs)

    async def close(self) -> None:
        """Let go of the file. May be called more than once."""
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
            raise translated(error, self._path, self._topic) from error

    def _connect(self, *, create: bool) -> None:
        self._connection = connect(
            self._path,
            create=create,
            synchronous=self._options.synchronous_mode,
            lock_timeout_s=self._options.lock_timeout_s,
        )
        self._file_id = _file_id(self._path)

    def _disconnect(self) -> None:
        if self._connection is not None:
            self._connection.close()


def _file_id(path: Path) -> tuple[int, int] | None:
    """What tells a file from another one at the same path; None where there is none."""
    try:
        status = os.stat(path)
    except FileNotFoundError:
        return None
    return status.st_dev, status.st_ino
