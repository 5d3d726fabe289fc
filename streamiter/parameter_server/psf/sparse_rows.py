"""Rows of sparse blocks, as psfs compute with them."""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from typing import Any

import numpy as np
import numpy.typing as npt

from streamiter.parameter_server.storage.block import Columns, Numbers, SparseRow

__all__ = ["aligned", "same_numbers", "without_default"]


def same_numbers(values: Numbers, number: Any) -> npt.NDArray[np.bool_]:
    """Where the values are that number; here NaN is the same as NaN."""
    same: npt.NDArray[np.bool_] = np.isnan(values) if number != number else values == number
    return same


def without_default(columns: Columns, values: Numbers, default: float) -> SparseRow:
    """A row that stores no column whose value is the default.

    >>> without_default(np.array([3, 5]), np.array([1.0, 0.0]), 0.0).columns.tolist()
    [3]
    """
    differs = ~same_numbers(values, default)
    if differs.all():
        return SparseRow(columns, values, default)
    return SparseRow(columns[differs], values[differs], default)


def aligned(rows: Sequence[SparseRow], dtype: np.dtype[Any]) -> tuple[Columns, list[Numbers]]:
    """The union of their columns, and for each row its values there, with its default as one more at the end.

    >>> one = SparseRow(np.array([2]), np.array([1.0]), 0.0)
    >>> two = SparseRow(np.array([4]), np.array([3.0]), 9.0)
    >>> columns, values = aligned([one, two], np.dtype("float64"))
    >>> columns.tolist(), [row.tolist() for row in values]
    ([2, 4], [[1.0, 0.0, 0.0], [9.0, 3.0, 9.0]])
    """
    every = [row.columns for row in rows] or [np.empty(0, np.int64)]
    columns = every[0] if all(other is every[0] for other in every) else reduce(np.union1d, every)
    return columns, [_at(columns, row, dtype) for row in rows]


def _at(columns: Columns, row: SparseRow, dtype: np.dtype[Any]) -> Numbers:
    values = np.full(len(columns) + 1, row.default, dtype)
    if len(columns) == len(row.columns):
        values[:-1] = row.values
    else:
        values[np.searchsorted(columns, row.columns)] = row.values
    return values
