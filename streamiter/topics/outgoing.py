"""What a connector without a server does with records on their way in: check them, spread them out.

>>> batch = OutgoingBatch([b"a", b"b", b"c"], keys=[b"k1", b"k2", b"k1"])
>>> {partition: part.values for partition, part in spread(batch, 2, unkeyed=0)}
{1: [b'a', b'b', b'c']}
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Sequence
from typing import Any, Final

from streamiter.errors import RecordTooLarge, TopicError
from streamiter.tables import rows_of_table
from streamiter.topics.topic import Headers, OutgoingBatch

__all__ = ["batch_bytes", "check_outgoing", "check_record_sizes", "partition_for_key", "spread"]

_BYTES_OR_NONE: Final = frozenset({bytes, type(None)})


def partition_for_key(key: bytes, partitions: int) -> int:
    """The partition of a key: CRC-32, the same in every process and release, modulo their number.

    >>> partition_for_key(b"user-7", 4)
    1
    """
    return zlib.crc32(key) % partitions


def spread(batch: OutgoingBatch, partitions: int, *, unkeyed: int) -> list[tuple[int, OutgoingBatch]]:
    """The parts of ``batch`` by partition: keyed records by their key, the rest together in ``unkeyed``."""
    if batch.partition is not None:
        return [(batch.partition, batch)]
    if batch.keys is None:
        return [(unkeyed, batch)]
    if partitions == 1:
        return [(0, batch)]
    return [
        (partition, _part(batch, indices))
        for partition, indices in _indices_by_partition(batch.keys, partitions, unkeyed)
    ]


def _indices_by_partition(
    keys: Sequence[bytes | None], partitions: int, unkeyed: int
) -> Iterable[tuple[int, list[int]]]:
    indices: dict[int, list[int]] = {}
    crc32 = zlib.crc32  # once for each record: the same function as partition_for_key, without the call
    for index, key in enumerate(keys):
        partition = unkeyed if key is None else crc32(key) % partitions
        indices.setdefault(partition, []).append(index)
    return indices.items()


def _part(batch: OutgoingBatch, indices: Sequence[int]) -> OutgoingBatch:
    if len(indices) == len(batch):
        return batch
    return OutgoingBatch(
        values=[batch.values[index] for index in indices],
        keys=_taken(batch.keys, indices),
        headers=_taken(batch.headers, indices),
        timestamps_ms=_taken(batch.timestamps_ms, indices),
    )


def _taken(column: Sequence[Any] | None, indices: Sequence[int]) -> list[Any] | None:
    return None if column is None else [column[index] for index in indices]


def check_outgoing(batch: OutgoingBatch, *, topic: str, partitions: int) -> None:
    """Raise ``TopicError`` unless the columns fit each other and the topic."""
    _check_lengths(batch, topic)
    _check_bytes("value", batch.values, topic)
    if batch.keys is not None:
        _check_bytes("key", batch.keys, topic)
    if batch.partition is not None and not 0 <= batch.partition < partitions:
        raise TopicError(
            f"topic {topic!r}: expected a partition of 0 to {partitions - 1}, given {batch.partition}; "
            f"create(partitions={batch.partition + 1}) adds the missing ones"
        )


def _check_lengths(batch: OutgoingBatch, topic: str) -> None:
    columns = {"keys": batch.keys, "headers": batch.headers, "timestamps_ms": batch.timestamps_ms}
    for name, column in columns.items():
        if column is not None and len(column) != len(batch):
            raise TopicError(
                f"topic {topic!r}: expected {len(batch)} {name}, one for each value, given {len(column)}"
            )


def _check_bytes(noun: str, column: Sequence[bytes | None], topic: str) -> None:
    if (
        not isinstance(column, (list, tuple))
        and rows_of_table(f"topic {topic!r}, {noun}s", column, TopicError) is not None
    ):
        raise TopicError(
            f"topic {topic!r}: expected a list of bytes as {noun}s, given a {type(column).__name__}; encode its rows "
            "first: Json().encode(…)"
        )
    if set(map(type, column)) <= _BYTES_OR_NONE:
        return
    index, entry = next(found for found in enumerate(column) if type(found[1]) not in _BYTES_OR_NONE)
    given = type(entry).__name__
    raise TopicError(f"topic {topic!r}: expected bytes or None as {noun}, given {given} (record {index})")


def check_record_sizes(batch: OutgoingBatch, limit_bytes: int, *, topic: str) -> None:
    """Raise ``RecordTooLarge`` for the first record whose key, value and headers are above the limit."""
    if batch_bytes(batch) <= limit_bytes:
        return
    for index in range(len(batch)):
        size_bytes = _record_bytes(batch, index)
        if size_bytes > limit_bytes:
            raise RecordTooLarge(
                f"topic {topic!r}: record {index} of the batch has {size_bytes} bytes, "
                f"expected at most {limit_bytes} (setting max_record_bytes); nothing of the batch was written"
            )


def batch_bytes(batch: OutgoingBatch) -> int:
    """Bytes of all keys, values and headers.

    >>> batch_bytes(OutgoingBatch([b"abc", None], keys=[b"k", b"k"], headers=[(("h", b"1"),), ()]))
    7
    """
    size_bytes = _column_bytes(batch.values)
    if batch.keys is not None:
        size_bytes += _column_bytes(batch.keys)
    if batch.headers is not None:
        size_bytes += sum(map(_headers_bytes, batch.headers))
    return size_bytes


def _column_bytes(column: Sequence[bytes | None]) -> int:
    return sum(map(len, filter(None, column)))


def _record_bytes(batch: OutgoingBatch, index: int) -> int:
    key = batch.keys[index] if batch.keys is not None else None
    headers = batch.headers[index] if batch.headers is not None else ()
    return len(batch.values[index] or b"") + len(key or b"") + _headers_bytes(headers)


def _headers_bytes(headers: Headers) -> int:
    return sum(len(name.encode()) + len(value) for name, value in headers)
