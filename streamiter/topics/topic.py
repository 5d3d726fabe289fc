"""The Topic protocol: what every connector implements and one contract test suite checks.

A topic is a durable log in partitions. A record has a partition, an offset in it (growing, with gaps
allowed), a time stamp, and optionally a key, a value and headers. Reading is by partition and offset,
*read committed*: records of a transaction are seen once it is committed, those of an aborted one never.
"""

from __future__ import annotations

import abc
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from types import MappingProxyType
from typing import ClassVar, Final, Literal, Protocol

from streamiter.clock import Clock, SystemClock
from streamiter.records import Batch, estimated_bytes

__all__ = [
    "Connector",
    "Decoder",
    "Encoder",
    "Headers",
    "OutgoingBatch",
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
        transaction is there (:func:`streamiter.topics.last_value.last_value`). Never take the error for
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
