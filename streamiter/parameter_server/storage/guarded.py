"""Blocks as functions of users get them."""

from __future__ import annotations

from typing import Any, final

import numpy as np
import numpy.typing as npt

from streamiter.deferred import Encode
from streamiter.errors import OutOfRange
from streamiter.parameter_server.storage.block import Block, Columns, Numbers, SparseRow

__all__ = ["GuardedBlock"]


@final
class GuardedBlock(Block):
    """The block itself, but rows and columns that lie in other blocks are refused.

    Counted from this block's first ones they would be below 0, and stand for others of its own. ``who`` names the
    function in errors.

    >>> from streamiter.parameter_server.matrix import Matrix
    >>> from streamiter.parameter_server.partitioning import BlockRange
    >>> from streamiter.parameter_server.storage import make_block
    >>> block = make_block(Matrix("w", rows=4, columns=3), BlockRange(1, 0, range(2, 4), range(0, 3)))
    >>> GuardedBlock(block, "f").get(0, None)
    Traceback (most recent call last):
        ...
    streamiter.errors.OutOfRange: f: expected a row of the block, 2 to 3, given 0; let its rows() name the rows it needs
    """

    def __init__(self, block: Block, who: str) -> None:
        self.is_sparse = block.is_sparse
        self.rows = block.rows
        self.columns = block.columns
        self.dtype = block.dtype
        self._block = block
        self._who = who

    @property
    def updates(self) -> int:
        """Those of the block."""
        return self._block.updates

    @updates.setter
    def updates(self, count: int) -> None:
        self._block.updates = count

    def get(self, row: int, columns: Columns | None, out: Numbers | None = None) -> Numbers:
        return self._block.get(self._here(row, columns), columns, out)

    def add(self, row: int, columns: Columns | None, values: Numbers) -> None:
        self._block.add(self._here(row, columns), columns, values)

    def put(self, row: int, columns: Columns | None, values: Numbers) -> None:
        self._block.put(self._here(row, columns), columns, values)

    def dense_row(self, row: int) -> npt.NDArray[Any]:
        return self._block.dense_row(self._here(row))

    def sparse_row(self, row: int) -> SparseRow:
        return self._block.sparse_row(self._here(row))

    def replace_row(self, row: int, content: SparseRow) -> None:
        self._block.replace_row(self._here(row, content.columns), content)

    def size_bytes(self) -> int:
        return self._block.size_bytes()

    def freeze(self, encode: Encode) -> dict[str, Any]:
        return self._block.freeze(encode)

    def restore(self, state: dict[str, Any]) -> None:
        self._block.restore(state)

    def _here(self, row: int, columns: Columns | None = None) -> int:
        """The row; raises OutOfRange unless all of this lies in the block."""
        if row not in self.rows:
            raise OutOfRange(
                f"{self._who}: expected a row of the block, {self.rows.start} to {self.rows.stop - 1}, given {row}; "
                "let its rows() name the rows it needs"
            )
        if columns is not None and np.size(columns):
            for column in (np.min(columns), np.max(columns)):
                if column not in self.columns:
                    raise OutOfRange(
                        f"{self._who}: expected columns of the block, {self.columns.start} to "
                        f"{self.columns.stop - 1}, given {column}; take those in block.columns, or let its split() "
                        "give each block its own"
                    )
        return row
