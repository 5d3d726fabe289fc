"""Functions that give all rows of a matrix new values."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from streamiter.errors import ParameterServerError
from streamiter.parameter_server.matrix import Matrix
from streamiter.parameter_server.partitioning import BlockRange, Partitioning
from streamiter.parameter_server.psf.function import UpdateFunction
from streamiter.parameter_server.psf.settings import (
    ComparedByContent,
    check_fits_dtype,
    set_numbers,
    set_values,
    where,
)
from streamiter.parameter_server.storage.block import Block, Numbers, SparseRow

__all__ = ["Diag", "Eye", "FullFill"]


def _fill(block: Block, value: float) -> None:
    """All numbers of a block; of a sparse one this is its new default."""
    with np.errstate(over="ignore"):
        number = block.dtype.type(value)
    for row in block.rows:
        if block.is_sparse:
            nothing = SparseRow(np.empty(0, np.int64), np.empty(0, block.dtype), number.item())
            block.replace_row(row, nothing)
        else:
            block.dense_row(row).fill(number)


def _diagonal(block: BlockRange | Block) -> range:
    """The rows, and columns, of the matrix's diagonal that lie in a block."""
    return range(
        max(block.rows.start, block.columns.start),
        min(block.rows.stop, block.columns.stop),
    )


def _fill_diagonal(block: Block, values: Numbers) -> None:
    """``values`` on the diagonal, 0 elsewhere."""
    _fill(block, 0)
    for row, value in zip(_diagonal(block), values, strict=True):
        block.put(row, np.array([row]), value)


@dataclass(frozen=True)
class FullFill(UpdateFunction):
    """Every number of the matrix = ``value``."""

    matrix: str
    value: float

    def __post_init__(self) -> None:
        set_numbers(self, "value")

    def check(self, matrix: Matrix) -> None:
        check_fits_dtype(self, matrix, ("value",))

    def partition_update(self, block: Block, part: Any) -> None:
        del part
        _fill(block, self.value)


@dataclass(frozen=True)
class Eye(UpdateFunction):
    """1 on the diagonal, 0 elsewhere; the matrix need not be square."""

    matrix: str

    def split(self, matrix: Matrix, partitioning: Partitioning) -> list[tuple[BlockRange, Any]]:
        return [(block, np.ones(len(_diagonal(block)), matrix.numpy_dtype)) for block in partitioning.blocks]

    def partition_update(self, block: Block, part: Numbers) -> None:
        _fill_diagonal(block, part)


@dataclass(frozen=True, eq=False)
class Diag(ComparedByContent, UpdateFunction):
    """``values`` on the diagonal, 0 elsewhere: as many as there are rows, or columns where these are fewer."""

    matrix: str
    values: npt.ArrayLike

    def __post_init__(self) -> None:
        set_values(self, "values")

    def check(self, matrix: Matrix) -> None:
        given, expected = len(np.asarray(self.values)), min(matrix.rows, matrix.columns)
        if given != expected:
            raise ParameterServerError(
                f"{where(self, matrix)}, values=: expected {expected} numbers, as the diagonal of {matrix.rows} × "
                f"{matrix.columns} has, given {given}"
            )
        check_fits_dtype(self, matrix, ("values",))

    def split(self, matrix: Matrix, partitioning: Partitioning) -> list[tuple[BlockRange, Any]]:
        with np.errstate(over="ignore"):
            values = np.asarray(self.values).astype(matrix.numpy_dtype, copy=False)
        diagonals = ((block, _diagonal(block)) for block in partitioning.blocks)
        return [(block, values[rows.start : max(rows.start, rows.stop)]) for block, rows in diagonals]

    def partition_update(self, block: Block, part: Numbers) -> None:
        _fill_diagonal(block, part)
