"""Functions of a row and an array, in place."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Final

import numpy as np
import numpy.typing as npt

from streamiter.errors import ConfigurationError
from streamiter.parameter_server.matrix import Matrix
from streamiter.parameter_server.partitioning import BlockRange, Partitioning
from streamiter.parameter_server.psf.function import UpdateFunction
from streamiter.parameter_server.psf.settings import (
    ComparedByContent,
    check_columns,
    check_fits_dtype,
    check_fractions_fit,
    check_width,
    set_columns,
    set_rows,
    set_values,
)
from streamiter.parameter_server.psf.sparse_rows import without_default
from streamiter.parameter_server.storage.block import Block, Numbers

__all__ = ["CompressUpdate", "Increment", "MaxA", "MinA", "Push", "Put", "SparsePush"]

# A number in few bits is a whole number of this type; one bit is the sign.
_POINTS: Final = {8: np.int8, 16: np.int16, 32: np.int32}


class _OfArrays(ComparedByContent, UpdateFunction):
    row: int

    def rows(self, matrix: Matrix) -> Sequence[int]:
        return (self.row,)


class _WholeRow(_OfArrays):
    """Row = function of itself and of an array of the matrix's full width; another width is an error."""

    array_field: ClassVar[str]
    body: ClassVar[Callable[..., Any]]

    def __post_init__(self) -> None:
        set_rows(self, "row")
        set_values(self, self.array_field)

    def check(self, matrix: Matrix) -> None:
        check_width(self, matrix, self.array_field)
        check_fits_dtype(self, matrix, (self.array_field,))

    def split(self, matrix: Matrix, partitioning: Partitioning) -> list[tuple[BlockRange, Any]]:
        with np.errstate(over="ignore"):
            array: Numbers = getattr(self, self.array_field).astype(matrix.numpy_dtype, copy=False)
        return [
            (block, array[block.columns.start : block.columns.stop])
            for block in partitioning.blocks_of_row(self.row)
        ]

    def partition_update(self, block: Block, part: Numbers) -> None:
        body = type(self).body
        with np.errstate(all="ignore"):
            if block.is_sparse:
                values = body(block.get(self.row, None), part)
                columns = np.arange(block.columns.start, block.columns.stop)
                default = block.sparse_row(self.row).default
                block.replace_row(self.row, without_default(columns, values, default))
            else:
                row = block.dense_row(self.row)
                body(row, part, out=row)


@dataclass(frozen=True, eq=False)
class Increment(_WholeRow):
    """Row += delta, or (``columns``) some of its columns; where a column is named twice, both count.

    As :meth:`Client.add` does, but at once, whatever the consistency.

    >>> Increment("w", row=0, delta=[1.0, 2.0])
    Increment(matrix='w', row=0, delta=array([1., 2.]), columns=None)
    >>> Increment("w", row=0, delta=[1.0, 2.0], columns=[3, 3])
    Increment(matrix='w', row=0, delta=array([1., 2.]), columns=array([3, 3]))
    """

    matrix: str
    row: int
    delta: npt.ArrayLike
    columns: npt.ArrayLike | None = None

    array_field = "delta"
    body = np.add

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.columns is not None:
            set_columns(self, "columns", "delta")

    def check(self, matrix: Matrix) -> None:
        if self.columns is None:
            super().check(matrix)
        else:
            check_columns(self, matrix, np.asarray(self.columns))
            check_fits_dtype(self, matrix, ("delta",))

    def split(self, matrix: Matrix, partitioning: Partitioning) -> list[tuple[BlockRange, Any]]:
        if self.columns is None:
            return super().split(matrix, partitioning)
        return _split_columns(self.row, self.columns, self.delta, matrix, partitioning)

    def partition_update(self, block: Block, part: Any) -> None:
        if self.columns is None:
            super().partition_update(block, part)
        else:
            with np.errstate(all="ignore"):
                block.add(self.row, *part)


def _split_columns(
    row: int, columns: npt.ArrayLike, values: npt.ArrayLike, matrix: Matrix, partitioning: Partitioning
) -> list[tuple[BlockRange, Any]]:
    """The columns of each block and their values, for the blocks that have any."""
    with np.errstate(over="ignore"):
        numbers = np.asarray(values).astype(matrix.numpy_dtype, copy=False)
    return [
        (part.block, (part.columns, numbers[part.positions]))
        for part in partitioning.split(row, np.asarray(columns))
    ]


@dataclass(frozen=True, eq=False)
class CompressUpdate(_WholeRow):
    """Row += delta, which is sent to the shards in 8, 16 or 32 ``bits`` a number. Not for int64.

    Each number becomes a whole multiple, the nearest, of the largest absolute value of ``delta`` divided by
    2^(bits − 1) − 1: the error of a number is at most half of that. ``delta`` has to be finite.

    >>> CompressUpdate("w", row=0, delta=[1.0, 0.3], bits=8)
    CompressUpdate(matrix='w', row=0, delta=array([1. , 0.3]), bits=8)
    """

    matrix: str
    row: int
    delta: npt.ArrayLike
    bits: int = 8

    array_field = "delta"
    body = np.add

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

    def check(self, matrix: Matrix) -> None:
        check_fractions_fit(self, matrix)
        super().check(matrix)

    def split(self, matrix: Matrix, partitioning: Partitioning) -> list[tuple[BlockRange, Any]]:
        delta = np.asarray(self.delta, np.float64)
        # Of the whole row, not of each block: the result does not depend on how the matrix is cut.
        largest = float(np.abs(delta).max(initial=0.0))
        points = np.rint(delta / (largest or 1.0) * (2 ** (self.bits - 1) - 1)).astype(_POINTS[self.bits])
        return [
            (block, (points[block.columns.start : block.columns.stop], largest))
            for block in partitioning.blocks_of_row(self.row)
        ]

    def partition_update(self, block: Block, part: Any) -> None:
        points, largest = part
        with np.errstate(all="ignore"):
            delta = points / (2 ** (self.bits - 1) - 1) * largest
            super().partition_update(block, delta.astype(block.dtype))


def _put(values: Numbers, given: Numbers, out: Numbers | None = None) -> Numbers:
    out = np.empty_like(values) if out is None else out
    np.copyto(out, given)
    return out


@dataclass(frozen=True, eq=False)
class Put(_WholeRow):
    """Row = values."""

    matrix: str
    row: int
    values: npt.ArrayLike

    array_field = "values"
    body = _put


class Push(Put):
    """Row = values: the same as :class:`Put`. It replaces; what adds is :class:`Increment`.

    >>> Push("w", row=0, values=[1.0, 2.0])
    Push(matrix='w', row=0, values=array([1., 2.]))
    """


@dataclass(frozen=True, eq=False)
class MaxA(_WholeRow):
    """Row = the larger of each of its numbers and that of ``other``; NaN where one is NaN."""

    matrix: str
    row: int
    other: npt.ArrayLike

    array_field = "other"
    body = np.maximum


@dataclass(frozen=True, eq=False)
class MinA(_WholeRow):
    """Row = the smaller of each of its numbers and that of ``other``; NaN where one is NaN."""

    matrix: str
    row: int
    other: npt.ArrayLike

    array_field = "other"
    body = np.minimum


@dataclass(frozen=True, eq=False)
class SparsePush(_OfArrays):
    """Row = ``values`` in ``columns``, and 0 in all others; where a column is named twice, the last value counts.

    >>> SparsePush("w", row=0, columns=[3, 7], values=[1.0, 2.0])
    SparsePush(matrix='w', row=0, columns=array([3, 7]), values=array([1., 2.]))
    """

    matrix: str
    row: int
    columns: npt.ArrayLike
    values: npt.ArrayLike

    def __post_init__(self) -> None:
        set_rows(self, "row")
        set_values(self, "values")
        set_columns(self, "columns", "values")

    def check(self, matrix: Matrix) -> None:
        check_columns(self, matrix, np.asarray(self.columns))
        check_fits_dtype(self, matrix, ("values",))

    def split(self, matrix: Matrix, partitioning: Partitioning) -> list[tuple[BlockRange, Any]]:
        columns, last = np.unique(np.asarray(self.columns)[::-1], return_index=True)
        values = np.asarray(self.values)[::-1][last]
        named = {
            block.number: part
            for block, part in _split_columns(self.row, columns, values, matrix, partitioning)
        }
        none = (np.empty(0, np.int64), np.empty(0, matrix.numpy_dtype))
        return [(block, named.get(block.number, none)) for block in partitioning.blocks_of_row(self.row)]

    def partition_update(self, block: Block, part: Any) -> None:
        columns, values = part
        if block.is_sparse:
            block.replace_row(self.row, without_default(columns, values, 0))
        else:
            row = block.dense_row(self.row)
            row.fill(0)
            row[columns - block.columns.start] = values
