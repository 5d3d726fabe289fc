"""The Topic protocol: the interface that every connector implements.

A topic is a durable log in partitions. Each record has a partition, an offset in that partition, a time stamp and,
optionally, a key, a value and headers. Offsets grow and may have gaps. A reader asks for partitions and offsets and is
*read committed*: it sees the records of a transaction once that is committed, and never those of an aborted one.

Read :class:`Topic` first: it opens readers, writers and transactions. What connectors have in common is in
:mod:`streamiter.topics.connecting`.
"""

from __future__ import annotations

import abc
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from itertools import chain
from types import MappingProxyType
from typing import Any, ClassVar, Final, Generic, Literal, Protocol, TypeVar

from streamiter.topics.joined_values import joined_column
from streamiter.values.helpers.clock import Clock, SystemClock
from streamiter.values.records import BATCH_RECORDS, Batch, estimated_bytes

_PartOf = Callable[[Sequence[Any]], Sequence[Any]]
_Part = TypeVar("_Part")


class Topic(abc.ABC):
    """A named log. A new object connects to no server; ``open_*`` and the calls that manage the topic do.

    Errors: ``TopicUnavailable`` when the server does not answer within the connector's own deadline, ``TopicNotFound``,
    ``TopicDenied``, ``OffsetOutOfRange``, ``StorageFull``, ``RecordTooLarge``.
    """

    has_transactions: ClassVar[bool] = True
    """Whether the topic has transactions; without them, written records are visible at once."""

    compaction_settings: ClassVar[Mapping[str, str]] = MappingProxyType({})
    """Settings for ``create`` that keep the last record of each key for ever and drop older ones."""

    eager_compaction_settings: ClassVar[Mapping[str, str]] = MappingProxyType({})
    """Further settings: older records are dropped soon, even if records are few and small."""

    seen_from: ClassVar[Literal["process", "machine", "network"]] = "network"
    """From where a URL leads to the same topic: this process, the processes of this machine, or all machines."""

    has_headers: ClassVar[bool] = True
    """Whether records have headers. Dead letters need headers: these say why a record was refused."""

    has_tombstones: ClassVar[bool] = True
    """Whether a record may lack a value. A sink then writes None as such a record, whatever its encoder is."""

    has_timestamps: ClassVar[bool] = True
    """Whether the topic gives each record the time at which it was written."""

    keeps_positions: ClassVar[bool] = False
    """Whether the server keeps the positions of consumer groups, as Kafka's brokers do. The positions of other topics
    are in the commit topic of their commit domain (:func:`streamiter.topics.compacted.committed_positions`)."""

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

    async def in_domain_of(self, other: Topic) -> Topic:
        """Return this topic with the commit domain of ``other``, where both domains are one; else the topic itself."""
        return self

    @abc.abstractmethod
    def beside(self, name: str) -> Topic:
        """Return the topic ``name`` on the same server or in the same file, with the same options and commit domain.

        The topic need not exist yet. Raises :class:`~streamiter.errors.ConfigurationError` for an invalid name, and
        where topics share no commit domain (files).
        """

    def default_decoder(self) -> Decoder | None:
        """Return the decoder that reads the values by default; None leaves it to the caller (JSON)."""
        return None

    def default_encoder(self) -> Encoder | None:
        """Return the encoder that writes records by default; None leaves it to the caller (JSON)."""
        return None

    @abc.abstractmethod
    async def open_reader(self, request: ReadRequest) -> TopicReader:
        """Return a reader at its start position. The topic must exist."""

    @abc.abstractmethod
    async def open_writer(self) -> TopicWriter:
        """Return a writer whose records are visible as soon as they are stored. The topic must exist."""

    @abc.abstractmethod
    async def open_transactions(self, transactional_id: str, *, timeout_s: float = 60.0) -> Transactions:
        """Return transactions in this topic's commit domain; one that is open for over ``timeout_s`` is aborted."""

    async def committed_positions(self, group: str) -> GroupPositions | None:
        """Return what :meth:`Transactions.commit_positions` has committed for this topic and group; None for nothing.

        Only called if ``keeps_positions``. Waits until an open transaction that changes it has ended.
        """
        raise NotImplementedError

    async def report_positions(self, group: str, positions: Mapping[int, int]) -> None:  # noqa: B027
        """Tell tools that show lag how far ``group`` has read: the next offset by partition.

        The engine does not depend on it, so a caller should log a failure and continue. Only Kafka has such tools. A
        topic of a SQLite file with the setting ``delete_read`` drops what was read; other topics do nothing.
        """

    @abc.abstractmethod
    async def create(self, *, partitions: int = 1, settings: Mapping[str, str] | None = None) -> None:
        """Create the topic if it does not exist, and add the partitions that it lacks."""

    def settings_to_keep(self, seconds: float) -> Mapping[str, str]:
        """Return settings for ``create`` that keep all records for this time, and the last of each key for ever."""
        return {}

    def early_deletion(self, settings: Mapping[str, str], seconds: float) -> str | None:
        """Return which ``settings`` may delete a record before this time is over, and what to do; None if none do."""
        return None

    @abc.abstractmethod
    async def describe(self) -> TopicDescription:
        """Return the current offsets and settings."""

    async def size_limit(self) -> SizeLimit | None:
        """Return the limit on the size of a record; None where no limit is known. The topic must exist."""
        return None

    @abc.abstractmethod
    async def delete(self) -> None:
        """Delete the topic and all its records."""

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.url!r})"


@dataclass(frozen=True, slots=True)
class TopicDescription:
    """The current state of a topic."""

    name: str
    """The topic's name on its server or in its file."""
    offsets: Mapping[int, tuple[int, int]]
    """For each partition the earliest offset and the offset after the last record."""
    settings: Mapping[str, str] = field(default_factory=dict)
    """The topic's settings, as far as the user may see them."""
    identities: Mapping[int, str] = field(default_factory=dict)
    """A text for each partition, as `TopicReader.identities` returns them."""

    @property
    def partitions(self) -> int:
        """The number of partitions."""
        return len(self.offsets)

    @property
    def records(self) -> int:
        """The number of records, exact if offsets have no gaps."""
        return sum(end - first for first, end in self.offsets.values())


@dataclass(frozen=True, slots=True)
class GroupPositions:
    """Where a group of readers resumes in a topic."""

    offsets: Mapping[int, int]
    """The next offset by partition."""
    run: str = ""
    """The id of the run that has committed them; empty if another program has."""
    identities: Mapping[int, str] = field(default_factory=dict)
    """The topic that the offsets belong to, as `TopicReader.identities` returns it. Kafka's brokers need none: they
    drop the offsets of a group together with the topic."""


class Connector(abc.ABC):
    """The class that an entry point of the group ``streamiter.topics`` names. Its name is a URL scheme."""

    @abc.abstractmethod
    def topic(self, url: str, options: Mapping[str, object]) -> Topic:
        """Return the topic at ``url``; raise ``ConfigurationError`` for an unknown option, listing the known ones."""

    @abc.abstractmethod
    async def list_topics(self, url: str, options: Mapping[str, object]) -> list[str]:
        """Return the names of the topics of the server or file at ``url``, which may name no topic."""


StartPosition = Literal["earliest", "latest"] | Mapping[int, int] | datetime
"""Where reading begins: at the earliest or after the latest record, at an offset for each partition, or at the first
record of a time or later (an aware datetime). A partition that a mapping lacks begins at its earliest record."""

SourceStart = StartPosition | Literal["committed"]
"""Where the source of a flow begins: at a position, or where its consumer group has committed to resume."""

StopPosition = Literal["latest"] | Mapping[int, int] | None
"""Where reading ends: never (None), at the last stable offset that the topic has when the reader is opened, or before
an offset for each partition. A partition that a mapping does not name is not read."""


@dataclass(frozen=True, slots=True)
class ReadRequest:
    """What one reader reads: the partitions p with p mod ``subtasks`` = ``subtask``, between two positions."""

    subtask: int = 0
    """The subtask of the reader."""
    subtasks: int = 1
    """The number of subtasks that share the partitions."""
    start: StartPosition = "earliest"
    """Where reading begins, without ``positions``."""
    stop: StopPosition = None
    """Where reading ends."""
    positions: Mapping[int, int] | None = None
    """The next offset by partition, from a snapshot; takes precedence over ``start``. A partition that it does not
    name is new and is read from its earliest record."""
    identities: Mapping[int, str] | None = None
    """The topic to which the offsets of ``positions``, or of a ``start`` by partition, belong: the text for each
    partition that `TopicReader.identities` or a description has returned. If the topic was deleted and created again
    since, opening or reading raises :class:`~streamiter.errors.OffsetOutOfRange`."""
    max_records: int = BATCH_RECORDS
    """The largest number of records in a batch."""
    refresh_s: float = 30.0
    """Partitions that the topic gains are found within this many seconds, and are read from their earliest record."""
    clock: Clock = field(default_factory=SystemClock)
    """The clock of the job."""


class TopicReader(abc.ABC):
    """Reads a share of a topic's partitions. Only one task uses it. It fetches ahead by a bounded amount."""

    @abc.abstractmethod
    async def read(self) -> TopicBatch | None:
        """Wait for records, and return the next ones of one partition, at least one; return None at the end.

        A cancellation loses no records. Partitions with records take turns. All records of a batch are in one
        partition. There is an end only with a stop position.
        """

    @abc.abstractmethod
    def positions(self) -> Mapping[int, int]:
        """Return the next offset of each partition of the share, after the records that ``read`` has returned."""

    def identities(self) -> Mapping[int, str]:
        """Return a text for each partition that tells the topic from others of its name, for a later request.

        A topic that was deleted and created again has other identities. A restart or a move of its server, retention
        and added partitions do not change them. A partition is missing where its identity is not known.
        """
        return {}

    @abc.abstractmethod
    def lag(self) -> Mapping[int, int]:
        """Return the number of records that ``read`` has not returned yet, by partition, as far as known."""

    def unanswered_since_s(self) -> float | None:
        """Return since when a server owes an answer for a partition, by the clock's seconds; None if none is owed.

        An empty answer counts: it proves that an idle topic is idle. A reader without a server is owed none.
        """
        return None

    @abc.abstractmethod
    async def close(self) -> None:
        """Release the server or file. May be called more than once."""


Headers = tuple[tuple[str, bytes | None], ...]
"""Pairs of name and value, in order; a name may occur more than once. Kafka lets a value be null."""


@dataclass(frozen=True, slots=True)
class TopicRecord:
    """One record of a topic, for tools and tests. The engine uses :class:`TopicBatch`."""

    partition: int
    offset: int
    timestamp_ms: int
    key: bytes | None
    value: bytes | None
    headers: Headers = ()


class _RecordsInColumns(Generic[_Part]):
    """Records in columns, of which the values are one."""

    __slots__ = ()
    values: Sequence[bytes | None]

    @property
    def nbytes(self) -> int:
        """The estimated size of the values."""
        return estimated_bytes(self.values)

    def __len__(self) -> int:
        return len(self.values)

    def __getitem__(self, which: slice) -> _Part:
        """Return the records of a slice."""
        return self._part(lambda column: column[which])

    def take(self, indices: Sequence[int]) -> _Part:
        """Return the records at ``indices``, in that order."""
        return self._part(lambda column: [column[index] for index in indices])

    def _part(self, part_of: _PartOf) -> _Part:
        """Return the records whose part of each column ``part_of`` returns."""
        raise NotImplementedError


class TopicBatch(_RecordsInColumns["TopicBatch"]):
    """Records of one partition in offset order, kept as columns.

    A connector may subclass it, to build columns that are rarely used only when they are needed.

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
        """The offset of each record; counted from 0 where none were given."""
        return self._offsets if self._offsets is not None else range(len(self.values))

    @property
    def timestamps_ms(self) -> Sequence[int]:
        """Milliseconds since 1970-01-01 UTC; zeros where none were given."""
        return self._timestamps_ms if self._timestamps_ms is not None else [0] * len(self.values)

    @property
    def keys(self) -> Sequence[bytes | None]:
        """The key of each record, or None."""
        return self._keys if self._keys is not None else [None] * len(self.values)

    @property
    def headers(self) -> Sequence[Headers]:
        """The headers of each record; ``()`` for none."""
        return self._headers if self._headers is not None else [()] * len(self.values)

    @property
    def first_offset(self) -> int:
        """The offset of the first record."""
        return self.offsets[0]

    @property
    def next_offset(self) -> int:
        """The offset to read next after this batch."""
        return self.offsets[-1] + 1

    @property
    def last_timestamp_ms(self) -> int:
        """The time stamp of the last record; 0 where none was given."""
        return self._timestamps_ms[-1] if self._timestamps_ms is not None else 0

    def _part(self, part_of: _PartOf) -> TopicBatch:
        return TopicBatch(
            partition=self.partition,
            values=part_of(self.values),
            offsets=part_of(self.offsets),
            timestamps_ms=None if self._timestamps_ms is None else part_of(self._timestamps_ms),
            keys=None if self._keys is None else part_of(self._keys),
            headers=None if self._headers is None else part_of(self._headers),
        )

    @staticmethod
    def joined(parts: Sequence[TopicBatch]) -> TopicBatch:
        """Join one or more consecutive batches of a partition into one batch."""
        first = parts[0]
        if len(parts) == 1:
            return first
        lengths = [len(part) for part in parts]
        offsets = range(first.first_offset, parts[-1].next_offset)
        return TopicBatch(
            partition=first.partition,
            values=list(chain.from_iterable(part.values for part in parts)),
            offsets=offsets  # unless compaction has left gaps
            if len(offsets) == sum(lengths)
            else list(chain.from_iterable(part.offsets for part in parts)),
            timestamps_ms=joined_column([part._timestamps_ms for part in parts], lengths, 0),
            keys=joined_column([part._keys for part in parts], lengths, None),
            headers=joined_column([part._headers for part in parts], lengths, ()),
        )

    def records(self) -> list[TopicRecord]:
        """Return an object for each record."""
        columns = zip(self.offsets, self.timestamps_ms, self.keys, self.values, self.headers, strict=True)
        return [TopicRecord(self.partition, *fields) for fields in columns]


@dataclass(frozen=True, slots=True)
class OutgoingBatch(_RecordsInColumns["OutgoingBatch"]):
    """Records to write to a topic, as columns. A column that is None has no entry for any record."""

    values: Sequence[bytes | None]
    """The value of each record."""
    keys: Sequence[bytes | None] | None = None
    """The key of each record."""
    headers: Sequence[Headers] | None = None
    """The headers of each record."""
    timestamps_ms: Sequence[int] | None = None
    """The time stamp of each record, in milliseconds since 1970-01-01 UTC."""
    partition: int | None = None
    """The partition of all records. None lets the topic choose: a record with a key goes to the partition of its key
    (on Kafka the partition that the Java client's default partitioner chooses), other records go to any partition."""

    def plain(self) -> tuple[list[Any] | int | None, ...]:
        """Return the fields as plain data."""
        columns = (self.values, self.keys, self.headers, self.timestamps_ms)
        return *(None if column is None else list(column) for column in columns), self.partition

    def _part(self, part_of: _PartOf) -> OutgoingBatch:
        return replace(
            self,
            values=part_of(self.values),
            keys=None if self.keys is None else part_of(self.keys),
            headers=None if self.headers is None else part_of(self.headers),
            timestamps_ms=None if self.timestamps_ms is None else part_of(self.timestamps_ms),
        )


# A topic may add this much to the key and value of a record without headers: Kafka adds 92 bytes for batch and record.
_FRAMING_BYTES: Final = 128


def longest(column: Sequence[bytes | None] | None) -> int:
    """Return the length of the longest entry."""
    return max(map(len, filter(None, column or ())), default=0)


def _size_of(value: bytes | None, key: bytes | None, headers: Headers) -> int:
    return len(value or b"") + len(key or b"") + sum(len(name.encode()) + len(text or b"") for name, text in headers)


@dataclass(frozen=True, slots=True)
class SizeLimit:
    """The limit on the size of a record: at most ``size_bytes``, measured by ``size_of(value, key, headers)``.

    ``size_of`` adds up their bytes unless the topic measures in another way.

    >>> limit = SizeLimit(4)
    >>> limit.holds(b"abc", b"k", ()), limit.exceeded_by(OutgoingBatch([b"abcd", b"abcde"]))
    (True, {1: 5})
    """

    size_bytes: int
    size_of: Callable[[bytes | None, bytes | None, Headers], int] = _size_of

    def holds(self, value: bytes | None, key: bytes | None, headers: Headers) -> bool:
        """Return whether the topic takes such a record."""
        return self.size_of(value, key, headers) <= self.size_bytes

    def exceeded_by(self, batch: OutgoingBatch) -> dict[int, int]:
        """Return the size in bytes of each record of the batch that is too large, by index."""
        if not batch.headers and longest(batch.values) + longest(batch.keys) < self.size_bytes - _FRAMING_BYTES:
            return {}
        given = TopicBatch(values=batch.values, keys=batch.keys, headers=batch.headers)
        sizes = enumerate(map(self.size_of, given.values, given.keys, given.headers))
        return {index: size_bytes for index, size_bytes in sizes if size_bytes > self.size_bytes}


class TopicWriter(abc.ABC):
    """Writes to one topic. Only one task uses it. It holds a bounded number of bytes that are not stored yet."""

    @abc.abstractmethod
    async def write(self, batch: OutgoingBatch) -> None:
        """Take a batch to write. Waits only while too many bytes are not stored yet.

        Records with the same key, or the same explicit partition, keep their order. The failure of an earlier batch is
        raised here or by ``flush``.
        """

    async def check(self) -> None:
        """Raise the failure of an earlier batch, if there is one. A sink calls it soon after its last batch."""
        await self.flush()

    @abc.abstractmethod
    async def flush(self) -> None:
        """Wait until all written records are stored durably and readable."""

    def unanswered_since_s(self) -> float | None:
        """Return since when a server owes an answer, by the clock's seconds; None if none is owed."""
        return None

    @abc.abstractmethod
    async def close(self) -> None:
        """Flush, then release the server or file. May be called more than once."""


class Transactions(abc.ABC):
    """Writes to topics of one commit domain; the records of a transaction become visible together.

    Opening a transactional id fences the writer that opened it before. The older writer's open transaction is
    aborted, and its next call that reaches the server or file, at the latest ``commit``, raises
    :class:`~streamiter.errors.ProducerFenced`. A transaction that was aborted because it was open for longer than its
    timeout raises :class:`~streamiter.errors.TransactionExpired` instead. A server may answer both in the same way.
    Then the time decides: a transaction that was open for longer than its timeout raises ``TransactionExpired``, even
    if a newer writer owns the id by then. So after that error, open the id again only if it is known from another
    source that no newer writer has. After either error, all further calls fail.

    Make one call at a time; the calls may come from several tasks of one event loop.
    """

    @abc.abstractmethod
    async def begin(self) -> None:
        """Begin a transaction. No other may be open."""

    @abc.abstractmethod
    async def write(self, topic: Topic, batch: OutgoingBatch) -> None:
        """Write within the open transaction, to a topic of the same commit domain.

        Returns when the records are taken, before they are stored. A later failure is raised by a later call of
        ``write``, or by ``commit``. After ``StorageFull`` the batch is part of the transaction: do not write it again.
        """

    async def commit_positions(self, topic: Topic, group: str, positions: GroupPositions) -> None:
        """Store within the open transaction where ``group`` resumes in a topic of the same commit domain.

        Only called if the topic ``keeps_positions``.
        """
        raise NotImplementedError

    @abc.abstractmethod
    async def commit(self) -> None:
        """Make all records of the transaction visible, durably and at once.

        When it returns, they are visible. After ``StorageFull``, and after the ``TopicUnavailable`` of a locked SQLite
        file, no record is committed and the transaction is still open: call ``commit`` again, or ``abort``.

        After any other error, a fence and a cancellation included, it is *not known* whether the transaction was
        committed, because the answer may have been lost. To find out, first open new transactions with the same id,
        which ends the old one. **Then** read whether a record of the transaction is in its topic
        (:func:`streamiter.topics.compacted.last_value`). Never take the error for "not committed".
        """

    @abc.abstractmethod
    async def abort(self) -> None:
        """Drop all records of the transaction."""

    def unanswered_since_s(self) -> float | None:
        """Return since when a server owes an answer, by the clock's seconds; None if none is owed."""
        return None

    @abc.abstractmethod
    async def close(self) -> None:
        """Abort the open transaction, then release the server or file. May be called more than once."""


class Decoder(Protocol):
    """Turns the values of a topic into a batch: one record for each value, in the same order.

    A decoder may have a method ``ahead(batch)`` as well. It returns None, or a function that does a part of ``decode``.
    A source calls that function in a thread before ``decode``, while the event loop runs other steps.

    A decoder that asks a server has an asynchronous method ``before_decoding(batch, clock)``. A source awaits it for
    each batch; it may be called, and cancelled, more than once for a batch. Statistics count no record of a decoder
    with ``brings_events = False`` as an event.

    A decoder with a method ``parts(batch)`` decodes each of the batches that it returns on its own.
    """

    def decode(self, batch: TopicBatch) -> Batch:
        """Return the records; raise :class:`~streamiter.errors.DecodeError` that names every bad value of the batch."""


class Encoder(Protocol):
    """Turns a batch into values of a topic: one value for each record, in the same order.

    An encoder that asks a server has an asynchronous method ``encoder_for(topic, clock)``, which returns the encoder of
    the topic of that name. A sink awaits it when it is opened.
    """

    def encode(self, batch: Batch) -> OutgoingBatch:
        """Return the values; raise :class:`~streamiter.errors.EncodeError` that names every bad record of the batch."""
