"""Records as they came off the wire, seen as columns."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

from streamiter.errors import ConfigurationError, TopicError
from streamiter.topics.topic import Headers, TopicBatch
from streamiter_kafka.wire import (
    ABORT_MARKER,
    ControlRecord,
    KafkaRecord,
    MemoryRecords,
    UnsupportedCodecError,
)

__all__ = [
    "KafkaBatch",
    "ReadPartition",
]


class KafkaBatch(TopicBatch):
    """Records of one partition; only the values are taken out of them at once.

    Most flows look at nothing else, and a list for each column would cost more than the reading.
    """

    __slots__ = ("_records",)

    def __init__(self, partition: int, records: list[KafkaRecord]) -> None:
        super().__init__(partition=partition, values=[record.value for record in records])
        self._records = records

    @property
    def offsets(self) -> Sequence[int]:
        if self._offsets is None:
            self._offsets = [record.offset for record in self._records]
        return self._offsets

    @property
    def timestamps_ms(self) -> Sequence[int]:
        if self._timestamps_ms is None:
            self._timestamps_ms = [record.timestamp for record in self._records]
        return self._timestamps_ms

    @property
    def keys(self) -> Sequence[bytes | None]:
        if self._keys is None:
            self._keys = [record.key for record in self._records]
        return self._keys

    @property
    def headers(self) -> Sequence[Headers]:
        if self._headers is None:
            self._headers = [_headers(record.headers) for record in self._records]
        return self._headers

    @property
    def first_offset(self) -> int:
        return self._records[0].offset

    @property
    def next_offset(self) -> int:
        return self._records[-1].offset + 1

    def __getitem__(self, which: slice) -> KafkaBatch:
        return KafkaBatch(self.partition, self._records[which])

    def take(self, indices: Sequence[int]) -> KafkaBatch:
        return KafkaBatch(self.partition, [self._records[index] for index in indices])


def _headers(given: list[tuple[str, bytes | None]]) -> Headers:
    """Kafka lets a header be null, which no one needs to tell from an empty one."""
    return tuple((name, value or b"") for name, value in given) if given else ()


AbortedTransactions = list[tuple[int, int]]
"""Producer and first offset of each aborted transaction among the fetched records."""

# Of a record batch off the wire: aiokafka gives compiled and plain classes that have nothing in common.
WireBatch = Any


class ReadPartition:
    """Offsets and fetched record batches of one partition.

    ``next_offset`` is where ``take`` goes on, ``fetch_offset`` where the next fetch begins: behind all that
    was fetched, also behind what is never returned (transaction markers, aborted or compacted records).

    One partition while it is read: what was fetched and not yet returned, and where to fetch on.

    Nothing here does I/O.
    """

    def __init__(self, number: int, subject: str, offset: int, stop: int | None) -> None:
        self.number = number
        self.next_offset = offset
        self.fetch_offset = offset
        self.stable_offset = offset
        self.fetched_bytes = 0
        self._subject = subject
        self._stop = stop
        self._batches: deque[tuple[WireBatch, int]] = deque()
        self._opened: list[KafkaRecord] = []

    @property
    def has_records(self) -> bool:
        """Whether ``take`` may return something without another fetch."""
        return bool(self._opened or self._batches)

    @property
    def is_fetched(self) -> bool:
        """Whether nothing more is wanted of it: all before its stop position has been fetched."""
        return self._stop is not None and self.fetch_offset >= self._stop

    @property
    def is_finished(self) -> bool:
        """Whether all before its stop position has been returned."""
        return self.is_fetched and not self.has_records

    @property
    def is_behind(self) -> bool:
        """Whether the broker is known to have more than was fetched."""
        return self.fetch_offset < self.stable_offset and not self.is_fetched

    @property
    def position(self) -> int:
        """Where reading goes on. With nothing left to return, that is behind all that was fetched: what lies
        between is never seen, and a position there could fall out of retention for nothing.
        """
        if self.has_records:
            return self.next_offset
        # Beyond the stop position, records were fetched and dropped: a later run may want them.
        behind = self.fetch_offset if self._stop is None else min(self.fetch_offset, self._stop)
        return max(self.next_offset, behind)

    @property
    def lag(self) -> int:
        """Offsets between what was returned and the end, or the stop position."""
        end = self.stable_offset if self._stop is None else min(self.stable_offset, self._stop)
        return max(0, end - self.position)

    def add(
        self, asked_offset: int, fetched: bytes, aborted: AbortedTransactions | None, stable_offset: int
    ) -> None:
        """Take in an answer to a fetch at ``asked_offset``.

        It is dropped where that is not the next offset to fetch any more: while a leader moves, the old one and the
        new one may both have been asked, and the old one may not know yet what the new one has.
        """
        if asked_offset != self.fetch_offset:
            return
        self.stable_offset = stable_offset
        visible = VisibleBatches(aborted)
        records = MemoryRecords(fetched)
        wanted = []
        while records.has_next():
            batch = records.next_batch()
            if visible.includes(batch) and not self._is_outside(batch):
                wanted.append(batch)
            self.fetch_offset = max(self.fetch_offset, batch.next_offset)
        if wanted:
            # They share the memory of the answer: each is charged with its part.
            size_bytes = len(fetched) // len(wanted)
            self.fetched_bytes += size_bytes * len(wanted)
            self._batches.extend((batch, size_bytes) for batch in wanted)

    def take(self, max_records: int) -> list[KafkaRecord]:
        """The next records, at most that many; empty when all that was fetched is compacted away."""
        records = self._opened
        while len(records) < max_records and self._batches:
            records = [*records, *self._open_next()] if records else self._open_next()
        self._opened = records[max_records:]
        records = records[:max_records] if self._opened else records
        if records:
            self.next_offset = records[-1].offset + 1
        return records

    def _is_outside(self, batch: WireBatch) -> bool:
        """Whether all of it lies before the position or behind the stop."""
        if batch.next_offset <= self.fetch_offset:
            return True
        return self._stop is not None and _base_offset(batch) >= self._stop

    def _open_next(self) -> list[KafkaRecord]:
        batch, size_bytes = self._batches.popleft()
        self.fetched_bytes -= size_bytes
        records = self._opened_records(batch)
        # A fetch returns whole batches: the first may begin before the position, the last end behind the stop.
        if records and records[0].offset < self.next_offset:
            records = [record for record in records if record.offset >= self.next_offset]
        if self._stop is not None and records and records[-1].offset >= self._stop:
            records = [record for record in records if record.offset < self._stop]
        return records

    def _opened_records(self, batch: WireBatch) -> list[KafkaRecord]:
        if not batch.validate_crc():
            raise TopicError(
                f"{self._subject}, partition {self.number}: the record batch that ends before offset "
                f"{batch.next_offset} is damaged (its checksum is wrong); start behind it to skip it"
            )
        try:
            return list(batch)
        except UnsupportedCodecError as error:
            raise ConfigurationError(
                f"{self._subject}, partition {self.number}: {error}; install it with: "
                "pip install 'streamiter[kafka]'"
            ) from None


class VisibleBatches:
    """Tells the batches of one fetch that may be read from markers and aborted transactions."""

    def __init__(self, aborted: AbortedTransactions | None) -> None:
        self._upcoming = deque(sorted(aborted or (), key=lambda transaction: transaction[1]))
        self._aborted_producers: set[int] = set()

    def includes(self, batch: WireBatch) -> bool:
        """Whether ``batch`` holds records for a reader; asked for each batch in order."""
        if batch.is_control_batch:
            self._end_transaction(batch)
            return False
        if not self._upcoming and not self._aborted_producers:
            return True
        self._begin_transactions(_base_offset(batch))
        return not (batch.is_transactional and batch.producer_id in self._aborted_producers)

    def _begin_transactions(self, offset: int) -> None:
        while self._upcoming and self._upcoming[0][1] <= offset:
            self._aborted_producers.add(self._upcoming.popleft()[0])

    def _end_transaction(self, marker: WireBatch) -> None:
        self._begin_transactions(_base_offset(marker))
        if ControlRecord.parse(next(marker).key) == ABORT_MARKER:
            self._aborted_producers.discard(marker.producer_id)


def _base_offset(batch: WireBatch) -> int:
    """Batches of the formats before Kafka 0.11 do not say where they begin; they have one record each."""
    return int(getattr(batch, "base_offset", batch.next_offset - 1))
