"""The cells of a sparse block: the numbers of one row, in one of two forms.

``HashedCells`` is a hash table of numpy arrays, in which many columns are looked up at once. ``FilledCells`` is an
array as wide as the block, for a row that is almost full. All other columns have the default of the row.
"""

from __future__ import annotations

import abc
from collections.abc import Callable, Iterator
from copy import copy
from typing import Final, Self, TypeAlias, final

import numpy as np
import numpy.typing as npt

from streamiter.parameter_server.storage.block import AnyScalar, BlockColumns, DTypeOfNumbers, Numbers, gathered

PART_COLUMNS: Final = 1 << 16
"""Columns of one part of a row: with their numbers about 0.8 MB, and a millisecond."""


Draw: TypeAlias = Callable[[BlockColumns, Numbers], None]
"""Writes the values of columns that are not stored to an array."""


class Cells(abc.ABC):
    """One row of a sparse block: a default, and columns with values of their own, which may equal the default.

    The default is a number, or values that are drawn; then all columns count as different from it.
    """

    default: AnyScalar
    """A scalar of the dtype."""
    made_after: int
    """The count of freezes of the block when these cells were made: only later frozen states hold them."""

    @abc.abstractmethod
    def get(self, columns: BlockColumns, out: Numbers | None) -> Numbers:
        """Return the values of these columns, in ``out`` if that is given."""

    @abc.abstractmethod
    def write_to(self, out: Numbers) -> None:
        """Write the values of all columns of the block to ``out``."""

    @abc.abstractmethod
    def add(self, columns: BlockColumns, values: Numbers) -> bool:
        """Add values; a column that is named twice gets both. Return False, and change nothing, if there is no room."""

    @abc.abstractmethod
    def put(self, columns: BlockColumns, values: Numbers) -> bool:
        """Overwrite values; a column that is named twice gets the last one. Return False as ``add`` does."""

    @abc.abstractmethod
    def reset(self, default: AnyScalar) -> None:
        """Set the default and all columns to this value."""

    @abc.abstractmethod
    def content(self) -> tuple[BlockColumns, Numbers]:
        """Return the columns that differ from the default, ascending, and their values, for reading only."""

    @abc.abstractmethod
    def parts(self) -> Iterator[tuple[BlockColumns, Numbers]]:
        """Yield the columns that differ from the default and their values, in no order, a part at a time."""

    @abc.abstractmethod
    def copy(self) -> Self:
        """Return a copy."""

    @abc.abstractmethod
    def is_large_for(self, count: int) -> bool:
        """Return whether smaller cells are better for so few columns."""

    @abc.abstractmethod
    def size_bytes(self) -> int:
        """Return the memory of the cells."""


def differs_from(values: Numbers, default: AnyScalar) -> npt.NDArray[np.bool_]:
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
    """Return the number of slots for ``count`` columns: 19 to 38 % are taken, so half as many more have room."""
    return max(_CAPACITY_MIN, 1 << (8 * count // 3).bit_length())


def hashed_bytes(count: int, dtype: DTypeOfNumbers, vector: int = 1) -> int:
    """Return the memory of a hash table for this many vectors."""
    return capacity_for(count) * (8 + vector * dtype.itemsize)


@final
class HashedCells(Cells):
    """A hash table with open addressing: at most half of the slots are taken, and no slot is ever freed.

    A slot has a *vector*: one column, or as many neighbouring ones as the matrix stores together.

    A lookup of many columns takes several rounds; each round looks at the next slot of all columns that have not found
    theirs. Steps of 1, 2, 3, … reach each slot of a power of two (triangular probing), and need half the rounds of
    steps of 1. Looking up 10,000 of a million columns takes about 130 µs; a binary search in sorted arrays takes 3 ms.
    """

    def __init__(
        self,
        capacity: int,
        dtype: DTypeOfNumbers,
        first: int,
        default: AnyScalar,
        made_after: int,
        *,
        vector: int = 1,
        draw: Draw | None = None,
    ) -> None:
        """``capacity`` is a power of two; ``first`` is the first column of the block."""
        self.default = default
        self.made_after = made_after
        self._first = first
        self._vector = vector
        self._draw = draw
        self._columns = np.full(capacity, _EMPTY, np.int64)
        """The first column of the vector in each slot."""
        # An empty slot has the default, so a lookup reads the value without checking whether the column is stored.
        self._values = np.full(capacity * vector, default, dtype)
        self._taken = 0
        self._set_constants()
        self._order: tuple[npt.NDArray[np.intp], BlockColumns] | None = None
        """The taken slots in the order of their columns, and the columns; None after new slots were taken."""

    def _set_constants(self) -> None:
        # Arrays without axes: converting a Python int takes as long as hashing 100 columns.
        capacity = len(self._columns)
        self._multiplier = np.array(_MULTIPLIER, np.uint64)
        self._shift = np.array(65 - capacity.bit_length(), np.uint64)
        self._mask = np.array(capacity - 1)

    def get(self, columns: BlockColumns, out: Numbers | None) -> Numbers:
        if self._vector == 1:
            slots, absent = self._find(columns)
            values = gathered(self._values, slots, out)
        else:
            firsts, parts = vectors_of(columns, self._vector)
            slots, absent = self._find(firsts)
            if parts is None:
                table = self._values.reshape(-1, self._vector)
                values = gathered(table, slots, None if out is None else out.reshape(-1, self._vector)).reshape(-1)
                absent = ranges(absent * self._vector, self._vector)
            else:
                vectors, within = parts
                values = gathered(self._values, slots[vectors] * self._vector + within, out)
                absent = (self._columns[slots] < 0)[vectors].nonzero()[0]
        if self._draw is not None and len(absent):
            drawn = np.empty(len(absent), values.dtype)
            self._draw(columns[absent], drawn)
            values[absent] = drawn
        return values if out is None else out

    def write_to(self, out: Numbers) -> None:
        if self._draw is None:
            out.fill(self.default)
        else:
            self._draw(np.arange(self._first, self._first + len(out)), out)
        slots = (self._columns >= 0).nonzero()[0]
        columns, values = self._stored(slots, self._columns[slots])
        out[columns - self._first] = values

    def add(self, columns: BlockColumns, values: Numbers) -> bool:
        places = self._claim(columns, is_overwritten=False)
        if places is None:
            return False
        np.add.at(self._values, places, values)
        return True

    def put(self, columns: BlockColumns, values: Numbers) -> bool:
        places = self._claim(columns, is_overwritten=True)
        if places is None:
            return False
        self._values[places] = values
        return True

    def count_absent(self, columns: BlockColumns) -> int:
        """Return how many different vectors of these columns ``count_different`` does not count."""
        firsts = columns if self._vector == 1 else columns - columns % self._vector
        slots, absent = self._find(firsts)
        if self._draw is None:  # An empty slot has the default, as a slot that was reset.
            of_slots = self._values.reshape(-1, self._vector)[slots]
            absent = np.flatnonzero(~differs_from(of_slots, self.default).any(axis=1))
        return len(distinct(firsts[absent]))

    def count_different(self) -> int:
        """Return the count of vectors with a column that differs from the default."""
        if self._draw is not None:
            return self._taken
        if self._vector == 1:
            return int(np.count_nonzero(differs_from(self._values, self.default)))
        return int(differs_from(self._values, self.default).reshape(-1, self._vector).any(axis=1).sum())

    def reset(self, default: AnyScalar) -> None:
        self.default = default
        self._values.fill(default)

    def content(self) -> tuple[BlockColumns, Numbers]:
        if self._order is None:
            slots = (self._columns >= 0).nonzero()[0]
            columns = self._columns[slots]
            ascending = columns.argsort()
            self._order = slots[ascending], columns[ascending]
            self._order[1].flags.writeable = False  # The caller gets this array.
        return self._different(*self._order)

    def parts(self) -> Iterator[tuple[BlockColumns, Numbers]]:
        step = max(1, PART_COLUMNS // self._vector)
        for begin in range(0, len(self._columns), step):
            slots = (self._columns[begin : begin + step] >= 0).nonzero()[0] + begin
            columns, values = self._different(slots, self._columns[slots])
            if len(columns):
                yield columns, values

    def _stored(self, slots: npt.NDArray[np.intp], firsts: BlockColumns) -> tuple[BlockColumns, Numbers]:
        """Return the columns in these slots and their values."""
        if self._vector == 1:
            return firsts, self._values[slots]
        return ranges(firsts, self._vector), self._values.reshape(-1, self._vector)[slots].reshape(-1)

    def _different(self, slots: npt.NDArray[np.intp], firsts: BlockColumns) -> tuple[BlockColumns, Numbers]:
        columns, values = self._stored(slots, firsts)
        if self._draw is not None:
            return columns, values
        differs = differs_from(values, self.default)
        return (columns, values) if differs.all() else (columns[differs], values[differs])

    def copy(self) -> HashedCells:
        twin = copy(self)
        twin._columns, twin._values = self._columns.copy(), self._values.copy()
        return twin

    def is_large_for(self, count: int) -> bool:
        return len(self._columns) > 4 * capacity_for(count)

    def size_bytes(self) -> int:
        ordered = 0 if self._order is None else 2 * self._order[0].nbytes
        return self._columns.nbytes + self._values.nbytes + ordered

    def _find(self, columns: BlockColumns) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.intp]]:
        """Return the slot of each column (of an absent one: an empty slot), and the positions of the absent columns.

        These are the first columns of vectors.
        """
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

    def _claim(self, columns: BlockColumns, *, is_overwritten: bool) -> npt.NDArray[np.int64] | None:
        """Return the place of each column, taking slots for absent ones; None if more than half would be taken.

        If whole vectors are then overwritten, their values are not drawn.
        """
        firsts, parts = (columns, None) if self._vector == 1 else vectors_of(columns, self._vector)
        slots, absent = self._find(firsts)
        if len(absent):
            missing = firsts[absent]
            new = distinct(missing)
            if 2 * (self._taken + len(new)) > len(self._columns):
                return None
            self._take(new)
            slots[absent] = self._find(missing)[0]
            if self._draw is not None and not (is_overwritten and parts is None):
                self._draw_stored(new)
        if self._vector == 1:
            return slots
        if parts is None:
            return ranges(slots * self._vector, self._vector)
        vectors, within = parts
        return slots[vectors] * self._vector + within

    def _take(self, new: BlockColumns) -> None:
        """Take slots for columns that are absent and distinct."""
        self._taken += len(new)
        self._order = None
        while len(new):
            slots, _ = self._find(new)
            self._columns[slots] = new  # If several columns want a slot, the last gets it; the others search again.
            new = new[self._columns[slots] != new]

    def _draw_stored(self, firsts: BlockColumns) -> None:
        """Write the drawn values of these vectors."""
        assert self._draw is not None
        drawn = np.empty(len(firsts) * self._vector, self._values.dtype)
        self._draw(ranges(firsts, self._vector), drawn)
        self._values.reshape(-1, self._vector)[self._find(firsts)[0]] = drawn.reshape(-1, self._vector)


def ranges(begins: npt.NDArray[np.int64], length: int) -> npt.NDArray[np.int64]:
    return (begins[:, np.newaxis] + np.arange(length)).reshape(-1)


def vectors_of(
    columns: BlockColumns, vector: int
) -> tuple[BlockColumns, tuple[npt.NDArray[np.intp], BlockColumns] | None]:
    """Return the first columns of the vectors of these columns, and for each column its vector and its place in that.

    The second is None if the columns are whole vectors. A vector occurs twice if its columns are not neighbours.

    >>> vectors_of(np.array([6, 7, 8, 0, 1, 2]), 3)
    (array([6, 0]), None)
    >>> firsts, (vectors, within) = vectors_of(np.array([6, 8, 1]), 3)
    >>> firsts.tolist(), vectors.tolist(), within.tolist()
    ([6, 0], [0, 0, 1], [0, 2, 1])
    """
    if len(columns) % vector == 0:
        table = columns.reshape(-1, vector)
        firsts = table[:, 0].copy()
        if not (firsts % vector).any() and (table - firsts[:, np.newaxis] == np.arange(vector)).all():
            return firsts, None
    within = columns % vector
    firsts = columns - within
    is_first = np.ones(len(firsts), np.bool_)
    np.not_equal(firsts[1:], firsts[:-1], out=is_first[1:])
    return firsts[is_first], (is_first.cumsum() - 1, within)


def distinct(columns: BlockColumns) -> BlockColumns:
    """Return the columns ascending, each once."""
    # np.unique of numpy 2.4 takes 8 ms for 10,000 columns, and this 100 µs.
    ascending = np.sort(columns)
    is_first = np.empty(len(ascending), np.bool_)
    is_first[:1] = True
    np.not_equal(ascending[1:], ascending[:-1], out=is_first[1:])
    return ascending[is_first]


@final
class FilledCells(Cells):
    """An array as wide as the block, for a row that stores almost every column."""

    def __init__(
        self, values: Numbers, first: int, default: AnyScalar, made_after: int, *, is_drawn: bool = False
    ) -> None:
        """``values`` is kept; ``first`` is the first column of the block."""
        self.default = default
        self._is_drawn = is_drawn
        self.made_after = made_after
        self._values = values
        self._first = np.array(first)

    def get(self, columns: BlockColumns, out: Numbers | None) -> Numbers:
        return gathered(self._values, columns - self._first, out)

    def write_to(self, out: Numbers) -> None:
        np.copyto(out, self._values)

    def add(self, columns: BlockColumns, values: Numbers) -> bool:
        np.add.at(self._values, columns - self._first, values)
        return True

    def put(self, columns: BlockColumns, values: Numbers) -> bool:
        self._values[columns - self._first] = values
        return True

    def add_all(self, values: Numbers) -> None:
        """Add values to all columns."""
        np.add(self._values, values, out=self._values)

    def reset(self, default: AnyScalar) -> None:
        self.default = default
        self._values.fill(default)

    def content(self) -> tuple[BlockColumns, Numbers]:
        at = self._different(self._values)
        return at + self._first, self._values[at]

    def _different(self, values: Numbers) -> npt.NDArray[np.intp]:
        return np.arange(len(values)) if self._is_drawn else differs_from(values, self.default).nonzero()[0]

    def parts(self) -> Iterator[tuple[BlockColumns, Numbers]]:
        for begin in range(0, len(self._values), PART_COLUMNS):
            values = self._values[begin : begin + PART_COLUMNS]
            at = self._different(values)
            if len(at):
                yield at + (self._first + begin), values[at]

    def copy(self) -> FilledCells:
        twin = copy(self)
        twin._values = self._values.copy()
        return twin

    def is_large_for(self, count: int) -> bool:
        return 4 * hashed_bytes(count, self._values.dtype) < self._values.nbytes

    def size_bytes(self) -> int:
        return self._values.nbytes
