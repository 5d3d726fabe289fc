"""Topics in an SQLite file: the connector, its URLs and options, the topic, and its reader.

A `SqliteReader` looks for new records at intervals. A *look* (`fetch`) runs in the thread of the `SqliteDatabase` and
returns the records of several partitions; the reader buffers them and returns them partition by partition, in turns.
"""

from __future__ import annotations

import contextlib
import os
import sqlite3
from collections.abc import AsyncIterator, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import ClassVar, Final
from urllib.parse import parse_qsl, quote, unquote

from streamiter.errors import ConfigurationError, OffsetOutOfRange, TopicNotFound
from streamiter.topics.connecting import (
    PartitionEnds,
    ReadingPositions,
    check_partition_count,
    check_request,
    closed_error,
    closed_on_failure,
    out_of_range_message,
    partitions_of,
    reading_positions,
    whole_number_settings,
)
from streamiter.topics.topic import Connector, ReadRequest, SizeLimit, Topic, TopicBatch, TopicDescription, TopicReader
from streamiter.topics.urls import options_from, shown_url, split_url
from streamiter.values.helpers.closing import closed_after
from streamiter_sqlite.file import DamagedFile, SqliteDatabase, SqliteOptions, checked_numbers, read_transaction
from streamiter_sqlite.log import (
    COMPACTION_SETTING,
    DELETION_SETTING,
    RETENTION_SETTINGS,
    RecordBlock,
    TopicRow,
    add_topic,
    delete_read,
    find_partitions,
    find_topic,
    partition_ends,
    remove_topic,
    topic_names,
    unpacked,
)
from streamiter_sqlite.writer import SqliteTransactions, SqliteWriter, take_over


class SqliteConnector(Connector):
    """Serves ``sqlite:///relative.db?topic=clicks`` and ``sqlite:////absolute.db?topic=clicks``.

    A relative path is resolved when the topic is made, from the working directory of that moment.
    """

    def topic(self, url: str, options: Mapping[str, object]) -> SqliteTopic:
        parsed = parse_sqlite_url(url)
        if parsed.topic is None:
            raise ConfigurationError(f"topic {shown_url(url)!r}: expected ?topic=<name> after the path")
        return SqliteTopic(parsed, parsed.topic, parse_options(url, options))

    async def list_topics(self, url: str, options: Mapping[str, object]) -> list[str]:
        path, parsed = absolute(parse_sqlite_url(url).path), parse_options(url, options)
        try:
            database = await SqliteDatabase.open(path, parsed)
        except TopicNotFound:  # no file means no topics
            return []
        async with closed_after(database.close):
            return await database.run(topic_names)


@dataclass(frozen=True, slots=True)
class SqliteUrl:
    """The path of the file, and the topic where the URL names one."""

    path: Path
    topic: str | None

    def __str__(self) -> str:
        query = f"?topic={quote(self.topic, safe='')}" if self.topic is not None else ""
        return f"sqlite:///{quote(str(self.path))}{query}"


def parse_sqlite_url(url: str) -> SqliteUrl:
    """Return the parts of a URL: three slashes and a path; a fourth slash makes the path absolute.

    >>> parse_sqlite_url("sqlite:///data/log.db?topic=clicks")
    SqliteUrl(path=PosixPath('data/log.db'), topic='clicks')
    >>> print(parse_sqlite_url("sqlite:////var/log.db"))
    sqlite:////var/log.db
    >>> parse_sqlite_url("sqlite://log.db?topic=clicks")
    Traceback (most recent call last):
    ...
    streamiter.errors.ConfigurationError: topic 'sqlite://log.db?topic=clicks': expected three slashes before \
a relative path and four before an absolute one, as in sqlite:///relative.db?topic=clicks
    """
    parts = split_url(url)
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
        raise ConfigurationError(f"topic {shown_url(url)!r}: expected ?topic=<name> and nothing else after the path")
    return SqliteUrl(Path(path), topic)


def parse_options(url: str, options: Mapping[str, object]) -> SqliteOptions:
    """Return the options of :func:`streamiter.topic`, checked.

    >>> parse_options("sqlite:///a.db", {"poll": 1})
    Traceback (most recent call last):
    ...
    streamiter.errors.ConfigurationError: topic 'sqlite:///a.db': unknown option 'poll'; the options are clock, \
lock_timeout_s, poll_interval_max_s, poll_interval_s, synchronous
    """
    parsed = options_from(SqliteOptions, options, f"topic {shown_url(url)!r}")
    if not parsed.poll_interval_s <= parsed.poll_interval_max_s:
        raise ConfigurationError(
            f"topic {shown_url(url)!r}: expected poll_interval_s <= poll_interval_max_s, "
            f"given {parsed.poll_interval_s} and {parsed.poll_interval_max_s}"
        )
    return parsed


def absolute(path: Path) -> Path:
    """Return the one absolute path of a file, with symbolic links resolved."""
    return Path(os.path.realpath(path))


_DELETING: Final = (COMPACTION_SETTING, DELETION_SETTING, *RETENTION_SETTINGS)
_SETTINGS: Final = (*_DELETING, "max_record_bytes")


class SqliteTopic(Topic):
    """A topic in an SQLite file. ``create`` makes the file, too, but not its folder.

    Settings: ``retention_records``, ``retention_bytes`` and ``retention_ms`` limit each partition and are applied when
    records are written; the file does not shrink, but its room is used again. ``max_record_bytes`` limits one record.
    ``compact=1`` keeps the last record of each key, for topics of few keys: an older record is dropped unless a record
    that is still the last of its key was stored together with it. ``delete_read=1`` is for a topic with one flow that
    reads it: records are dropped when a checkpoint of the flow behind them is committed. Settings are fixed when the
    topic is created.
    """

    seen_from: ClassVar = "machine"
    compaction_settings: ClassVar[Mapping[str, str]] = MappingProxyType({COMPACTION_SETTING: "1"})

    def __init__(self, url: SqliteUrl, name: str, options: SqliteOptions) -> None:
        self._url = url
        self._name = name
        self._options = options
        self._path = absolute(url.path)
        self._deletes_read: TopicRow | None = None
        """The topic that this object has read, if it drops records that were read."""

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

    async def open_reader(self, request: ReadRequest) -> SqliteReader:
        check_request(request, self._name)
        async with closed_on_failure(await self._connect()) as database:
            topic, ends, positions = await database.run(_begin, self._name, request)
            self._deletes_read = topic if topic.settings.get(DELETION_SETTING) else None
            return SqliteReader(database, topic, ends, positions, request, self._options)

    async def open_writer(self) -> SqliteWriter:
        async with closed_on_failure(await self._connect()) as database:
            topic, partitions = await database.run(find_partitions, self._name)
            return SqliteWriter(database, topic, partitions, self._options.clock)

    async def open_transactions(self, transactional_id: str, *, timeout_s: float = 60.0) -> SqliteTransactions:
        async with closed_on_failure(await self._connect()) as database:
            owner = await database.run(take_over, transactional_id, self._options.clock.now_ms())
            return SqliteTransactions(database, self.commit_domain, owner, timeout_s, self._options)

    async def create(self, *, partitions: int = 1, settings: Mapping[str, str] | None = None) -> None:
        check_partition_count(self._name, partitions)
        checked = whole_number_settings(self._name, settings or {}, _SETTINGS)
        async with self._connected(create=True) as database:
            await database.run(add_topic, self._name, partitions, checked)

    def early_deletion(self, settings: Mapping[str, str], seconds: float) -> str | None:
        limits = [name for name in _DELETING if settings.get(name, "0") != "0"]
        is_long = float(settings.get("retention_ms", 0)) >= 1000 * seconds
        if not (early := [name for name in limits if name != "retention_ms" or not is_long]):
            return None
        given = ", ".join(f"{name}={settings[name]}" for name in early)
        return f"it has {given}, and a topic keeps its settings: use another topic without them"

    async def report_positions(self, group: str, positions: Mapping[int, int]) -> None:
        if self._deletes_read is not None:
            async with self._connected() as database:
                await database.run(delete_read, self._deletes_read, positions)

    async def describe(self) -> TopicDescription:
        async with self._connected() as database:
            return await database.run(_describe, self._name)

    async def size_limit(self) -> SizeLimit:
        async with self._connected() as database:
            return SizeLimit((await database.run(find_topic, self._name)).max_record_bytes)

    async def delete(self) -> None:
        async with self._connected() as database:
            await database.run(remove_topic, self._name)

    async def _connect(self, *, create: bool = False) -> SqliteDatabase:
        return await SqliteDatabase.open(self._path, self._options, topic=self._name, create=create)

    @contextlib.asynccontextmanager
    async def _connected(self, *, create: bool = False) -> AsyncIterator[SqliteDatabase]:
        database = await self._connect(create=create)
        async with closed_after(database.close):
            yield database


def _describe(connection: sqlite3.Connection, name: str) -> TopicDescription:
    with read_transaction(connection):
        topic = find_topic(connection, name)
        ends = partition_ends(connection, topic)
    offsets = {number: (partition.earliest, partition.end) for number, partition in ends.items()}
    settings = {key: str(value) for key, value in topic.settings.items()}
    return TopicDescription(name, offsets, settings, topic.identities(offsets))


# The packed bytes that one look brings into memory, over all partitions: four full blocks.
_FETCH_BYTES: Final = 4 << 20

# The factor by which each empty look lengthens the pause: from 20 ms to 200 ms within a second. Measured: to wake an
# idle process for a look costs about 0.5 ms of CPU, so 2.5 % at 50 looks a second and 0.25 % at 5.
_PAUSE_GROWTH: Final = 1.2


def _begin(
    connection: sqlite3.Connection, name: str, request: ReadRequest
) -> tuple[TopicRow, Mapping[int, PartitionEnds], ReadingPositions]:
    """Return the topic, the ends of its partitions, and the positions of a reader when it is opened."""
    with read_transaction(connection):
        topic = find_topic(connection, name)
        ends = partition_ends(connection, topic)

        def first_at(number: int, timestamp_ms: int) -> int:
            return offset_at(connection, topic, number, ends[number], timestamp_ms)

        positions = reading_positions(request, ends, topic.identities(ends), first_at, topic=name)
    return topic, ends, positions


@dataclass(slots=True)
class BufferedBatch:
    """Fetched records of one partition; the first ``taken`` of them were returned."""

    batch: TopicBatch
    taken: int = 0


class SqliteReader(TopicReader):
    """Reads its share of a topic's partitions; looks for new records at intervals, whichever process writes them.

    It owns its database and closes it.
    """

    def __init__(
        self,
        database: SqliteDatabase,
        topic: TopicRow,
        ends: Mapping[int, PartitionEnds],
        positions: ReadingPositions,
        request: ReadRequest,
        options: SqliteOptions,
    ) -> None:
        self._database = database
        self._topic, self._ends, self._positions = topic, ends, positions
        self._request = request
        self._options = options
        self._buffers: dict[int, BufferedBatch] = {}
        self._seen_version: int | None = None
        self._pause_s = options.poll_interval_s
        self._is_closed = False

    async def read(self) -> TopicBatch | None:
        while True:
            if self._is_closed:
                raise closed_error("reader", self._topic.name)
            batch = self._take()
            if batch is not None or self._positions.are_at_stop:
                return batch
            if not await self._look():
                await self._request.clock.sleep(self._pause_s)
                self._pause_s = min(self._options.poll_interval_max_s, self._pause_s * _PAUSE_GROWTH)

    def positions(self) -> Mapping[int, int]:
        return self._positions.by_partition()

    def identities(self) -> Mapping[int, str]:
        return self._topic.identities(self._positions.by_partition())

    def lag(self) -> Mapping[int, int]:
        return self._positions.lag({number: ends.end for number, ends in self._ends.items()})

    async def close(self) -> None:
        self._is_closed = True
        await self._database.close()

    def _take(self) -> TopicBatch | None:
        """Return the next buffered records of the partition whose turn it is; None where no record is buffered."""
        for number in self._positions:
            if number in self._buffers:
                return self._take_from(number, self._buffers[number])
        return None

    def _take_from(self, number: int, buffered: BufferedBatch) -> TopicBatch:
        start, stop = buffered.taken, buffered.taken + self._request.max_records
        batch = buffered.batch if stop - start >= len(buffered.batch) else buffered.batch[start:stop]
        buffered.taken = stop
        if stop >= len(buffered.batch):
            del self._buffers[number]
        self._positions.returned(number, batch.next_offset)
        return batch

    async def _look(self) -> bool:
        """Fetch into the buffers; return whether the next look should follow without a pause."""
        # A copy, since the look of a cancelled call continues in the thread.
        wanted = ReadingPositions(self._positions.in_turn(), self._positions.stops)
        fetched = await self._database.run(fetch, self._topic, wanted, self._request.max_records, self._seen_version)
        if fetched is None:
            return False
        self._ends = fetched.ends
        self._buffers = {number: BufferedBatch(batch) for number, batch in fetched.batches.items()}
        for number, following in fetched.passed.items():
            self._positions.passed(number, following)
        has_news = self._add_partitions() or bool(fetched.batches)
        # After records there may be more than one look can fetch, so the next look must not be skipped.
        self._seen_version = None if has_news else fetched.version
        if has_news:
            self._pause_s = self._options.poll_interval_s
        return has_news

    def _add_partitions(self) -> bool:
        share = partitions_of(self._request, len(self._ends))
        return self._positions.add_new(share, lambda number: self._ends[number].earliest)


@dataclass(frozen=True, slots=True)
class LookResult:
    """The records that a look has found, and the state of the file."""

    batches: Mapping[int, TopicBatch]
    """The records, by partition."""
    passed: Mapping[int, int]
    """The offset to read next of each partition that had no records up to its end or stop."""
    ends: Mapping[int, PartitionEnds]
    """The ends of all partitions."""
    version: int
    """The version of the file, which the commits of other connections change."""


def fetch(
    connection: sqlite3.Connection,
    topic: TopicRow,
    wanted: ReadingPositions,
    max_records: int,
    seen_version: int | None,
) -> LookResult | None:
    """Return the records from the wanted positions, or None where the file still has the version of the last look.

    A look fetches whole blocks, and at least one where there are records: no further block of a partition that has
    ``max_records``. For an unchanged file it only reads a counter in shared memory.
    """
    [version] = connection.execute("PRAGMA data_version").fetchone()
    if version == seen_version:
        return None
    batches: dict[int, TopicBatch] = {}
    passed: dict[int, int] = {}
    room_bytes = _FETCH_BYTES
    with read_transaction(connection):
        ends = partition_ends(connection, topic)
        for partition, position in wanted.in_turn().items():
            span = OffsetSpan(topic, partition, position, wanted.limit(partition, ends[partition].end))
            if span.start >= span.stop or room_bytes <= 0:
                continue
            if position < ends[partition].earliest:
                raise OffsetOutOfRange(out_of_range_message(topic.name, partition, position, ends[partition]))
            parts, size_bytes = _fetch_parts(connection, span, max_records, room_bytes)
            if parts:
                batches[partition] = TopicBatch.joined(parts)
            else:
                passed[partition] = span.stop
            room_bytes -= size_bytes
    return LookResult(batches, passed, ends, version)


@dataclass(frozen=True, slots=True)
class OffsetSpan:
    """The offsets ``start`` to ``stop`` (half-open) of one partition."""

    topic: TopicRow
    partition: int
    start: int
    stop: int


def _fetch_parts(
    connection: sqlite3.Connection, span: OffsetSpan, max_records: int, max_bytes: int
) -> tuple[list[TopicBatch], int]:
    parts: list[TopicBatch] = []
    records = size_bytes = 0
    following = span.start
    for first_offset, end_offset, payload, crc32 in _payloads(connection, span):
        block = _block(span, following, (first_offset, end_offset), payload, crc32)
        following = end_offset
        part = _part(first_offset, block, span)
        size_bytes += len(payload or b"")
        if not len(part):  # the block is before the span, and compaction has left a gap after it
            continue
        parts.append(part)
        records += len(part)
        if records >= max_records or size_bytes >= max_bytes:
            break
    else:
        _check_gap(span, following, span.stop)
    return parts, size_bytes


def _block(
    span: OffsetSpan, following: int, offsets: tuple[int, int], payload: bytes | None, crc32: int | None
) -> RecordBlock:
    """Return a stored block; raise ``DamagedFile`` if the block is incomplete or records before it are missing."""
    first_offset, end_offset = checked_numbers(offsets, "entries")
    _check_gap(span, following, first_offset)
    block = None if payload is None or crc32 is None else unpacked(payload, crc32)
    if block is None or len(block.values) != end_offset - first_offset:
        raise DamagedFile(f"a block of topic {span.topic.name!r}, from offset {first_offset} on, is missing")
    return block


def _check_gap(span: OffsetSpan, following: int, offset: int) -> None:
    """Raise ``DamagedFile`` for a gap, unless the topic is compacted: only compaction leaves gaps."""
    if offset > following and not span.topic.settings.get(COMPACTION_SETTING):
        raise DamagedFile(
            f"records of topic {span.topic.name!r}, partition {span.partition}, from offset {following} to "
            f"{offset - 1} are missing"
        )


def _payloads(connection: sqlite3.Connection, span: OffsetSpan) -> Iterator[tuple[int, int, bytes | None, int | None]]:
    """Return the offsets, the bytes and the checksum of each block that has records of the span, in order."""
    return connection.execute(
        "SELECT first_offset, end_offset, payload, crc32 FROM entries LEFT JOIN blocks ON blocks.id = block_id"
        " WHERE topic_id = :topic AND partition = :partition AND first_offset < :stop AND first_offset >= coalesce(("
        "  SELECT max(first_offset) FROM entries"
        "  WHERE topic_id = :topic AND partition = :partition AND first_offset <= :start), :start)"
        " ORDER BY first_offset",
        {"topic": span.topic.id, "partition": span.partition, "start": span.start, "stop": span.stop},
    )


def _part(first_offset: int, block: RecordBlock, span: OffsetSpan) -> TopicBatch:
    """Return the records of a block that are in the span."""
    whole = TopicBatch(
        partition=span.partition,
        values=block.values,
        offsets=range(first_offset, first_offset + len(block.values)),
        timestamps_ms=block.times_ms(),
        keys=block.keys,
        headers=block.headers,
    )
    if span.start <= first_offset and first_offset + len(block.values) <= span.stop:
        return whole  # Part of a batch is a copy.
    return whole[max(0, span.start - first_offset) : max(0, span.stop - first_offset)]


def offset_at(
    connection: sqlite3.Connection, topic: TopicRow, partition: int, ends: PartitionEnds, timestamp_ms: int
) -> int:
    """Return the offset of the first record at or after a time; the end where there is none."""
    rows = connection.execute(
        "SELECT first_offset, payload, crc32 FROM entries JOIN blocks ON blocks.id = block_id"
        " WHERE topic_id = ? AND partition = ? AND latest_ms >= ? ORDER BY first_offset",
        (topic.id, partition, timestamp_ms),
    )
    for first_offset, payload, crc32 in rows:
        for offset, time_ms in enumerate(unpacked(payload, crc32).times_ms(), first_offset):
            if time_ms >= timestamp_ms and offset >= ends.earliest:
                return offset
    return ends.end
