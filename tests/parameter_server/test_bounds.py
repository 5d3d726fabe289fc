"""Rows and columns given by a caller are accepted as they are; ``refusals.txt`` has those that are refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from streamiter.parameter_server.matrix import Matrix, MatrixPartitioning

_PARTITIONING = MatrixPartitioning(Matrix("w", rows=3, columns=300), shards=2)


def test_columns_of_the_right_kind_are_not_copied() -> None:
    """A copy of ten thousand keys took as long as their lookup."""
    columns = np.array([299, 0, 5, 5], np.int64)
    assert _PARTITIONING.checked_columns(columns) is columns
    strided = np.arange(300)[::-3]
    assert _PARTITIONING.checked_columns(strided) is strided


@pytest.mark.parametrize(
    "columns",
    [
        [4, 0, 299],
        (4, 0, 299),
        np.array([4, 0, 299], np.int32),
        np.array([4, 0, 299], np.uint16),
        np.array([4, 0, 200], np.uint8),
        np.array([4, 0, 299], np.uint64),
        np.array([4, 0, 299], ">i8"),
    ],
)
def test_whole_numbers_of_any_kind_are_columns(columns: Any) -> None:
    """Columns from pandas, libsvm readers or lists have many dtypes, and some were refused."""
    checked = _PARTITIONING.checked_columns(columns)
    assert checked.dtype == np.int64
    assert checked.dtype.isnative
    assert checked.tolist() == list(columns)


@pytest.mark.parametrize("columns", [[], (), np.empty(0, np.int64), np.empty(0, np.int32), range(0)])
def test_an_empty_list_of_columns_is_accepted(columns: Any) -> None:
    """An empty list becomes a numpy array of floats, which was refused."""
    checked = _PARTITIONING.checked_columns(columns)
    assert checked.dtype == np.int64
    assert checked.shape == (0,)


@pytest.mark.parametrize("row", [0, 2, np.int64(0), np.int64(2), np.uint8(1)])
def test_a_row_is_a_whole_number(row: Any) -> None:
    """A row from an array, which is a numpy integer, was refused."""
    checked = _PARTITIONING.checked_row(row)
    assert type(checked) is int
    assert checked == row
    assert _PARTITIONING.checked_rows(iter([row, 1])) == [row, 1]
