"""The rows of several blocks, numbered through."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias, final

import numpy as np
import numpy.typing as npt

from streamiter.parameter_server.changes import ChangedRows
from streamiter.parameter_server.storage.block import Block

__all__ = ["Marks", "Positions", "RowsOfBlocks"]

Positions: TypeAlias = "npt.NDArray[np.intp]"


@final
class RowsOfBlocks:
    """Gives each row of each block a position: block by block, row by row."""

    def __init__(self, blocks: Mapping[int, Block]) -> None:
        self._blocks = blocks
        self._numbers = list(blocks)
        self._starts = np.cumsum([0, *(len(block.rows) for block in blocks.values())])
        self._start_of = dict(zip(self._numbers, self._starts.tolist(), strict=False))
        self._row_bytes = np.array(
            [len(block.columns) * block.dtype.itemsize for block in blocks.values()], np.int64
        )
        self.count = int(self._starts[-1])

    def positions(self, block: int, rows: Sequence[int]) -> slice | list[int]:
        """Where these rows of a block stand."""
        offset = self._start_of[block] - self._blocks[block].rows.start
        if isinstance(rows, range) and rows.step == 1:
            return slice(rows.start + offset, rows.stop + offset)
        return [row + offset for row in rows]

    def mask(self, rows: npt.NDArray[np.int64] | None) -> npt.NDArray[np.bool_]:
        """True where one of these rows stands; None: everywhere."""
        if rows is None:
            return np.ones(self.count, np.bool_)
        mask = np.zeros(self.count, np.bool_)
        for number, block in self._blocks.items():
            here = rows[(rows >= block.rows.start) & (rows < block.rows.stop)]
            mask[here + (self._start_of[number] - block.rows.start)] = True
        return mask

    def size_bytes(self, positions: Positions) -> npt.NDArray[np.int64]:
        """What the values of each of these rows take."""
        return self._row_bytes[self._index_of_block(positions)]

    def read(self, positions: Positions) -> list[ChangedRows]:
        """These rows as they are now; ``positions`` ascending."""
        found: list[ChangedRows] = []
        indices, begins = np.unique(self._index_of_block(positions), return_index=True)
        ends = [*begins[1:].tolist(), len(positions)]
        for index, begin, end in zip(indices.tolist(), begins.tolist(), ends, strict=True):
            number = self._numbers[index]
            block = self._blocks[number]
            rows = positions[begin:end].astype(np.int64) + (block.rows.start - int(self._starts[index]))
            values: npt.NDArray[Any] = np.empty((len(rows), len(block.columns)), block.dtype)
            for row, out in zip(rows.tolist(), values, strict=True):
                block.get(row, None, out)
            found.append(ChangedRows(number, rows, values))
        return found

    def _index_of_block(self, positions: Positions) -> Positions:
        return np.searchsorted(self._starts, positions, side="right") - 1


@final
class Marks:
    """A set of positions, in a byte for each that there could be; quick where those in it lie close together."""

    def __init__(self, count: int) -> None:
        self._is_marked = np.zeros(count, np.bool_)
        self._low, self._high = count, 0
        """All that are marked lie from here to below there."""

    def __bool__(self) -> bool:
        return self._low < self._high

    def add(self, positions: slice | list[int] | Positions) -> None:
        """Mark these; an array is ascending."""
        if isinstance(positions, slice):
            low, high = positions.start, positions.stop
        elif isinstance(positions, list):
            low, high = min(positions, default=0), max(positions, default=-1) + 1
        else:
            low, high = (int(positions[0]), int(positions[-1]) + 1) if len(positions) else (0, 0)
        if low < high:
            self._is_marked[positions] = True
            self._low, self._high = min(low, self._low), max(high, self._high)

    def take(self) -> Positions:
        """All that are marked, ascending; none is any more."""
        low, high = self._low, self._high
        if low >= high:
            return np.empty(0, np.intp)
        span = self._is_marked[low:high]
        positions = np.flatnonzero(span) + low
        span[:] = False
        self._low, self._high = len(self._is_marked), 0
        return positions
