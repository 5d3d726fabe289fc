"""Sparse blocks: for each row a default, and the columns whose values differ from it.

A row is stored in *cells*, in one of two forms: a hash table of numpy arrays, in which many columns are looked up at
once (``HashedCells``), or, for a row that is almost full, an array as wide as the block (``FilledCells``).
``SparseBlock`` chooses the form, and copies cells before they change while a frozen state still holds them.
"""

from __future__ import annotations

import math
from collections.abc import Generator, Iterable, Iterator
from functools import partial
from itertools import groupby
from operator import itemgetter
from typing import Final, TypeAlias, TypeGuard, TypeVar, cast

import numpy as np

from streamiter.errors import CheckpointError
from streamiter.parameter_server.matrix import BlockRange, DrawnValues, Matrix
from streamiter.parameter_server.storage.block import (
    AnyScalar,
    Block,
    BlockColumns,
    BlockRow,
    DTypeOfNumbers,
    Frozen,
    FrozenState,
    Numbers,
    ShardBlock,
    block_shape,
    check_shape,
)
from streamiter.parameter_server.storage.cells import (
    Cells,
    Draw,
    FilledCells,
    HashedCells,
    capacity_for,
    differs_from,
    distinct,
    hashed_bytes,
)
from streamiter.values.deferred import Encode

AnyCells = TypeVar("AnyCells", bound=Cells)


class SparseBlock(ShardBlock):
    """A block that stores, for each row, a default and the columns that differ from it.

    A row is a hash table until an array as wide as the block is smaller. A row that was never changed takes no memory.
    A row whose default is drawn stores all columns that were changed, and has the default NaN in ``BlockRow``.
    """

    is_sparse = True

    def __init__(self, matrix: Matrix, block: BlockRange) -> None:
        super().__init__(matrix, block)
        is_drawn = isinstance(matrix.default, DrawnValues)
        self._drawn: DrawnValues | None = cast("DrawnValues", matrix.default) if is_drawn else None
        self._default = self.dtype.type(0 if is_drawn else matrix.default)
        self._vector = matrix.vector
        self._cells: dict[int, Cells] = {}
        """The cells of each row; a row without cells has the matrix's default in all columns."""
        self._freezes = 0
        self._unfinished = 0
        """The count of frozen states that are not written yet; cells that they hold are copied before they change."""

    def get(self, row: int, columns: BlockColumns | None, out: Numbers | None = None) -> Numbers:
        cells = self._cells.get(row)
        if columns is not None and cells is not None:
            return cells.get(columns, out)
        if out is None:
            out = np.empty(len(self.columns) if columns is None else len(columns), self.dtype)
        if cells is not None:
            cells.write_to(out)
        elif (draw := self._draw_of(row)) is not None:
            draw(np.arange(self.columns.start, self.columns.stop) if columns is None else columns, out)
        else:
            out.fill(self._default)
        return out

    def _draw_of(self, row: int) -> Draw | None:
        """Return the function that draws the default of the row; None if it is a number."""
        return partial(self._drawn.draw, row) if self._drawn is not None and self._drawn.draws(row) else None

    def add(self, row: int, columns: BlockColumns | None, values: Numbers) -> None:
        if columns is None:
            at = values.nonzero()[0]
            if self._is_better_filled(len(at) // self._vector):
                self._changeable_filled(row).add_all(values)
                return
            columns, values = at + self.columns.start, values[at]
        cells = self._changeable_row(row)
        if not cells.add(columns, values):
            self._enlarged(row, cells, columns).add(columns, values)

    def put(self, row: int, columns: BlockColumns | None, values: Numbers) -> None:
        if columns is None:
            cells = self._cells.get(row)
            default = self._default if cells is None else cells.default
            at = np.arange(len(values)) if self._draw_of(row) else differs_from(values, default).nonzero()[0]
            self._replace(row, at + self.columns.start, values[at], default)
            return
        cells = self._changeable_row(row)
        if not cells.put(columns, values):
            self._enlarged(row, cells, columns).put(columns, values)

    def sparse_row(self, row: int) -> BlockRow:
        cells = self._cells.get(row)
        columns, values = (np.empty(0, np.int64), np.empty(0, self.dtype)) if cells is None else cells.content()
        default = self._default if cells is None else cells.default
        return BlockRow(columns, values, math.nan if self._draw_of(row) else default.item())

    def replace_row(self, row: int, content: BlockRow) -> None:
        self._replace(row, content.columns, content.values, self.dtype.type(content.default))

    def _replace(self, row: int, columns: BlockColumns, values: Numbers, default: AnyScalar) -> None:
        cells = self._cells.get(row)
        count = len(columns) if self._vector == 1 else len(distinct(columns - columns % self._vector))
        if cells is not None and not self._is_held(cells) and not cells.is_large_for(count) and not self._draw_of(row):
            # The usual case: an optimizer writes the same columns again and again.
            cells.reset(default)
            if cells.put(columns, values):
                return
        self._cells[row] = made = self._made(row, count, default)
        made.put(columns, values)

    def size_bytes(self) -> int:
        return sum(cells.size_bytes() for cells in self._cells.values())

    def freeze(self, encode: Encode) -> FrozenState:
        self._freezes += 1
        self._unfinished += 1
        # The next row is last, so memory is freed row by row. Two lists: pairs take ten times as long to make.
        rows, cells = list(reversed(self._cells)), list(reversed(self._cells.values()))

        def finish() -> None:
            rows.clear()
            cells.clear()
            self._unfinished -= 1

        contents = _frame_contents(_segments(rows, cells, self.dtype), self.dtype)
        frozen = Frozen(contents, encode, name=self._name, on_release=finish)
        return {"shape": block_shape(self), "updates": self.updates, "cells": frozen}

    def restore(self, state: FrozenState) -> None:
        check_shape(self, state["shape"], self._name)
        self._cells = {}
        for row, of_row in groupby(_read_segments(state["cells"], self, self._name), key=itemgetter(0)):
            # A hash table comes in the order of its slots. In a smaller table the first segments would all want the
            # same slots: a table that grew with them took 20 times as long.
            segments = list(of_row)
            count = sum(len(columns) for _, _, columns, _ in segments) // self._vector
            self._cells[row] = self._made(row, count, self.dtype.type(segments[0][1]))
            for _, _, columns, values in segments:
                self.put(row, columns, values)
        self.updates = state["updates"]

    def take_over(self, other: SparseBlock, rows: range, columns: range) -> None:
        for row in [row for row in other._cells if row in rows]:
            found = other.sparse_row(row)
            within = (found.columns >= columns.start) & (found.columns < columns.stop)
            if row not in self._cells:
                self.replace_row(row, BlockRow(found.columns[within], found.values[within], found.default))
            elif self._draw_of(row) or self._cells[row].default == found.default:
                self.put(row, found.columns[within], found.values[within])
            else:
                every = np.arange(columns.start, columns.stop)
                self.put(row, every, other.get(row, every))

    def _made(self, row: int, count: int, default: AnyScalar) -> Cells:
        """Return empty cells with room for this many vectors."""
        first, vector, draw = self.columns.start, self._vector, self._draw_of(row)
        if not self._is_better_filled(count):
            return HashedCells(capacity_for(count), self.dtype, first, default, self._freezes, vector=vector, draw=draw)
        values = np.full(len(self.columns), default, self.dtype)
        if draw is not None:
            draw(np.arange(self.columns.start, self.columns.stop), values)
        return FilledCells(values, first, default, self._freezes, is_drawn=draw is not None)

    def _is_better_filled(self, count: int) -> bool:
        return hashed_bytes(count, self.dtype, self._vector) >= len(self.columns) * self.dtype.itemsize

    def _changeable_row(self, row: int) -> Cells:
        cells = self._cells.get(row)
        if cells is None:
            cells = self._cells[row] = self._made(row, 0, self._default)
            return cells
        return self._changeable(row, cells)

    def _changeable_filled(self, row: int) -> FilledCells:
        cells = self._cells.get(row)
        if isinstance(cells, FilledCells):
            return self._changeable(row, cells)
        default = self._default if cells is None else cells.default
        is_drawn = self._draw_of(row) is not None
        filled = FilledCells(self.get(row, None), self.columns.start, default, self._freezes, is_drawn=is_drawn)
        self._cells[row] = filled
        return filled

    def _changeable(self, row: int, cells: AnyCells) -> AnyCells:
        if not self._is_held(cells):
            return cells
        twin = cells.copy()
        twin.made_after = self._freezes
        self._cells[row] = twin
        return twin

    def _is_held(self, cells: Cells) -> bool:
        return cells.made_after < self._freezes and self._unfinished > 0

    def _enlarged(self, row: int, cells: Cells, columns: BlockColumns) -> Cells:
        """Return larger cells with room for these columns; columns whose values equal the default are dropped."""
        assert isinstance(cells, HashedCells)  # Filled ones have room for all columns.
        larger = self._made(row, cells.count_different() + cells.count_absent(columns), cells.default)
        for some_columns, values in cells.parts():
            larger.put(some_columns, values)
        self._cells[row] = larger
        return larger


# -- in checkpoints ------------------------------------------------------------------------------------------

Segment: TypeAlias = tuple[int, AnyScalar, BlockColumns, Numbers]
"""The row, its default, and columns with their values."""

# A millisecond or two to gather and to encode; a small row takes about 10 µs.
_FRAME_BYTES: Final = 1 << 20
_FRAME_SEGMENTS: Final = 256


def _segments(rows: list[int], cells: list[Cells], dtype: DTypeOfNumbers) -> Iterator[Segment]:
    """Yield the segments of each row, or of parts of a large row, from the last row on; the lists become empty."""
    while cells:
        row, of_row = rows.pop(), cells.pop()
        is_empty = True
        for columns, values in of_row.parts():
            is_empty = False
            yield row, of_row.default, columns, values
        if is_empty:  # Its default may differ from the matrix's.
            yield row, of_row.default, np.empty(0, np.int64), np.empty(0, dtype)


def _frame_contents(segments: Iterator[Segment], dtype: DTypeOfNumbers) -> Generator[tuple[Numbers, ...], None, None]:
    """Yield the content of each frame: a tuple of arrays, ``(rows, defaults, lengths, columns, values)``."""
    gathered: list[Segment] = []
    size_bytes = 0
    for segment in segments:
        gathered.append(segment)
        _, _, columns, values = segment
        size_bytes += columns.nbytes + values.nbytes
        if size_bytes >= _FRAME_BYTES or len(gathered) >= _FRAME_SEGMENTS:
            yield _joined(gathered, dtype)
            size_bytes = 0
    if gathered:
        yield _joined(gathered, dtype)


def _joined(gathered: list[Segment], dtype: DTypeOfNumbers) -> tuple[Numbers, ...]:
    rows, defaults, columns, values = zip(*gathered, strict=True)
    gathered.clear()
    return (
        np.array(rows, np.int64),
        np.array(defaults, dtype),
        np.array([len(some) for some in columns], np.int64),
        np.concatenate(columns),
        np.concatenate(values),
    )


def _read_segments(frames: Iterable[object], block: Block, name: str) -> Iterator[Segment]:
    """Yield the segments of decoded frames; raise CheckpointError for a frame that does not fit the block."""
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


def _fits(frame: object, block: Block) -> TypeGuard[tuple[Numbers, Numbers, Numbers, Numbers, Numbers]]:
    if not (isinstance(frame, tuple) and len(frame) == 5 and all(isinstance(part, np.ndarray) for part in frame)):
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


def _all_in(numbers: BlockColumns, expected: range) -> bool:
    return bool(((numbers >= expected.start) & (numbers < expected.stop)).all())
