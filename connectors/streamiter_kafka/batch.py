"""Records as they came off the wire, seen as columns."""

from __future__ import annotations

from collections.abc import Sequence

from streamiter.topics.topic import Headers, TopicBatch
from streamiter_kafka.wire import Record

__all__ = ["KafkaBatch"]


class KafkaBatch(TopicBatch):
    """Records of one partition; only the values are taken out of them at once.

    Most flows look at nothing else, and a list for each column would cost more than the reading.
    """

    __slots__ = ("_records",)

    def __init__(self, partition: int, records: list[Record]) -> None:
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
