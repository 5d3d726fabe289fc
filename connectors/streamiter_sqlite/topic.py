"""Topics in an SQLite file: the connector, its URLs and options, and the topic."""

from __future__ import annotations

import contextlib
import os
import sqlite3
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar, Final, cast
from urllib.parse import parse_qsl, quote, unquote, urlsplit

from streamiter.errors import ConfigurationError, TopicNotFound
from streamiter.topics.connecting import (
    check_partition_count,
    check_request,
    closed_on_failure,
    whole_number_settings,
)
from streamiter.topics.lookup import check_options
from streamiter.topics.secrets import shown_url
from streamiter.topics.topic import Connector, Decoder, ReadRequest, SizeLimit, Topic, TopicDescription
from streamiter_sqlite.file import Database, SqliteOptions, read_transaction, write_transaction
from streamiter_sqlite.log import (
    COMPACTION_SETTING,
    RETENTION_SETTINGS,
    create_topic,
    delete_topic,
    find_topic,
    partition_ends,
    topic_names,
)
from streamiter_sqlite.reader import SqliteReader
from streamiter_sqlite.writer import SqliteTransactions, SqliteWriter


class SqliteConnector(Connector):
    """Serves ``sqlite:///relative.db?topic=clicks`` and ``sqlite:////absolute.db?topic=clicks``.

    A relative path is resolved when the topic is made, from the working directory of that moment.
    """

    def topic(self, url: str, options: Mapping[str, object]) -> SqliteTopic:
        parsed = parse_url(url)
        if parsed.topic is None:
            raise ConfigurationError(f"topic {shown_url(url)!r}: expected ?topic=<name> after the path")
        return SqliteTopic(parsed, parsed.topic, parse_options(url, options))

    async def list_topics(self, url: str, options: Mapping[str, object]) -> list[str]:
        path, parsed = absolute(parse_url(url).path), parse_options(url, options)
        try:
            database = await Database.open(path, parsed)
        except TopicNotFound:  # no file means no topics
            return []
        try:
            return await database.run(topic_names)
        finally:
            await database.close()


@dataclass(frozen=True, slots=True)
class SqliteUrl:
    """The path of the file, and the topic where the URL names one."""

    path: Path
    topic: str | None

    def __str__(self) -> str:
        query = f"?topic={quote(self.topic, safe='')}" if self.topic is not None else ""
        return f"sqlite:///{quote(str(self.path))}{query}"


def parse_url(url: str) -> SqliteUrl:
    """Return the parts of a URL: three slashes and a path; a fourth slash makes the path absolute.

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
            f"topic {shown_url(url)!r}: expected ?topic=<name> and nothing else after the path"
        )
    return SqliteUrl(Path(path), topic)


def parse_options(url: str, options: Mapping[str, object]) -> SqliteOptions:
    """Return the options of :func:`streamiter.topic`, checked.

    >>> parse_options("sqlite:///a.db", {"poll": 1})
    Traceback (most recent call last):
    ...
    streamiter.errors.ConfigurationError: topic 'sqlite:///a.db': unknown option 'poll'; the options are clock, \
poll_interval_s, poll_interval_max_s, synchronous, lock_timeout_s
    """
    check_options(f"topic {shown_url(url)!r}", options, [option.name for option in fields(SqliteOptions)])
    parsed = SqliteOptions(**cast("Mapping[str, Any]", options))
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
    """Return the one absolute path of a file, with symbolic links resolved."""
    return Path(os.path.realpath(path))


_SETTINGS: Final = (COMPACTION_SETTING, "max_record_bytes", *RETENTION_SETTINGS)


class SqliteTopic(Topic):
    """A topic in an SQLite file. ``create`` makes the file, too, but not its folder.

    Settings: ``retention_records``, ``retention_bytes`` and ``retention_ms`` limit each partition and are applied when
    records are written; the file does not shrink, but its room is used again. ``max_record_bytes`` limits one record.
    ``compact=1`` keeps the last record of each key, for topics of few keys: an older record is dropped unless a record
    that is still the last of its key was stored together with it. Settings are fixed when the topic is created.
    """

    compaction_settings: ClassVar[Mapping[str, str]] = MappingProxyType({COMPACTION_SETTING: "1"})

    def __init__(self, url: SqliteUrl, name: str, options: SqliteOptions) -> None:
        self._url = url
        self._name = name
        self._options = options
        self._path = absolute(url.path)

    @property
    def url(self) -> str:
        return str(self._url)

    @property
    def name(self) -> str:
        return self._name

    @property
    def commit_domain(self) -> str:
        return f"sqlite:{self._path}"

    def beside(self, name: str) -> SqliteTopic:
        # The absolute path, because the working directory may have changed since this topic was made.
        return SqliteTopic(replace(self._url, path=self._path, topic=name), name, self._options)

    def default_decoder(self) -> Decoder | None:
        return None

    async def open_reader(self, request: ReadRequest) -> SqliteReader:
        check_request(request, self._name)
        async with closed_on_failure(await self._connect()) as database:
            return await SqliteReader.open(database, self._name, request, self._options)

    async def open_writer(self) -> SqliteWriter:
        async with closed_on_failure(await self._connect()) as database:
            return await SqliteWriter.open(database, self._name, self._options.clock)

    async def open_transactions(
        self, transactional_id: str, *, timeout_s: float = 60.0
    ) -> SqliteTransactions:
        async with closed_on_failure(await self._connect()) as database:
            return await SqliteTransactions.open(
                database, self.commit_domain, transactional_id, timeout_s, self._options
            )

    async def create(self, *, partitions: int = 1, settings: Mapping[str, str] | None = None) -> None:
        check_partition_count(self._name, partitions)
        checked = whole_number_settings(self._name, settings or {}, _SETTINGS)
        async with self._connected(create=True) as database:
            await database.run(_create, self._name, partitions, checked)

    async def describe(self) -> TopicDescription:
        async with self._connected() as database:
            return await database.run(_describe, self._name)

    async def size_limit(self) -> SizeLimit:
        async with self._connected() as database:
            return SizeLimit(await database.run(_max_record_bytes, self._name))

    async def delete(self) -> None:
        async with self._connected() as database:
            await database.run(_delete, self._name)

    async def _connect(self, *, create: bool = False) -> Database:
        return await Database.open(self._path, self._options, topic=self._name, create=create)

    @contextlib.asynccontextmanager
    async def _connected(self, *, create: bool = False) -> AsyncIterator[Database]:
        database = await self._connect(create=create)
        try:
            yield database
        finally:
            await database.close()

    def __repr__(self) -> str:
        return f"SqliteTopic({self.url!r})"


def _create(connection: sqlite3.Connection, name: str, partitions: int, settings: Mapping[str, int]) -> None:
    with write_transaction(connection):
        create_topic(connection, name, partitions, settings)


def _delete(connection: sqlite3.Connection, name: str) -> None:
    with write_transaction(connection):
        delete_topic(connection, name)


def _max_record_bytes(connection: sqlite3.Connection, name: str) -> int:
    with read_transaction(connection):
        return find_topic(connection, name).max_record_bytes


def _describe(connection: sqlite3.Connection, name: str) -> TopicDescription:
    with read_transaction(connection):
        topic = find_topic(connection, name)
        ends = partition_ends(connection, topic)
    offsets = {number: (partition.earliest, partition.end) for number, partition in ends.items()}
    settings = {key: str(value) for key, value in topic.settings.items()}
    return TopicDescription(name, offsets, settings, topic.identities(offsets))
