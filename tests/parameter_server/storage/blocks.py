"""Blocks of all kinds for tests, and helpers that encode and decode their state."""

from typing import Any

import numpy as np
import pytest

from streamiter.parameter_server.matrix import BlockRange, Matrix, MatrixPartitioning
from streamiter.parameter_server.storage import ShardBlock, block, cells, make_block, sparse
from streamiter.values.deferred import Deferred
from streamiter.values.plain_data import PlainData

__all__ = ["KINDS", "PLAIN", "block_of", "columns_of", "decoded", "deferred_of", "restored", "small_frames"]

PLAIN = PlainData()

KINDS = [(is_sparse, dtype) for is_sparse in (False, True) for dtype in ("float32", "float64", "int64")]


def block_of(matrix: Matrix, row: int = 0, column: int = 0) -> tuple[ShardBlock, BlockRange]:
    """Return the block of a matrix that stores this row and column, and its range."""
    for place in MatrixPartitioning(matrix, shards=2).blocks:
        if row in place.rows and column in place.columns:
            return make_block(matrix, place), place
    raise AssertionError((row, column))


def columns_of(*columns: int) -> np.ndarray[Any, np.dtype[np.int64]]:
    return np.array(columns, np.int64)


def decoded(state: dict[str, Any]) -> tuple[dict[str, Any], list[bytes]]:
    """Return a frozen state as a restore receives it, and the frames of its encoding."""
    data, deferred = PLAIN.encode_state(state)
    frames: list[bytes] = []

    def resolve(number: int) -> Any:
        frames.extend(deferred[number].frames())
        return map(PLAIN.decode, frames)

    return PLAIN.decode_state(data, resolve), frames


def restored(matrix: Matrix, place: BlockRange, state: dict[str, Any]) -> ShardBlock:
    """Return a new block restored from a frozen state."""
    other = make_block(matrix, place)
    other.restore(decoded(state)[0])
    return other


def deferred_of(state: dict[str, Any]) -> Deferred:
    """Return the deferred part of a frozen state."""
    (deferred,) = (part for part in state.values() if isinstance(part, Deferred))
    return deferred


def small_frames(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make frames hold only a few numbers, so that small blocks have many frames."""
    monkeypatch.setattr(block, "_FRAME_BYTES", 64)
    monkeypatch.setattr(sparse, "_FRAME_BYTES", 64)
    monkeypatch.setattr(sparse, "_FRAME_SEGMENTS", 2)
    monkeypatch.setattr(cells, "PART_COLUMNS", 16)
