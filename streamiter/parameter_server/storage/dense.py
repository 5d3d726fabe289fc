"""Blocks that hold every number."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, cast, final

import numpy as np
import numpy.typing as npt

from streamiter.deferred import Encode
from streamiter.errors import InternalError
from streamiter.parameter_server.matrix import Matrix
from streamiter.parameter_server.partitioning import BlockRange
from streamiter.parameter_server.storage.block import Block, Columns, Numbers, SparseRow
from streamiter.parameter_server.storage.frozen_arrays import FrozenArrays, fill_from_frames
from streamiter.parameter_server.storage.gathering import gathered
from streamiter.parameter_server.storage.shape import block_shape, check_shape

__all__ = ["DenseBlock"]

_ROW_VIEWS_MAX: Final = 4096


@final
class DenseBlock(Block):
    """An array of rows × columns, C-contiguous; zeros at first."""

    is_sparse = False

    def __init__(self, matrix: Matrix, block: BlockRange) -> None:
        super().__init__(matrix, block)
        self._array = np.zeros((len(block.rows), len(block.columns)), self.dtype)
        # A view takes 100 ns to make, a third of what 100 numbers take to read, and 100 bytes to keep.
        self._row_views: Sequence[npt.NDArray[Any]] = (
            list(self._array) if len(block.rows) <= _ROW_VIEWS_MAX else cast(Any, self._array)
        )
        self._first_row = block.rows.start
        # An array without axes: a Python int would cost as much again to convert as 100 columns to move.
        self._first_column = np.array(block.columns.start)
        self._begins_at_0 = block.columns.start == 0

    def get(self, row: int, columns: Columns | None, out: Numbers | None = None) -> Numbers:
        numbers = self._row_views[row - self._first_row]
        if columns is not None:
            return gathered(numbers, self._local(columns), out)
        if out is None:
            return numbers.copy()
        np.copyto(out, numbers)
        return out

    def add(self, row: int, columns: Columns | None, values: Numbers) -> None:
        numbers = self._row_views[row - self._first_row]
        if columns is None:
            np.add(numbers, values, out=numbers)
            return
        # It counts duplicates, and takes half the time of `numbers[local] += values`, which does not: one pass over
        # the row in place of two. To look for duplicates first takes longer than to add (of 10,000 keys 55 and 50 µs).
        np.add.at(numbers, self._local(columns), values)

    def put(self, row: int, columns: Columns | None, values: Numbers) -> None:
        numbers = self._row_views[row - self._first_row]
        if columns is None:
            np.copyto(numbers, values)
        else:
            numbers[self._local(columns)] = values

    def dense_row(self, row: int) -> npt.NDArray[Any]:
        return self._row_views[row - self._first_row]

    def sparse_row(self, row: int) -> SparseRow:
        raise InternalError(f"{self._name}: expected a sparse block, row {row} lies in a dense one")

    def replace_row(self, row: int, content: SparseRow) -> None:
        raise InternalError(f"{self._name}: expected a sparse block, row {row} lies in a dense one")

    def _local(self, columns: Columns) -> Columns:
        return columns if self._begins_at_0 else columns - self._first_column

    def size_bytes(self) -> int:
        return self._array.nbytes

    def freeze(self, encode: Encode) -> dict[str, Any]:
        return {
            "shape": block_shape(self),
            "updates": self.updates,
            "numbers": FrozenArrays([self._array.reshape(-1)], name=self._name, encode=encode),
        }

    def restore(self, state: dict[str, Any]) -> None:
        check_shape(self, state["shape"], self._name)
        fill_from_frames([self._array.reshape(-1)], state["numbers"], name=self._name)
        self.updates = state["updates"]
