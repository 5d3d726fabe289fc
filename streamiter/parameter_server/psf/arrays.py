"""Functions of a row and an array, in place."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from streamiter.parameter_server.matrix import Matrix
from streamiter.parameter_server.partitioning import BlockRange, Partitioning
from streamiter.parameter_server.psf.function import UpdateFunction
from streamiter.parameter_server.psf.settings import (
    ComparedByContent,
    check_columns,
    check_fits_dtype,
    check_width,
    set_columns,
    set_rows,
    set_values,
)
from streamiter.parameter_server.psf.sparse_rows import without_default
from streamiter.parameter_server.storage.block import Block, Numbers

__all__ = ["Increment", "MaxA", "MinA", "Push", "Put"]


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
    """Row += delta.

    >>> Increment("w", row=0, delta=[1.0, 2.0])
    Increment(matrix='w', row=0, delta=array([1., 2.]))
    """

    matrix: str
    row: int
    delta: npt.ArrayLike

    array_field = "delta"
    body = np.add


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
class Push(_OfArrays):
    """Add values to some columns of a row; where a column is named twice, both count.

    As :meth:`Client.add` does, but at once, whatever the consistency. The way back is :class:`Pull` with columns.

    >>> Push("w", row=0, columns=[3, 3], values=[1.0, 2.0])
    Push(matrix='w', row=0, columns=array([3, 3]), values=array([1., 2.]))
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
        with np.errstate(over="ignore"):
            values = np.asarray(self.values).astype(matrix.numpy_dtype, copy=False)
        slices = partitioning.split(self.row, np.asarray(self.columns))
        return [(part.block, (part.columns, values[part.positions])) for part in slices]

    def partition_update(self, block: Block, part: Any) -> None:
        columns, values = part
        with np.errstate(all="ignore"):
            block.add(self.row, columns, values)
