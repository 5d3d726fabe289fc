"""One partition in memory: records in offset order, and the transactions they belong to.

Nothing here waits or does I/O. The broker's lock is held around every call.

>>> log = PartitionLog()
>>> transaction = Transaction()
>>> log.append(OutgoingBatch([b"a", b"b"]), [1, 1])
>>> log.append(OutgoingBatch([b"c"]), [2], transaction)
>>> [(part.offsets, part.values) for part in log.read(0, log.stable_offset, 10)[0]]
[(range(0, 2), [b'a', b'b'])]
>>> log.end_transaction(transaction, committed=True)
>>> [part.values for part in log.read(2, log.stable_offset, 10)[0]]
[[b'c']]
"""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

from streamiter.topics.compaction import COMPACTED_BLOCKS, is_superseded
from streamiter.topics.positions import PartitionEnds
from streamiter.topics.topic import OutgoingBatch, TopicBatch

__all__ = ["Part", "PartitionLog", "Transaction", "joined"]


class Transaction:
    """Whether the records that point to it may be seen."""

    __slots__ = ("is_aborted",)

    def __init__(self) -> None:
        self.is_aborted = False


@dataclass(frozen=True, slots=True)
class Part:
    """Records of consecutive offsets, written together; also a slice of them."""

    offsets: range
    values: Sequence[bytes | None]
    timestamps_ms: Sequence[int]
    keys: Sequence[bytes | None] | None
    headers: Sequence[Any] | None
    transaction: Transaction | None = None

    def between(self, start: int, stop: int) -> Part:
        """The records of the offsets ``start`` to ``stop`` (half-open) as far as they are here."""
        which = slice(max(0, start - self.offsets.start), max(0, stop - self.offsets.start))
        return Part(
            self.offsets[which],
            self.values[which],
            self.timestamps_ms[which],
            None if self.keys is None else self.keys[which],
            None if self.headers is None else self.headers[which],
        )


class PartitionLog:
    """One partition: append at the end, read anywhere, drop at the front.

    As in Kafka, the end of a transaction takes one offset of each partition it wrote to, so that
    offsets have gaps and readers meet them in tests.
    """

    def __init__(self) -> None:
        self.start_offset = 0
        self.end_offset = 0
        self._parts: list[Part] = []
        self._open: dict[Transaction, int] = {}  # its first offset here; the oldest transaction first

    @property
    def stable_offset(self) -> int:
        """Where the records begin that are not decided yet; the end when there are none."""
        return next(iter(self._open.values()), self.end_offset)

    @property
    def ends(self) -> PartitionEnds:
        """The earliest, the last stable and the end offset."""
        return PartitionEnds(self.start_offset, self.stable_offset, self.end_offset)

    def append(
        self, batch: OutgoingBatch, timestamps_ms: Sequence[int], transaction: Transaction | None = None
    ) -> None:
        """Write ``batch`` at the end, within ``transaction`` if there is one."""
        if not len(batch):
            return
        if transaction is not None:
            self._open.setdefault(transaction, self.end_offset)
        offsets = range(self.end_offset, self.end_offset + len(batch))
        # Lists are copied: the caller may go on using its own.
        self._parts.append(
            Part(
                offsets,
                list(batch.values),
                list(timestamps_ms),
                None if batch.keys is None else list(batch.keys),
                None if batch.headers is None else list(batch.headers),
                transaction,
            )
        )
        self.end_offset = offsets.stop

    def end_transaction(self, transaction: Transaction, *, committed: bool) -> None:
        """Decide the records of ``transaction``; its end takes one offset."""
        if self._open.pop(transaction, None) is None:
            return
        transaction.is_aborted = not committed
        self.end_offset += 1

    def read(self, position: int, limit: int, max_records: int) -> tuple[list[Part], int]:
        """Visible records from ``position``, at most ``max_records`` and before ``limit``, and where to
        read on: behind what can never be seen.
        """
        taken: list[Part] = []
        room = max_records
        for index in range(self._index_of(position), len(self._parts)):
            part = self._parts[index]
            if part.offsets.start >= limit:
                break
            if part.transaction is not None and part.transaction.is_aborted:
                continue
            first = max(position, part.offsets.start)
            taken.append(part.between(first, min(limit, first + room)))
            position = taken[-1].offsets.stop
            room -= len(taken[-1].offsets)
            if room == 0:
                return taken, position
        return taken, max(position, limit)

    def offset_at(self, timestamp_ms: int) -> int:
        """The first offset whose record is of that time or later; the end when there is none."""
        for part in self._parts:
            for offset, timestamp in zip(part.offsets, part.timestamps_ms, strict=True):
                if timestamp >= timestamp_ms and offset >= self.start_offset:
                    return offset
        return self.stable_offset

    def retain(self, records: int) -> None:
        """Drop what lies before the last ``records`` offsets, but nothing that is not decided yet."""
        self.start_offset = max(self.start_offset, min(self.stable_offset, self.end_offset - records))
        del self._parts[: self._index_of(self.start_offset)]

    def compact(self) -> None:
        """Drop parts all of whose records have a newer one of their key, among the last parts.

        That is exact as long as these hold all keys: after it the topic has hardly more parts than keys.
        """
        first = max(0, len(self._parts) - COMPACTED_BLOCKS)
        superseded: set[bytes] = set()
        kept: list[Part] = []
        for part in reversed(self._parts[first:]):
            if part.transaction in self._open:
                kept.append(part)  # may yet be aborted, and then supersedes nothing
            elif part.transaction is not None and part.transaction.is_aborted:
                continue
            elif not is_superseded(part.keys, superseded):
                kept.append(part)
                superseded.update(key for key in part.keys or () if key is not None)
        self._parts[first:] = reversed(kept)

    def _index_of(self, offset: int) -> int:
        """The first part that has ``offset`` or a later one."""
        return bisect.bisect_right(self._parts, offset, key=lambda part: part.offsets.stop)


def joined(partition: int, parts: Sequence[Part]) -> TopicBatch:
    """One batch of all parts, which must not be empty."""
    if len(parts) == 1:
        [part] = parts
        return TopicBatch(
            partition=partition,
            values=part.values,
            offsets=part.offsets,
            timestamps_ms=part.timestamps_ms,
            keys=part.keys,
            headers=part.headers,
        )
    return TopicBatch(
        partition=partition,
        values=list(chain.from_iterable(part.values for part in parts)),
        offsets=list(chain.from_iterable(part.offsets for part in parts)),
        timestamps_ms=list(chain.from_iterable(part.timestamps_ms for part in parts)),
        keys=_joined_column([part.keys for part in parts], parts, None),
        headers=_joined_column([part.headers for part in parts], parts, ()),
    )


def _joined_column(
    columns: Sequence[Sequence[Any] | None], parts: Sequence[Part], missing: object
) -> list[Any] | None:
    if all(column is None for column in columns):
        return None
    merged: list[Any] = []
    for column, part in zip(columns, parts, strict=True):
        merged.extend([missing] * len(part.offsets) if column is None else column)
    return merged
