"""One connection to the file and the one thread that uses it: the event loop never waits for the disk."""

from __future__ import annotations

import asyncio
import functools
import os
import sqlite3
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, TypeVar

from streamiter.errors import TopicNotFound
from streamiter_sqlite.failures import DamagedFile, translated
from streamiter_sqlite.options import SqliteOptions
from streamiter_sqlite.schema import connect

__all__ = ["Database", "uninterrupted"]

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
