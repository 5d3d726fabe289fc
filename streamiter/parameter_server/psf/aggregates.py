"""What is computed from one or two rows where they lie: a number comes back, not the rows.

Sums are taken in float64 for float32, too, and in int64 for whole numbers, where they wrap around. How the row is
cut into blocks changes a sum in its last bits at most.
"""

from __future__ import annotations

import abc
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import numpy as np

from streamiter.parameter_server.matrix import Matrix
from streamiter.parameter_server.psf.function import GetFunction, aligned, set_not_negative, set_rows
from streamiter.parameter_server.storage.block import Block, Numbers

__all__ = [
    "Amax",
    "Amin",
    "Asum",
    "Dot",
    "Equal",
    "Max",
    "Min",
    "Nnz",
    "Nrm2",
    "Size",
    "Sum",
]

_PIECE = 1 << 16
"""Numbers converted to float64 at a time: half a megabyte, which stays in the cache."""


class Reduction(GetFunction):
    """One number from each piece of the rows; numbers are then brought together."""

    row_fields: ClassVar[tuple[str, ...]]
    together: ClassVar[Literal["sum", "max", "min", "all"]]

    def __post_init__(self) -> None:
        set_rows(self, *self.row_fields)

    @abc.abstractmethod
    def of(self, *values: Numbers) -> Any:
        """The number for some columns; of float64 or int64. There is at least one column."""

    def rows(self, matrix: Matrix) -> Sequence[int]:
        return tuple(getattr(self, field) for field in self.row_fields)

    def partition_get(self, block: Block, part: Any) -> Any:
        del part
        rows = [getattr(self, field) for field in self.row_fields]
        with np.errstate(all="ignore"):
            if not block.is_sparse:
                return self._over_pieces([block.dense_row(row) for row in rows])
            columns, values = aligned([block.sparse_row(row) for row in rows], block.dtype)
            there = [each[:-1] for each in values]
            absent = self._of_absent([each[-1:] for each in values], len(block.columns) - len(columns))
            return self._over_pieces(there, absent)

    def _over_pieces(self, rows: Sequence[Numbers], more: Sequence[Any] = ()) -> Any:
        dtype = np.int64 if rows[0].dtype.kind == "i" else np.float64
        numbers = [
            self.of(*(row[start : start + _PIECE].astype(dtype, copy=False) for row in rows))
            for start in range(0, len(rows[0]), _PIECE)
        ]
        return self._together([*numbers, *more])

    def _of_absent(self, defaults: Sequence[Numbers], count: int) -> Sequence[Any]:
        """What columns that are not there add; none of them adds nothing (0 · ∞ would be NaN)."""
        if not count:
            return ()
        one = self._over_pieces(defaults)
        return (np.multiply(one, count),) if self.together == "sum" else (one,)

    def _together(self, numbers: Sequence[Any]) -> Any:
        return getattr(np.array(numbers), self.together)().item()

    def merge(self, parts: Sequence[Any]) -> Any:
        with np.errstate(all="ignore"):
            return self._together(parts)


@dataclass(frozen=True)
class OneRow(Reduction):
    """Of one row.

    >>> Sum("w", row=0)
    Sum(matrix='w', row=0)
    """

    matrix: str
    row: int

    row_fields = ("row",)


class Sum(OneRow):
    """Σ x."""

    together = "sum"

    def of(self, *values: Numbers) -> Any:
        return values[0].sum()


class Max(OneRow):
    """The largest number; NaN if one is NaN."""

    together = "max"

    def of(self, *values: Numbers) -> Any:
        return values[0].max()


class Min(OneRow):
    """The smallest number; NaN if one is NaN."""

    together = "min"

    def of(self, *values: Numbers) -> Any:
        return values[0].min()


class Amax(OneRow):
    """The largest ``|x|``; NaN if one is NaN."""

    together = "max"

    def of(self, *values: Numbers) -> Any:
        return np.absolute(values[0]).max()


class Amin(OneRow):
    """The smallest ``|x|``; NaN if one is NaN."""

    together = "min"

    def of(self, *values: Numbers) -> Any:
        return np.absolute(values[0]).min()


class Asum(OneRow):
    """Σ ``|x|``."""

    together = "sum"

    def of(self, *values: Numbers) -> Any:
        return np.absolute(values[0]).sum()


class Nnz(OneRow):
    """How many numbers are not 0; NaN counts as one."""

    together = "sum"

    def of(self, *values: Numbers) -> Any:
        return np.count_nonzero(values[0])


class Nrm2(OneRow):
    """√Σx², a float."""

    together = "sum"

    def of(self, *values: Numbers) -> Any:
        return np.square(values[0], dtype=np.float64).sum()

    def merge(self, parts: Sequence[Any]) -> Any:
        return math.sqrt(super().merge(parts))


class Size(OneRow):
    """How many numbers are stored: all columns of a dense row, of a sparse one those that differ from its default."""

    together = "sum"

    def of(self, *values: Numbers) -> Any:
        return len(values[0])

    def _of_absent(self, defaults: Sequence[Numbers], count: int) -> Sequence[Any]:
        return (0,)


@dataclass(frozen=True)
class Dot(Reduction):
    """Σ x·y of rows ``first`` and ``second``.

    >>> Dot("w", 0, 1)
    Dot(matrix='w', first=0, second=1)
    """

    matrix: str
    first: int
    second: int

    row_fields = ("first", "second")
    together = "sum"

    def of(self, *values: Numbers) -> Any:
        return np.multiply(*values).sum()


@dataclass(frozen=True)
class Equal(Reduction):
    """Whether no two numbers of rows ``first`` and ``second`` differ by more than ``tolerance``.

    Infinities are equal to themselves; NaN equals nothing, unless ``equal_nan`` says that it equals NaN.

    >>> Equal("w", 0, 1)
    Equal(matrix='w', first=0, second=1, tolerance=1e-10, equal_nan=False)
    """

    matrix: str
    first: int
    second: int
    tolerance: float = 1e-10
    equal_nan: bool = False

    row_fields = ("first", "second")
    together = "all"

    def __post_init__(self) -> None:
        super().__post_init__()
        set_not_negative(self, "tolerance")

    def of(self, *values: Numbers) -> Any:
        first, second = values
        # The larger minus the smaller wraps around to the right number where it is read as unsigned.
        apart = np.maximum(first, second) - np.minimum(first, second)
        apart = apart.view(np.uint64) if apart.dtype.kind == "i" else apart
        same = (first == second) | (apart <= self.tolerance)
        if self.equal_nan:
            same |= np.isnan(first) & np.isnan(second)
        return same.all()
