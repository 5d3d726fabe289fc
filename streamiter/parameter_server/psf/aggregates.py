"""Functions that read: aggregates, which return one number for one or two rows, and pulls, which return the rows.

Aggregates run on the shards, so the numbers of a row are not sent. A sum of floats is computed in float64, also for
float32. A sum of whole numbers is computed in int64, and wraps around. How a row is cut into blocks changes at most the
last bits of a sum.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar, TypeAlias

import numpy as np
import numpy.typing as npt

from streamiter.parameter_server.matrix import BlockRange, Matrix, MatrixPartitioning
from streamiter.parameter_server.psf.function import (
    Checked,
    ColumnsOrAll,
    GetFunction,
    NotNegative,
    Part,
    Row,
    SentInParts,
    aligned,
    same_numbers,
    without_default,
)
from streamiter.parameter_server.storage.block import AnyScalar, Block, BlockColumns, BlockRow, Numbers

_PIECE_COLUMNS = 1 << 16
"""Columns converted to float64 at a time: half a megabyte, which stays in the processor's cache."""

_PlainNumber: TypeAlias = int | float | bool


class _Reduction(Checked, GetFunction):
    """One number for the rows of its settings, computed piece by piece.

    Class keywords: ``piece`` computes the number of some columns, from one array of float64 or int64 for each row;
    ``merge`` computes one number from those of all pieces (their sum); ``result`` changes the number of all blocks.
    """

    _piece: ClassVar[Callable[..., AnyScalar | int]]
    _merge: ClassVar[Callable[..., AnyScalar]] = staticmethod(np.sum)
    _result: ClassVar[Callable[..., _PlainNumber]] = staticmethod(lambda number: number)

    def of_columns(self, *values: Numbers) -> AnyScalar | int:
        """Return the aggregate of one column or more."""
        return self._piece(*values)

    def partition_get(self, block: Block, part: Part) -> _PlainNumber:
        rows = self.named_rows
        with np.errstate(all="ignore"):
            if not block.is_sparse:
                return self._over_pieces([block.dense_row(row) for row in rows])
            columns, values = aligned([block.sparse_row(row) for row in rows], block.dtype)
            present = [each[:-1] for each in values]
            absent = self._of_absent([each[-1:] for each in values], len(block.columns) - len(columns))
            return self._over_pieces(present, absent)

    def _over_pieces(self, rows: Sequence[Numbers], more: Sequence[AnyScalar | _PlainNumber] = ()) -> _PlainNumber:
        dtype = np.int64 if rows[0].dtype.kind == "i" else np.float64
        numbers = [
            self.of_columns(*(row[start : start + _PIECE_COLUMNS].astype(dtype, copy=False) for row in rows))
            for start in range(0, len(rows[0]), _PIECE_COLUMNS)
        ]
        return self._merged([*numbers, *more])

    def _of_absent(self, defaults: Sequence[Numbers], count: int) -> Sequence[AnyScalar | _PlainNumber]:
        """Return the contribution of absent columns; no column contributes nothing (0 · ∞ would be NaN)."""
        if not count:
            return ()
        one = self._over_pieces(defaults)
        return (np.multiply(one, count),) if self._merge is np.sum else (one,)

    def _merged(self, numbers: Sequence[AnyScalar | _PlainNumber]) -> _PlainNumber:
        merged: _PlainNumber = self._merge(np.array(numbers)).item()
        return merged

    def merge(self, parts: Sequence[_PlainNumber]) -> _PlainNumber:
        with np.errstate(all="ignore"):
            return self._result(self._merged(parts))


@dataclass(frozen=True)
class NumberOfRow(_Reduction, sentence="Return {} of row ``row``."):
    """A number for one row."""

    row: Row


class Size(NumberOfRow, piece=len):
    """Return the count of stored numbers: all columns of a dense row; the columns of a sparse row that differ from its
    default.

    >>> Size("w", row=0)
    Size(matrix='w', row=0)
    """

    def _of_absent(self, defaults: Sequence[Numbers], count: int) -> Sequence[int]:
        return (0,)


@dataclass(frozen=True)
class Dot(_Reduction, piece=lambda x, y: np.multiply(x, y).sum()):
    """Return Σ x·y of rows ``first`` and ``second``.

    >>> Dot("w", 0, 1)
    Dot(matrix='w', first=0, second=1)
    """

    first: Row
    second: Row


@dataclass(frozen=True)
class Equal(_Reduction, merge=np.all):
    """Return True if no two numbers of rows ``first`` and ``second`` differ by more than ``tolerance``.

    An infinity equals itself. NaN equals nothing; with ``equal_nan=True`` it equals NaN.

    >>> Equal("w", 0, 1)
    Equal(matrix='w', first=0, second=1, tolerance=1e-10, equal_nan=False)
    """

    first: Row
    second: Row
    tolerance: NotNegative = 1e-10
    equal_nan: bool = False

    def of_columns(self, *values: Numbers) -> AnyScalar:
        first, second = values
        # The larger minus the smaller wraps around; read as an unsigned number, it is right.
        apart = np.maximum(first, second) - np.minimum(first, second)
        apart = apart.view(np.uint64) if apart.dtype.kind == "i" else apart
        same = (first == second) | (apart <= self.tolerance)
        if self.equal_nan:
            same |= np.isnan(first) & np.isnan(second)
        is_equal: AnyScalar = same.all()
        return is_equal


# -- pulls -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Pull(SentInParts, Checked, GetFunction):
    """Return a row, or some of its ``columns`` in the given order: an array of the matrix's dtype.

    >>> Pull("w", row=0, columns=[5, 2])
    Pull(matrix='w', row=0, columns=array([5, 2]))
    """

    row: Row
    columns: ColumnsOrAll = None

    def split(self, matrix: Matrix, partitioning: MatrixPartitioning) -> list[tuple[BlockRange, _PulledColumns]]:
        columns = None if self.columns is None else np.asarray(self.columns)
        slices = partitioning.split(self.row, columns)
        if not slices:  # An empty result has the dtype of the matrix, too.
            return [(partitioning.blocks_of_row(self.row)[0], (columns, 0))]
        return [(part.block, (part.columns, _place(part.positions))) for part in slices]

    def partition_get(self, block: Block, part: _PulledColumns) -> tuple[_Place, Numbers]:
        columns, place = part
        return place, block.get(self.row, columns)

    def merge(self, parts: Sequence[tuple[_Place, Numbers]]) -> Numbers:
        merged = np.empty(sum(len(values) for _, values in parts), parts[0][1].dtype)
        for place, values in parts:
            merged[slice(place, place + len(values)) if isinstance(place, int) else place] = values
        return merged


_Place: TypeAlias = int | npt.NDArray[np.intp]
"""Positions in the result of ``Pull``: the first of consecutive ones, or all of them."""
_PulledColumns: TypeAlias = tuple[BlockColumns | None, _Place]


def _place(positions: slice | npt.NDArray[np.intp]) -> _Place:
    """Return positions as plain data: a slice as its start."""
    return positions.start if isinstance(positions, slice) else positions


class FullPull(Checked, GetFunction):
    """Return the whole matrix: an array of (rows, columns), of the matrix's dtype.

    >>> FullPull("w")
    FullPull(matrix='w')
    """

    def partition_get(self, block: Block, part: Part) -> tuple[int, int, Numbers]:
        values = np.stack([block.get(row, None) for row in block.rows])
        return block.rows.start, block.columns.start, values

    def merge(self, parts: Sequence[tuple[int, int, Numbers]]) -> Numbers:
        rows = max(row + len(values) for row, _, values in parts)
        columns = max(column + values.shape[1] for _, column, values in parts)
        merged = np.empty((rows, columns), parts[0][2].dtype)
        for row, column, values in parts:
            merged[row : row + len(values), column : column + values.shape[1]] = values
        return merged


_PulledSparse: TypeAlias = tuple[int, int, BlockColumns, Numbers, float]
"""First column and end of a block, then the fields of a ``BlockRow``."""


@dataclass(frozen=True)
class PullSparse(Checked, GetFunction):
    """Return the columns of a row that differ from its default, with their values: a ``BlockRow``.

    The default of a dense row is 0; a drawn default is NaN.

    >>> PullSparse("w", row=0)
    PullSparse(matrix='w', row=0)
    """

    row: Row

    only_stored = True

    def partition_get(self, block: Block, part: Part) -> _PulledSparse:
        start, stop = block.columns.start, block.columns.stop
        if block.is_sparse:
            content = block.sparse_row(self.row)
            # Copies: the row may change before the reply is read.
            content = BlockRow(content.columns.copy(), content.values.copy(), content.default)
        else:
            content = without_default(np.arange(start, stop), block.get(self.row, None), 0)
        return start, stop, content.columns, content.values, content.default

    def merge(self, parts: Sequence[_PulledSparse]) -> BlockRow:
        default = parts[0][-1]
        blocks = [_with_default(part, default) for part in parts]
        return BlockRow(
            np.concatenate([content.columns for content in blocks]),
            np.concatenate([content.values for content in blocks]),
            default,
        )


def _with_default(part: _PulledSparse, default: float) -> BlockRow:
    """Return the columns that differ from ``default``; a block without absent columns may have a default of its own."""
    start, stop, columns, values, own = part
    if same_numbers(np.array([own]), default)[0]:
        return BlockRow(columns, values, default)
    every = np.full(stop - start, own, values.dtype)
    every[columns - start] = values
    return without_default(np.arange(start, stop), every, default)
