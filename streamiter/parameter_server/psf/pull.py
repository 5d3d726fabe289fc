"""Rows as they are."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from streamiter.parameter_server.matrix import Matrix
from streamiter.parameter_server.partitioning import BlockRange, Partitioning
from streamiter.parameter_server.psf.function import GetFunction
from streamiter.parameter_server.psf.settings import ComparedByContent, check_columns, set_columns, set_rows
from streamiter.parameter_server.psf.sparse_rows import same_numbers, without_default
from streamiter.parameter_server.storage.block import Block, SparseRow

__all__ = ["FullPull", "Pull", "PullSparse"]


@dataclass(frozen=True, eq=False)
class Pull(ComparedByContent, GetFunction):
    """A row, or (``columns``) some of its columns in the order given: an array of the matrix's dtype.

    >>> Pull("w", row=0, columns=[5, 2])
    Pull(matrix='w', row=0, columns=array([5, 2]))
    """

    matrix: str
    row: int
    columns: npt.ArrayLike | None = None

    def __post_init__(self) -> None:
        set_rows(self, "row")
        if self.columns is not None:
            set_columns(self, "columns")

    def rows(self, matrix: Matrix) -> Sequence[int]:
        return (self.row,)

    def check(self, matrix: Matrix) -> None:
        if self.columns is not None:
            check_columns(self, matrix, np.asarray(self.columns))

    def split(self, matrix: Matrix, partitioning: Partitioning) -> list[tuple[BlockRange, Any]]:
        columns = None if self.columns is None else np.asarray(self.columns)
        slices = partitioning.split(self.row, columns)
        if not slices:  # the dtype of no columns at all is the matrix's, too
            return [(partitioning.blocks_of_row(self.row)[0], (columns, 0))]
        return [(part.block, (part.columns, _place(part.positions))) for part in slices]

    def partition_get(self, block: Block, part: Any) -> Any:
        columns, place = part
        return place, block.get(self.row, columns)

    def merge(self, parts: Sequence[Any]) -> npt.NDArray[Any]:
        merged = np.empty(sum(len(values) for _, values in parts), parts[0][1].dtype)
        for place, values in parts:
            merged[slice(place, place + len(values)) if isinstance(place, int) else place] = values
        return merged


def _place(positions: slice | npt.NDArray[np.intp]) -> int | npt.NDArray[np.intp]:
    """Plain data: a slice as its start."""
    return positions.start if isinstance(positions, slice) else positions


@dataclass(frozen=True)
class FullPull(GetFunction):
    """The whole matrix: an array of (rows, columns), of the matrix's dtype.

    >>> FullPull("w")
    FullPull(matrix='w')
    """

    matrix: str

    def partition_get(self, block: Block, part: Any) -> Any:
        del part
        values = np.stack([block.get(row, None) for row in block.rows])
        return block.rows.start, block.columns.start, values

    def merge(self, parts: Sequence[Any]) -> npt.NDArray[Any]:
        rows = max(row + len(values) for row, _, values in parts)
        columns = max(column + values.shape[1] for _, column, values in parts)
        merged = np.empty((rows, columns), parts[0][2].dtype)
        for row, column, values in parts:
            merged[row : row + len(values), column : column + values.shape[1]] = values
        return merged


@dataclass(frozen=True)
class PullSparse(GetFunction):
    """The columns of a row that differ from its default (of a dense row: from 0), and their values: a ``SparseRow``.

    >>> PullSparse("w", row=0)
    PullSparse(matrix='w', row=0)
    """

    matrix: str
    row: int

    def __post_init__(self) -> None:
        set_rows(self, "row")

    def rows(self, matrix: Matrix) -> Sequence[int]:
        return (self.row,)

    def partition_get(self, block: Block, part: Any) -> Any:
        del part
        start, stop = block.columns.start, block.columns.stop
        if block.is_sparse:
            content = block.sparse_row(self.row)
            # Copies: the reply may be looked at after the row has changed.
            content = SparseRow(content.columns.copy(), content.values.copy(), content.default)
        else:
            content = without_default(np.arange(start, stop), block.get(self.row, None), 0)
        return start, stop, content.columns, content.values, content.default

    def merge(self, parts: Sequence[Any]) -> SparseRow:
        default = parts[0][-1]
        blocks = [_with_default(part, default) for part in parts]
        return SparseRow(
            np.concatenate([content.columns for content in blocks]),
            np.concatenate([content.values for content in blocks]),
            default,
        )


def _with_default(part: Any, default: float) -> SparseRow:
    """The block's columns beside another default: one with no absent column may have its own."""
    start, stop, columns, values, own = part
    if same_numbers(np.array([own]), default)[0]:
        return SparseRow(columns, values, default)
    every = np.full(stop - start, own, values.dtype)
    every[columns - start] = values
    return without_default(np.arange(start, stop), every, default)
