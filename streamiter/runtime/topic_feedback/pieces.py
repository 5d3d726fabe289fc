"""Batches as values of a topic, none above what it takes."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

from streamiter.checkpoints.plain_data import PlainData
from streamiter.errors import RecordTooLarge
from streamiter.operators.rejection import shortened
from streamiter.records import Batch, slice_batch

__all__ = ["encoded_pieces"]


def encoded_pieces(records: Batch, limit_bytes: int, plain_data: PlainData) -> Iterator[bytes]:
    """The encodings of consecutive pieces of a batch, each of at most ``limit_bytes``.

    Raises PlainDataError for what is not plain data, RecordTooLarge for a record that does not fit by itself.

    >>> [len(piece) <= 400 for piece in encoded_pieces([b"x" * 100] * 10, 400, PlainData())]
    [True, True, True, True]
    """
    value = plain_data.encode_batch(records)
    if len(value) <= limit_bytes:
        yield value
        return
    count = len(records)
    if count == 1:
        raise RecordTooLarge(
            f"expected records of at most {limit_bytes} bytes, given one of {len(value)}: "
            f"{shortened(records[0])}; feed back smaller ones, or raise the topic's limit"
        )
    # Records differ in size: pieces that still are too large are cut again.
    pieces = min(count, len(value) // limit_bytes + 1)
    bounds = [count * piece // pieces for piece in range(pieces + 1)]
    for start, stop in pairwise(bounds):
        yield from encoded_pieces(slice_batch(records, start, stop), limit_bytes, plain_data)
