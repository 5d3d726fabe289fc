"""Blocks: records of one partition packed together, and how handed-over batches become blocks.

>>> pending = PendingRecords()
>>> pending.add(0, OutgoingBatch([b"a", b"b"]), now_ms=5)
>>> pending.add(0, OutgoingBatch([b"c"], keys=[b"k"]), now_ms=6)
>>> [(partition, block)] = blocks_of(pending.take())
>>> partition, block.records, block.latest_ms
(0, 3, 6)
>>> unpacked(block.payload, block.crc32)
RecordBlock(values=[b'a', b'b', b'c'], keys=[None, None, b'k'], headers=None, timestamps_ms=[5, 5, 6])
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeVar

import msgspec

from streamiter.topics.topic import Headers, OutgoingBatch
from streamiter.topics.topic_sink import batch_bytes
from streamiter_sqlite.schema import DamagedFile

__all__ = ["PackedBlock", "PendingRecords", "RecordBlock", "blocks_of", "unpacked"]

# A block is read and unpacked as a whole: large enough that a row of SQLite costs nothing for each record,
# small enough for a reader that wants a few records.
_BLOCK_RECORDS: Final = 8192
_BLOCK_BYTES: Final = 1 << 20

# What is handed over and not yet stored, at most (and one batch more): a few commits of full blocks.
_PENDING_BYTES: Final = 16 << 20
# Memory that a record takes besides its bytes: the objects of value and time stamp.
_RECORD_OVERHEAD_BYTES: Final = 100

Entry = TypeVar("Entry")


class RecordBlock(msgspec.Struct, array_like=True):
    """Records as columns; keys and headers are None where no record has any, and equal time stamps are one."""

    values: list[bytes | None]
    keys: list[bytes | None] | None
    headers: list[Headers] | None
    timestamps_ms: int | list[int]

    def times_ms(self) -> list[int]:
        """The time stamp of each record."""
        return (
            [self.timestamps_ms] * len(self.values)
            if isinstance(self.timestamps_ms, int)
            else self.timestamps_ms
        )

    def between(self, start: int, stop: int) -> RecordBlock:
        """The records ``start`` to ``stop`` (half-open)."""
        if start == 0 and stop == len(self.values):
            return self
        return RecordBlock(
            self.values[start:stop],
            None if self.keys is None else self.keys[start:stop],
            None if self.headers is None else self.headers[start:stop],
            self.timestamps_ms if isinstance(self.timestamps_ms, int) else self.timestamps_ms[start:stop],
        )


@dataclass(frozen=True, slots=True)
class PackedBlock:
    """A block as it is stored, and what its entry tells of it."""

    payload: bytes
    records: int
    latest_ms: int

    @property
    def crc32(self) -> int:
        """The checksum to store with it."""
        return zlib.crc32(self.payload)


def unpacked(payload: bytes, crc32: int | None) -> RecordBlock:
    """The inverse of packing. Raises ``DamagedFile`` for a payload that is not the one that was stored.

    ``crc32`` is the checksum that was stored with it, None where none was.
    """
    if crc32 is not None and (not isinstance(payload, bytes) or zlib.crc32(payload) != crc32):
        raise DamagedFile("a block of records has a wrong checksum")
    try:
        return msgspec.msgpack.decode(payload, type=RecordBlock)
    except (msgspec.DecodeError, TypeError, UnicodeDecodeError) as error:
        raise DamagedFile(f"a block of records cannot be read: {error}") from error


class PendingRecords:
    """Records that were handed over and are not stored yet, by partition, in order."""

    def __init__(self) -> None:
        self._parts: dict[int, list[OutgoingBatch]] = {}
        self._size_bytes = 0

    @property
    def is_full(self) -> bool:
        """Whether to wait for a commit before handing over more."""
        return self._size_bytes >= _PENDING_BYTES

    @property
    def has_full_block(self) -> bool:
        """Whether there is enough for storing it to be worth a transaction."""
        return self._size_bytes >= _BLOCK_BYTES

    def __bool__(self) -> bool:
        return bool(self._parts)

    def add(self, partition: int, part: OutgoingBatch, *, now_ms: int) -> None:
        """Add records of one partition; without time stamps they get ``now_ms``."""
        if not len(part):
            return
        timestamps_ms = part.timestamps_ms if part.timestamps_ms is not None else [now_ms] * len(part)
        self._parts.setdefault(partition, []).append(
            # Copies: the caller may go on using its own lists.
            OutgoingBatch(list(part.values), _copied(part.keys), _copied(part.headers), list(timestamps_ms))
        )
        self._size_bytes += batch_bytes(part) + _RECORD_OVERHEAD_BYTES * len(part)

    def take(self) -> dict[int, list[OutgoingBatch]]:
        """Everything, which is then no longer here."""
        parts, self._parts, self._size_bytes = self._parts, {}, 0
        return parts

    def put_back(self, taken: Mapping[int, Sequence[OutgoingBatch]]) -> None:
        """Undo a ``take`` whose records could not be stored: they go before what has come since."""
        for partition, parts in taken.items():
            self._parts[partition] = [*parts, *self._parts.get(partition, [])]
            self._size_bytes += sum(batch_bytes(part) + _RECORD_OVERHEAD_BYTES * len(part) for part in parts)


def _copied(column: Sequence[Entry] | None) -> list[Entry] | None:
    return None if column is None else list(column)


def blocks_of(parts: Mapping[int, Sequence[OutgoingBatch]]) -> Iterator[tuple[int, PackedBlock]]:
    """The blocks to store, with their partition."""
    for partition, batches in parts.items():
        for merged in _merged(batches):
            yield partition, _packed(merged)


def _merged(batches: Sequence[OutgoingBatch]) -> Iterator[OutgoingBatch]:
    """The same records, cut into batches of the size of a block."""
    whole = _concatenated(batches)
    records = max(1, min(_BLOCK_RECORDS, _BLOCK_BYTES * len(whole) // max(1, batch_bytes(whole))))
    for start in range(0, len(whole), records):
        yield _sliced(whole, slice(start, start + records))


def _concatenated(batches: Sequence[OutgoingBatch]) -> OutgoingBatch:
    if len(batches) == 1:
        return batches[0]
    return OutgoingBatch(
        values=[value for batch in batches for value in batch.values],
        keys=_column([batch.keys for batch in batches], batches, None),
        headers=_column([batch.headers for batch in batches], batches, ()),
        timestamps_ms=_column([batch.timestamps_ms for batch in batches], batches, 0),
    )


def _column(
    columns: Sequence[Sequence[Any] | None], batches: Sequence[OutgoingBatch], missing: object
) -> list[Any] | None:
    if all(column is None for column in columns):
        return None
    joined: list[Any] = []
    for column, batch in zip(columns, batches, strict=True):
        joined.extend([missing] * len(batch) if column is None else column)
    return joined


def _sliced(batch: OutgoingBatch, which: slice) -> OutgoingBatch:
    if which.start == 0 and which.stop >= len(batch):
        return batch
    return OutgoingBatch(
        values=batch.values[which],
        keys=None if batch.keys is None else batch.keys[which],
        headers=None if batch.headers is None else batch.headers[which],
        timestamps_ms=None if batch.timestamps_ms is None else batch.timestamps_ms[which],
    )


def _packed(batch: OutgoingBatch) -> PackedBlock:
    timestamps_ms = batch.timestamps_ms
    assert timestamps_ms
    first, latest = timestamps_ms[0], max(timestamps_ms)
    is_one_time = first == latest == min(timestamps_ms)
    columns = (batch.values, batch.keys, batch.headers, first if is_one_time else timestamps_ms)
    return PackedBlock(msgspec.msgpack.encode(columns), len(batch), latest)
