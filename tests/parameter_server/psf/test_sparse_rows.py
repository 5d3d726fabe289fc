"""Functions of the column's number on sparse rows, and functions that are refused before any change."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from parameter_server.psf.on_blocks import SHAPES, Fixture, OnBlocks

from streamiter.errors import ParameterServerError
from streamiter.parameter_server import psf

Array = np.ndarray[Any, Any]

SPARSE = Fixture("sparse", "float64", default=0.0, density=0.2)


def refused(driver: OnBlocks, function: Any) -> str:
    before = driver.values()
    with pytest.raises(ParameterServerError) as refusal:
        driver.update(function)
    assert driver.values().tobytes() == before.tobytes()
    return str(refusal.value)


@pytest.mark.parametrize("shape", SHAPES)
def test_a_function_of_the_column_must_give_absent_columns_one_number(shape: str) -> None:
    """The number for the last block's absent columns became the default, and other absent columns read wrong."""
    driver = OnBlocks(SPARSE, SHAPES[shape])
    absent = np.flatnonzero(driver.initial[1] == 0)
    message = refused(driver, psf.MapWithIndex("w", 1, 3, lambda i, x: x + i))
    given = f"{float(absent[0])} for column {absent[0]} and {float(absent[1])} for column {absent[1]}"
    assert message == (
        "psf.MapWithIndex on matrix 'w': expected its function to return one number for all columns that are absent "
        f"from sparse rows, given {given}; use a dense matrix"
    )


def test_blocks_must_agree_on_the_new_default() -> None:
    """Each block had one default, because blocks were as wide as the function's steps; the whole matrix had none."""
    steps = psf.MapWithIndex("w", 1, 3, lambda i, x: i // 50 + 0 * x)
    message = refused(OnBlocks(SPARSE, (5, 50)), steps)
    assert "given 0.0 for column 0 and 1.0 for column 50" in message


def test_all_blocks_are_checked_before_one_is_changed() -> None:
    """The first blocks had the new values and the last block the old ones."""

    def fails_at_the_end(index: Array, x: Array) -> Array:
        if index.max() == 99:
            raise ValueError("no such column")
        return x

    for fixture in (SPARSE, Fixture("dense", "float64")):
        message = refused(OnBlocks(fixture, (5, 50)), psf.MapWithIndex("w", 1, 3, fails_at_the_end))
        assert message == (
            "psf.MapWithIndex on matrix 'w': expected its function to return an array, given ValueError: no such column"
        )


def test_maps_without_column_numbers_check_all_blocks_first() -> None:
    """A function that failed on one value left the blocks before it changed."""
    for fixture in (SPARSE, Fixture("dense", "float64")):
        driver = OnBlocks(fixture, (5, 50))
        bad = driver.initial[1, 50:].max()

        def fails_on_one(x: Array, bad: float = bad) -> Array:
            if (x == bad).any():
                raise ValueError("too much")
            return x + 1

        assert "given ValueError: too much" in refused(driver, psf.Map("w", 1, 3, fails_on_one))


def test_nan_may_be_the_default_of_absent_columns() -> None:
    """NaN is not equal to itself, so two equal defaults of NaN were taken for different numbers."""
    driver = OnBlocks(SPARSE, (5, 50))
    driver.update(psf.MapWithIndex("w", 1, 3, lambda i, x: np.where(x == 0, np.nan, i)))
    expected = np.where(driver.initial[1] == 0, np.nan, np.arange(100))
    np.testing.assert_array_equal(driver.values()[3], expected)
    assert driver.aggregate(psf.Size("w", 3)) == np.count_nonzero(driver.initial[1])


def test_a_row_without_absent_columns_accepts_any_function() -> None:
    """A function was refused because of absent columns that the row did not have."""
    driver = OnBlocks(Fixture("full", "float64", default=0.0), (5, 50))
    driver.update(psf.MapWithIndex("w", 1, 3, lambda i, x: i + x))
    np.testing.assert_array_equal(driver.values()[3], np.arange(100) + driver.initial[1])


@pytest.mark.parametrize(
    ("function", "default"),
    [
        (psf.Log("w", 1, 3), -np.inf),
        (psf.Div("w", 1, 1, 3), np.nan),
        (psf.Exp("w", 1, 3), 1.0),
        (psf.Fill("w", 3, 4), 4.0),
        (psf.Put("w", 3, np.zeros(100)), 0.0),
    ],
)
def test_values_equal_to_the_new_default_are_not_stored(function: Any, default: float) -> None:
    """Log stored −inf for every column of the row, and NaN was stored although the default was NaN."""
    driver = OnBlocks(SPARSE, (5, 50))
    driver.update(function)
    pulled = driver.aggregate(psf.PullSparse("w", 3))
    np.testing.assert_equal(pulled.default, default)
    assert len(pulled.columns) <= np.count_nonzero(driver.initial[1])


def test_random_numbers_fill_all_columns_of_a_sparse_row() -> None:
    """Random numbers were drawn only for the stored columns."""
    driver = OnBlocks(SPARSE, (5, 50))
    driver.update(psf.RandomUniform("w", 3, 1.0, 2.0, seed=3))
    assert driver.aggregate(psf.Size("w", 3)) == 100


def test_blocks_with_defaults_of_their_own_are_pulled_as_one_row() -> None:
    """One block's default was used for the columns of another block."""
    driver = OnBlocks(SPARSE, (5, 50))
    driver.update(psf.Fill("w", 1, 0.0))
    driver.update(psf.Increment("w", 1, np.ones(50), columns=np.arange(50)))
    driver.update(psf.MapWithIndex("w", 1, 3, lambda i, x: np.where(i < 50, i, 7.0)))
    pulled = driver.aggregate(psf.PullSparse("w", 3))
    values = np.full(100, pulled.default)
    values[pulled.columns] = pulled.values
    np.testing.assert_array_equal(values, np.where(np.arange(100) < 50, np.arange(100), 7.0))


def test_a_wide_sparse_row_is_computed_in_pieces() -> None:
    """Arguments for all absent columns at once took more memory than the sparse matrix saved."""
    from streamiter.parameter_server.matrix import Matrix, MatrixPartitioning
    from streamiter.parameter_server.storage import make_block

    matrix = Matrix("w", rows=2, columns=200_000, sparse=True, block=(2, 200_000))
    (place,) = MatrixPartitioning(matrix, shards=1).blocks
    block = make_block(matrix, place)
    block.add(0, np.array([5, 150_000]), np.array([1.0, 2.0]))
    longest = 0

    def watched(index: Array, x: Array) -> Array:
        nonlocal longest
        longest = max(longest, len(index))
        return np.where(x == 0, 3.0, index * x)

    psf.MapWithIndex("w", 0, 1, watched).partition_update(block, None)
    content = block.sparse_row(1)
    assert (content.columns.tolist(), content.values.tolist(), content.default) == ([5, 150_000], [5.0, 3e5], 3.0)
    assert longest <= 1 << 16
