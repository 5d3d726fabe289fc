"""The fetched records of one partition.

A `ReadPartition` holds the record batches that were fetched and not yet returned; it does no I/O. Plain records become
columns at once (:mod:`streamiter_kafka.record_columns`). A `KafkaBatch` shows all other records as columns.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from streamiter.errors import ConfigurationError, TopicError
from streamiter.topics.topic import Headers, TopicBatch
from streamiter.values.helpers.compiled import is_loaded, saying_that_it_compiles
from streamiter_kafka.wire import (
    ABORT_MARKER,
    ControlRecord,
    KafkaRecord,
    MemoryRecords,
    UnsupportedCodecError,
    WireBatch,
    fetched_batch_bytes,
)

if TYPE_CHECKING:
    from streamiter_kafka.record_columns import LocatedRecords

# The records of smaller answers are parsed one by one, and several answers are joined to one batch. An answer with so
# many records is a batch of its own; a flow's costs for a batch are then small for each record.
_LOCATED_FROM: Final = 1_000

AbortedTransactions = list[tuple[int, int]]
"""Producer and first offset of each aborted transaction among the fetched records."""


class FetchedAnswer(NamedTuple):
    """The wanted record batches of an answer, all of which share its memory."""

    fetched: bytes
    """The answer."""
    starts: Sequence[int]
    """The index of the first byte of each wanted batch."""
    batches: Sequence[WireBatch]
    """The wanted batches."""

    @property
    def share_bytes(self) -> int:
        """The part of the answer with which each batch counts."""
        return len(self.fetched) // len(self.batches)


class ReadPartition:
    """The offsets of one partition, and its record batches that were fetched and not yet returned.

    ``take`` returns records from ``next_offset`` on. The next fetch begins at ``fetch_offset``: after all fetched
    batches, those that are never returned included (transaction markers, aborted and compacted records).
    """

    def __init__(self, number: int, subject: str, offset: int, stop: int | None) -> None:
        self.number = number
        self.next_offset = offset
        self.fetch_offset = offset
        self.stable_offset = offset
        self.fetched_bytes = 0
        self._subject = subject
        self._stop = stop
        # A fetched record is in one of these, in this order. Batches or located records are of one answer.
        self._opened: list[KafkaRecord] = []
        self._batches: deque[tuple[WireBatch, int]] = deque()
        self._located: LocatedRecords | None = None
        self._answers: deque[FetchedAnswer] = deque()
        self._ahead: tuple[FetchedAnswer, LocatedRecords | None] | None = None
        """The next answer, with its records, if a thread has located them."""

    @property
    def held_bytes(self) -> int:
        """The bytes of memory of all records that were fetched and not yet returned."""
        return self.fetched_bytes + (self._located.nbytes if self._located else 0)

    @property
    def has_records(self) -> bool:
        """Whether ``take`` may return records without another fetch."""
        return bool(self._opened or self._batches or self._located or self._answers)

    @property
    def is_fetched(self) -> bool:
        """Whether all records before the stop position were fetched."""
        return self._stop is not None and self.fetch_offset >= self._stop

    @property
    def is_finished(self) -> bool:
        """Whether all records before the stop position were returned."""
        return self.is_fetched and not self.has_records

    @property
    def is_behind(self) -> bool:
        """Whether the broker is known to have records that were not fetched."""
        return self.fetch_offset < self.stable_offset and not self.is_fetched

    @property
    def position(self) -> int:
        """The offset at which reading resumes.

        When no fetched record is left to return, this is the end of the fetched batches: the offsets before it hold no
        visible record, and a position among them could fall out of retention for no reason.
        """
        if self.has_records:
            return self.next_offset
        # Records after the stop position were fetched and dropped; a later run may read them.
        behind = self.fetch_offset if self._stop is None else min(self.fetch_offset, self._stop)
        return max(self.next_offset, behind)

    @property
    def lag(self) -> int:
        """The number of offsets between the position and the end, or the stop position."""
        end = self.stable_offset if self._stop is None else min(self.stable_offset, self._stop)
        return max(0, end - self.position)

    def add(self, asked_offset: int, fetched: bytes, aborted: AbortedTransactions | None, stable_offset: int) -> None:
        """Add the answer to a fetch at ``asked_offset``.

        The answer is dropped if that is not the next offset to fetch any more. While the leadership of a partition
        moves, both leaders may have been asked, and the old leader may lack records that the new leader has.
        """
        if asked_offset != self.fetch_offset:
            return
        self.stable_offset = stable_offset
        visible = VisibleBatches(aborted)
        records = MemoryRecords(fetched)
        wanted, starts, start = [], [], 0
        while records.has_next():
            batch = records.next_batch()
            if visible.includes(batch) and not self._is_outside(batch):
                wanted.append(batch)
                starts.append(start)
            start += fetched_batch_bytes(fetched, start)
            self.fetch_offset = max(self.fetch_offset, batch.next_offset)
        if wanted:
            answer = FetchedAnswer(fetched, starts, wanted)
            self.fetched_bytes += answer.share_bytes * len(wanted)
            self._answers.append(answer)

    def locating(self, max_records: int) -> Callable[[], None] | None:
        """Return the part of the next ``take`` that runs in a thread, while other tasks run; None if there is none."""
        if self._opened or self._batches or self._located or not self._answers:
            return None
        answer = self._answers[0]
        if (self._ahead is not None and self._ahead[0] is answer) or not (locate := self._locate(answer, max_records)):
            return None

        def work() -> None:
            self._ahead = answer, locate()

        return work

    def take(self, max_records: int) -> TopicBatch | None:
        """Return the next records, at most that many; None if compaction has dropped all fetched records.

        Located records are in batches of the number that was asked for when they were located.
        """
        batch: TopicBatch
        records = self._opened
        while len(records) < max_records and self._has_batches(max_records):
            records = [*records, *self._open_next()] if records else self._open_next()
        if records:
            self._opened = records[max_records:]
            batch = KafkaBatch(self.number, records[:max_records] if self._opened else records)
        elif self._located:
            batch = self._located.take()
            self._located = self._located or None
        else:
            return None
        self.next_offset = batch.next_offset
        return batch

    def _has_batches(self, max_records: int) -> bool:
        """Whether there is a record batch to parse, after opening the next answer if nothing else is left."""
        while self._answers and not self._batches and not self._located:
            answer = self._answers.popleft()
            if self._ahead is not None and self._ahead[0] is answer:
                located = self._ahead[1]
            else:
                locate = self._locate(answer, max_records)
                located = None if locate is None else locate()
            self._ahead = None
            # Few records are joined to larger batches; a compacted topic has few in many offsets.
            if located is None or 0 < len(located) < _LOCATED_FROM:
                self._batches.extend((batch, answer.share_bytes) for batch in answer.batches)
            else:
                self._located = located or None
                self.fetched_bytes -= answer.share_bytes * len(answer.batches)
        return bool(self._batches)

    def _locate(self, answer: FetchedAnswer, max_records: int) -> Callable[[], LocatedRecords | None] | None:
        """Return the function that locates the records of an answer; None if they are few, and parsed one by one.

        It returns None for an answer that is not plain, or damaged.
        """
        batches = answer.batches
        if batches[-1].next_offset - _base_offset(batches[0]) < _LOCATED_FROM or not is_loaded():
            return None
        between = self.next_offset, self._stop
        return partial(compiled_locate(), self.number, answer.fetched, answer.starts, batches, between, max_records)

    def _is_outside(self, batch: WireBatch) -> bool:
        """Whether all records of the batch are before the position or after the stop."""
        if batch.next_offset <= self.fetch_offset:
            return True
        return self._stop is not None and _base_offset(batch) >= self._stop

    def _open_next(self) -> list[KafkaRecord]:
        batch, size_bytes = self._batches.popleft()
        self.fetched_bytes -= size_bytes
        records = self._opened_records(batch)
        # A fetch returns whole batches: the first may begin before the position, the last may end after the stop.
        if records and records[0].offset < self.next_offset:
            records = [record for record in records if record.offset >= self.next_offset]
        if self._stop is not None and records and records[-1].offset >= self._stop:
            records = [record for record in records if record.offset < self._stop]
        return records

    def _opened_records(self, batch: WireBatch) -> list[KafkaRecord]:
        if not batch.validate_crc():
            raise TopicError(
                f"{self._subject}, partition {self.number}: the record batch that ends before offset "
                f"{batch.next_offset} is damaged (its checksum is wrong); start at that offset to skip the batch"
            )
        try:
            return list(batch)
        except UnsupportedCodecError as error:
            raise ConfigurationError(
                f"{self._subject}, partition {self.number}: {error}; install it with: pip install 'streamiter[kafka]'"
            ) from None


@cache
def compiled_locate() -> Callable[..., LocatedRecords | None]:
    """Return the function that locates the plain records of an answer; the first call compiles it."""
    from streamiter_kafka import record_columns

    with saying_that_it_compiles("the reader of Kafka topics"):
        record_columns.compile_it()
    return record_columns.located_records


class VisibleBatches:
    """Selects the visible batches of one fetch: no markers, and no records of aborted transactions."""

    def __init__(self, aborted: AbortedTransactions | None) -> None:
        self._upcoming = deque(sorted(aborted or (), key=lambda transaction: transaction[1]))
        self._aborted_producers: set[int] = set()

    def includes(self, batch: WireBatch) -> bool:
        """Return whether ``batch`` has visible records. Call this for each batch, in order."""
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
    """Return the first offset. Batches of the formats before Kafka 0.11 do not hold it, and have one record each."""
    return int(getattr(batch, "base_offset", batch.next_offset - 1))


class KafkaBatch(TopicBatch):
    """Records of one partition as columns. Only the values are extracted at once.

    Most flows use no other column, and building the lists of all columns would cost more than the reading.
    """

    __slots__ = ("_records",)

    def __init__(self, partition: int, records: list[KafkaRecord]) -> None:
        super().__init__(partition=partition, values=[record.value for record in records])
        self._records = records

    @property
    def offsets(self) -> Sequence[int]:
        self._offsets = self._offsets or [record.offset for record in self._records]
        return self._offsets

    @property
    def timestamps_ms(self) -> Sequence[int]:
        self._timestamps_ms = self._timestamps_ms or [record.timestamp for record in self._records]
        return self._timestamps_ms

    @property
    def keys(self) -> Sequence[bytes | None]:
        self._keys = self._keys or [record.key for record in self._records]
        return self._keys

    @property
    def headers(self) -> Sequence[Headers]:
        self._headers = self._headers or [_headers(record.headers) for record in self._records]
        return self._headers

    @property
    def last_timestamp_ms(self) -> int:
        return self._records[-1].timestamp

    @property
    def first_offset(self) -> int:
        return self._records[0].offset

    @property
    def next_offset(self) -> int:
        return self._records[-1].offset + 1

    def _part(self, part_of: Callable[[Sequence[Any]], Sequence[Any]]) -> KafkaBatch:
        return KafkaBatch(self.partition, list(part_of(self._records)))


def _headers(given: list[tuple[str, bytes | None]]) -> Headers:
    return tuple(given) if given else ()
