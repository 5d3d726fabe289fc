"""The behaviour of all blocks, sparse or dense, of any dtype and shape, compared with a numpy array."""

import copy
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from parameter_server.storage.blocks import KINDS, PLAIN, block_of, columns_of, deferred_of, restored, small_frames

from streamiter.errors import InternalError
from streamiter.parameter_server import psf
from streamiter.parameter_server.matrix import DTYPES, DrawnValues, DType, Matrix
from streamiter.parameter_server.storage import Block
from streamiter.parameter_server.storage.block import BlockRow

_ROWS = 5
_SPECIAL = [0.0, -0.0, float("nan"), float("inf")]

_shares = st.lists(st.floats(0, 1, exclude_max=True, width=32), max_size=70)
"""Columns, as fractions of the width of the block."""


class _BlockMachine(RuleBasedStateMachine):
    """Makes random calls on a block in the middle of a matrix."""

    is_sparse: bool

    @initialize(
        dtype=st.sampled_from(DTYPES),
        columns=st.sampled_from([1, 7, 90, 700]),
        row_share=st.floats(0, 1, exclude_max=True),
        column_share=st.floats(0, 1, exclude_max=True),
        block_rows=st.integers(1, _ROWS),
        parts=st.integers(1, 3),
        default=st.sampled_from([0.0, 1.0, -3.0, psf.RandomUniform("w", 1, -1.0, 1.0, seed=7)]),
        vector=st.sampled_from([1, 3]),
    )
    def make(
        self,
        dtype: DType,
        columns: int,
        row_share: float,
        column_share: float,
        block_rows: int,
        parts: int,
        default: Any,
        vector: int,
    ) -> None:
        if not self.is_sparse or (isinstance(default, DrawnValues) and dtype == "int64"):
            default = 0.0
        self.dtype: Any = dtype
        self.vector = vector if self.is_sparse else 1
        columns *= self.vector
        self.matrix = Matrix(
            "w",
            rows=_ROWS,
            columns=columns,
            dtype=self.dtype,
            sparse=self.is_sparse,
            default=default,
            vector=self.vector,
            block=(block_rows, -(-columns // parts // self.vector) * self.vector),
        )
        self.block, self.range = block_of(self.matrix, int(row_share * _ROWS), int(column_share * columns))
        # As wide and high as the matrix: the block must not touch columns and rows outside of it.
        self.expected = np.full((_ROWS, columns), 0.0 if self.matrix.draws(1) else default, self.dtype)
        if self.matrix.draws(1):
            default.draw(1, range(columns), self.expected[1])
        self.frozen: list[tuple[dict[str, Any], np.ndarray[Any, Any], int]] = []

    def _columns(self, shares: list[float]) -> np.ndarray[Any, np.dtype[np.int64]]:
        columns = columns_of(*(self._column(share) for share in shares))
        if self.vector == 1 or len(columns) % 2:
            return columns
        return (columns[:, np.newaxis] // self.vector * self.vector + np.arange(self.vector)).reshape(-1)

    def _column(self, share: float) -> int:
        within = self.range.columns
        return min(int(within.start + share * len(within)), within.stop - 1)

    def _row(self, number: int) -> int:
        return self.range.rows[number % len(self.range.rows)]

    def _values(self, seed: int, count: int, share_of_zeros: float = 0.1) -> np.ndarray[Any, Any]:
        random = np.random.default_rng(seed)
        values = random.integers(-9, 10, count) * (random.random(count) >= share_of_zeros)
        return values.astype(self.dtype)

    @rule(row=st.integers(0, 9), shares=_shares, seed=st.integers(0, 99), with_out=st.booleans())
    def get(self, row: int, shares: list[float], seed: int, with_out: bool) -> None:
        row, columns = self._row(row), self._columns(shares)
        out = self._values(seed, len(columns)) if with_out else None
        values = self.block.get(row, columns, out)
        assert out is None or values is out
        assert values.dtype == self.dtype
        np.testing.assert_array_equal(values, self.expected[row, columns])
        values += 1  # The array belongs to the caller.

    @rule(row=st.integers(0, 9), shares=_shares, seed=st.integers(0, 99))
    def add(self, row: int, shares: list[float], seed: int) -> None:
        row, columns = self._row(row), self._columns(shares)
        values = self._values(seed, len(columns))
        given = columns.copy(), values.copy()
        self.block.add(row, columns, values)
        for column, value in zip(columns.tolist(), values, strict=True):
            self.expected[row, column] += value
        np.testing.assert_array_equal(columns, given[0])
        np.testing.assert_array_equal(values, given[1])

    @rule(row=st.integers(0, 9), shares=_shares, seed=st.integers(0, 99), special=st.sampled_from(_SPECIAL))
    def put(self, row: int, shares: list[float], seed: int, special: float) -> None:
        row, columns = self._row(row), self._columns(shares)
        values = self._values(seed, len(columns))
        if self.dtype != "int64":
            values[::3] = special
        self.block.put(row, columns, values)
        for column, value in zip(columns.tolist(), values, strict=True):
            self.expected[row, column] = value

    @rule(row=st.integers(0, 9), seed=st.integers(0, 99), zeros=st.sampled_from([0.0, 0.99, 1.0]), puts=st.booleans())
    def change_whole_row(self, row: int, seed: int, zeros: float, puts: bool) -> None:
        row, within = self._row(row), self.range.columns
        values = self._values(seed, len(within), zeros)
        if puts:
            self.block.put(row, None, values)
            self.expected[row, within.start : within.stop] = values
        else:
            self.block.add(row, None, values)
            self.expected[row, within.start : within.stop] += values
        values[:] = 77  # The block does not keep the array.

    @precondition(lambda self: self.is_sparse)
    @rule(row=st.integers(0, 9), kept=st.sampled_from([0.0, 0.1, 0.5, 1.0]), default=st.sampled_from([0.0, 1.0, 2.5]))
    def replace_row(self, row: int, kept: float, default: float) -> None:
        row = self._row(row)
        if self.matrix.draws(row):  # No function that replaces rows runs on it.
            return
        content = self.block.sparse_row(row)
        is_kept = np.random.default_rng(len(content.columns)).random(len(content.columns)) < kept
        columns, values = content.columns[is_kept], content.values[is_kept] + self.expected.dtype.type(1)
        self.block.replace_row(row, BlockRow(columns, values, default))
        self.expected[row, self.range.columns.start : self.range.columns.stop] = default
        self.expected[row, columns] = values

    @precondition(lambda self: not self.is_sparse)
    @rule(row=st.integers(0, 9))
    def change_in_place(self, row: int) -> None:
        row, within = self._row(row), self.range.columns
        numbers = self.block.dense_row(row)
        assert numbers.flags.c_contiguous
        numbers -= 2
        self.expected[row, within.start : within.stop] -= 2

    @precondition(lambda self: len(self.frozen) < 3)
    @rule(read=st.booleans())
    def freeze(self, read: bool) -> None:
        self.block.updates += 1
        state = self.block.freeze(PLAIN.encode)
        if read:  # The first frame is read before the changes.
            state = _begun(state)
        self.frozen.append((state, self.expected.copy(), self.block.updates))

    @precondition(lambda self: self.frozen)
    @rule(first=st.booleans(), continues=st.booleans())
    def restore(self, first: bool, continues: bool) -> None:
        state, expected, updates = self.frozen.pop(0 if first else -1)
        other = restored(self.matrix, self.range, state)
        assert other.updates == updates
        self._check(other, expected)
        if continues:
            self.block, self.expected = other, expected

    @precondition(lambda self: self.frozen)
    @rule()
    def release(self) -> None:
        deferred_of(self.frozen.pop()[0]).release()

    @invariant()
    def has_what_is_expected(self) -> None:
        self._check(self.block, self.expected)

    def _check(self, block: Block, expected: np.ndarray[Any, Any]) -> None:
        within = self.range.columns
        for row in self.range.rows:
            own = expected[row, within.start : within.stop]
            np.testing.assert_array_equal(block.get(row, None), own)
            if self.is_sparse:
                content = block.sparse_row(row)
                assert (np.diff(content.columns) > 0).all()
                if self.matrix.draws(row):
                    assert np.isnan(content.default)
                    np.testing.assert_array_equal(content.values, own[content.columns - within.start])
                    continue
                dense = np.full(len(within), content.default, self.dtype)
                dense[content.columns - within.start] = content.values
                np.testing.assert_array_equal(dense, own)


def _begun(state: dict[str, Any]) -> dict[str, Any]:
    """Return the same state after one frame has been read."""
    deferred = deferred_of(state)
    frames = deferred.frames()
    first = next(frames, None)

    def all_frames() -> Iterator[bytes]:
        if first is not None:
            yield first
        yield from frames

    begun = copy.copy(deferred)
    begun.frames = all_frames
    begun.release = deferred.release
    return {name: begun if part is deferred else part for name, part in state.items()}


@pytest.mark.parametrize("is_sparse", [False, True])
def test_any_sequence_of_calls_gives_the_same_as_on_an_array(is_sparse: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Duplicates counted once, a column went to the next block, or an absent column was 0 instead of the default.

    A sparse block whose default is drawn equals an array with the numbers that numpy draws for the whole row.
    """
    small_frames(monkeypatch)
    machine = type("Machine", (_BlockMachine,), {"is_sparse": is_sparse})
    run_state_machine_as_test(machine, settings=settings(max_examples=30, stateful_step_count=25, deadline=None))


@pytest.mark.parametrize(("is_sparse", "dtype"), KINDS)
def test_a_row_is_read_into_memory_that_is_given(is_sparse: bool, dtype: Any) -> None:
    """A pull into the caller's array went through a second array, or left old values in it."""
    block, _ = block_of(Matrix("w", rows=2, columns=1000, dtype=dtype, sparse=is_sparse))
    block.add(1, columns_of(3, 3), np.array([1, 2], dtype))
    out = np.full(500, 9, dtype)
    for row in (1, 0):
        assert block.get(row, None, out) is out
        assert out.sum() == (3 if row else 0)


def test_dense_and_sparse_blocks_refuse_calls_for_the_other_kind() -> None:
    """A function took a sparse row for a dense one and changed a copy."""
    dense, _ = block_of(Matrix("w", rows=1, columns=4))
    sparse, _ = block_of(Matrix("w", rows=1, columns=4, sparse=True))
    with pytest.raises(InternalError, match="matrix 'w': expected a sparse block, given row 0 of a dense block"):
        dense.sparse_row(0)
    with pytest.raises(InternalError, match="matrix 'w': expected a sparse block, given row 0 of a dense block"):
        dense.replace_row(0, sparse.sparse_row(0))
    with pytest.raises(InternalError, match="matrix 'w': expected a dense block, given row 0 of a sparse block"):
        sparse.dense_row(0)
