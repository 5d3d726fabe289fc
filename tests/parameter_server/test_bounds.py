"""Rows and columns given by a caller: accepted as they are, or refused by name."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from streamiter.errors import OutOfRange
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
        np.array([4, 0, 299], np.uint64),
        np.array([4, 0, 299], ">i8"),
    ],
)
def test_whole_numbers_of_any_kind_are_columns(columns: Any) -> None:
    """Columns from pandas, libsvm readers or lists have many dtypes, and some were refused."""
    checked = _PARTITIONING.checked_columns(columns)
    assert checked.dtype == np.int64
    assert checked.dtype.isnative
    assert checked.tolist() == [4, 0, 299]


@pytest.mark.parametrize("columns", [[], (), np.empty(0, np.int64), np.empty(0, np.int32), range(0)])
def test_an_empty_list_of_columns_is_accepted(columns: Any) -> None:
    """An empty list becomes a numpy array of floats, which was refused."""
    checked = _PARTITIONING.checked_columns(columns)
    assert checked.dtype == np.int64
    assert checked.shape == (0,)


@pytest.mark.parametrize(
    ("columns", "given"),
    [
        (np.array([4, 299, 300]), "given 300 at position 2"),
        (np.array([4, 300, -1]), "given 300 at position 1"),
        (np.array([4, -1, 300]), "given -1 at position 1"),
        (np.array([np.iinfo(np.int64).min]), "given -9223372036854775808 at position 0"),
        ([0] * 1000 + [1 << 40], "given 1099511627776 at position 1000"),
        (np.array([3, 200], np.uint8), None),
        (np.array([3, -100], np.int8), "given -100 at position 1"),
        (np.array([3, (1 << 64) - 1], np.uint64), "given 18446744073709551615 at position 1"),
        ((1, 2, 1000), "given 1000 at position 2"),
    ],
)
def test_the_first_column_out_of_range_is_named(columns: Any, given: str | None) -> None:
    """A negative column counts from the end in numpy: −1 from a hash function trained the last weight."""
    if given is None:
        assert _PARTITIONING.checked_columns(columns).tolist() == columns.tolist()
        return
    with pytest.raises(OutOfRange) as raised:
        _PARTITIONING.checked_columns(columns)
    assert str(raised.value) == f"matrix 'w', columns: expected columns from 0 to 299, {given}"


@pytest.mark.parametrize(
    ("columns", "given"),
    [
        ([1.0, 2.0], "given dtype float64 (it begins with 1.0); convert it: columns.astype(np.int64)"),
        (np.empty(0), "given dtype float64 (it begins with nothing); convert it: columns.astype(np.int64)"),
        ([True, False], "given dtype bool (it begins with True); convert it: columns.astype(np.int64)"),
        (np.zeros(300, bool), "given dtype bool (it begins with False); convert it: columns.astype(np.int64)"),
        (["a", "b"], "given dtype <U1 (it begins with 'a'); convert it: columns.astype(np.int64)"),
        ([1 << 70], "given dtype object (it begins with 1180591620717411303424); convert it: "),
        (5, "given 5"),
        (np.int64(5), "given 5"),
        (None, "given None"),
        ("name", "given 'name'"),
        ([[1, 2], [3, 4]], "given an array of shape (2, 2)"),
        (np.zeros((0, 2), np.int64), "given an array of shape (0, 2)"),
        ([[1], [2, 3]], "given lists of different lengths"),
        ({"a": 1}, "given {'a': 1}"),
    ],
)
def test_values_that_are_no_columns_are_refused(columns: Any, given: str) -> None:
    """A mask given instead of column numbers read columns 0 and 1 again and again."""
    with pytest.raises(OutOfRange) as raised:
        _PARTITIONING.checked_columns(columns)
    assert str(raised.value).startswith(
        f"matrix 'w', columns: expected a one-dimensional array of whole numbers, {given}"
    )


@pytest.mark.parametrize("row", [0, 2, np.int64(2), np.uint8(1)])
def test_a_row_is_a_whole_number(row: Any) -> None:
    """A row from an array, which is a numpy integer, was refused."""
    checked = _PARTITIONING.checked_row(row)
    assert type(checked) is int
    assert checked == row


@pytest.mark.parametrize(
    ("row", "given"),
    [
        (3, "3"),
        (-1, "-1"),
        (np.int64(-2), "-2"),
        (1.0, "1.0"),
        (np.float32(1), "1.0"),
        (True, "True"),
        (None, "None"),
        ("1", "'1'"),
        ([1], "[1]"),
        ("x" * 200, "'" + "x" * 99 + "…"),
    ],
)
def test_a_value_that_is_no_row_of_the_matrix_is_refused(row: Any, given: str) -> None:
    """A row out of range was a silent no-op, and the model never changed."""
    with pytest.raises(OutOfRange) as raised:
        _PARTITIONING.checked_row(row)
    assert str(raised.value) == f"matrix 'w', row: expected a whole number from 0 to 2, given {given}"


def test_several_rows_are_checked_one_by_one() -> None:
    """The error did not name the row that the matrix does not have."""
    assert _PARTITIONING.checked_rows(iter([1, np.int64(0)])) == [1, 0]
    with pytest.raises(OutOfRange, match=r"row: expected a whole number from 0 to .*, given -1$"):
        _PARTITIONING.checked_rows([0, -1])


@pytest.mark.parametrize("rows", [2, "12", None])
def test_a_value_that_is_no_list_of_rows_is_refused(rows: Any) -> None:
    """A string was taken for a list of its letters."""
    with pytest.raises(OutOfRange) as refused:
        _PARTITIONING.checked_rows(rows)
    assert str(refused.value) == f"matrix 'w', rows: expected a list of rows, given {rows!r}"
