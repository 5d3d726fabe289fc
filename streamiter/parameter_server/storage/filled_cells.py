"""A sparse row that has become full enough to hold every column."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, final

import numpy as np

from streamiter.parameter_server.storage.block import Columns, Numbers
from streamiter.parameter_server.storage.cells import PART_COLUMNS, Cells, differs_from
from streamiter.parameter_server.storage.gathering import gathered
from streamiter.parameter_server.storage.hashed_cells import hashed_bytes

__all__ = ["FilledCells"]


@final
class FilledCells(Cells):
    """An array as wide as the block."""

    def __init__(self, values: Numbers, first: int, default: Any, made_after: int) -> None:
        """``values`` is kept; ``first`` is the first column of the block."""
        self.default = default
        self.made_after = made_after
        self._values = values
        self._first = np.array(first)

    def get(self, columns: Columns, out: Numbers | None) -> Numbers:
        return gathered(self._values, columns - self._first, out)

    def write_to(self, out: Numbers) -> None:
        np.copyto(out, self._values)

    def add(self, columns: Columns, values: Numbers) -> bool:
        np.add.at(self._values, columns - self._first, values)
        return True

    def put(self, columns: Columns, values: Numbers) -> bool:
        self._values[columns - self._first] = values
        return True

    def add_all(self, values: Numbers) -> None:
        """Add to every column."""
        np.add(self._values, values, out=self._values)

    def count_absent(self, columns: Columns) -> int:
        del columns
        return 0

    def reset(self, default: Any) -> None:
        self.default = default
        self._values.fill(default)

    def content(self) -> tuple[Columns, Numbers]:
        at = differs_from(self._values, self.default).nonzero()[0]
        return at + self._first, self._values[at]

    def parts(self) -> Iterator[tuple[Columns, Numbers]]:
        for begin in range(0, len(self._values), PART_COLUMNS):
            values = self._values[begin : begin + PART_COLUMNS]
            at = differs_from(values, self.default).nonzero()[0]
            if len(at):
                yield at + (self._first + begin), values[at]

    def copy(self) -> FilledCells:
        return FilledCells(self._values.copy(), self._first.item(), self.default, self.made_after)

    def is_large_for(self, count: int) -> bool:
        return 4 * hashed_bytes(count, self._values.dtype) < self._values.nbytes

    def size_bytes(self) -> int:
        return self._values.nbytes
