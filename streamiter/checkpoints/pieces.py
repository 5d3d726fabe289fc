"""Batches brought to a sensible size: small neighbours joined, large ones cut.

Where batches are cut carries no meaning. But each batch costs some objects and calls wherever it goes,
and as much memory at once as it has bytes.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from streamiter.records import Batch, Columns, can_concatenate, concatenate, estimated_bytes, slice_batch

__all__ = ["PIECE_BYTES_MAX", "OpenPiece", "is_small", "piece_bytes", "pieces_of"]

PIECE_BYTES_MAX: Final = 4 << 20
"""What a batch is cut above: a few of these under way at once are nothing beside a limit in memory."""

# Joined up to there: by then the cost of a batch is spread over enough, and more would only be copied more.
_JOINED_RECORDS_MAX: Final = 4096
_JOINED_BYTES_MAX: Final = 1 << 20

# An array or a list without its content, and its places in lists, rounded up.
_OBJECT_BYTES: Final = 128


def piece_bytes(batch: Batch) -> int:
    """Estimated bytes of memory that keeping a batch takes."""
    return _OBJECT_BYTES + estimated_bytes(batch)


def is_small(batch: Batch) -> bool:
    """Whether a batch is to be joined; so that no piece but the last of its kind in a row is below a half."""
    return len(batch) < _JOINED_RECORDS_MAX // 2 and estimated_bytes(batch) < _JOINED_BYTES_MAX // 2


def pieces_of(batch: Batch) -> Iterator[Batch]:
    """The batch itself, or its parts where it is above ``PIECE_BYTES_MAX`` (arrays are views, not copies)."""
    size_bytes = estimated_bytes(batch)
    if size_bytes <= PIECE_BYTES_MAX:
        yield batch
        return
    records_max = max(1, len(batch) * PIECE_BYTES_MAX // size_bytes)
    count = -(-len(batch) // records_max)
    step = -(-len(batch) // count)
    for start in range(0, len(batch), step):
        yield slice_batch(batch, start, start + step)


class OpenPiece:
    """Small batches that come one after another and are to be one; begins with ``first``.

    They are joined once, when they are asked for, so each record is copied once; what has been asked for
    takes no more.
    """

    __slots__ = ("_joined_bytes", "_parts", "_record_bytes", "_was_read", "records")

    def __init__(self, first: Batch) -> None:
        self._parts = [first]
        self._record_bytes = _record_bytes(first)
        self._joined_bytes = estimated_bytes(first)
        self._was_read = False
        self.records = len(first)

    @property
    def size_bytes(self) -> int:
        """Estimated bytes of memory it takes, or will take once joined where that is more."""
        return _OBJECT_BYTES * len(self._parts) + self._joined_bytes

    def add(self, batch: Batch, *, bytes_max: int | None = None) -> bool:
        """Take a batch in and say so; where it cannot be joined or would be too much, nothing changes.

        ``bytes_max`` is what ``size_bytes`` may become.
        """
        if self._was_read or self.records + len(batch) > _JOINED_RECORDS_MAX:
            return False
        if not can_concatenate(self._parts[0], batch):
            return False
        record_bytes = tuple(map(max, self._record_bytes, _record_bytes(batch)))
        joined_bytes = self._joined_bytes + estimated_bytes(batch)
        if record_bytes:
            # Texts take the width of the longest.
            joined_bytes = (self.records + len(batch)) * sum(record_bytes)
        if joined_bytes > _JOINED_BYTES_MAX:
            return False
        if bytes_max is not None and _OBJECT_BYTES * (len(self._parts) + 1) + joined_bytes > bytes_max:
            return False
        self._parts.append(batch)
        self._record_bytes = record_bytes
        self._joined_bytes = joined_bytes
        self.records += len(batch)
        return True

    def joined(self) -> Batch:
        """All of it as one batch, the same object each time; from now on nothing can be added."""
        if len(self._parts) > 1:
            self._parts = [concatenate(self._parts)]
        self._was_read = True
        return self._parts[0]


def _record_bytes(batch: Batch) -> tuple[int, ...]:
    """Bytes of a record in each array of the batch; of a list none."""
    if isinstance(batch, Columns):
        return tuple(map(_row_bytes, batch.arrays.values()))
    if isinstance(batch, np.ndarray):
        return (_row_bytes(batch),)
    return ()


def _row_bytes(array: npt.NDArray[Any]) -> int:
    return array.nbytes // len(array)
