"""Sparse blocks: for each row a default, and the columns whose values differ from it.

A row is stored in *cells*, in one of two forms: a hash table of numpy arrays, in which many columns are looked up at
once (``HashedCells``), or, for a row that is almost full, an array as wide as the block (``FilledCells``).
``SparseBlock`` chooses the form, and copies cells before they change while a frozen state (``FrozenCells``) still
holds them.
"""

from __future__ import annotations

import abc
from collections.abc import Iterable, Iterator
from typing import Final, Self, TypeAlias, TypeGuard, TypeVar, final

import numpy as np
import numpy.typing as npt

from streamiter.deferred import Deferred, Encode
from streamiter.errors import CheckpointError, InternalError
from streamiter.parameter_server.matrix import BlockRange, Matrix
from streamiter.parameter_server.storage.block import (
    Block,
    Columns,
    DTypeOfNumbers,
    FrozenState,
    Number,
    Numbers,
    SparseRow,
    block_shape,
    check_shape,
    gathered,
)

# -- cells ---------------------------------------------------------------------------------------------------

PART_COLUMNS: Final = 1 << 16
"""Columns of one part of a row: with their numbers about 0.8 MB, and a millisecond."""


class Cells(abc.ABC):
    """One row of a sparse block: a default, and columns with values of their own, which may equal the default."""

    default: Number
    """A scalar of the dtype."""
    made_after: int
    """The count of freezes of the block when these cells were made: only later frozen states hold them."""

    @abc.abstractmethod
    def get(self, columns: Columns, out: Numbers | None) -> Numbers:
        """Return the values of these columns, in ``out`` if that is given."""

    @abc.abstractmethod
    def write_to(self, out: Numbers) -> None:
        """Write the values of all columns of the block to ``out``."""

    @abc.abstractmethod
    def add(self, columns: Columns, values: Numbers) -> bool:
        """Add values; a column that is named twice gets both. Return False, and change nothing, if there is no room."""

    @abc.abstractmethod
    def put(self, columns: Columns, values: Numbers) -> bool:
        """Overwrite values; a column that is named twice gets the last one. Return False as ``add`` does."""

    @abc.abstractmethod
    def count_absent(self, columns: Columns) -> int:
        """Return how many different columns of these the cells do not store yet."""

    @abc.abstractmethod
    def reset(self, default: Number) -> None:
        """Set the default and all columns to this value."""

    @abc.abstractmethod
    def content(self) -> tuple[Columns, Numbers]:
        """Return the columns that differ from the default, ascending, and their values, for reading only."""

    @abc.abstractmethod
    def parts(self) -> Iterator[tuple[Columns, Numbers]]:
        """Yield the columns that differ from the default and their values, in no order, a part at a time."""

    def count_different(self) -> int:
        """Return the count of columns that differ from the default."""
        return sum(len(columns) for columns, _ in self.parts())

    @abc.abstractmethod
    def copy(self) -> Self:
        """Return a copy."""

    @abc.abstractmethod
    def is_large_for(self, count: int) -> bool:
        """Return whether smaller cells are better for so few columns."""

    @abc.abstractmethod
    def size_bytes(self) -> int:
        """Return the memory of the cells."""


def differs_from(values: Numbers, default: Number) -> npt.NDArray[np.bool_]:
    """Return which values differ from the default in a bit: NaN equals NaN; −0.0 differs from 0.0, as 1/x shows."""
    bits = np.dtype(f"u{values.itemsize}")
    differs: npt.NDArray[np.bool_] = values.view(bits) != np.asarray(default, values.dtype).view(bits)
    return differs


# -- a hash table --------------------------------------------------------------------------------------------

_EMPTY: Final = -1

_CAPACITY_MIN: Final = 16

# Knuth, The Art of Computer Programming 3, 6.4: multiplicative hashing with 2^64 / golden ratio spreads neighbours.
_MULTIPLIER: Final = 0x9E3779B97F4A7C15


def capacity_for(count: int) -> int:
    """Return the slots for so many columns: 19 to 38 % are taken, so that half as many columns more have room."""
    return max(_CAPACITY_MIN, 1 << (8 * count // 3).bit_length())


def hashed_bytes(count: int, dtype: DTypeOfNumbers) -> int:
    """Return the memory of a hash table for so many columns."""
    return capacity_for(count) * (8 + dtype.itemsize)


@final
class HashedCells(Cells):
    """A hash table with open addressing: at most half of the slots are taken, and no slot is ever freed.

    A lookup of many columns takes several rounds; each round looks at the next slot of all columns that have not found
    theirs. Steps of 1, 2, 3, … reach each slot of a power of two (triangular probing), and need half the rounds of
    steps of 1. Looking up 10,000 of a million columns takes about 130 µs; a binary search in sorted arrays takes 3 ms.
    """

    def __init__(self, capacity: int, dtype: DTypeOfNumbers, first: int, default: Number, made_after: int) -> None:
        """``capacity`` is a power of two; ``first`` is the first column of the block."""
        self.default = default
        self.made_after = made_after
        self._first = first
        self._columns = np.full(capacity, _EMPTY, np.int64)
        # An empty slot has the default, so a lookup reads the value without checking whether the column is stored.
        self._values = np.full(capacity, default, dtype)
        self._taken = 0
        self._set_constants()
        self._order: tuple[npt.NDArray[np.intp], Columns] | None = None
        """The taken slots in the order of their columns, and the columns; None after new slots were taken."""

    def _set_constants(self) -> None:
        # Arrays without axes: converting a Python int takes as long as hashing 100 columns.
        capacity = len(self._columns)
        self._multiplier = np.array(_MULTIPLIER, np.uint64)
        self._shift = np.array(65 - capacity.bit_length(), np.uint64)
        self._mask = np.array(capacity - 1)

    def get(self, columns: Columns, out: Numbers | None) -> Numbers:
        return gathered(self._values, self._find(columns)[0], out)

    def write_to(self, out: Numbers) -> None:
        out.fill(self.default)
        slots = (self._columns >= 0).nonzero()[0]
        out[self._columns[slots] - self._first] = self._values[slots]

    def add(self, columns: Columns, values: Numbers) -> bool:
        slots = self._claim(columns)
        if slots is None:
            return False
        np.add.at(self._values, slots, values)
        return True

    def put(self, columns: Columns, values: Numbers) -> bool:
        slots = self._claim(columns)
        if slots is None:
            return False
        self._values[slots] = values
        return True

    def count_absent(self, columns: Columns) -> int:
        return len(_distinct(columns[self._find(columns)[1]]))

    def reset(self, default: Number) -> None:
        self.default = default
        self._values.fill(default)

    def content(self) -> tuple[Columns, Numbers]:
        if self._order is None:
            slots = (self._columns >= 0).nonzero()[0]
            columns = self._columns[slots]
            ascending = columns.argsort()
            self._order = slots[ascending], columns[ascending]
            self._order[1].flags.writeable = False  # The caller gets this array.
        slots, columns = self._order
        values = self._values[slots]
        differs = differs_from(values, self.default)
        return (columns, values) if differs.all() else (columns[differs], values[differs])

    def parts(self) -> Iterator[tuple[Columns, Numbers]]:
        for begin in range(0, len(self._columns), PART_COLUMNS):
            # Empty slots have the default, so they are not found.
            slots = differs_from(self._values[begin : begin + PART_COLUMNS], self.default).nonzero()[0] + begin
            if len(slots):
                yield self._columns[slots], self._values[slots]

    def copy(self) -> HashedCells:
        twin = HashedCells.__new__(HashedCells)
        twin.default, twin.made_after, twin._first = self.default, self.made_after, self._first
        twin._columns, twin._values = self._columns.copy(), self._values.copy()
        twin._taken, twin._order = self._taken, self._order
        twin._set_constants()
        return twin

    def is_large_for(self, count: int) -> bool:
        return len(self._columns) > 4 * capacity_for(count)

    def size_bytes(self) -> int:
        ordered = 0 if self._order is None else 2 * self._order[0].nbytes
        return self._columns.nbytes + self._values.nbytes + ordered

    def _find(self, columns: Columns) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.intp]]:
        """Return the slot of each column (of an absent one: an empty slot), and the positions of the absent columns."""
        slots = ((columns.view(np.uint64) * self._multiplier) >> self._shift).view(np.int64)
        seen = self._columns[slots]
        at = ((seen != columns) & (seen >= 0)).nonzero()[0]
        if len(at):
            searched, places, step = columns[at], slots[at], 0
            while len(at):
                step += 1
                places = (places + step) & self._mask
                there = self._columns[places]
                slots[at], seen[at] = places, there
                further = ((there != searched) & (there >= 0)).nonzero()[0]
                at, searched, places = at[further], searched[further], places[further]
        return slots, (seen < 0).nonzero()[0]

    def _claim(self, columns: Columns) -> npt.NDArray[np.int64] | None:
        """Return the slot of each column, taking slots for absent ones; None if more than half would be taken."""
        slots, absent = self._find(columns)
        if len(absent):
            missing = columns[absent]
            new = _distinct(missing)
            if 2 * (self._taken + len(new)) > len(self._columns):
                return None
            self._take(new)
            slots[absent] = self._find(missing)[0]
        return slots

    def _take(self, new: Columns) -> None:
        """Take slots for columns that are absent and distinct."""
        self._taken += len(new)
        self._order = None
        while len(new):
            slots, _ = self._find(new)
            self._columns[slots] = new  # If several columns want a slot, the last gets it; the others search again.
            new = new[self._columns[slots] != new]


def _distinct(columns: Columns) -> Columns:
    # np.unique of numpy 2.4 takes 8 ms for 10,000 columns, and this 100 µs.
    ascending = np.sort(columns)
    is_first = np.empty(len(ascending), np.bool_)
    is_first[:1] = True
    np.not_equal(ascending[1:], ascending[:-1], out=is_first[1:])
    return ascending[is_first]


@final
class FilledCells(Cells):
    """An array as wide as the block, for a row that stores almost every column."""

    def __init__(self, values: Numbers, first: int, default: Number, made_after: int) -> None:
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
        """Add values to all columns."""
        np.add(self._values, values, out=self._values)

    def count_absent(self, columns: Columns) -> int:
        del columns
        return 0

    def reset(self, default: Number) -> None:
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


# -- the block -----------------------------------------------------------------------------------------------

AnyCells = TypeVar("AnyCells", bound=Cells)


@final
class SparseBlock(Block):
    """A block that stores, for each row, a default and the columns that differ from it.

    A row is a hash table until an array as wide as the block is smaller. A row that was never changed takes no memory.
    """

    is_sparse = True

    def __init__(self, matrix: Matrix, block: BlockRange) -> None:
        super().__init__(matrix, block)
        self._default = self.dtype.type(matrix.default)
        self._cells: dict[int, Cells] = {}
        """The cells of each row; a row without cells has the matrix's default in all columns."""
        self._freezes = 0
        self._frozen: list[FrozenCells] = []
        """Frozen states that are not written yet; the block copies cells that they hold before it changes them."""

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
            self._replace(row, at + self.columns.start, values[at], default)
            return
        cells = self._changeable_row(row)
        if not cells.put(columns, values):
            self._enlarged(row, cells, columns).put(columns, values)

    def dense_row(self, row: int) -> Numbers:
        raise InternalError(f"{self._name}: expected a dense block, given row {row} of a sparse block")

    def sparse_row(self, row: int) -> SparseRow:
        cells = self._cells.get(row)
        if cells is None:
            return SparseRow(np.empty(0, np.int64), np.empty(0, self.dtype), self._default.item())
        columns, values = cells.content()
        return SparseRow(columns, values, cells.default.item())

    def replace_row(self, row: int, content: SparseRow) -> None:
        self._replace(row, content.columns, content.values, self.dtype.type(content.default))

    def _replace(self, row: int, columns: Columns, values: Numbers, default: Number) -> None:
        cells = self._cells.get(row)
        if cells is not None and not self._is_held(cells) and not cells.is_large_for(len(columns)):
            # The usual case: an optimizer writes the same columns again and again.
            cells.reset(default)
            if cells.put(columns, values):
                return
        self._cells[row] = made = self._made(len(columns), default)
        made.put(columns, values)

    def size_bytes(self) -> int:
        return sum(cells.size_bytes() for cells in self._cells.values())

    def freeze(self, encode: Encode) -> FrozenState:
        self._freezes += 1
        cells = FrozenCells(self._cells, self.dtype, name=self._name, encode=encode, unfinished=self._frozen)
        return {"shape": block_shape(self), "updates": self.updates, "cells": cells}

    def restore(self, state: FrozenState) -> None:
        check_shape(self, state["shape"], self._name)
        self._cells = {}
        for row, default, columns, values in segments_of(state["cells"], self, self._name):
            if row not in self._cells:
                self._cells[row] = self._made(len(columns), self.dtype.type(default))
            self.put(row, columns, values)
        self.updates = state["updates"]

    def _made(self, count: int, default: Number) -> Cells:
        """Return empty cells with room for so many columns."""
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
        if not self._is_held(cells):
            return cells
        twin = cells.copy()
        twin.made_after = self._freezes
        self._cells[row] = twin
        return twin

    def _is_held(self, cells: Cells) -> bool:
        return cells.made_after < self._freezes and bool(self._frozen)

    def _enlarged(self, row: int, cells: Cells, columns: Columns) -> Cells:
        """Return larger cells with room for these columns; columns whose values equal the default are dropped."""
        larger = self._made(cells.count_different() + cells.count_absent(columns), cells.default)
        for some_columns, values in cells.parts():
            larger.put(some_columns, values)
        self._cells[row] = larger
        return larger


# -- in checkpoints ------------------------------------------------------------------------------------------

Segment: TypeAlias = tuple[int, Number, Columns, Numbers]
"""The row, its default, and columns with their values."""

# A millisecond or two to gather and to encode; a small row takes about 10 µs.
_FRAME_BYTES: Final = 1 << 20
_FRAME_SEGMENTS: Final = 256


@final
class FrozenCells(Deferred):
    """The rows of a sparse block as they were at one moment, encoded while the block changes.

    Freezing takes a list of the cells only; the block copies cells before it changes them. A frame is a tuple of
    arrays, ``(rows, defaults, lengths, columns, values)``, with a *segment* for each row, or a part of a large row.
    """

    def __init__(
        self,
        cells: dict[int, Cells],
        dtype: DTypeOfNumbers,
        *,
        name: str,
        encode: Encode,
        unfinished: list[FrozenCells],
    ) -> None:
        """``unfinished`` is a list of the block; it contains this object until all frames are read or released."""
        self.name = name
        self._dtype = dtype
        self._encode = encode
        self._is_released = False
        # The next row is last, so memory is freed row by row. Two lists: pairs take ten times as long to make.
        self._rows = list(reversed(cells))
        self._cells = list(reversed(cells.values()))
        self._unfinished = unfinished
        unfinished.append(self)

    def frames(self) -> Iterator[bytes]:
        gathered: list[Segment] = []
        size_bytes = 0
        for segment in self._segments():
            gathered.append(segment)
            _, _, columns, values = segment
            size_bytes += columns.nbytes + values.nbytes
            if size_bytes >= _FRAME_BYTES or len(gathered) >= _FRAME_SEGMENTS:
                yield self._frame(gathered)
                self._check()
                size_bytes = 0
        if gathered:
            yield self._frame(gathered)
        self.release()

    def _segments(self) -> Iterator[Segment]:
        self._check()
        while self._cells:
            row, cells = self._rows.pop(), self._cells.pop()
            is_empty = True
            for columns, values in cells.parts():
                is_empty = False
                yield row, cells.default, columns, values
            if is_empty:  # Its default may differ from the matrix's.
                yield row, cells.default, np.empty(0, np.int64), np.empty(0, self._dtype)

    def _frame(self, gathered: list[Segment]) -> bytes:
        rows, defaults, columns, values = zip(*gathered, strict=True)
        gathered.clear()
        content = (
            np.array(rows, np.int64),
            np.array(defaults, self._dtype),
            np.array([len(some) for some in columns], np.int64),
            np.concatenate(columns),
            np.concatenate(values),
        )
        return self._encode(content, name=f"state of {self.name}")

    def _check(self) -> None:
        if self._is_released:
            raise InternalError(f"the state of {self.name} was released before all of it was read")

    def release(self) -> None:
        self._is_released = True
        self._rows, self._cells = [], []
        if self in self._unfinished:
            self._unfinished.remove(self)


def segments_of(frames: Iterable[object], block: Block, name: str) -> Iterator[Segment]:
    """Yield the segments of decoded frames; raise CheckpointError for a frame that does not fit the block."""
    for frame in frames:
        if not _fits(frame, block):
            raise CheckpointError(
                f"state of {name}: expected rows, defaults, lengths, columns and values of {block.dtype} in rows "
                f"{block.rows.start} to {block.rows.stop - 1} and columns {block.columns.start} to "
                f"{block.columns.stop - 1}, given something else; the snapshot is damaged, or of another matrix"
            )
        rows, defaults, lengths, columns, values = frame
        end = 0
        for row, default, length in zip(rows.tolist(), defaults, lengths.tolist(), strict=True):
            begin, end = end, end + length
            yield row, default, columns[begin:end], values[begin:end]


def _fits(frame: object, block: Block) -> TypeGuard[tuple[Numbers, Numbers, Numbers, Numbers, Numbers]]:
    if not (isinstance(frame, tuple) and len(frame) == 5 and all(isinstance(part, np.ndarray) for part in frame)):
        return False
    rows, defaults, lengths, columns, values = frame
    return (
        all(part.ndim == 1 for part in frame)
        and all(part.dtype == np.int64 for part in (rows, lengths, columns))
        and defaults.dtype == values.dtype == block.dtype
        and len(rows) == len(defaults) == len(lengths)
        and len(columns) == len(values) == lengths.sum()
        and bool((lengths >= 0).all())
        and _all_in(rows, block.rows)
        and _all_in(columns, block.columns)
    )


def _all_in(numbers: Columns, expected: range) -> bool:
    return bool(((numbers >= expected.start) & (numbers < expected.stop)).all())
