"""How a matrix is cut into blocks, and which shard each block lies on."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Final, NamedTuple, final

import numpy as np
import numpy.typing as npt

from streamiter.errors import OutOfRange, RowsInDifferentBlocks
from streamiter.parameter_server.bounds import checked_columns, checked_row
from streamiter.parameter_server.matrix import Matrix

__all__ = ["BlockRange", "Partitioning", "Slice"]

# Keys in no order, of a row with two to four blocks: a mask for each block takes 3 to 6 µs for 100 keys, 30 to 55 µs
# for 10,000 and 5 to 8 ms for a million; to sort by block takes 6 µs, 65 to 75 µs and 10 to 12 ms, however many blocks.
_BLOCKS_BY_MASK: Final = 4


@dataclass(frozen=True, slots=True)
class BlockRange:
    """Where a block lies: half-open ranges of rows and columns, its number, and its shard."""

    number: int
    shard: int
    rows: range
    columns: range


class Slice(NamedTuple):
    """The part of a request that goes to one block."""

    block: BlockRange
    columns: npt.NDArray[np.int64] | None
    """Global columns, in the caller's order; None: all of the block."""
    positions: slice | npt.NDArray[np.intp]
    """Where these columns stand in what the caller gave, ascending."""


@final
class Partitioning:
    """The blocks of a matrix, row by row of blocks; neighbours in that order lie on the same shard.

    All blocks are of the same size, but those at the right and lower border. Where the matrix names no block, each
    shard has one with all rows (the last shards none, where few columns do not come out even).

    >>> partitioning = Partitioning(Matrix("w", rows=2, columns=10, block=(1, 5)), shards=2)
    >>> [(block.rows, block.columns, block.shard) for block in partitioning.blocks[:2]]
    [(range(0, 1), range(0, 5), 0), (range(0, 1), range(5, 10), 0)]
    """

    def __init__(self, matrix: Matrix, shards: int) -> None:
        self._matrix = matrix
        rows, columns = matrix.block or (matrix.rows, -(-matrix.columns // min(shards, matrix.columns)))
        rows, columns = min(rows, matrix.rows), min(columns, matrix.columns)
        self._block_rows, self._block_columns = rows, columns
        row_ranges = [range(row, min(row + rows, matrix.rows)) for row in range(0, matrix.rows, rows)]
        column_ranges = [
            range(column, min(column + columns, matrix.columns))
            for column in range(0, matrix.columns, columns)
        ]
        across = self._across = len(column_ranges)
        count = len(row_ranges) * across
        self.blocks = tuple(
            BlockRange(
                number, number * shards // count, row_ranges[number // across], column_ranges[number % across]
            )
            for number in range(count)
        )
        self._bounds = np.arange(columns, matrix.columns, columns, dtype=np.int64)
        """Where blocks meet: the first column of each but the first."""
        self._first_bounds: list[int] = self._bounds[:_BLOCKS_BY_MASK].tolist()
        self._number_dtype = np.min_scalar_type(across)

    def checked_row(self, row: Any) -> int:
        """The row as a plain int. Raises OutOfRange for one that the matrix does not have, and what is none."""
        if type(row) is int and 0 <= row < self._matrix.rows:
            return row
        return checked_row(row, self._matrix)

    def checked_rows(self, rows: Any) -> list[int]:
        """Several rows, in the order given. Raises OutOfRange, also for what is no list of rows."""
        if isinstance(rows, str) or not isinstance(rows, Iterable):
            raise OutOfRange(f"matrix {self._matrix.name!r}, rows: expected a list of rows, given {rows!r}")
        return [self.checked_row(row) for row in rows]

    def checked_columns(self, columns: Any) -> npt.NDArray[np.int64]:
        """The columns as one-dimensional int64: the same array, where it is one.

        Raises OutOfRange for a column that the matrix does not have, and for what are no whole numbers.
        """
        return checked_columns(columns, self._matrix)

    def blocks_of_row(self, row: int) -> tuple[BlockRange, ...]:
        """The blocks that hold a row, from left to right."""
        first = row // self._block_rows * self._across
        return self.blocks[first : first + self._across]

    def split(self, row: int, columns: npt.NDArray[np.int64] | None) -> list[Slice]:
        """A request for some columns of a row (None: all), by block; blocks that have none of them are left out.

        ``columns`` as ``checked_columns`` gives them. Those of a slice may be a view of them.
        """
        blocks = self.blocks_of_row(row)
        if columns is None:
            return [Slice(block, None, slice(block.columns.start, block.columns.stop)) for block in blocks]
        if len(columns) == 0:
            return []
        if len(blocks) == 1:
            return [Slice(blocks[0], columns, slice(0, len(columns)))]
        if _is_ascending(columns):
            return self._split_ascending(blocks, columns)
        if len(blocks) <= _BLOCKS_BY_MASK:
            return self._split_by_mask(blocks, columns)
        return self._split_by_sorting(blocks, columns)

    def _split_ascending(self, blocks: tuple[BlockRange, ...], columns: npt.NDArray[np.int64]) -> list[Slice]:
        """Nothing is copied: each slice has a view."""
        first = columns.item(0) // self._block_columns
        last = columns.item(-1) // self._block_columns
        if last - first > len(columns):
            return _slices_of_runs(blocks, columns // self._block_columns, columns, None)
        ends = [*columns.searchsorted(self._bounds[first:last]).tolist(), len(columns)]
        slices, begin = [], 0
        for block, end in zip(blocks[first : last + 1], ends, strict=True):
            if begin < end:
                slices.append(Slice(block, columns[begin:end], slice(begin, end)))
                begin = end
        return slices

    def _split_by_mask(self, blocks: tuple[BlockRange, ...], columns: npt.NDArray[np.int64]) -> list[Slice]:
        masks, before = [], None
        for bound in self._first_bounds:
            below = columns < bound
            masks.append(below if before is None else below ^ before)
            before = below
        assert before is not None
        masks.append(~before)
        return [
            Slice(block, columns[positions], positions)
            for block, mask in zip(blocks, masks, strict=True)
            if len(positions := mask.nonzero()[0])
        ]

    def _split_by_sorting(
        self, blocks: tuple[BlockRange, ...], columns: npt.NDArray[np.int64]
    ) -> list[Slice]:
        # Numbers of one or two bytes are sorted by radix; of 10,000 int64 numbers the sort alone would take 600 µs.
        at = (columns // self._block_columns).astype(self._number_dtype)
        order = at.argsort(kind="stable")
        return _slices_of_runs(blocks, at[order], columns[order], order)

    def check_same_row_block(self, rows: Iterable[int], who: str) -> None:
        """Raise RowsInDifferentBlocks unless all rows lie in the same row of blocks."""
        rows = list(dict.fromkeys(rows))
        if len({row // self._block_rows for row in rows}) > 1:
            raise RowsInDifferentBlocks(
                f"{who} on matrix {self._matrix.name!r}: expected rows of one row block "
                f"({self._block_rows} rows each), given rows {', '.join(map(str, rows))}; make the matrix with "
                f"blocks of more rows: block=({self._matrix.rows}, {self._block_columns})"
            )


def _slices_of_runs(
    blocks: tuple[BlockRange, ...],
    at: npt.NDArray[np.integer[Any]],
    columns: npt.NDArray[np.int64],
    positions: npt.NDArray[np.intp] | None,
) -> list[Slice]:
    """Of columns that are sorted by block, a slice for each run; ``at`` is the place of each one's block in ``blocks``.

    It takes no time for blocks that have none of them. ``positions`` None: they stand as the caller gave them.
    """
    begins = [0, *((at[1:] != at[:-1]).nonzero()[0] + 1).tolist()]
    ends = [*begins[1:], len(at)]
    return [
        Slice(
            blocks[number],
            columns[begin:end],
            slice(begin, end) if positions is None else positions[begin:end],
        )
        for number, begin, end in zip(at[begins].tolist(), begins, ends, strict=True)
    ]


def _is_ascending(columns: npt.NDArray[np.int64]) -> bool:
    # Three of them tell most that are in no order, at a tenth of the cost.
    if not columns.item(0) <= columns.item(len(columns) // 2) <= columns.item(-1):
        return False
    return bool((columns[1:] >= columns[:-1]).all())
