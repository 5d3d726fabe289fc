"""Update functions that write whole rows and matrices: with an array of the caller or a constant.

With an array: ``Increment``, ``CompressUpdate``, ``Put``, ``Push``, ``MaxA``, ``MinA``, ``SparsePush``. With a
constant: ``Fill`` and ``Reset`` (some rows), ``FullFill``, ``Eye`` and ``Diag`` (the whole matrix).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Annotated, ClassVar, Final, cast

import numpy as np
import numpy.typing as npt

from streamiter.errors import ConfigurationError, ParameterServerError
from streamiter.parameter_server.matrix import BlockRange, Matrix, MatrixPartitioning
from streamiter.parameter_server.psf.function import (
    NUMBER,
    ChangedRow,
    Checked,
    ColumnNumbers,
    ColumnsOrAll,
    Number,
    Part,
    SentInParts,
    UpdateFunction,
    Values,
    as_number,
    as_row,
    as_values,
    check_as_many,
    check_width,
    fields_with,
    set_checked,
    where,
    without_default,
)
from streamiter.parameter_server.storage.block import Block, BlockColumns, BlockRow, Numbers
from streamiter.values.numbers import is_number

# -- a row and an array ----------------------------------------------------------------------------------------


class _WithArray(SentInParts, Checked, UpdateFunction):
    """Row = ``ufunc(row, array)``, with an array that is as wide as the matrix; each block receives its part of it.

    A function with a field ``columns`` may change some columns only: by the method ``by_columns`` of the block.
    """

    row: ChangedRow
    columns: ColumnsOrAll = None
    _ufunc: ClassVar[Callable[..., Numbers]]
    _by_columns: ClassVar[str]

    @property
    def only_stored(self) -> bool:  # type: ignore[override]
        return self.columns is not None

    @property
    def array_field(self) -> str:
        """The name of the setting that is the array."""
        return fields_with(type(self), NUMBER)[0]

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.columns is not None:
            check_as_many(self, "columns", self.array_field)

    def check(self, matrix: Matrix) -> None:
        if self.columns is None:
            check_width(self, matrix, self.array_field)
        super().check(matrix)

    def split(self, matrix: Matrix, partitioning: MatrixPartitioning) -> list[tuple[BlockRange, Part]]:
        columns = None if self.columns is None else np.asarray(self.columns)
        return _split(self.row, columns, getattr(self, self.array_field), matrix, partitioning)

    def partition_update(self, block: Block, part: Part) -> None:
        columns, values = part
        with np.errstate(all="ignore"):
            if columns is not None:
                getattr(block, self._by_columns)(self.row, columns, values)
            elif block.is_sparse:
                values = self._ufunc(block.get(self.row, None), values)
                columns = np.arange(block.columns.start, block.columns.stop)
                default = block.sparse_row(self.row).default
                block.replace_row(self.row, without_default(columns, values, default))
            else:
                row = block.dense_row(self.row)
                self._ufunc(row, values, out=row)


def _split(
    row: int, columns: BlockColumns | None, values: npt.ArrayLike, matrix: Matrix, partitioning: MatrixPartitioning
) -> list[tuple[BlockRange, Part]]:
    """Return the blocks that have some of the columns (None: all), each with its columns and their values."""
    with np.errstate(over="ignore"):
        numbers = np.asarray(values).astype(matrix.numpy_dtype, copy=False)
    return [(part.block, (part.columns, numbers[part.positions])) for part in partitioning.split(row, columns)]


@dataclass(frozen=True)
class Increment(_WithArray, ufunc=np.add, by_columns="add"):
    """Row += ``delta``, or some of its ``columns`` += ``delta``; a column that is named twice gets both.

    :meth:`~streamiter.parameter_server.Client.add` does the same, but waits where the consistency says so;
    ``Increment`` never waits.

    >>> Increment("w", row=0, delta=[1.0, 2.0])
    Increment(matrix='w', row=0, delta=array([1., 2.]), columns=None)
    >>> Increment("w", row=0, delta=[1.0, 2.0], columns=[3, 3])
    Increment(matrix='w', row=0, delta=array([1., 2.]), columns=array([3, 3]))
    """

    row: ChangedRow
    delta: Values
    columns: ColumnsOrAll = None


# A number in few bits is a whole number of this type; one bit is the sign.
_POINTS: Final = {8: np.int8, 16: np.int16, 32: np.int32}


@dataclass(frozen=True)
class CompressUpdate(_WithArray, ufunc=np.add, int64="refused"):
    """Row += ``delta``, which is sent to the shards in 8, 16 or 32 ``bits`` a number. Not for int64.

    The step is the largest absolute value of ``delta``, divided by 2^(bits − 1) − 1. Each number is rounded to the
    nearest multiple of the step, so its error is at most half a step. ``delta`` must be finite.

    >>> CompressUpdate("w", row=0, delta=[1.0, 0.3], bits=8)
    CompressUpdate(matrix='w', row=0, delta=array([1. , 0.3]), bits=8)
    """

    row: ChangedRow
    delta: Values
    bits: int = 8

    def __post_init__(self) -> None:
        super().__post_init__()
        if type(self.bits) is not int or self.bits not in _POINTS:
            raise ConfigurationError(f"psf.CompressUpdate(bits=): expected 8, 16 or 32, given {self.bits!r}")
        delta = np.asarray(self.delta)
        if not np.isfinite(delta).all():
            raise ConfigurationError(
                "psf.CompressUpdate(delta=): expected finite numbers, given "
                f"{delta[~np.isfinite(delta)][0]}; add it with psf.Increment"
            )

    def split(self, matrix: Matrix, partitioning: MatrixPartitioning) -> list[tuple[BlockRange, Part]]:
        delta = np.asarray(self.delta, np.float64)
        # The largest of the whole row, not of each block: the result does not depend on how the matrix is cut.
        largest = float(np.abs(delta).max(initial=0.0))
        points = np.rint(delta / (largest or 1.0) * (2 ** (self.bits - 1) - 1)).astype(_POINTS[self.bits])
        return [
            (block, (points[block.columns.start : block.columns.stop], largest))
            for block in partitioning.blocks_of_row(self.row)
        ]

    def partition_update(self, block: Block, part: Part) -> None:
        points, largest = part
        with np.errstate(all="ignore"):
            delta = points / (2 ** (self.bits - 1) - 1) * largest
            super().partition_update(block, (None, delta.astype(block.dtype)))


def _put(values: Numbers, given: Numbers, out: Numbers | None = None) -> Numbers:
    out = np.empty_like(values) if out is None else out
    np.copyto(out, given)
    return out


@dataclass(frozen=True)
class Put(_WithArray, ufunc=_put, by_columns="put"):
    """Row = ``values``, as many as the matrix has columns; or some ``columns`` = ``values``, and others stay.

    A column that is named twice gets the last value.
    """

    row: ChangedRow
    values: Values
    columns: ColumnsOrAll = None


class Push(Put):
    """Row = ``values``, as :class:`Put` does. ``Push`` replaces the row; :class:`Increment` adds to it.

    >>> Push("w", row=0, values=[1.0, 2.0])
    Push(matrix='w', row=0, values=array([1., 2.]), columns=None)
    """


@dataclass(frozen=True)
class _WithOther(_WithArray):
    row: ChangedRow
    other: Values


class MaxA(_WithOther, ufunc=np.maximum):
    """Row = the larger of each of its numbers and the number of ``other``; NaN if one is NaN."""


class MinA(_WithOther, ufunc=np.minimum):
    """Row = the smaller of each of its numbers and the number of ``other``; NaN if one is NaN."""


@dataclass(frozen=True)
class SparsePush(SentInParts, Checked, UpdateFunction):
    """Row = ``values`` in ``columns``, and 0 in all others; a column that is named twice gets the last value.

    >>> SparsePush("w", row=0, columns=[3, 7], values=[1.0, 2.0])
    SparsePush(matrix='w', row=0, columns=array([3, 7]), values=array([1., 2.]))
    """

    row: ChangedRow
    columns: ColumnNumbers
    values: Values

    def __post_init__(self) -> None:
        super().__post_init__()
        check_as_many(self, "columns", "values")

    def split(self, matrix: Matrix, partitioning: MatrixPartitioning) -> list[tuple[BlockRange, Part]]:
        columns, last = np.unique(np.asarray(self.columns)[::-1], return_index=True)
        values = np.asarray(self.values)[::-1][last]
        named = {block.number: part for block, part in _split(self.row, columns, values, matrix, partitioning)}
        none = (np.empty(0, np.int64), np.empty(0, matrix.numpy_dtype))
        return [(block, named.get(block.number, none)) for block in partitioning.blocks_of_row(self.row)]

    def partition_update(self, block: Block, part: Part) -> None:
        columns, values = part
        if block.is_sparse:
            block.replace_row(self.row, without_default(columns, values, 0))
        else:
            row = block.dense_row(self.row)
            row.fill(0)
            row[columns - block.columns.start] = values


# -- a constant ------------------------------------------------------------------------------------------------


def _fill(block: Block, rows: Iterable[int], value: float) -> None:
    """Write ``value`` to all numbers of these rows; for a sparse row it becomes the default."""
    with np.errstate(over="ignore"):
        number = block.dtype.type(value)
    for row in rows:
        if block.is_sparse:
            empty = BlockRow(np.empty(0, np.int64), np.empty(0, block.dtype), number.item())
            block.replace_row(row, empty)
        else:
            block.dense_row(row).fill(number)


def _diagonal(block: BlockRange | Block) -> range:
    """Return the rows, which are also the columns, of the part of the matrix's diagonal in a block."""
    return range(max(block.rows.start, block.columns.start), min(block.rows.stop, block.columns.stop))


def _as_rows(option: str, value: object) -> int | tuple[int, ...]:
    if isinstance(value, (Sequence, np.ndarray)) and not isinstance(value, (str, bytes)):
        return tuple(as_row(option, row) for row in value)
    return as_row(option, value)


class _FillsRows(Checked, UpdateFunction):
    """Give one row, or several rows in any blocks, a value each."""

    row: int | Sequence[int]

    def __post_init__(self) -> None:
        set_checked(self, "row", _as_rows)

    def _values(self) -> dict[int, float]:
        """Return the value of each row."""
        return dict.fromkeys((self.row,) if isinstance(self.row, int) else self.row, 0)

    def rows(self, matrix: Matrix) -> Sequence[int]:
        return (self.row,) if isinstance(self.row, int) else ()

    def split(self, matrix: Matrix, partitioning: MatrixPartitioning) -> list[tuple[BlockRange, Part]]:
        rows = partitioning.checked_rows(self._values())
        places = {block.number: block for row in rows for block in partitioning.blocks_of_row(row)}
        return [(block, None) for block in places.values()]

    def partition_update(self, block: Block, part: Part) -> None:
        for row, value in self._values().items():
            if row in block.rows:
                _fill(block, (row,), value)


@dataclass(frozen=True)
class Fill(_FillsRows):
    """Every number of the row = ``value``; ``value`` becomes the default of a sparse row.

    ``row`` may be a sequence of rows; ``value`` is then one number for all of them, or one for each.

    >>> Fill("w", row=0, value=1)
    Fill(matrix='w', row=0, value=1)
    >>> Fill("w", row=[0, 7], value=[1.0, 2.0])
    Fill(matrix='w', row=(0, 7), value=(1.0, 2.0))
    """

    row: int | Sequence[int]
    value: Annotated[float | Sequence[float], NUMBER]

    def __post_init__(self) -> None:
        super().__post_init__()
        if isinstance(self.row, int) or is_number(self.value):
            set_checked(self, "value", as_number)
            return
        set_checked(self, "value", as_values)
        values = np.asarray(self.value)
        if len(values) != len(self.row):
            raise ConfigurationError(
                f"psf.Fill(value=): expected one number, or as many as rows, given {len(values)} and "
                f"{len(self.row)} rows"
            )
        object.__setattr__(self, "value", tuple(values.tolist()))

    def _values(self) -> dict[int, float]:
        if isinstance(self.row, int):
            return {self.row: cast("float", self.value)}
        values = self.value if isinstance(self.value, tuple) else (self.value,) * len(self.row)
        return dict(zip(self.row, values, strict=True))


@dataclass(frozen=True)
class Reset(_FillsRows):
    """Every number of a row, or of several rows, = 0; a sparse row stores nothing, and its default becomes 0.

    >>> Reset("w", row=[0, 7])
    Reset(matrix='w', row=(0, 7))
    """

    row: int | Sequence[int]


@dataclass(frozen=True)
class FullFill(Checked, UpdateFunction):
    """Every number of the matrix = ``value``."""

    value: Number

    def partition_update(self, block: Block, part: Part) -> None:
        _fill(block, block.rows, self.value)


class _OfDiagonal(Checked, UpdateFunction):
    def _diagonal(self, matrix: Matrix) -> Numbers:
        """Return the diagonal of the whole matrix."""
        return np.ones(min(matrix.rows, matrix.columns), matrix.numpy_dtype)

    def split(self, matrix: Matrix, partitioning: MatrixPartitioning) -> list[tuple[BlockRange, Part]]:
        values = self._diagonal(matrix)
        diagonals = ((block, _diagonal(block)) for block in partitioning.blocks)
        return [(block, values[rows.start : max(rows.start, rows.stop)]) for block, rows in diagonals]

    def partition_update(self, block: Block, part: Numbers) -> None:
        _fill(block, block.rows, 0)
        for row, value in zip(_diagonal(block), part, strict=True):
            block.put(row, np.array([row]), value)


class Eye(_OfDiagonal):
    """The matrix = 1 on the diagonal, 0 elsewhere; it need not be square."""


@dataclass(frozen=True)
class Diag(SentInParts, _OfDiagonal):
    """The matrix = ``values`` on the diagonal, 0 elsewhere; as many values as rows or columns, whichever are fewer."""

    values: Values

    def check(self, matrix: Matrix) -> None:
        given, expected = len(np.asarray(self.values)), min(matrix.rows, matrix.columns)
        if given != expected:
            raise ParameterServerError(
                f"{where(self, matrix)}, values=: expected {expected} numbers, as the diagonal of {matrix.rows} × "
                f"{matrix.columns} has, given {given}"
            )
        super().check(matrix)

    def _diagonal(self, matrix: Matrix) -> Numbers:
        with np.errstate(over="ignore"):
            return np.asarray(self.values).astype(matrix.numpy_dtype, copy=False)
