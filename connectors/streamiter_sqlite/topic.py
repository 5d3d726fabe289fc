"""A topic in an SQLite file."""

from __future__ import annotations

import contextlib
import sqlite3
from collections.abc import AsyncIterator, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import ClassVar, Final

from streamiter.errors import ConfigurationError, TopicNotFound
from streamiter.numbers import whole_number_in
from streamiter.topics.secrets import shown_url
from streamiter.topics.topic import (
    Connector,
    Decoder,
    ReadRequest,
    SizeLimit,
    Topic,
    TopicDescription,
    check_request,
)
from streamiter_sqlite.database import Database, SqliteOptions, SqliteUrl, absolute, parse_options, parse_url
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
from streamiter_sqlite.schema import read_transaction, write_transaction
from streamiter_sqlite.transactions import SqliteTransactions
from streamiter_sqlite.writer import SqliteWriter

__all__ = [
    "SqliteConnector",
    "SqliteTopic",
]


_SETTINGS: Final = (COMPACTION_SETTING, "max_record_bytes", *RETENTION_SETTINGS)


class SqliteTopic(Topic):
    """A topic in an SQLite file; ``create`` makes the file too, but not its folder.

    Settings: ``retention_records``, ``retention_bytes``, ``retention_ms`` (each for every partition; applied
    as records are written; the file does not shrink, its room is used again) and ``max_record_bytes``.
    ``compact=1`` keeps the last record of each key, and drops those before it as far as nothing else was
    stored together with them: for topics of few keys. Settings are fixed when the topic is created.
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
        # The absolute path: the working directory may have changed since this topic was made.
        return SqliteTopic(replace(self._url, path=self._path, topic=name), name, self._options)

    def default_decoder(self) -> Decoder | None:
        return None

    async def open_reader(self, request: ReadRequest) -> SqliteReader:
        check_request(request, self._name)
        return await SqliteReader.open(await self._connect(), self._name, request, self._options)

    async def open_writer(self) -> SqliteWriter:
        return await SqliteWriter.open(await self._connect(), self._name, self._options.clock)

    async def open_transactions(
        self, transactional_id: str, *, timeout_s: float = 60.0
    ) -> SqliteTransactions:
        database = await self._connect()
        return await SqliteTransactions.open(
            database, self.commit_domain, transactional_id, timeout_s, self._options
        )

    async def create(self, *, partitions: int = 1, settings: Mapping[str, str] | None = None) -> None:
        if partitions < 1:
            raise ConfigurationError(f"topic {self._name!r}: expected partitions >= 1, given {partitions}")
        checked = _checked_settings(self._name, settings or {})
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


def _checked_settings(name: str, settings: Mapping[str, str]) -> dict[str, int]:
    checked: dict[str, int] = {}
    for setting, value in settings.items():
        if setting not in _SETTINGS:
            raise ConfigurationError(
                f"topic {name!r}: expected settings out of {', '.join(_SETTINGS)}, given {setting!r}"
            )
        number = whole_number_in(str(value))
        if number is None:
            raise ConfigurationError(f"topic {name!r}: expected {setting} as a whole number, given {value!r}")
        checked[setting] = number
    return checked


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


class SqliteConnector(Connector):
    """Serves ``sqlite:///relative.db?topic=clicks`` and ``sqlite:////absolute.db?topic=clicks``.

    A relative path is taken from the working directory at the time the topic is made.

    From a ``sqlite:`` URL to its topics.
    """

    def topic(self, url: str, options: Mapping[str, object]) -> SqliteTopic:
        parsed = parse_url(url)
        if parsed.topic is None:
            raise ConfigurationError(f"topic {shown_url(url)!r}: expected ?topic=<name> behind the path")
        return SqliteTopic(parsed, parsed.topic, parse_options(url, options))

    async def list_topics(self, url: str, options: Mapping[str, object]) -> list[str]:
        path, parsed = absolute(parse_url(url).path), parse_options(url, options)
        try:
            database = await Database.open(path, parsed)
        except TopicNotFound:  # no file, no topics
            return []
        try:
            return await database.run(topic_names)
        finally:
            await database.close()
