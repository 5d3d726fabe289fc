"""A sparse row as a hash table of numpy arrays, in which many columns are looked up at once."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final, final

import numpy as np
import numpy.typing as npt

from streamiter.parameter_server.storage.block import Columns, Numbers
from streamiter.parameter_server.storage.cells import PART_COLUMNS, Cells, differs_from
from streamiter.parameter_server.storage.gathering import gathered

__all__ = ["HashedCells", "capacity_for", "hashed_bytes"]

_EMPTY: Final = -1

_CAPACITY_MIN: Final = 16

# Knuth, The Art of Computer Programming 3, 6.4: multiplicative hashing with 2^64 / golden ratio spreads neighbours.
_MULTIPLIER: Final = 0x9E3779B97F4A7C15


def capacity_for(count: int) -> int:
    """Slots for so many columns: between 19 and 38 % are taken, so that half as many more find room, too."""
    return max(_CAPACITY_MIN, 1 << (8 * count // 3).bit_length())


def hashed_bytes(count: int, dtype: np.dtype[Any]) -> int:
    """Memory for so many columns."""
    return capacity_for(count) * (8 + dtype.itemsize)


@final
class HashedCells(Cells):
    """Open addressing, at most half of the slots taken, none ever freed.

    A lookup goes round by round for all columns at once, with ever fewer columns that have not found their slot; steps
    of 1, 2, 3, … reach each slot of a power of two (triangular probing), and need half the rounds of steps of 1. 10,000
    columns of a million take some 130 µs; a binary search in sorted arrays takes 3 ms.
    """

    def __init__(
        self, capacity: int, dtype: np.dtype[Any], first: int, default: Any, made_after: int
    ) -> None:
        """``capacity`` is a power of two; ``first`` is the first column of the block."""
        self.default = default
        self.made_after = made_after
        self._first = first
        self._columns = np.full(capacity, _EMPTY, np.int64)
        # An empty slot has the default, so what is looked up is read without asking whether it is there.
        self._values = np.full(capacity, default, dtype)
        self._taken = 0
        self._set_constants()
        self._order: tuple[npt.NDArray[np.intp], Columns] | None = None
        """The taken slots by column, and their columns; None after others were taken."""

    def _set_constants(self) -> None:
        # As arrays without axes: a Python int costs as much again to convert as 100 columns to hash.
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

    def reset(self, default: Any) -> None:
        self.default = default
        self._values.fill(default)

    def content(self) -> tuple[Columns, Numbers]:
        if self._order is None:
            slots = (self._columns >= 0).nonzero()[0]
            columns = self._columns[slots]
            ascending = columns.argsort()
            self._order = slots[ascending], columns[ascending]
            self._order[1].flags.writeable = False  # It is handed out.
        slots, columns = self._order
        values = self._values[slots]
        differs = differs_from(values, self.default)
        return (columns, values) if differs.all() else (columns[differs], values[differs])

    def parts(self) -> Iterator[tuple[Columns, Numbers]]:
        for begin in range(0, len(self._columns), PART_COLUMNS):
            # Empty slots have the default.
            slots = (
                differs_from(self._values[begin : begin + PART_COLUMNS], self.default).nonzero()[0] + begin
            )
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
        """The slot of each column, or the empty one where its search ends; and which of the columns are absent."""
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
        """The slot of each column, taken now where it was absent; None where more than half would be taken."""
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
        """Slots for columns that are absent and distinct."""
        self._taken += len(new)
        self._order = None
        while len(new):
            slots, _ = self._find(new)
            self._columns[slots] = new  # Where several want a slot the last has it, and the others search on.
            new = new[self._columns[slots] != new]


def _distinct(columns: Columns) -> Columns:
    # np.unique of numpy 2.4 takes 8 ms for 10,000 columns, and this 100 µs.
    ascending = np.sort(columns)
    is_first = np.empty(len(ascending), np.bool_)
    is_first[:1] = True
    np.not_equal(ascending[1:], ascending[:-1], out=is_first[1:])
    return ascending[is_first]
