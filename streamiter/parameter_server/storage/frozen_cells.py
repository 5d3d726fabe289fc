"""Sparse rows as they were at one moment, encoded while others change."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, Final, final

import numpy as np

from streamiter.deferred import Deferred, Encode
from streamiter.errors import CheckpointError, InternalError
from streamiter.parameter_server.storage.block import Block, Columns, Numbers
from streamiter.parameter_server.storage.cells import Cells

__all__ = ["FrozenCells", "segments_of"]

# A millisecond or two to gather and to encode; a small row takes some 10 µs.
_FRAME_BYTES: Final = 1 << 20
_FRAME_SEGMENTS: Final = 256


@final
class FrozenCells(Deferred):
    """The cells of all rows of a block. It costs a list of them; the block copies those that change later.

    A frame is ``(rows, defaults, lengths, columns, values)``, arrays: a *segment* for each row, or part of a large one.
    """

    def __init__(
        self,
        cells: dict[int, Cells],
        dtype: np.dtype[Any],
        *,
        name: str,
        encode: Encode,
        unfinished: list[FrozenCells],
    ) -> None:
        """``unfinished``, a list of the owner of the cells, has this one from now on until it is done."""
        self.name = name
        self._dtype = dtype
        self._encode = encode
        self._is_released = False
        # The next one last: so they are given back bit by bit. Two lists, for pairs take ten times as long to make.
        self._rows = list(reversed(cells))
        self._cells = list(reversed(cells.values()))
        self._unfinished = unfinished
        unfinished.append(self)

    def frames(self) -> Iterator[bytes]:
        rows: list[int] = []
        defaults: list[Any] = []
        columns: list[Columns] = []
        values: list[Numbers] = []
        size_bytes = 0
        for row, default, some_columns, some_values in self._segments():
            rows.append(row)
            defaults.append(default)
            columns.append(some_columns)
            values.append(some_values)
            size_bytes += some_columns.nbytes + some_values.nbytes
            if size_bytes >= _FRAME_BYTES or len(rows) >= _FRAME_SEGMENTS:
                yield self._frame(rows, defaults, columns, values)
                self._check()
                size_bytes = 0
        if rows:
            yield self._frame(rows, defaults, columns, values)
        self.release()

    def _segments(self) -> Iterator[tuple[int, Any, Columns, Numbers]]:
        self._check()
        while self._cells:
            row, cells = self._rows.pop(), self._cells.pop()
            is_empty = True
            for columns, values in cells.parts():
                is_empty = False
                yield row, cells.default, columns, values
            if is_empty:  # Its default may be another than the matrix's.
                yield row, cells.default, np.empty(0, np.int64), np.empty(0, self._dtype)

    def _frame(
        self, rows: list[int], defaults: list[Any], columns: list[Columns], values: list[Numbers]
    ) -> bytes:
        content = (
            np.array(rows, np.int64),
            np.array(defaults, self._dtype),
            np.array([len(some) for some in columns], np.int64),
            np.concatenate(columns),
            np.concatenate(values),
        )
        for gathered in (rows, defaults, columns, values):
            gathered.clear()
        return self._encode(content, name=f"state of {self.name}")

    def _check(self) -> None:
        if self._is_released:
            raise InternalError(f"the state of {self.name} was released before all of it was read")

    def release(self) -> None:
        self._is_released = True
        self._rows, self._cells = [], []
        if self in self._unfinished:
            self._unfinished.remove(self)


def segments_of(
    frames: Iterable[Any], block: Block, name: str
) -> Iterator[tuple[int, Any, Columns, Numbers]]:
    """Row, default, columns and values of each segment. Raises ``CheckpointError`` for what does not fit the block."""
    for frame in frames:
        if not _fits(frame, block):
            raise CheckpointError(
                f"state of {name}: expected rows, defaults, lengths, columns and values of {block.dtype} in rows "
                f"{block.rows.start} to {block.rows.stop - 1} and columns {block.columns.start} to "
                f"{block.columns.stop - 1}, given something else; the snapshot is damaged, or of another matrix"
            )
        rows, defaults, lengths, columns, values = frame
        end = 0
        for row, default, length in zip(rows.tolist(), defaults, lengths.tolist(), strict=True):
            begin, end = end, end + length
            yield row, default, columns[begin:end], values[begin:end]


def _fits(frame: Any, block: Block) -> bool:
    if not (
        isinstance(frame, tuple) and len(frame) == 5 and all(isinstance(part, np.ndarray) for part in frame)
    ):
        return False
    rows, defaults, lengths, columns, values = frame
    return (
        all(part.ndim == 1 for part in frame)
        and all(part.dtype == np.int64 for part in (rows, lengths, columns))
        and defaults.dtype == values.dtype == block.dtype
        and len(rows) == len(defaults) == len(lengths)
        and len(columns) == len(values) == lengths.sum()
        and bool((lengths >= 0).all())
        and _all_in(rows, block.rows)
        and _all_in(columns, block.columns)
    )


def _all_in(numbers: Columns, expected: range) -> bool:
    return bool(((numbers >= expected.start) & (numbers < expected.stop)).all())
