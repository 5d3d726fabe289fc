"""Functions that give some rows of a matrix, or all of them, new values."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from streamiter.errors import ConfigurationError, OutOfRange, ParameterServerError
from streamiter.numbers import is_number, whole_number
from streamiter.parameter_server.matrix import Matrix
from streamiter.parameter_server.partitioning import BlockRange, Partitioning
from streamiter.parameter_server.psf.function import UpdateFunction
from streamiter.parameter_server.psf.settings import (
    ComparedByContent,
    check_fits_dtype,
    set_numbers,
    set_rows,
    set_values,
    where,
)
from streamiter.parameter_server.storage.block import Block, Numbers, SparseRow

__all__ = ["Diag", "Eye", "Fill", "FullFill", "Reset"]


def _fill(block: Block, rows: Iterable[int], value: float) -> None:
    """All numbers of these rows; of a sparse row this is its new default."""
    with np.errstate(over="ignore"):
        number = block.dtype.type(value)
    for row in rows:
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
    _fill(block, block.rows, 0)
    for row, value in zip(_diagonal(block), values, strict=True):
        block.put(row, np.array([row]), value)


class _FillsRows(UpdateFunction):
    """One row, or several, which may lie in any blocks."""

    row: int | Sequence[int]

    def __post_init__(self) -> None:
        if isinstance(self.row, (Sequence, np.ndarray)) and not isinstance(self.row, (str, bytes)):
            rows = tuple(whole_number(f"psf.{self.name}(row=)", row, 0, error=OutOfRange) for row in self.row)
            object.__setattr__(self, "row", rows)
        else:
            set_rows(self, "row")

    def _values(self) -> dict[int, float]:
        raise NotImplementedError

    def rows(self, matrix: Matrix) -> Sequence[int]:
        return (self.row,) if isinstance(self.row, int) else ()

    def changed_rows(self, matrix: Matrix, block: Block) -> Sequence[int]:
        return [row for row in self._values() if row in block.rows]

    def split(self, matrix: Matrix, partitioning: Partitioning) -> list[tuple[BlockRange, Any]]:
        rows = partitioning.checked_rows(self._values())
        places = {block.number: block for row in rows for block in partitioning.blocks_of_row(row)}
        return [(block, None) for block in places.values()]

    def partition_update(self, block: Block, part: Any) -> None:
        del part
        for row, value in self._values().items():
            if row in block.rows:
                _fill(block, (row,), value)


@dataclass(frozen=True)
class Fill(_FillsRows):
    """Every number of the row = ``value``; a sparse row then holds no more than its new default.

    Of several rows, all have this value, or (a sequence as long) each its own.

    >>> Fill("w", row=0, value=1)
    Fill(matrix='w', row=0, value=1)
    >>> Fill("w", row=[0, 7], value=[1.0, 2.0])
    Fill(matrix='w', row=(0, 7), value=(1.0, 2.0))
    """

    matrix: str
    row: int | Sequence[int]
    value: float | Sequence[float]

    def __post_init__(self) -> None:
        super().__post_init__()
        if isinstance(self.row, int) or is_number(self.value):
            set_numbers(self, "value")
            return
        set_values(self, "value")
        values = np.asarray(self.value)
        if len(values) != len(self.row):
            raise ConfigurationError(
                f"psf.Fill(value=): expected one number, or as many as rows, given {len(values)} and "
                f"{len(self.row)} rows"
            )
        object.__setattr__(self, "value", tuple(values.tolist()))

    def check(self, matrix: Matrix) -> None:
        check_fits_dtype(self, matrix, ("value",))

    def _values(self) -> dict[int, float]:
        if isinstance(self.row, int):
            return {self.row: cast(float, self.value)}
        values = self.value if isinstance(self.value, tuple) else (self.value,) * len(self.row)
        return dict(zip(self.row, values, strict=True))


@dataclass(frozen=True)
class Reset(_FillsRows):
    """Every number of a row, or of several, = 0; a sparse row then holds nothing, and its default is 0.

    >>> Reset("w", row=[0, 7])
    Reset(matrix='w', row=(0, 7))
    """

    matrix: str
    row: int | Sequence[int]

    def _values(self) -> dict[int, float]:
        return dict.fromkeys((self.row,) if isinstance(self.row, int) else self.row, 0)


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
        _fill(block, block.rows, self.value)


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
