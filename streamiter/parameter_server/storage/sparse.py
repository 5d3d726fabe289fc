"""Blocks that hold what differs from a default."""

from __future__ import annotations

from typing import Any, TypeVar, final

import numpy as np
import numpy.typing as npt

from streamiter.deferred import Encode
from streamiter.errors import InternalError
from streamiter.parameter_server.matrix import Matrix
from streamiter.parameter_server.partitioning import BlockRange
from streamiter.parameter_server.storage.block import Block, Columns, Numbers, SparseRow
from streamiter.parameter_server.storage.cells import Cells, differs_from
from streamiter.parameter_server.storage.filled_cells import FilledCells
from streamiter.parameter_server.storage.frozen_cells import FrozenCells, segments_of
from streamiter.parameter_server.storage.hashed_cells import HashedCells, capacity_for, hashed_bytes
from streamiter.parameter_server.storage.shape import block_shape, check_shape

__all__ = ["SparseBlock"]

AnyCells = TypeVar("AnyCells", bound=Cells)


@final
class SparseBlock(Block):
    """For each row a default, and the columns that differ from it.

    A row is a hash table, until an array as wide as the block is smaller. Rows that nobody has changed take no memory.
    """

    is_sparse = True

    def __init__(self, matrix: Matrix, block: BlockRange) -> None:
        super().__init__(matrix, block)
        self._default = self.dtype.type(matrix.default)
        self._cells: dict[int, Cells] = {}
        """By row; one that is not there has the matrix's default everywhere."""
        self._freezes = 0
        self._frozen: list[FrozenCells] = []
        """Those that are not written yet: they hold cells of this block, which are copied before they change."""

    def get(self, row: int, columns: Columns | None, out: Numbers | None = None) -> Numbers:
        cells = self._cells.get(row)
        if columns is not None and cells is not None:
            return cells.get(columns, out)
        if out is None:
            out = np.empty(len(self.columns) if columns is None else len(columns), self.dtype)
        if cells is None:
            out.fill(self._default)
        else:
            cells.write_to(out)
        return out

    def add(self, row: int, columns: Columns | None, values: Numbers) -> None:
        if columns is None:
            at = values.nonzero()[0]
            if self._is_better_filled(len(at)):
                self._changeable_filled(row).add_all(values)
                return
            columns, values = at + self.columns.start, values[at]
        cells = self._changeable_row(row)
        if not cells.add(columns, values):
            self._enlarged(row, cells, columns).add(columns, values)

    def put(self, row: int, columns: Columns | None, values: Numbers) -> None:
        if columns is None:
            cells = self._cells.get(row)
            default = self._default if cells is None else cells.default
            at = differs_from(values, default).nonzero()[0]
            self.replace_row(row, SparseRow(at + self.columns.start, values[at], default))
            return
        cells = self._changeable_row(row)
        if not cells.put(columns, values):
            self._enlarged(row, cells, columns).put(columns, values)

    def dense_row(self, row: int) -> npt.NDArray[Any]:
        raise InternalError(f"{self._name}: expected a dense block, row {row} lies in a sparse one")

    def sparse_row(self, row: int) -> SparseRow:
        cells = self._cells.get(row)
        if cells is None:
            return SparseRow(np.empty(0, np.int64), np.empty(0, self.dtype), self._default.item())
        return SparseRow(*cells.content(), cells.default.item())

    def replace_row(self, row: int, content: SparseRow) -> None:
        count = len(content.columns)
        default = self.dtype.type(content.default)
        cells = self._cells.get(row)
        if cells is not None and not self._is_frozen(cells) and not cells.is_large_for(count):
            # The usual case: an optimizer writes the same columns again and again.
            cells.reset(default)
            if cells.put(content.columns, content.values):
                return
        self._cells[row] = made = self._made(count, default)
        made.put(content.columns, content.values)

    def size_bytes(self) -> int:
        return sum(cells.size_bytes() for cells in self._cells.values())

    def freeze(self, encode: Encode) -> dict[str, Any]:
        self._freezes += 1
        cells = FrozenCells(self._cells, self.dtype, name=self._name, encode=encode, unfinished=self._frozen)
        return {"shape": block_shape(self), "updates": self.updates, "cells": cells}

    def restore(self, state: dict[str, Any]) -> None:
        check_shape(self, state["shape"], self._name)
        self._cells = {}
        for row, default, columns, values in segments_of(state["cells"], self, self._name):
            if row not in self._cells:
                self._cells[row] = self._made(len(columns), self.dtype.type(default))
            self.put(row, columns, values)
        self.updates = state["updates"]

    def _made(self, count: int, default: Any) -> Cells:
        """Empty ones, with room for so many columns."""
        first = self.columns.start
        if self._is_better_filled(count):
            return FilledCells(np.full(len(self.columns), default, self.dtype), first, default, self._freezes)
        return HashedCells(capacity_for(count), self.dtype, first, default, self._freezes)

    def _is_better_filled(self, count: int) -> bool:
        return hashed_bytes(count, self.dtype) >= len(self.columns) * self.dtype.itemsize

    def _changeable_row(self, row: int) -> Cells:
        cells = self._cells.get(row)
        if cells is None:
            cells = self._cells[row] = self._made(0, self._default)
            return cells
        return self._changeable(row, cells)

    def _changeable_filled(self, row: int) -> FilledCells:
        cells = self._cells.get(row)
        if isinstance(cells, FilledCells):
            return self._changeable(row, cells)
        default = self._default if cells is None else cells.default
        filled = FilledCells(self.get(row, None), self.columns.start, default, self._freezes)
        self._cells[row] = filled
        return filled

    def _changeable(self, row: int, cells: AnyCells) -> AnyCells:
        if not self._is_frozen(cells):
            return cells
        twin = cells.copy()
        twin.made_after = self._freezes
        self._cells[row] = twin
        return twin

    def _is_frozen(self, cells: Cells) -> bool:
        return cells.made_after < self._freezes and bool(self._frozen)

    def _enlarged(self, row: int, cells: Cells, columns: Columns) -> Cells:
        """The same with room for further columns; those that have come to equal the default are dropped."""
        larger = self._made(cells.count_different() + cells.count_absent(columns), cells.default)
        for some_columns, values in cells.parts():
            larger.put(some_columns, values)
        self._cells[row] = larger
        return larger
