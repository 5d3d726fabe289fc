"""Rows that are followed, put together from their blocks."""

from __future__ import annotations

from typing import Any, final

import numpy as np
import numpy.typing as npt

from streamiter.parameter_server.changes import Changes, RowChange
from streamiter.parameter_server.matrix import Matrix
from streamiter.parameter_server.partitioning import Partitioning

__all__ = ["RowAssembly"]


@final
class RowAssembly:
    """What has come of some rows, and which of them are still to be told of: in the order they first changed.

    A row is told of only when all of its blocks have come. If rows lie in several blocks, a copy of each is kept.
    """

    def __init__(self, matrix: Matrix, partitioning: Partitioning) -> None:
        self._matrix = matrix
        self._partitioning = partitioning
        self._rows: dict[int, npt.NDArray[Any]] = {}
        self._missing: dict[int, set[int]] = {}
        """Blocks that have not come yet, by row."""
        self._news: dict[int, dict[int, int]] = {}
        """What is to be told: by row and block, the clock."""
        self._parts: dict[int, dict[int, int]] = {}
        """The same of rows that are not complete."""

    @property
    def has_news(self) -> bool:
        """Whether there is a row to tell of."""
        return bool(self._news)

    def take(self, changes: Changes) -> None:
        """Take what has come from a shard."""
        for number, rows, values in changes.parts:
            columns = self._partitioning.blocks[number].columns
            is_whole = len(columns) == self._matrix.columns
            for row, part in zip(rows.tolist(), values, strict=True):
                if is_whole:
                    # A row that a subscriber keeps must not keep the whole reply in memory.
                    self._rows[row] = part if len(rows) == 1 else part.copy()
                    self._news.setdefault(row, {})[number] = changes.clock
                else:
                    self._put(row, number, columns, part, changes.clock)

    def _put(self, row: int, block: int, columns: range, part: npt.NDArray[Any], clock: int) -> None:
        if row not in self._rows:
            self._rows[row] = np.empty(self._matrix.columns, self._matrix.numpy_dtype)
            self._missing[row] = {one.number for one in self._partitioning.blocks_of_row(row)}
        self._rows[row][columns.start : columns.stop] = part
        missing = self._missing.get(row)
        if missing is None:
            self._news.setdefault(row, {})[block] = clock
            return
        missing.discard(block)
        self._parts.setdefault(row, {})[block] = clock
        if not missing:
            del self._missing[row]
            self._news[row] = self._parts.pop(row)

    def tell(self) -> RowChange:
        """The first row that there is to tell of."""
        row = next(iter(self._news))
        clocks = self._news.pop(row)
        blocks = [self._partitioning.blocks[number].columns for number in clocks]
        start, stop = min(columns.start for columns in blocks), max(columns.stop for columns in blocks)
        is_whole = stop - start == self._matrix.columns
        is_in_one_block = len(blocks[0]) == self._matrix.columns
        values = self._rows.pop(row) if is_in_one_block else self._rows[row].copy()
        return RowChange(
            self._matrix.name, row, min(clocks.values()), None if is_whole else range(start, stop), values
        )
