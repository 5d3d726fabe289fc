"""From outgoing records to record batches: which partition, which size, which bytes.

`Packing` distributes the records of a batch over the partitions of a topic, by the same hash of the key as the default
partitioner of the Java client: so equal keys meet in one partition, whichever client writes them. A `PartitionQueue`
holds the record batches of one partition that are not stored yet. Nothing here does I/O.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain, repeat
from types import MappingProxyType
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from streamiter.errors import ProducerFenced, RecordTooLarge, StreamiterError, TopicError, TransactionExpired
from streamiter.topics.connecting import check_outgoing
from streamiter.topics.topic import Headers, OutgoingBatch, SizeLimit, longest
from streamiter_kafka.cluster import NO_LEADER
from streamiter_kafka.trouble import BrokerTrouble, Code, error_of_code
from streamiter_kafka.wire import RecordBatchBuilder, murmur2

# From org.apache.kafka.common.utils.Utils.murmur2.
_SEED: Final = 0x9747B28C
_M: Final = 0x5BD1E995
_R: Final = 24
_POSITIVE: Final = 0x7FFFFFFF

# For fewer keys, arranging them for numpy takes longer than hashing them one by one.
_FEW_KEYS: Final = 8

Words = npt.NDArray[np.uint32]


def partitions_of_keys(keys: Sequence[bytes], partitions: int) -> list[int]:
    """Return the partition of each key.

    >>> partitions_of_keys([b"21", b"foobar", b"21"], 10)
    [0, 6, 0]
    """
    if partitions == 1:
        return [0] * len(keys)
    if len(keys) < _FEW_KEYS:
        return [(murmur2(key) & _POSITIVE) % partitions for key in keys]
    hashes = _murmur2_of_many(keys)
    positive = (hashes & np.uint32(_POSITIVE)) % np.uint32(partitions)
    result: list[int] = positive.tolist()
    return result


def _murmur2_of_many(keys: Sequence[bytes]) -> Words:
    """Hash the keys of one length together, one length after the other."""
    hashes = np.empty(len(keys), np.uint32)
    lengths = np.fromiter(map(len, keys), np.intp, len(keys))
    for length in np.unique(lengths).tolist():
        where = np.flatnonzero(lengths == length)
        hashes[where] = _murmur2_of_length([keys[index] for index in where.tolist()], length)
    return hashes


def _murmur2_of_length(keys: Sequence[bytes], length: int) -> Words:
    m, words = np.uint32(_M), _words(keys, length)
    value = np.full(len(keys), _SEED ^ length, np.uint32)
    for column in range(length // 4):
        word = words[:, column] * m
        value = (value * m) ^ ((word ^ (word >> np.uint32(_R))) * m)
    if length % 4:
        value = (value ^ words[:, -1]) * m
    value = (value ^ (value >> np.uint32(13))) * m
    result: Words = value ^ (value >> np.uint32(15))
    return result


def _words(keys: Sequence[bytes], length: int) -> Words:
    """Return the keys as rows of little-endian numbers; the last number of a row is filled up with zeros."""
    padded = np.zeros((len(keys), -(-length // 4) * 4), np.uint8)
    padded[:, :length] = np.frombuffer(b"".join(keys), np.uint8).reshape(len(keys), length)
    return padded.view("<u4").astype(np.uint32, copy=False)


DEFAULT_LIMIT_BYTES: Final = 1_048_588
"""The largest record batch of a topic without the setting ``max.message.bytes``."""

_FORMAT: Final = 2
_CODECS: Final[Mapping[str, int]] = MappingProxyType({"none": 0, "gzip": 1, "snappy": 2, "lz4": 3, "zstd": 4})
_BATCH_HEADER_BYTES: Final = 61
# The size of a record besides key, value and headers: at most 21 bytes, and 5 for each length.
_RECORD_OVERHEAD_BYTES: Final = 64
# A batch that does not compress grows by up to half a percent.
_LARGEST_PART_OF_LIMIT: Final = 0.95
_MAX_SEQUENCE: Final = 2**31


RecordToPack = tuple[bytes | None, bytes | None, list[tuple[str, bytes | None]], int]
"""Value, key, headers and time of a record, as the builder of record batches takes them."""


class ProducerIdentity(NamedTuple):
    """The id and the epoch by which a broker recognizes a batch that is sent again; -1 for no recognition."""

    number: int = -1
    epoch: int = -1
    transactional_id: str | None = None
    has_version_2: bool = False
    """Whether its transactions have version 2 (KIP-890): each end raises the epoch, and records join by themselves."""


class PendingBatch:
    """A record batch that is not stored yet. It takes records until it is sealed for the first attempt to send it."""

    __slots__ = ("_builder", "_sealed", "base_sequence", "count", "is_full", "size_bytes")

    def __init__(self, builder: RecordBatchBuilder) -> None:
        self._builder = builder
        self._sealed: bytes | None = None
        self.count = 0
        self.size_bytes = 0
        self.base_sequence = 0
        self.is_full = False

    @property
    def is_open(self) -> bool:
        """Whether the batch takes more records."""
        return self._sealed is None and not self.is_full

    @property
    def is_sealed(self) -> bool:
        """Whether an attempt to send the batch may have begun."""
        return self._sealed is not None

    def fill(self, rows: Iterable[RecordToPack]) -> RecordToPack | None:
        """Take rows of value, key, headers and time until the batch is full; return the row that did not fit."""
        append, offset = self._builder.append, self.count
        left = None
        for value, key, headers, timestamp_ms in rows:
            if append(offset, timestamp_ms, key, value, headers) is None:
                left = (value, key, headers, timestamp_ms)
                break
            offset += 1
        self.is_full = left is not None
        self.count, self.size_bytes = offset, self._builder.size()
        return left

    def size_of_first(self, row: RecordToPack) -> int:
        """Return the size in bytes of ``row`` as the first record of a batch."""
        value, key, headers, timestamp_ms = row
        return int(self._builder.size_in_bytes(0, timestamp_ms, key, value, headers))

    def seal(self, producer: ProducerIdentity, base_sequence: int) -> bytes:
        """Return the bytes of the batch. They are the same for each attempt to send it."""
        if self._sealed is None:
            self.base_sequence = base_sequence
            self._builder.set_producer_state(producer.number, producer.epoch, base_sequence)
            self._sealed = self._builder.build()
        return self._sealed

    @property
    def next_sequence(self) -> int:
        """The sequence number of the record after the batch."""
        return (self.base_sequence + self.count) % _MAX_SEQUENCE


class Packing:
    """Packs the records for one topic."""

    def __init__(
        self, topic: str, limit_bytes: int, *, compression: str, max_batch_bytes: int, transactional: bool
    ) -> None:
        self.topic = topic
        self.limit_bytes = limit_bytes
        self._codec = _CODECS[compression]
        self._batch_bytes = min(max_batch_bytes, int(limit_bytes * _LARGEST_PART_OF_LIMIT))
        self._transactional = transactional
        self._turn = 0

    def new_batch(self) -> PendingBatch:
        """Return an empty record batch."""
        return PendingBatch(RecordBatchBuilder(_FORMAT, self._codec, self._transactional, -1, -1, 0, self._batch_bytes))

    def size_limit(self) -> SizeLimit:
        """Return the limit for one record: its size alone in a batch, compressed if it is too large otherwise."""
        return SizeLimit(self.limit_bytes, self._size_alone)

    def _size_alone(self, value: bytes | None, key: bytes | None, headers: Headers) -> int:
        alone = self.new_batch()
        row = (value, key, list(headers), 0)
        size_bytes = _BATCH_HEADER_BYTES + alone.size_of_first(row)
        if size_bytes <= self.limit_bytes or not self._codec:
            return size_bytes
        alone.fill([row])
        return len(alone.seal(ProducerIdentity(), 0))

    def spread(self, batch: OutgoingBatch, leaders: Mapping[int, int]) -> list[tuple[int, OutgoingBatch]]:
        """Check the batch and return its parts by partition.

        A record with a key goes to the partition of the key. The records without a key go together to the next
        partition in turn. Raises ``TopicError`` or ``RecordTooLarge``; then no record of the batch may be written.
        """
        check_outgoing(batch, topic=self.topic, partitions=len(leaders))
        self._check_sizes(batch)
        if batch.partition is not None:
            return [(batch.partition, batch)]
        if batch.keys is None:
            return [(self._next_in_turn(leaders), batch)]
        return self._by_key(batch, batch.keys, leaders)

    def _next_in_turn(self, leaders: Mapping[int, int]) -> int:
        """Return the next partition in turn; skip partitions without a leader, which take no records now."""
        led = [number for number, leader in leaders.items() if leader != NO_LEADER] or list(leaders)
        self._turn += 1
        return led[self._turn % len(led)]

    def _by_key(
        self, batch: OutgoingBatch, keys: Sequence[bytes | None], leaders: Mapping[int, int]
    ) -> list[tuple[int, OutgoingBatch]]:
        if len(leaders) == 1:
            return [(0, batch)]
        numbers = partitions_of_keys([key or b"" for key in keys], len(leaders))
        if None in keys:
            unkeyed = self._next_in_turn(leaders)
            numbers = [unkeyed if key is None else number for key, number in zip(keys, numbers, strict=True)]
        indices: dict[int, list[int]] = {}
        for index, number in enumerate(numbers):
            indices.setdefault(number, []).append(index)
        return [(number, batch.take(chosen)) for number, chosen in indices.items()]

    def _check_sizes(self, batch: OutgoingBatch) -> None:
        # Records that compress well may be larger; the batch is measured after compression.
        if self._codec or not len(batch):
            return
        largest_bytes = (
            longest(batch.values) + longest(batch.keys) + max(map(_most_bytes, batch.headers or ()), default=0)
        )
        if largest_bytes + _BATCH_HEADER_BYTES + _RECORD_OVERHEAD_BYTES > self.limit_bytes:
            self._check_each_size(batch)

    def _check_each_size(self, batch: OutgoingBatch) -> None:
        empty = self.new_batch()
        for index, row in enumerate(rows(batch, 0)):
            size_bytes = _BATCH_HEADER_BYTES + empty.size_of_first(row)
            if size_bytes > self.limit_bytes:
                raise RecordTooLarge(
                    f"topic {self.topic!r}: record {index} of the batch{_named(row[1])} takes {size_bytes} bytes, "
                    f"expected at most {self.limit_bytes} (the topic's setting max.message.bytes); nothing of "
                    "the batch was written"
                )


def rows(batch: OutgoingBatch, now_ms: int) -> Iterable[RecordToPack]:
    """Return value, key, headers and time of each record, as the builder of record batches takes them."""
    no_headers: list[tuple[str, bytes | None]] = []
    return zip(
        batch.values,
        repeat(None) if batch.keys is None else batch.keys,
        repeat(no_headers) if batch.headers is None else map(list, batch.headers),
        repeat(now_ms) if batch.timestamps_ms is None else batch.timestamps_ms,
        strict=False,  # repeat has no end
    )


def _most_bytes(headers: Headers) -> int:
    """Return the most bytes that these headers can have: four for each character of a name, five for each length."""
    return sum([4 * len(name) + len(value or b"") + 10 for name, value in headers])


def _named(key: bytes | None) -> str:
    return "" if key is None else f" (key {key[:40]!r})"


PartitionKey = tuple[str, int]
"""Topic and partition."""


class PartitionQueue:
    """The record batches of one partition that are not stored yet, in order and numbered."""

    def __init__(self, packing: Packing, number: int) -> None:
        self.packing = packing
        self.key: PartitionKey = (packing.topic, number)
        self.batches: deque[PendingBatch] = deque()
        self.next_sequence = 0
        self.is_sending = False
        self.opened_s = 0.0

    def put(self, batch: OutgoingBatch, now_ms: int) -> int:
        """Append records; return the number of bytes that they add."""
        remaining = iter(rows(batch, now_ms))
        added_bytes = 0
        while True:
            pending = self._open_batch()
            before_bytes = pending.size_bytes
            left = pending.fill(remaining)
            added_bytes += pending.size_bytes - before_bytes
            if left is None:
                return added_bytes
            remaining = chain([left], remaining)

    def seal(self, producer: ProducerIdentity) -> bytes:
        """Return the bytes of the first batch; its sequence numbers follow those of the batch before."""
        head = self.batches[0]
        if not head.is_sealed:
            head.seal(producer, self.next_sequence)
            self.next_sequence = head.next_sequence
        return head.seal(producer, head.base_sequence)

    def take_back(self) -> PendingBatch:
        """Remove the first batch, which the broker has refused, and reuse its sequence numbers."""
        head = self.batches.popleft()
        self.next_sequence = head.base_sequence
        return head

    def _open_batch(self) -> PendingBatch:
        if not self.batches or not self.batches[-1].is_open:
            self.batches.append(self.packing.new_batch())
        return self.batches[-1]


_TOO_LARGE: Final = frozenset({Code.MESSAGE_TOO_LARGE, Code.RECORD_LIST_TOO_LARGE})
_FENCED: Final = frozenset({Code.INVALID_PRODUCER_EPOCH, Code.PRODUCER_FENCED})


def produce_refusal(
    code: int, batch: PendingBatch, producer: ProducerIdentity, subject: str
) -> BrokerTrouble | StreamiterError:
    """Return the exception for an error code in the answer to ``batch``."""
    if code in _TOO_LARGE:
        what = "a record" if batch.count == 1 else f"a batch of {batch.count} records"
        return RecordTooLarge(
            f"{subject}: {what} of {batch.size_bytes} bytes before compression is more than the broker takes; "
            "raise the topic's max.message.bytes or lower the option max_batch_bytes"
        )
    if lost := loss_of_id(code, producer, subject):
        return lost
    if code == Code.OUT_OF_ORDER_SEQUENCE_NUMBER:
        return TopicError(
            f"{subject}: the broker lacks records that it had confirmed to this writer "
            "(OUT_OF_ORDER_SEQUENCE_NUMBER); it lost them, perhaps by an unclean election of a leader"
        )
    if code == Code.INVALID_RECORD:
        return TopicError(
            f"{subject}: the broker refused a record as invalid; a compacted topic takes only records with keys"
        )
    return error_of_code(code, subject)


def loss_of_id(code: int, producer: ProducerIdentity, subject: str) -> ProducerFenced | None:
    """Return the exception for an error code that says that the producer does not have its id any more."""
    if code in _FENCED:
        owned = f"the transactional id {producer.transactional_id!r} belongs to a newer writer"
        return ProducerFenced(f"{subject}: {owned}")
    if code == Code.INVALID_PRODUCER_ID_MAPPING:
        return TransactionExpired(
            f"{subject}: the broker does not know the transactional id any more, which was not used "
            "for longer than its transactional.id.expiration.ms; open new transactions"
        )
    return None
