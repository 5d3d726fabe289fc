"""Sparse rows: which columns are absent, how much memory they take, and how they grow."""

from typing import Any

import numpy as np
import pytest
from parameter_server.storage.blocks import block_of, columns_of

from streamiter.parameter_server.matrix import Matrix
from streamiter.parameter_server.storage import cells
from streamiter.parameter_server.storage.block import BlockRow

_HUGE = 1 << 40
"""More columns than any memory holds."""


def test_only_columns_that_differ_are_in_a_sparse_row() -> None:
    """A gradient that had been cleared by hand made an optimizer walk over a million zeros."""
    block, _ = block_of(Matrix("w", rows=1, columns=2000, sparse=True, default=1.5))
    block.put(0, columns_of(7, 5, 3), np.array([1.5, 2.0, 9.0]))
    block.add(0, columns_of(7, 6, 6), np.array([0.0, 1.0, -1.0]))
    content = block.sparse_row(0)
    assert content.columns.tolist() == [3, 5]
    assert content.values.tolist() == [9.0, 2.0]
    assert content.default == 1.5


@pytest.mark.parametrize("columns", [20, 20_000])
def test_nan_and_negative_zero_are_kept_apart_from_the_default(columns: int) -> None:
    """With a default of NaN, which differs from itself, a row stored every column; 1 / −0.0 came out as +inf."""
    block, _ = block_of(Matrix("w", rows=1, columns=columns, sparse=True), column=0)
    block.put(0, columns_of(1, 2), np.array([-0.0, 0.0]))
    assert block.sparse_row(0).columns.tolist() == [1]
    assert np.signbit(block.get(0, columns_of(1, 2))).tolist() == [True, False]
    block.replace_row(0, BlockRow(columns_of(4), np.array([0.0]), float("nan")))
    assert block.sparse_row(0).columns.tolist() == [4]
    assert np.isnan(block.get(0, columns_of(1, 2, 3))).all()


def test_a_row_without_changes_takes_no_memory() -> None:
    """A table of a million words took the memory of a million empty rows."""
    block, _ = block_of(Matrix("w", rows=1_000_000, columns=1000, sparse=True, default=0.5))
    assert block.get(999_999, columns_of(4)).tolist() == [0.5]
    assert block.get(999_998, None).tolist() == [0.5] * 500
    assert block.sparse_row(999_997).default == 0.5
    assert block.size_bytes() == 0


def test_memory_grows_with_the_stored_columns_and_not_with_the_width() -> None:
    """A row of hashed features took memory for its range of 2⁴⁰ instead of for the few million that occur."""
    block, _ = block_of(Matrix("w", rows=1, columns=_HUGE, dtype="float32", sparse=True, block=(1, _HUGE)))
    columns = np.random.default_rng(1).integers(0, _HUGE, 50_000)
    for some in np.array_split(columns, 40):
        block.add(0, some, np.ones(len(some), np.float32))
    expected, counts = np.unique(columns, return_counts=True)
    content = block.sparse_row(0)
    np.testing.assert_array_equal(content.columns, expected)
    np.testing.assert_array_equal(content.values, counts)
    assert block.size_bytes() < 50_000 * 100


def test_a_row_that_has_filled_up_is_no_larger_than_a_dense_one() -> None:
    """A full row was stored as a hash table, which takes five times the memory of its numbers."""
    block, within = block_of(Matrix("w", rows=1, columns=20_000, dtype="float32", sparse=True, block=(1, 20_000)))
    sizes = []
    for column in range(0, 20_000, 1000):
        columns = np.arange(column, column + 1000)
        block.add(0, columns, columns.astype(np.float32))
        sizes.append(block.size_bytes())
    assert max(sizes) <= 20_000 * 4
    np.testing.assert_array_equal(block.get(0, None), np.arange(20_000, dtype=np.float32))
    block.replace_row(0, BlockRow(columns_of(5), np.array([1], np.float32), 0.0))
    assert block.size_bytes() < 1000
    assert within.columns == range(20_000)


@pytest.mark.parametrize("is_replaced", [False, True])
def test_columns_reset_to_the_default_make_room_for_others(is_replaced: bool) -> None:
    """An accumulator that got other columns in each round, and was cleared after it, grew without end."""
    block, _ = block_of(Matrix("w", rows=1, columns=_HUGE, sparse=True, block=(1, _HUGE)))
    sizes = []
    for number in range(60):
        columns = np.random.default_rng(number).integers(0, _HUGE, 500)
        block.add(0, columns, np.ones(500))
        assert len(block.sparse_row(0).columns) == 500
        sizes.append(block.size_bytes())
        if is_replaced:
            block.replace_row(0, BlockRow(columns[:0], np.empty(0), 0.0))
        else:
            block.put(0, columns, np.zeros(500))
    assert max(sizes[20:]) <= max(sizes[:20])


@pytest.mark.parametrize("vector", [1, 2])
def test_columns_that_a_row_stores_as_the_default_are_added_to_while_it_grows(vector: int) -> None:
    """A larger table had no room for columns that were stored, but reset: all gradients of the block were lost."""
    block, _ = block_of(Matrix("w", rows=1, columns=_HUGE, sparse=True, vector=vector))
    for first, stop in ((0, 9), (9, 12), (8, 17)):
        columns = np.arange(vector * first, vector * stop)
        block.add(0, columns, np.ones(len(columns)))
        assert block.sparse_row(0).columns.tolist() == columns.tolist()
        block.replace_row(0, BlockRow(columns[:0], np.zeros(0), 0.0))


def test_duplicate_columns_take_memory_once() -> None:
    """A batch with one word a thousand times made a table for a thousand words."""
    block, _ = block_of(Matrix("w", rows=1, columns=_HUGE, sparse=True, block=(1, _HUGE)))
    for column in (9, 8):
        block.add(0, np.full(1000, column), np.ones(1000))
    assert block.get(0, columns_of(8, 9)).tolist() == [1000.0, 1000.0]
    assert block.size_bytes() < 1000


def test_a_row_that_shrinks_releases_its_memory() -> None:
    """A gradient that had once been large made each later step fill a table of that size."""
    block, _ = block_of(Matrix("w", rows=1, columns=_HUGE, sparse=True, block=(1, _HUGE)))
    block.add(0, np.arange(5000), np.ones(5000))
    block.replace_row(0, BlockRow(columns_of(3), np.ones(1), 0.0))
    assert block.size_bytes() < 1000
    assert block.get(0, columns_of(3, 4)).tolist() == [1.0, 0.0]


def test_a_row_that_is_added_to_as_a_whole_keeps_its_default() -> None:
    """After an add to a whole row, all of its columns were stored, also columns without an add."""
    block, _ = block_of(Matrix("w", rows=1, columns=1000, sparse=True, block=(1, 1000)))
    block.replace_row(0, BlockRow(columns_of(), np.empty(0), 2.0))
    values = np.ones(1000)
    values[700:] = 0.0
    block.add(0, None, values)
    content = block.sparse_row(0)
    assert content.default == 2.0
    assert content.columns.tolist() == list(range(700))


@pytest.mark.parametrize("step", [1, 2, 16, 4096, 1 << 20, 1 << 28])
def test_columns_at_regular_distances_are_found(step: int) -> None:
    """Fields of a feature at a fixed distance fell into the same slots of the table."""
    block, _ = block_of(Matrix("w", rows=1, columns=_HUGE, dtype="int64", sparse=True, block=(1, _HUGE)))
    columns = np.arange(3000) * step
    block.add(0, columns[::-1].copy(), columns[::-1])
    np.testing.assert_array_equal(block.get(0, columns), columns)
    np.testing.assert_array_equal(block.get(0, columns + _HUGE // 2 + 1), np.zeros(3000, np.int64))


def test_columns_that_all_want_the_same_slot_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """A search that probed only some slots did not end when these were taken."""
    monkeypatch.setattr(cells, "_MULTIPLIER", 0)
    block, _ = block_of(Matrix("w", rows=1, columns=_HUGE, sparse=True, block=(1, _HUGE)))
    for count in range(1, 40):
        block.add(0, columns_of(count * 7), np.array([1.0 + count]))
        found = block.get(0, np.arange(1, 60) * 7)
        assert found[:count].tolist() == [2.0 + number for number in range(count)]
        assert not found[count:].any()


def test_whole_numbers_are_exact_beyond_the_range_of_a_float() -> None:
    """Counts above 2⁵³ that went through a float lost their last digits."""
    block, _ = block_of(Matrix("w", rows=1, columns=100_000, dtype="int64", sparse=True))
    large = (1 << 62) + 1
    block.put(0, columns_of(9), np.array([large]))
    block.add(0, columns_of(9, 9), np.array([1, 1]))
    assert block.get(0, columns_of(9)).tolist() == [large + 2]
    block.replace_row(0, BlockRow(columns_of(), np.empty(0, np.int64), large))
    assert block.sparse_row(0).default == large
    assert block.get(0, columns_of(3)).tolist() == [large]


@pytest.mark.parametrize("columns", [30, 30_000])
def test_content_read_from_a_sparse_row_does_not_change_with_later_writes(columns: int) -> None:
    """A function read one row and wrote the same row, and the values that it had read changed."""
    matrix = Matrix("w", rows=1, columns=columns, sparse=True)
    block, _ = block_of(matrix)
    block.add(0, columns_of(2, 1), np.array([2.0, 1.0]))
    content = block.sparse_row(0)
    block.add(0, columns_of(1, 4), np.array([5.0, 5.0]))
    block.replace_row(0, BlockRow(columns_of(7), np.array([7.0]), 3.0))
    assert _plain(content) == ([1, 2], [1.0, 2.0], 0.0)


def _plain(content: BlockRow) -> tuple[Any, ...]:
    return content.columns.tolist(), content.values.tolist(), content.default
