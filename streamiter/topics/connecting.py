"""What connectors have in common, for authors of a connector.

Readers: which partitions and offsets a `ReadRequest` asks for. Writers: how an outgoing batch is checked, measured and
distributed over partitions. Transactions: which call is allowed next. Topics: how settings and options are checked.
Nothing here does I/O, but :class:`ReaderBehindLosses` calls its topic.
"""

from __future__ import annotations

import contextlib
import enum
import logging
import zlib
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import partial
from typing import Final, Literal, Protocol, TypeVar

from streamiter.errors import ConfigurationError, OffsetOutOfRange, ProducerFenced, RecordTooLarge, TopicError
from streamiter.topics.topic import (
    Headers,
    OutgoingBatch,
    ReadRequest,
    SizeLimit,
    Topic,
    TopicBatch,
    TopicDescription,
    TopicReader,
)
from streamiter.values.helpers.closing import close_each, note_unclosed
from streamiter.values.numbers import whole_number, whole_number_in
from streamiter.values.records import rows_of_table
from streamiter.values.subtasks import partitions_of_subtask

_log = logging.getLogger("streamiter.job")


@dataclass(frozen=True, slots=True)
class PartitionEnds:
    """The offsets at the ends of one partition."""

    earliest: int
    """The offset of the earliest record."""
    stable: int
    """The last stable offset: the records before it are committed or aborted."""
    end: int
    """The offset after the last record."""


def check_request(request: ReadRequest, topic: str) -> None:
    """Raise ``ConfigurationError`` for a request that is invalid for every topic."""
    if not 0 <= request.subtask < request.subtasks:
        raise ConfigurationError(
            f"reader of {topic!r}: expected 0 <= subtask < subtasks, "
            f"given subtask {request.subtask} of {request.subtasks}"
        )
    whole_number(f"reader of {topic!r}: max_records", request.max_records, 1)
    if isinstance(request.start, str) and request.start not in ("earliest", "latest"):
        raise ConfigurationError(
            f"reader of {topic!r}: expected start 'earliest', 'latest', offsets by partition or an aware "
            f"datetime, given {request.start!r}"
        )
    if isinstance(request.start, datetime) and request.start.tzinfo is None:
        raise ConfigurationError(
            f"reader of {topic!r}: expected an aware datetime as start, given {request.start} without a time "
            "zone; say which one, e.g. start.replace(tzinfo=UTC)"
        )


def partitions_of(request: ReadRequest, partitions: int) -> range:
    """Return the partitions that the request's subtask reads.

    >>> list(partitions_of(ReadRequest(subtask=1, subtasks=3), 8))
    [1, 4, 7]
    """
    return partitions_of_subtask(request.subtask, request.subtasks, partitions)


def named_positions(request: ReadRequest) -> Mapping[int, int]:
    """Return the offsets that a request names by partition; empty where it names none."""
    named = request.positions if request.positions is not None else request.start
    return named if isinstance(named, Mapping) else {}


def check_named_partitions(request: ReadRequest, partitions: int, *, topic: str) -> None:
    """Raise ``OffsetOutOfRange`` for positions of partitions that the topic does not have.

    A topic never loses partitions. So the topic was deleted and created again, and its offsets mean other records.
    """
    missing = [number for number in named_positions(request) if number >= partitions]
    if missing:
        raise OffsetOutOfRange(
            f"topic {topic!r}: it has {partitions} partitions, given a position for partition {missing[0]}; "
            "was the topic created again? Start from 'earliest' or 'latest', or from offsets of this topic"
        )


def check_identities(
    request: ReadRequest, identities: Mapping[int, str], ends: Mapping[int, PartitionEnds], *, topic: str
) -> None:
    """Raise ``OffsetOutOfRange`` where the offsets of a request belong to a topic that was deleted.

    ``identities`` are the current ones of the topic. A partition whose identity is not known, now or in the request, is
    taken to be the same.
    """
    for number, position in named_positions(request).items():
        known, found = (request.identities or {}).get(number), identities.get(number)
        if number in ends and known is not None and found is not None and known != found:
            raise OffsetOutOfRange(recreated_message(topic, number, position, ends[number]))


def first_position(
    request: ReadRequest, partition: int, ends: PartitionEnds, offset_at: Callable[[int], int], *, topic: str
) -> int:
    """Return the offset at which reading of a partition begins; the partition exists when the reader is opened.

    ``offset_at`` returns the offset of the first record at or after a time stamp.
    Raises ``OffsetOutOfRange`` for an offset that the partition does not have.
    """
    if request.positions is not None:
        return _named_position(request.positions, partition, ends, topic)
    if isinstance(request.start, datetime):
        return offset_at(timestamp_of(request.start))
    if isinstance(request.start, Mapping):
        return _named_position(request.start, partition, ends, topic)
    return ends.stable if request.start == "latest" else ends.earliest


def _named_position(positions: Mapping[int, int], partition: int, ends: PartitionEnds, topic: str) -> int:
    position = positions.get(partition, ends.earliest)
    if not ends.earliest <= position <= ends.end:
        raise OffsetOutOfRange(out_of_range_message(topic, partition, position, ends))
    return position


def timestamp_of(start: datetime) -> int:
    """Return the milliseconds since 1970-01-01 UTC, rounded up: a record of an earlier millisecond is earlier.

    >>> timestamp_of(datetime(1970, 1, 1, 0, 0, 1, 500_001, tzinfo=UTC))
    1501
    """
    elapsed = start - datetime(1970, 1, 1, tzinfo=UTC)
    microseconds = (elapsed.days * 86_400 + elapsed.seconds) * 1_000_000 + elapsed.microseconds
    return -(-microseconds // 1000)


def stop_offsets(request: ReadRequest, stable: Mapping[int, int]) -> dict[int, int] | None:
    """Return the offset before which reading ends for each partition; None where reading never ends.

    ``stable`` holds the last stable offset of each partition of the share when the reader is opened. A partition that
    the result does not name is not read.
    """
    if request.stop is None:
        return None
    if isinstance(request.stop, Mapping):
        return dict(request.stop)
    return dict(stable)


class ReadingPositions:
    """The next offset of each partition that a reader reads, and the offsets before which it stops.

    Partitions take turns: a partition whose records were returned goes behind the others.

    >>> positions = ReadingPositions({0: 5, 1: 7}, stops={0: 6, 1: 7})
    >>> positions.returned(0, 6)
    >>> list(positions), positions.by_partition(), positions.are_at_stop
    ([1, 0], {0: 6, 1: 7}, True)
    """

    def __init__(self, positions: Mapping[int, int], stops: Mapping[int, int] | None) -> None:
        self._positions = dict(positions)
        self.stops = stops

    def __iter__(self) -> Iterator[int]:
        """Iterate over the partitions in the order of their turns."""
        return iter(self._positions)

    def __getitem__(self, partition: int) -> int:
        return self._positions[partition]

    def by_partition(self) -> dict[int, int]:
        """Return the next offset of each partition, in the order of the partitions."""
        return {partition: self._positions[partition] for partition in sorted(self._positions)}

    def in_turn(self) -> dict[int, int]:
        """Return the next offset of each partition, in the order of their turns."""
        return dict(self._positions)

    def add_new(self, share: range, earliest: Callable[[int], int]) -> bool:
        """Add the partitions of the share that the topic has gained; return whether there were any."""
        added = [partition for partition in share if partition not in self._positions]
        self._positions.update({partition: earliest(partition) for partition in added})
        return bool(added)

    def returned(self, partition: int, following: int) -> None:
        """Records before the offset ``following`` were returned: the other partitions have their turns first."""
        del self._positions[partition]
        self._positions[partition] = following

    def passed(self, partition: int, following: int) -> None:
        """No record before the offset ``following`` can be returned; the partition keeps its turn."""
        self._positions[partition] = following

    def limit(self, partition: int, end: int) -> int:
        """Return the offset before which reading ends for now: the end of the partition, or the stop."""
        return end if self.stops is None else min(end, self.stops.get(partition, 0))

    @property
    def are_at_stop(self) -> bool:
        """Whether reading is over: each partition has reached its stop."""
        return self.stops is not None and all(
            position >= self.stops.get(partition, 0) for partition, position in self._positions.items()
        )

    def lag(self, ends: Mapping[int, int]) -> dict[int, int]:
        """Return the number of offsets between each position and the end, or the stop, of its partition."""
        return {
            partition: max(0, self.limit(partition, ends[partition]) - self._positions[partition])
            for partition in sorted(self._positions)
            if partition in ends
        }


def reading_positions(
    request: ReadRequest,
    ends: Mapping[int, PartitionEnds],
    identities: Mapping[int, str],
    offset_at: Callable[[int, int], int],
    *,
    topic: str,
) -> ReadingPositions:
    """Return the positions of a new reader, for a topic whose partitions have these ends and identities.

    ``offset_at(partition, timestamp_ms)`` returns the offset of the first record at or after a time stamp. Raises
    ``OffsetOutOfRange`` for positions that the topic does not have, or that belong to another topic of its name.
    """
    check_named_partitions(request, len(ends), topic=topic)
    check_identities(request, identities, ends, topic=topic)
    positions = {
        number: first_position(request, number, ends[number], partial(offset_at, number), topic=topic)
        for number in partitions_of(request, len(ends))
    }
    return ReadingPositions(positions, stop_offsets(request, {number: ends[number].stable for number in positions}))


class ReaderBehindLosses(TopicReader):
    """Reads on where records are left if the topic no longer has a position, and warns in the log ``streamiter.job``.

    A position whose records retention has deleted becomes the earliest one of its partition. If a position is of
    another topic, reading begins at the start of the request.
    """

    def __init__(self, topic: Topic, request: ReadRequest) -> None:
        self._topic = topic
        self._request = request
        self._reader: TopicReader

    @staticmethod
    async def open(topic: Topic, request: ReadRequest) -> TopicReader:
        """Open the topic. Raises the errors of ``open_reader``, but ``OffsetOutOfRange`` for a ``start`` only."""
        made = ReaderBehindLosses(topic, request)
        try:
            made._reader = await topic.open_reader(request)
        except OffsetOutOfRange as error:
            await made._pass_by(error)
        return made

    async def _pass_by(self, error: OffsetOutOfRange) -> None:
        before, given = self._request, dict(self._request.positions or {})
        found, known = await self._topic.describe(), before.identities or {}
        is_same = all(known.get(number, each) == each for number, each in found.identities.items() if number in given)
        if given and is_same and given.keys() <= found.offsets.keys():
            ends = {number: found.offsets[number] for number in given}
            left = {number: min(max(at, ends[number][0]), ends[number][1]) for number, at in given.items()}
            skipped = sum(max(0, left[number] - at) for number, at in given.items())
            self._request, told = replace(before, positions=left), f"{skipped:,} deleted records are left out"
        else:
            self._request = replace(before, positions=None, identities=None)
            told = f"the topic is read from start={before.start!r}"
        if self._request == before:
            raise error
        _log.warning("%s; as on_lost='skip' says, %s", error, told)
        self._reader = await self._topic.open_reader(self._request)

    async def read(self) -> TopicBatch | None:
        try:
            return await self._reader.read()
        except OffsetOutOfRange as error:
            before = self._reader
            self._request = replace(self._request, positions=before.positions(), identities=before.identities())
            await self._pass_by(error)
            await before.close()
            return await self._reader.read()

    def positions(self) -> Mapping[int, int]:
        return self._reader.positions()

    def identities(self) -> Mapping[int, str]:
        return self._reader.identities()

    def lag(self) -> Mapping[int, int]:
        return self._reader.lag()

    def unanswered_since_s(self) -> float | None:
        return self._reader.unanswered_since_s()

    async def close(self) -> None:
        await self._reader.close()


def out_of_range_message(topic: str, partition: int, position: int, ends: PartitionEnds) -> str:
    """Return the message for an offset that the partition no longer has, or does not have yet."""
    what = "fell out of retention" if position < ends.earliest else "is not there yet"
    return (
        f"topic {topic!r}, partition {partition}: offset {position} {what}; expected {ends.earliest} to "
        f"{ends.end}. Start from 'earliest' or 'latest', or restore a snapshot that is "
        f"{'newer' if position < ends.earliest else 'of this topic'}"
    )


def recreated_message(topic: str, partition: int, position: int, ends: PartitionEnds) -> str:
    """Return the message for an offset of a topic that was deleted and created again."""
    return (
        f"topic {topic!r}, partition {partition}: offset {position} belongs to a topic of this name that was deleted; "
        f"the topic was created again, with other records, and has the offsets {ends.earliest} to {ends.end}. Start "
        "from 'earliest' or 'latest', or restore a snapshot that is of this topic"
    )


# By default Kafka's brokers and clients take 1 MiB, framing and headers included.
RECORD_BYTES_MAX: Final = 1_000_000

# The settings with the size of the largest record: of Kafka, and of topics in memory and in SQLite.
_LIMIT_SETTINGS: Final = ("max.message.bytes", "max_record_bytes")


def record_limit(description: TopicDescription) -> int:
    """Return the size of the largest record to write to the topic: its own limit, at most ``RECORD_BYTES_MAX``.

    >>> record_limit(TopicDescription("models", {0: (0, 0)}, {"max.message.bytes": "500000"}))
    500000
    """
    limits = [int(description.settings[name]) for name in _LIMIT_SETTINGS if name in description.settings]
    return min([RECORD_BYTES_MAX, *limits])


def check_outgoing(batch: OutgoingBatch, *, topic: str, partitions: int) -> None:
    """Raise ``TopicError`` unless the columns have equal lengths and valid types, and the topic has the partition."""
    _check_lengths(batch, topic)
    _check_bytes("value", batch.values, topic)
    if batch.keys is not None:
        _check_bytes("key", batch.keys, topic)
    if batch.partition is not None and not 0 <= batch.partition < partitions:
        raise TopicError(
            f"topic {topic!r}: expected a partition of 0 to {partitions - 1}, given {batch.partition}; "
            f"create(partitions={batch.partition + 1}) adds the missing ones"
        )


def _check_lengths(batch: OutgoingBatch, topic: str) -> None:
    columns = {"keys": batch.keys, "headers": batch.headers, "timestamps_ms": batch.timestamps_ms}
    for name, column in columns.items():
        if column is not None and len(column) != len(batch):
            raise TopicError(f"topic {topic!r}: expected {len(batch)} {name}, one for each value, given {len(column)}")


_BYTES_OR_NONE: Final = frozenset({bytes, type(None)})


def _check_bytes(noun: str, column: Sequence[bytes | None], topic: str) -> None:
    if (
        not isinstance(column, (list, tuple))
        and rows_of_table(f"topic {topic!r}, {noun}s", column, TopicError) is not None
    ):
        raise TopicError(
            f"topic {topic!r}: expected a list of bytes as {noun}s, given a {type(column).__name__}; encode its rows "
            "first: Json().encode(…)"
        )
    if set(map(type, column)) <= _BYTES_OR_NONE:
        return
    index, entry = next(found for found in enumerate(column) if type(found[1]) not in _BYTES_OR_NONE)
    given = type(entry).__name__
    raise TopicError(f"topic {topic!r}: expected bytes or None as {noun}, given {given} (record {index})")


def spread(batch: OutgoingBatch, partitions: int, *, unkeyed: int) -> list[tuple[int, OutgoingBatch]]:
    """Return the parts of ``batch`` by partition: by the key of each record; records without a key go to ``unkeyed``.

    >>> batch = OutgoingBatch([b"a", b"b", b"c"], keys=[b"k1", b"k2", b"k1"])
    >>> {partition: part.values for partition, part in spread(batch, 2, unkeyed=0)}
    {1: [b'a', b'b', b'c']}
    """
    if batch.partition is not None:
        return [(batch.partition, batch)]
    if batch.keys is None:
        return [(unkeyed, batch)]
    if partitions == 1:
        return [(0, batch)]
    return [
        (partition, batch.take(indices))
        for partition, indices in _indices_by_partition(batch.keys, partitions, unkeyed)
    ]


def _indices_by_partition(
    keys: Sequence[bytes | None], partitions: int, unkeyed: int
) -> Iterable[tuple[int, list[int]]]:
    indices: dict[int, list[int]] = {}
    crc32 = zlib.crc32  # the same in every process and release
    for index, key in enumerate(keys):
        partition = unkeyed if key is None else crc32(key) % partitions
        indices.setdefault(partition, []).append(index)
    return indices.items()


def check_record_sizes(batch: OutgoingBatch, limit_bytes: int, *, topic: str) -> None:
    """Raise ``RecordTooLarge`` for the first record whose key, value and headers exceed the limit."""
    if batch_bytes(batch) <= limit_bytes:
        return
    for index, size_bytes in SizeLimit(limit_bytes).exceeded_by(batch).items():
        raise RecordTooLarge(
            f"topic {topic!r}: record {index} of the batch has {size_bytes} bytes, "
            f"expected at most {limit_bytes} (setting max_record_bytes); nothing of the batch was written"
        )


def batch_bytes(batch: OutgoingBatch) -> int:
    """Return the size in bytes of all keys, values and headers.

    >>> batch_bytes(OutgoingBatch([b"abc", None], keys=[b"k", b"k"], headers=[(("h", b"1"),), ()]))
    7
    """
    size_bytes = _column_bytes(batch.values)
    if batch.keys is not None:
        size_bytes += _column_bytes(batch.keys)
    if batch.headers is not None:
        size_bytes += sum(map(_headers_bytes, batch.headers))
    return size_bytes


def _column_bytes(column: Sequence[bytes | None]) -> int:
    return sum(map(len, filter(None, column)))


def _headers_bytes(headers: Headers) -> int:
    return sum(len(name.encode()) + len(value or b"") for name, value in headers)


class _TransactionPhase(enum.Enum):
    IDLE = "idle"
    OPEN = "open"
    FENCED = "fenced"
    CLOSED = "closed"


class TransactionState:
    """Which calls of a `Transactions` object are allowed now. A call that is not allowed raises its error.

    The state is idle, then open from ``begin`` to ``end``. A fence is final: each later call raises the same error.

    >>> state = TransactionState("transactions 'job'")
    >>> state.check_open()
    Traceback (most recent call last):
    ...
    streamiter.errors.TopicError: transactions 'job': expected an open transaction, given none; call begin() first
    """

    def __init__(self, subject: str) -> None:
        self.subject = subject
        self._phase = _TransactionPhase.IDLE
        self._fence: ProducerFenced | None = None

    @property
    def is_open(self) -> bool:
        return self._phase is _TransactionPhase.OPEN

    @property
    def is_closed(self) -> bool:
        return self._phase is _TransactionPhase.CLOSED

    def check_usable(self) -> None:
        """Raise ``TopicError`` after ``close``, and the error of the fence after a fence."""
        if self.is_closed:
            raise TopicError(f"{self.subject}: expected open transactions, given closed ones; open new ones")
        if self._fence is not None:
            raise self._fence

    def check_idle(self) -> None:
        """Raise ``TopicError`` where a transaction is open."""
        self.check_usable()
        if self.is_open:
            raise TopicError(f"{self.subject}: commit or abort the open transaction before begin()")

    def check_open(self) -> None:
        """Raise ``TopicError`` where no transaction is open."""
        self.check_usable()
        if not self.is_open:
            raise TopicError(f"{self.subject}: expected an open transaction, given none; call begin() first")

    def check_topic(self, topic: Topic, commit_domain: str) -> None:
        """Raise ``TopicError`` for a topic of another commit domain."""
        if topic.commit_domain != commit_domain:
            raise TopicError(
                f"{self.subject}: expected a topic of the commit domain {commit_domain}, given {topic.url} of the "
                f"commit domain {topic.commit_domain}; write to it with a writer of its own"
            )

    def begin(self) -> None:
        """A transaction is open from now on."""
        self.check_idle()
        self._phase = _TransactionPhase.OPEN

    def end(self) -> None:
        """No transaction is open any more."""
        if self.is_open:
            self._phase = _TransactionPhase.IDLE

    def fence(self, reason: ProducerFenced) -> ProducerFenced:
        """Refuse all further calls, for the first reason that was given; return that reason."""
        if self._fence is None:
            self._fence = reason
            if not self.is_closed:
                self._phase = _TransactionPhase.FENCED
        return self._fence

    def close(self) -> None:
        """Refuse all further calls."""
        self._phase = _TransactionPhase.CLOSED


def closed_error(noun: Literal["reader", "writer"], topic: str) -> TopicError:
    """Return the error of a call to a reader or writer that is closed."""
    return TopicError(f"topic {topic!r}: expected an open {noun}, given one that is closed; open a new one")


def check_partition_count(topic: str, partitions: int) -> None:
    """Raise ``ConfigurationError`` unless a topic can have this number of partitions."""
    whole_number(f"topic {topic!r}: partitions", partitions, 1)


def whole_number_settings(topic: str, settings: Mapping[str, str], known: Sequence[str]) -> dict[str, int]:
    """Return the settings of a new topic as numbers; raise ``ConfigurationError`` for an unknown or wrong one."""
    numbers: dict[str, int] = {}
    for name, value in settings.items():
        if name not in known:
            raise ConfigurationError(f"topic {topic!r}: expected settings out of {', '.join(known)}, given {name!r}")
        number = whole_number_in(str(value))
        if number is None:
            raise ConfigurationError(f"topic {topic!r}: expected {name} as a whole number, given {value!r}")
        numbers[name] = number
    return numbers


class Closeable(Protocol):
    """A connection to a server or file."""

    async def close(self) -> None:
        """Release the server or file."""


Connection = TypeVar("Connection", bound=Closeable)


@contextlib.asynccontextmanager
async def closed_on_failure(connection: Connection) -> AsyncIterator[Connection]:
    """Close the connection where the body fails. Otherwise the object that the body opens owns the connection."""
    try:
        yield connection
    except BaseException as error:
        note_unclosed(error, await close_each([connection.close]))
        raise


def last_records(offsets: Mapping[int, tuple[int, int]], count: int) -> dict[int, int]:
    """Return the offset of the last ``count`` records of each partition, exact if offsets have no gaps."""
    return {partition: max(first, end - count) for partition, (first, end) in offsets.items()}
