"""The Topic protocol: what every connector implements and one contract test suite checks.

A topic is a durable log in partitions. A record has a partition, an offset in it (growing, with gaps
allowed), a time stamp, and optionally a key, a value and headers. Reading is by partition and offset,
*read committed*: records of a transaction are seen once it is committed, those of an aborted one never.
"""

from __future__ import annotations

import abc
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from types import MappingProxyType
from typing import ClassVar, Final, Literal, Protocol

from streamiter.clock import Clock, SystemClock
from streamiter.errors import ConfigurationError, OffsetOutOfRange
from streamiter.records import Batch, estimated_bytes

__all__ = [
    "RECORD_BYTES_MAX",
    "Connector",
    "Decoder",
    "Encoder",
    "Headers",
    "OutgoingBatch",
    "PartitionEnds",
    "ReadRequest",
    "SizeLimit",
    "StartPosition",
    "StopPosition",
    "Topic",
    "TopicBatch",
    "TopicDescription",
    "TopicReader",
    "TopicRecord",
    "TopicWriter",
    "Transactions",
    "check_identities",
    "check_named_partitions",
    "check_request",
    "first_position",
    "named_positions",
    "out_of_range_message",
    "partitions_of",
    "record_limit",
    "recreated_message",
    "stop_offsets",
    "timestamp_of",
]


Headers = tuple[tuple[str, bytes], ...]
"""Name and value, in order; a name may come more than once."""

StartPosition = Literal["earliest", "latest"] | Mapping[int, int] | datetime
"""Where reading begins: an end of the topic, an offset for each partition, or the first record of that
time or later (an aware datetime). A partition that a mapping does not name begins at its earliest record."""

StopPosition = Literal["latest"] | Mapping[int, int] | None
"""Where reading ends: never (None), at the end the topic has when the reader is opened (its last stable
offset), or before an offset for each partition. A partition that a mapping does not name is not read."""


@dataclass(frozen=True, slots=True)
class TopicRecord:
    """One record of a topic, for tools and tests; the hot path uses :class:`TopicBatch`."""

    partition: int
    offset: int
    timestamp_ms: int
    key: bytes | None
    value: bytes | None
    headers: Headers = ()


class TopicBatch:
    """Records of one partition in offset order, kept as columns.

    A connector may subclass it to build the columns that are rarely needed only when asked for.

    >>> batch = TopicBatch(partition=0, offsets=[7, 8], values=[b"a", b"b"])
    >>> batch.next_offset, batch[1:].values, batch.records()[0].offset
    (9, [b'b'], 7)
    """

    __slots__ = ("_headers", "_keys", "_offsets", "_timestamps_ms", "partition", "values")

    def __init__(
        self,
        *,
        values: Sequence[bytes | None],
        partition: int = 0,
        offsets: Sequence[int] | None = None,
        timestamps_ms: Sequence[int] | None = None,
        keys: Sequence[bytes | None] | None = None,
        headers: Sequence[Headers] | None = None,
    ) -> None:
        self.partition = partition
        self.values = values
        self._offsets = offsets
        self._timestamps_ms = timestamps_ms
        self._keys = keys
        self._headers = headers

    @property
    def offsets(self) -> Sequence[int]:
        """Offset of each record; counted from 0 where none were given."""
        return self._offsets if self._offsets is not None else range(len(self.values))

    @property
    def timestamps_ms(self) -> Sequence[int]:
        """Milliseconds since 1970-01-01 UTC; zeros where none were given."""
        return self._timestamps_ms if self._timestamps_ms is not None else [0] * len(self.values)

    @property
    def keys(self) -> Sequence[bytes | None]:
        """Key of each record, or None."""
        return self._keys if self._keys is not None else [None] * len(self.values)

    @property
    def headers(self) -> Sequence[Headers]:
        """Headers of each record, mostly ``()``."""
        return self._headers if self._headers is not None else [()] * len(self.values)

    @property
    def first_offset(self) -> int:
        """The offset of the first record."""
        return self.offsets[0]

    @property
    def next_offset(self) -> int:
        """The offset to read on from after this batch."""
        return self.offsets[-1] + 1

    @property
    def nbytes(self) -> int:
        """Estimated size of the values."""
        return estimated_bytes(self.values)

    def __len__(self) -> int:
        return len(self.values)

    def __getitem__(self, which: slice) -> TopicBatch:
        return TopicBatch(
            partition=self.partition,
            values=self.values[which],
            offsets=self.offsets[which],
            timestamps_ms=None if self._timestamps_ms is None else self._timestamps_ms[which],
            keys=None if self._keys is None else self._keys[which],
            headers=None if self._headers is None else self._headers[which],
        )

    def take(self, indices: Sequence[int]) -> TopicBatch:
        """The records at ``indices``, in that order."""
        offsets, timestamps, keys, headers = self.offsets, self.timestamps_ms, self.keys, self.headers
        return TopicBatch(
            partition=self.partition,
            values=[self.values[index] for index in indices],
            offsets=[offsets[index] for index in indices],
            timestamps_ms=[timestamps[index] for index in indices],
            keys=[keys[index] for index in indices],
            headers=[headers[index] for index in indices],
        )

    def records(self) -> list[TopicRecord]:
        """The same, an object for each record."""
        columns = zip(self.offsets, self.timestamps_ms, self.keys, self.values, self.headers, strict=True)
        return [TopicRecord(self.partition, *fields) for fields in columns]


@dataclass(frozen=True, slots=True)
class OutgoingBatch:
    """Records on their way into a topic, as columns; what is None has no entry for any record.

    ``partition`` puts all of them there; otherwise a keyed record goes to a partition by its key (for
    Kafka the same as the Java client's default partitioner) and the rest may go anywhere.
    """

    values: Sequence[bytes | None]
    keys: Sequence[bytes | None] | None = None
    headers: Sequence[Headers] | None = None
    timestamps_ms: Sequence[int] | None = None
    partition: int | None = None

    def __len__(self) -> int:
        return len(self.values)


# What a topic may add to key and value of a record without headers: 92 bytes on Kafka for the batch and the record.
_FRAMING_BYTES: Final = 128


def _longest(column: Sequence[bytes | None] | None) -> int:
    return max(map(len, filter(None, column or ())), default=0)


def _size_of(value: bytes | None, key: bytes | None, headers: Headers) -> int:
    return len(value or b"") + len(key or b"") + sum(len(name.encode()) + len(text) for name, text in headers)


@dataclass(frozen=True, slots=True)
class SizeLimit:
    """How large a record a topic takes: at most ``size_bytes``, counted by ``size_of(value, key, headers)``.

    ``size_of`` adds up their bytes unless the topic counts otherwise.

    >>> limit = SizeLimit(4)
    >>> limit.holds(b"abc", b"k", ()), limit.exceeded_by(OutgoingBatch([b"abcd", b"abcde"]))
    (True, {1: 5})
    """

    size_bytes: int
    size_of: Callable[[bytes | None, bytes | None, Headers], int] = _size_of

    def holds(self, value: bytes | None, key: bytes | None, headers: Headers) -> bool:
        """Whether the topic takes such a record."""
        return self.size_of(value, key, headers) <= self.size_bytes

    def exceeded_by(self, batch: OutgoingBatch) -> dict[int, int]:
        """The records of the batch that are too large, with their sizes in bytes."""
        if (
            not batch.headers
            and _longest(batch.values) + _longest(batch.keys) < self.size_bytes - _FRAMING_BYTES
        ):
            return {}
        nothing = [None] * len(batch)
        headers = [()] * len(batch) if batch.headers is None else batch.headers
        records = zip(batch.values, batch.keys or nothing, headers, strict=True)
        sizes = enumerate(self.size_of(*record) for record in records)
        return {index: size_bytes for index, size_bytes in sizes if size_bytes > self.size_bytes}


class Decoder(Protocol):
    """Turns what a topic holds into a batch: one record for each value, in the same order."""

    def decode(self, batch: TopicBatch) -> Batch:
        """Raises :class:`~streamiter.errors.DecodeError` naming every bad value of the batch."""


class Encoder(Protocol):
    """Turns a batch into what a topic holds: one value for each record, in the same order."""

    def encode(self, batch: Batch) -> OutgoingBatch:
        """Raises :class:`~streamiter.errors.EncodeError` naming every bad record of the batch."""


@dataclass(frozen=True, slots=True)
class ReadRequest:
    """What one reader reads: the partitions p with p mod ``subtasks`` = ``subtask``, from where to where.

    ``positions`` (next offset by partition, from a snapshot) go before ``start``; with it, a partition
    it does not name is new and begins at its earliest record. Partitions that the topic gains while it
    is read are found within ``refresh_s`` seconds and read from their earliest record.
    ``max_records`` bounds one batch.

    ``identities`` (by partition, as ``TopicReader.identities`` or a description gave them) say to which topic the
    offsets of ``positions``, or of a ``start`` by partition, belong. Where the topic was deleted and created again
    since, opening or reading raises :class:`~streamiter.errors.OffsetOutOfRange`.
    """

    subtask: int = 0
    subtasks: int = 1
    start: StartPosition = "earliest"
    stop: StopPosition = None
    positions: Mapping[int, int] | None = None
    identities: Mapping[int, str] | None = None
    max_records: int = 8192
    refresh_s: float = 30.0
    clock: Clock = field(default_factory=SystemClock)


class TopicReader(abc.ABC):
    """Reads a share of a topic's partitions. Used by one task; bounded in what it fetches ahead."""

    @abc.abstractmethod
    async def read(self) -> TopicBatch | None:
        """The next records of some partition (at least one), waiting for them; None at the end.

        May be cancelled without losing records. Partitions that have records take turns.
        Records of a batch all lie in one partition. The end comes only with a stop position.
        """

    @abc.abstractmethod
    def positions(self) -> Mapping[int, int]:
        """Where reading goes on after what ``read`` has returned: an offset for each partition of the share."""

    def identities(self) -> Mapping[int, str]:
        """To which topic the positions belong: a text by partition, for the ``identities`` of a later request.

        A topic that is deleted and created again under its name has others; restarts and moves of its server,
        retention and added partitions change none. Empty, or without a partition, where that is not known.
        """
        return {}

    @abc.abstractmethod
    def lag(self) -> Mapping[int, int]:
        """Records not yet returned by ``read``, by partition, as far as known without asking again."""

    @abc.abstractmethod
    async def close(self) -> None:
        """Let go of the server or file. May be called more than once."""


class TopicWriter(abc.ABC):
    """Writes to one topic. Used by one task; bounded in what is under way."""

    @abc.abstractmethod
    async def write(self, batch: OutgoingBatch) -> None:
        """Hand over a batch; waits only where too much is under way.

        Records with the same key (or the same explicit partition) keep their order. What went wrong
        with an earlier batch is raised here or by ``flush``.
        """

    @abc.abstractmethod
    async def flush(self) -> None:
        """Return when all that was handed over is stored, durably and readable."""

    @abc.abstractmethod
    async def close(self) -> None:
        """Flush, then let go. May be called more than once."""


class Transactions(abc.ABC):
    """Writes to topics of one commit domain, made visible together.

    Opening with an id fences whoever opened it before: their next call that reaches the server or file, at
    the latest ``commit``, raises :class:`~streamiter.errors.ProducerFenced`; their open transaction is aborted.
    A transaction that was aborted because it was open for longer than its timeout raises
    :class:`~streamiter.errors.TransactionExpired` instead. Servers need not tell which of the two it was; then
    the time decides, and one open for longer than its timeout raises ``TransactionExpired`` although somebody
    else has the id by now. Who opens the id again after that error must know from elsewhere that nobody has.
    After either error, nothing works any more.

    One call at a time; they may come from several tasks of one event loop.
    """

    @abc.abstractmethod
    async def begin(self) -> None:
        """Begin a transaction; one at a time."""

    @abc.abstractmethod
    async def write(self, topic: Topic, batch: OutgoingBatch) -> None:
        """Write within the open transaction, to a topic of the same commit domain.

        Returns when the records are taken, not when they are stored: what goes wrong then is raised here
        later, or by ``commit``. After ``StorageFull`` the batch is part of the transaction nevertheless:
        do not write it again.
        """

    @abc.abstractmethod
    async def commit(self) -> None:
        """Make all records of the transaction visible, durably and at once.

        When it returns, that is done. After ``StorageFull``, and where a file was locked by others for too
        long (``TopicUnavailable`` of SQLite), nothing is committed and the transaction is still open: call
        it again, or ``abort``.

        After any other error, a fence and a cancellation included, it is *not known* whether the
        transaction was committed: the answer may have been lost. To find out, open the transactions anew
        with the same id, which settles what was under way, and **then** read whether a record of the
        transaction is there (:func:`streamiter.topics.compacted.last_value`). Never take the error for
        "not committed".
        """

    @abc.abstractmethod
    async def abort(self) -> None:
        """Take back all records of the transaction."""

    @abc.abstractmethod
    async def close(self) -> None:
        """Abort what is open, then let go. May be called more than once."""


@dataclass(frozen=True, slots=True)
class TopicDescription:
    """What a topic looks like now: for each partition its earliest offset and the one after its last.

    ``identities`` are as those of ``TopicReader.identities``.
    """

    name: str
    offsets: Mapping[int, tuple[int, int]]
    settings: Mapping[str, str] = field(default_factory=dict)
    identities: Mapping[int, str] = field(default_factory=dict)

    @property
    def partitions(self) -> int:
        """How many partitions there are."""
        return len(self.offsets)


class Topic(abc.ABC):
    """A named log. Making one connects to nothing; ``open_*`` and the admin calls do.

    Errors: ``TopicUnavailable`` when the server does not answer within the connector's own deadline,
    ``TopicNotFound``, ``TopicDenied``, ``OffsetOutOfRange``, ``StorageFull``, ``RecordTooLarge``.
    """

    has_transactions: ClassVar[bool] = True
    """Whether ``open_transactions`` can succeed; without, records that are written are visible at once."""

    compaction_settings: ClassVar[Mapping[str, str]] = MappingProxyType({})
    """Settings for ``create`` that keep the last record of each key for ever and drop those before it."""

    eager_compaction_settings: ClassVar[Mapping[str, str]] = MappingProxyType({})
    """Added to these: dropped soon, though records are few and small."""

    has_headers: ClassVar[bool] = True
    """Whether records have headers. Dead letters need them: they say there why a record was refused."""

    @property
    @abc.abstractmethod
    def url(self) -> str:
        """The URL that :func:`streamiter.topic` takes, without credentials."""

    @property
    @abc.abstractmethod
    def name(self) -> str:
        """The topic's name on its server or in its file."""

    @property
    @abc.abstractmethod
    def commit_domain(self) -> str:
        """Topics of equal commit domain can be written in one transaction."""

    @abc.abstractmethod
    def beside(self, name: str) -> Topic:
        """The topic ``name`` on the same server or in the same file: same options, same commit domain.

        It need not be there yet. Raises :class:`~streamiter.errors.ConfigurationError` for a name that
        cannot be one, and where topics do not lie beside each other (files).
        """

    @abc.abstractmethod
    def default_decoder(self) -> Decoder | None:
        """How this topic's values are read unless said otherwise; None leaves it to the caller (JSON)."""

    @abc.abstractmethod
    async def open_reader(self, request: ReadRequest) -> TopicReader:
        """A reader at its start position. The topic must exist."""

    @abc.abstractmethod
    async def open_writer(self) -> TopicWriter:
        """A writer whose records are visible when they are stored. The topic must exist."""

    @abc.abstractmethod
    async def open_transactions(self, transactional_id: str, *, timeout_s: float = 60.0) -> Transactions:
        """Transactions in this topic's commit domain; one left open longer than ``timeout_s`` is aborted."""

    async def report_positions(self, group: str, positions: Mapping[int, int]) -> None:  # noqa: B027
        """Tell tools that show lag how far ``group`` has read: the next offset by partition.

        Nothing depends on it: whoever calls it should log a failure and go on. Without such tools (all
        but Kafka) it does nothing.
        """

    @abc.abstractmethod
    async def create(self, *, partitions: int = 1, settings: Mapping[str, str] | None = None) -> None:
        """Create it if it is not there. One that is there with fewer partitions gains the missing ones."""

    @abc.abstractmethod
    async def describe(self) -> TopicDescription:
        """What it looks like now."""

    async def size_limit(self) -> SizeLimit | None:
        """How large a record it takes; None where nothing is known of a limit. The topic must exist."""
        return None

    @abc.abstractmethod
    async def delete(self) -> None:
        """Delete it with all its records."""


class Connector(abc.ABC):
    """What an entry point of the group ``streamiter.topics`` must give: a class; its name is a URL scheme."""

    @abc.abstractmethod
    def topic(self, url: str, options: Mapping[str, object]) -> Topic:
        """The topic at ``url``; an unknown option is a ``ConfigurationError`` that lists the known ones."""

    @abc.abstractmethod
    async def list_topics(self, url: str, options: Mapping[str, object]) -> list[str]:
        """Names of the topics of the server or file at ``url`` (whose topic part may be missing)."""


@dataclass(frozen=True, slots=True)
class PartitionEnds:
    """The offsets of one partition: the earliest record, the last stable offset, the one after the last.

    Which partitions a reader reads, from which offset to which: pure functions on a `ReadRequest`.
    """

    earliest: int
    stable: int
    end: int


def check_request(request: ReadRequest, topic: str) -> None:
    """Raise ``ConfigurationError`` for a request that no reader could serve on any topic."""
    if not 0 <= request.subtask < request.subtasks:
        raise ConfigurationError(
            f"reader of {topic!r}: expected 0 <= subtask < subtasks, "
            f"given subtask {request.subtask} of {request.subtasks}"
        )
    if request.max_records < 1:
        raise ConfigurationError(
            f"reader of {topic!r}: expected max_records >= 1, given {request.max_records}"
        )
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
    """The share of the partitions that the request's subtask reads.

    >>> list(partitions_of(ReadRequest(subtask=1, subtasks=3), 8))
    [1, 4, 7]
    """
    return range(request.subtask, partitions, request.subtasks)


def check_named_partitions(request: ReadRequest, partitions: int, *, topic: str) -> None:
    """Raise ``OffsetOutOfRange`` for positions of partitions that the topic does not have.

    A topic never loses partitions: it was deleted and created anew, and its offsets mean other records.
    """
    missing = [number for number in named_positions(request) if number >= partitions]
    if missing:
        raise OffsetOutOfRange(
            f"topic {topic!r}: it has {partitions} partitions, given a position for partition {missing[0]}; "
            "was the topic created anew? Start from 'earliest' or 'latest', or from offsets of this topic"
        )


def named_positions(request: ReadRequest) -> Mapping[int, int]:
    """The offsets that a request names by partition; empty where it names none."""
    named = request.positions if request.positions is not None else request.start
    return named if isinstance(named, Mapping) else {}


def check_identities(
    request: ReadRequest, identities: Mapping[int, str], ends: Mapping[int, PartitionEnds], *, topic: str
) -> None:
    """Raise ``OffsetOutOfRange`` where the offsets of a request belong to a topic that was deleted.

    ``identities`` are those of the topic as it is now. A partition whose identity is not known, now or in the
    request, is taken to be the same.
    """
    for number, position in named_positions(request).items():
        known, found = (request.identities or {}).get(number), identities.get(number)
        if number in ends and known is not None and found is not None and known != found:
            raise OffsetOutOfRange(recreated_message(topic, number, position, ends[number]))


def timestamp_of(start: datetime) -> int:
    """Milliseconds since 1970-01-01 UTC, rounded up: a record of an earlier millisecond is earlier.

    >>> timestamp_of(datetime(1970, 1, 1, 0, 0, 1, 500_001, tzinfo=UTC))
    1501
    """
    elapsed = start - datetime(1970, 1, 1, tzinfo=UTC)
    microseconds = (elapsed.days * 86_400 + elapsed.seconds) * 1_000_000 + elapsed.microseconds
    return -(-microseconds // 1000)


def first_position(
    request: ReadRequest,
    partition: int,
    ends: PartitionEnds,
    offset_at: Callable[[int], int],
    *,
    topic: str,
) -> int:
    """Where reading of a partition begins that is there as the reader is opened.

    ``offset_at`` gives the offset of the first record at or after a time stamp.
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


def out_of_range_message(topic: str, partition: int, position: int, ends: PartitionEnds) -> str:
    """What has happened to an offset that is gone or not there yet, with the numbers and the choices."""
    what = "fell out of retention" if position < ends.earliest else "is not there yet"
    return (
        f"topic {topic!r}, partition {partition}: offset {position} {what}; expected {ends.earliest} to "
        f"{ends.end}. Start from 'earliest' or 'latest', or restore a snapshot that is "
        f"{'newer' if position < ends.earliest else 'of this topic'}"
    )


def recreated_message(topic: str, partition: int, position: int, ends: PartitionEnds) -> str:
    """What has happened to an offset of a topic that was deleted and created again."""
    return (
        f"topic {topic!r}, partition {partition}: offset {position} belongs to a topic of this name that was deleted; "
        f"the topic was created again, with other records, and has the offsets {ends.earliest} to {ends.end}. Start "
        "from 'earliest' or 'latest', or restore a snapshot that is of this topic"
    )


def stop_offsets(request: ReadRequest, stable: Mapping[int, int]) -> dict[int, int] | None:
    """The offset before which reading ends for each partition, or None where it never ends.

    ``stable`` holds the last stable offset of each partition of the share as the reader is opened.
    A partition that the result does not name is not read.
    """
    if request.stop is None:
        return None
    if isinstance(request.stop, Mapping):
        return dict(request.stop)
    return dict(stable)


# Kafka's brokers and clients take 1 MiB unless told otherwise, framing and headers included.
RECORD_BYTES_MAX: Final = 1_000_000

# Where a topic tells the largest record it takes: Kafka's name, and that of the memory and SQLite topics.
_LIMIT_SETTINGS: Final = ("max.message.bytes", "max_record_bytes")


def record_limit(description: TopicDescription) -> int:
    """The largest record to write to the topic: its own limit, at most ``RECORD_BYTES_MAX``.

    >>> record_limit(TopicDescription("models", {0: (0, 0)}, {"max.message.bytes": "500000"}))
    500000

    How large a record a topic takes.
    """
    limits = [int(description.settings[name]) for name in _LIMIT_SETTINGS if name in description.settings]
    return min([RECORD_BYTES_MAX, *limits])
