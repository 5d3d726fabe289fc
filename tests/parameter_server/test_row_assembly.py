"""Rows that arrive from several shards, one part at a time."""

from __future__ import annotations

import numpy as np

from streamiter.parameter_server.matrix import Matrix, MatrixPartitioning
from streamiter.parameter_server.requests import ChangedRows, Changes
from streamiter.parameter_server.subscriptions import RowAssembly


def _assembly(columns_of_block: int) -> RowAssembly:
    matrix = Matrix("w", rows=2, columns=6, block=(2, columns_of_block))
    return RowAssembly(matrix, MatrixPartitioning(matrix, shards=3))


def _changes(block: int, clock: int, rows: list[int], values: list[list[float]]) -> Changes:
    return Changes(1, clock, [ChangedRows(block, np.array(rows, np.int64), np.array(values))])


def test_a_row_is_given_only_when_all_of_its_blocks_have_arrived() -> None:
    """A row was given with uninitialized memory in the parts that had not arrived."""
    rows = _assembly(columns_of_block=2)
    rows.take(_changes(2, 7, [1], [[5.0, 6.0]]))
    rows.take(_changes(0, 5, [1], [[1.0, 2.0]]))
    assert not rows.has_news
    rows.take(_changes(1, 6, [0, 1], [[0.0, 0.0], [3.0, 4.0]]))
    change = rows.take_row()
    assert (change.row, change.clock, change.columns) == (1, 5, None)
    assert change.values.tolist() == [1.0, 2.0, 3.0, 4.0, 5.0, 6.0]
    assert not rows.has_news


def test_parts_that_arrive_before_a_row_is_given_are_given_together() -> None:
    """A slow subscriber got each part of each row as a separate change."""
    rows = _assembly(columns_of_block=2)
    for block in range(3):
        rows.take(_changes(block, 0, [0], [[0.0, 0.0]]))
    rows.take_row()
    rows.take(_changes(2, 3, [0], [[5.0, 6.0]]))
    rows.take(_changes(1, 2, [0], [[3.0, 4.0]]))
    rows.take(_changes(2, 4, [0], [[7.0, 8.0]]))
    change = rows.take_row()
    assert (change.clock, change.columns) == (2, range(2, 6))
    assert change.values.tolist() == [0.0, 0.0, 3.0, 4.0, 7.0, 8.0]
    assert not rows.has_news


def test_rows_in_one_block_are_not_kept_once_they_are_given() -> None:
    """A subscriber stored a whole matrix twice, or a kept row held all rows that arrived with it in memory."""
    rows = _assembly(columns_of_block=6)
    changes = _changes(0, 1, [0, 1], [[1.0] * 6, [2.0] * 6])
    rows.take(changes)
    first, second = rows.take_row(), rows.take_row()
    assert (first.columns, second.values.tolist()) == (None, [2.0] * 6)
    assert first.values.base is None
    assert not rows._rows
