"""Fetched records as columns, with compiled code and without a Python object for each record.

The code reads *plain* record batches: of the format of Kafka 0.11 (version 2), not compressed, whose records have no
headers. `ReadPartition` leaves all others, and damaged ones, to aiokafka's parser, so that both ways give the same
records and the same errors.

This module is imported only where Numba is loaded (``streamiter.values.helpers.compiled``).

Source: the description of the record batch in the documentation of Kafka, and KIP-98.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

import numpy as np

from streamiter.topics.joined_values import LINE_FEED, JoinedValues
from streamiter.topics.topic import TopicBatch
from streamiter.values.helpers.compiled import compiled, pointer_function
from streamiter.values.helpers.numba_code import crc32c_instruction, has_crc32c_instruction
from streamiter.values.numbers import Bytes, Indices, Integers

if TYPE_CHECKING:
    from streamiter_kafka.wire import WireBatch

__all__ = ["LocatedRecords", "compile_it", "located_records"]

pointer_to = pointer_function()
_add_word, _add_byte = crc32c_instruction(64), crc32c_instruction(8)

_ODD: Final = -1
"""Instead of an index or a count: a record batch is not plain."""

# The columns of the located records, one after the other.
_OFFSET: Final = 0
_TIMESTAMP: Final = 1
_KEY: Final = 2  # the index of the first byte
_KEY_SIZE: Final = 3  # -1 for None
_VALUE: Final = 4
_VALUE_SIZE: Final = 5
_COLUMNS: Final = 6

_HEADER_BYTES: Final = 61
_CHECKSUM_AT: Final = 17
_CHECKED_FROM: Final = 21
_ALL_BITS: Final = (1 << 32) - 1
_LEAST_RECORD_BYTES: Final = 7


@compiled
def _number(data: Bytes, at: int, size: int) -> int:
    """Return a big-endian number of this many bytes; only one of eight bytes has a sign."""
    number = 0
    for index in range(at, at + size):
        number = number << 8 | data[index]
    return number


@compiled
def _varint(data: Bytes, at: int, end: int) -> tuple[int, int]:
    """Return the index after a number of variable size, and the number; a number of over 62 bits is odd."""
    number = shift = 0
    while at < end and shift < 63:
        byte = data[at]
        at += 1
        number |= (byte & 0x7F) << shift
        if byte < 0x80:
            return at, (number >> 1) ^ -(number & 1)
        shift += 7
    return _ODD, 0


@compiled
def _count_records(data: Bytes, starts: Integers) -> int:
    """Return the number of records in all batches."""
    records = 0
    for start in starts:
        size = _number(data, start + 8, 4) + 12
        if size < _HEADER_BYTES or start + size > len(data):
            return _ODD
        if data[start + 16] != 2 or data[start + 22] & 0x07:
            return _ODD
        count = _number(data, start + 57, 4)
        if count > (size - _HEADER_BYTES) // _LEAST_RECORD_BYTES:
            return _ODD
        records += count
    return records


@compiled
def _are_whole(data: Bytes, starts: Integers) -> bool:
    """Return whether the checksums of all batches are right, which were found to be within the bytes."""
    text = pointer_to(data)
    for start in starts:
        at, end, checksum = start + _CHECKED_FROM, start + 12 + _number(text, start + 8, 4), _ALL_BITS
        while at + 8 <= end:
            checksum = _add_word(checksum, text, at)
            at += 8
        while at < end:
            checksum = _add_byte(checksum, text, at)
            at += 1
        if checksum ^ _ALL_BITS != _number(text, start + _CHECKSUM_AT, 4):
            return False
    return True


@compiled
def _after_bytes(data: Bytes, at: int, end: int) -> tuple[int, int, int]:
    """Return the index after a key or value, the index of its first byte, and its size; -1 for None."""
    start, size = _varint(data, at, end)
    if start == _ODD or size > end - start:
        return _ODD, 0, 0
    return (start + size, start, size) if size >= 0 else (start, start, -1)


@compiled
def _locate_record(
    data: Bytes, at: int, end: int, base_offset: int, base_timestamp: int, columns: Integers, row: int, rows: int
) -> int:
    """Fill a row of the columns, which have ``rows`` rows each; return the index after the record."""
    start, size = _varint(data, at, end)
    if start == _ODD or start >= end or data[start] >= 0x80:  # attributes, of which none is in use
        return _ODD
    at, timestamp = _varint(data, start + 1, end)
    if at == _ODD:
        return _ODD
    at, offset = _varint(data, at, end)
    if at == _ODD:
        return _ODD
    columns[_OFFSET * rows + row] = base_offset + offset
    columns[_TIMESTAMP * rows + row] = base_timestamp + timestamp
    at, columns[_KEY * rows + row], columns[_KEY_SIZE * rows + row] = _after_bytes(data, at, end)
    if at == _ODD:
        return _ODD
    at, columns[_VALUE * rows + row], columns[_VALUE_SIZE * rows + row] = _after_bytes(data, at, end)
    # The number of headers ends the record, and must be 0.
    return at + 1 if at != _ODD and at < end and data[at] == 0 and at + 1 - start == size else _ODD


@compiled
def _locate(data: Bytes, starts: Integers, records: Integers) -> int:
    """Fill the columns of all records; return their number. The offsets of plain batches are in order."""
    text, columns, row, expected, rows = pointer_to(data), pointer_to(records), 0, 0, records.shape[1]
    for start in starts:
        end = start + 12 + _number(text, start + 8, 4)
        base_offset, base_timestamp = _number(text, start, 8), _number(text, start + 27, 8)
        last_offset = base_offset + _number(text, start + 23, 4)
        at, first, expected = start + _HEADER_BYTES, row, max(expected, base_offset)
        for _ in range(_number(text, start + 57, 4)):
            at = _locate_record(text, at, end, base_offset, base_timestamp, columns, row, rows)
            offset = columns[_OFFSET * rows + row]
            if at == _ODD or not expected <= offset <= last_offset:
                return _ODD
            expected = offset + 1
            row += 1
        if at != end:
            return _ODD
        if data[start + 22] & 0x08:  # the time when the broker stored the batch
            records[_TIMESTAMP, first:row] = _number(text, start + 35, 8)
    return row


@compiled
def _join(data: Bytes, starts: Integers, sizes: Integers, joined: Bytes, ends: Integers) -> None:
    """Copy the bytes of all records into one buffer, each followed by a line feed."""
    source, target, at = pointer_to(data), pointer_to(joined), 0
    for row in range(len(starts)):
        start = starts[row]
        for index in range(sizes[row]):
            target[at + index] = source[start + index]
        at += max(sizes[row], 0)
        joined[at] = LINE_FEED
        ends[row] = at
        at += 1


class LocatedRecords:
    """The records of one answer, in batches whose values are copied out of it."""

    def __init__(self, batches: Sequence[TopicBatch], sizes: Sequence[int]) -> None:
        self._batches = deque(zip(batches, sizes, strict=True))
        self.nbytes = sum(sizes)
        """The bytes of memory."""

    def __len__(self) -> int:
        return sum(len(batch) for batch, _ in self._batches)

    def take(self) -> TopicBatch:
        """Remove the first batch, and return it."""
        batch, size_bytes = self._batches.popleft()
        self.nbytes -= size_bytes
        return batch


def _batch_of(partition: int, data: Bytes, columns: Integers) -> tuple[TopicBatch, int]:
    """Return the records with these columns, and their bytes of memory."""
    first, last = int(columns[_OFFSET, 0]), int(columns[_OFFSET, -1])
    values = _joined(data, columns[_VALUE], columns[_VALUE_SIZE])
    keys = _joined(data, columns[_KEY], columns[_KEY_SIZE]) if columns[_KEY_SIZE].max() >= 0 else None
    batch = TopicBatch(
        partition=partition,
        values=values,
        offsets=range(first, last + 1) if last - first == columns.shape[1] - 1 else columns[_OFFSET].tolist(),
        timestamps_ms=memoryview(columns[_TIMESTAMP].copy()),
        keys=keys,
    )
    return batch, values.nbytes + (0 if keys is None else keys.nbytes) + columns[_TIMESTAMP].nbytes


def _joined(data: Bytes, starts: Integers, sizes: Integers) -> JoinedValues:
    nulls = np.flatnonzero(sizes < 0)
    joined = np.empty(int(sizes.sum()) + len(nulls) + len(sizes), np.uint8)
    ends: Indices = np.empty(len(sizes), np.int64)
    _join(data, starts, sizes, joined, ends)
    return JoinedValues(joined, ends, nulls)


def located_records(
    partition: int,
    fetched: bytes,
    starts: Sequence[int],
    batches: Sequence[WireBatch],
    between: tuple[int, int | None],
    max_records: int,
) -> LocatedRecords | None:
    """Return the records of record batches, which begin at ``starts``; None if one is not plain, or damaged.

    ``between``: the offset of the first record to return, and the offset behind the last one.
    """
    data, begins = np.frombuffer(fetched, np.uint8), np.array(starts, np.int64)
    count = _count_records(data, begins)
    if count == _ODD:
        return None
    # aiokafka takes four times as long, and no other thread can run Python meanwhile.
    if not (_are_whole(data, begins) if has_crc32c_instruction() else all(each.validate_crc() for each in batches)):
        return None
    records: Integers = np.empty((_COLUMNS, count), np.int64)
    if _locate(data, begins, records) != count:
        return None
    first, stop = np.searchsorted(records[_OFFSET], (between[0], sys.maxsize if between[1] is None else between[1]))
    rows = range(int(first), int(stop), max_records)
    cut = [_batch_of(partition, data, records[:, row : min(row + max_records, int(stop))]) for row in rows]
    return LocatedRecords([batch for batch, _ in cut], [size_bytes for _, size_bytes in cut])


def compile_it() -> None:
    """Compile the functions of this module, on no records."""
    no_slots: Integers = np.empty(0, np.int64)
    located_records(0, b"\0", [], [], (0, None), 1)
    _join(np.frombuffer(b"\0", np.uint8), no_slots, no_slots, np.empty(0, np.uint8), no_slots)
