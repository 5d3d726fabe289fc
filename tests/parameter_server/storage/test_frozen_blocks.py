"""The state of a block: frozen at the barrier, encoded in pieces, and refused by other blocks."""

import time
from typing import Any

import numpy as np
import pytest
from parameter_server.storage.blocks import KINDS, PLAIN, block_of, columns_of, decoded, deferred_of, restored

from streamiter.errors import CheckpointError, InternalError
from streamiter.parameter_server.matrix import Matrix
from streamiter.parameter_server.storage import Block, make_block
from streamiter.parameter_server.storage.block import BlockRow

_WIDTH = 300_000


def _block_with_much(matrix: Matrix) -> tuple[Block, Any]:
    block, within = block_of(matrix)
    block.put(0, None, np.arange(1, _WIDTH + 1).astype(matrix.dtype))
    columns = np.arange(0, _WIDTH, 20)
    block.add(1, columns, np.ones(len(columns), matrix.dtype))
    return block, within


def _wide(is_sparse: bool, dtype: Any) -> Matrix:
    return Matrix("w", rows=3, columns=_WIDTH, dtype=dtype, sparse=is_sparse, block=(3, _WIDTH))


@pytest.mark.parametrize(("is_sparse", "dtype"), KINDS)
def test_large_blocks_come_in_frames_of_about_a_megabyte(is_sparse: bool, dtype: Any) -> None:
    """A block encoded in one piece blocked the event loop for a second."""
    block, within = _block_with_much(matrix := _wide(is_sparse, dtype))
    state, frames = decoded(block.freeze(PLAIN.encode))
    assert len(frames) > 2
    assert max(map(len, frames)) < 2.2 * (1 << 20)
    other = make_block(matrix, within)
    other.restore(state)
    for row in range(3):
        np.testing.assert_array_equal(other.get(row, None), block.get(row, None))


@pytest.mark.parametrize(("is_sparse", "dtype"), KINDS)
def test_frames_contain_no_changes_made_between_them(is_sparse: bool, dtype: Any) -> None:
    """A snapshot held half of an add, which counted twice after a restart."""
    block, within = _block_with_much(matrix := _wide(is_sparse, dtype))
    expected = [block.get(row, None) for row in range(3)]
    state = block.freeze(PLAIN.encode)
    frames = []
    for number, frame in enumerate(deferred_of(state).frames()):
        frames.append(PLAIN.decode(frame))
        for row in range(3):
            block.add(row, columns_of(number, _WIDTH - 1), np.ones(2, dtype))
            block.add(row, None, np.ones(_WIDTH, dtype))
        if is_sparse:
            block.replace_row(number % 3, BlockRow(columns_of(3), np.ones(1, dtype), 4.0))
    other = make_block(matrix, within)
    other.restore({name: frames if part is deferred_of(state) else part for name, part in state.items()})
    for row in range(3):
        np.testing.assert_array_equal(other.get(row, None), expected[row])


@pytest.mark.parametrize(("is_sparse", "dtype"), KINDS)
def test_a_restore_replaces_later_changes(is_sparse: bool, dtype: Any) -> None:
    """After a rollback, rows that had changed since the snapshot kept their changes."""
    matrix = Matrix("w", rows=4, columns=900, dtype=dtype, sparse=is_sparse, default=2.0 if is_sparse else 0.0)
    block, within = block_of(matrix)
    block.add(1, columns_of(5), np.array([3], dtype))
    block.updates = 7
    expected = [block.get(row, None) for row in within.rows]
    state, _ = decoded(block.freeze(PLAIN.encode))
    for row in within.rows:
        block.add(row, None, np.ones(len(within.columns), dtype))
    block.updates = 9
    block.restore(state)
    assert block.updates == 7
    for row in within.rows:
        np.testing.assert_array_equal(block.get(row, None), expected[row])


def test_many_small_rows_share_frames() -> None:
    """One frame for each of 5,000 rows needed 5,000 checksums; one frame for all rows blocked the event loop."""
    matrix = Matrix("w", rows=5000, columns=1000, sparse=True, block=(5000, 1000))
    block, within = block_of(matrix)
    for row in range(5000):
        block.add(row, columns_of(row % 1000), np.array([1.0 + row]))
    state, frames = decoded(block.freeze(PLAIN.encode))
    assert 10 <= len(frames) <= 20
    other = make_block(matrix, within)
    other.restore(state)
    assert [other.get(row, columns_of(row % 1000)).item() for row in range(5000)] == [1.0 + row for row in range(5000)]


def test_rows_are_copied_only_while_a_snapshot_needs_them() -> None:
    """Copies that no snapshot needed any more doubled the memory and the time of each add."""
    block, _ = block_of(Matrix("w", rows=1, columns=1000, sparse=True))
    block.add(0, columns_of(1), np.ones(1))
    frozen = [deferred_of(block.freeze(PLAIN.encode)) for _ in range(2)]
    before = block._cells[0]
    block.add(0, columns_of(1), np.ones(1))
    copied = block._cells[0]
    assert copied is not before
    block.add(0, columns_of(1), np.ones(1))
    assert block._cells[0] is copied
    list(frozen[0].frames())
    frozen[1].release()
    block.freeze(PLAIN.encode)["cells"].release()
    block.add(0, columns_of(1), np.ones(1))
    assert block._cells[0] is copied


@pytest.mark.parametrize("is_sparse", [False, True])
def test_reading_a_released_state_is_an_error(is_sparse: bool) -> None:
    """A checkpoint that was aborted halfway was stored as complete."""
    block, _ = _block_with_much(_wide(is_sparse, "float64"))
    deferred = deferred_of(block.freeze(PLAIN.encode))
    frames = deferred.frames()
    next(frames)
    deferred.release()
    with pytest.raises(InternalError, match="state of matrix 'w' was released before all of it was read"):
        list(frames)
    deferred.release()


@pytest.mark.parametrize("is_sparse", [False, True])
def test_the_state_of_another_block_is_refused(is_sparse: bool) -> None:
    """A matrix made with other blocks restored numbers into wrong places."""
    block, _ = block_of(Matrix("w", rows=2, columns=8, sparse=is_sparse, block=(2, 8)))
    other, _ = block_of(Matrix("w", rows=2, columns=8, dtype="float32", sparse=is_sparse, block=(1, 4)), 1, 5)
    state, _ = decoded(block.freeze(PLAIN.encode))
    with pytest.raises(CheckpointError, match="make the matrix with the settings it had") as raised:
        other.restore(state)
    assert "('float32', 1, 2, 4, 8), given ('float64', 0, 2, 0, 8)" in str(raised.value)


@pytest.mark.parametrize(
    ("frames", "given"),
    [
        ([], "expected 8 more numbers of float64, given no more"),
        ([np.zeros(5)], "expected 3 more numbers of float64, given no more"),
        ([np.zeros(9)], r"given an array of shape \(9,\) and dtype float64"),
        ([np.zeros(8, np.float32)], r"given an array of shape \(8,\) and dtype float32"),
        ([np.zeros((2, 4))], r"given an array of shape \(2, 4\)"),
        ([np.zeros(8), np.zeros(1)], r"expected no more, given an array of shape \(1,\)"),
        ([[1.0]], "given list"),
    ],
)
def test_frames_of_another_dense_block_are_refused(frames: list[Any], given: str) -> None:
    """Only half of a block was restored, and the training continued without an error."""
    block, _ = block_of(Matrix("w", rows=2, columns=4, block=(2, 4)))
    state = block.freeze(PLAIN.encode)
    with pytest.raises(CheckpointError, match=given):
        block.restore({**state, "numbers": iter(frames)})


_FRAME = (columns_of(1), np.zeros(1), columns_of(2), columns_of(0, 3), np.ones(2))


@pytest.mark.parametrize(
    "frame",
    [
        None,
        _FRAME[:4],
        (*_FRAME[:4], [1.0, 1.0]),
        (*_FRAME[:4], np.ones(3)),
        (*_FRAME[:4], np.ones(2, np.float32)),
        (*_FRAME[:3], columns_of(0, 4), np.ones(2)),
        (*_FRAME[:3], columns_of(-1, 3), np.ones(2)),
        (columns_of(2), *_FRAME[1:]),
        (columns_of(1, 1), np.zeros(2), columns_of(3, -1), *_FRAME[3:]),
        (columns_of(1), np.zeros(2), *_FRAME[2:]),
    ],
)
def test_frames_of_another_sparse_block_are_refused(frame: Any) -> None:
    """A column outside of the block was restored, where no call could read or clear it."""
    block, _ = block_of(Matrix("w", rows=2, columns=4, sparse=True, block=(2, 4)))
    state = block.freeze(PLAIN.encode)
    block.restore({**state, "cells": iter([_FRAME])})
    assert block.get(1, None).tolist() == [1.0, 0.0, 0.0, 1.0]
    with pytest.raises(CheckpointError, match="in rows 0 to 1 and columns 0 to 3, given something else"):
        block.restore({**state, "cells": iter([frame])})


def test_a_restore_takes_no_longer_than_adding_the_same_columns() -> None:
    """A restore inserted columns in the order of a larger hash table: 200,000 of them took three seconds."""
    width = 1 << 40
    matrix = Matrix("w", rows=1, columns=width, dtype="float32", sparse=True, block=(1, width))
    block, place = block_of(matrix)
    columns = np.random.default_rng(1).integers(0, width, 200_000)
    began_s = time.process_time()
    block.add(0, columns, np.ones(len(columns), np.float32))
    added_s = time.process_time()
    other = restored(matrix, place, block.freeze(PLAIN.encode))
    assert time.process_time() - added_s < 10 * (added_s - began_s)  # Half of it; it was 85 times as long.
    assert other.get(0, columns).tobytes() == block.get(0, columns).tobytes()
