"""What tests of blocks share: blocks of all kinds, and their state through its encoding and back."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from streamiter.checkpoints.plain_data import PlainData
from streamiter.deferred import Deferred
from streamiter.parameter_server.matrix import BlockRange, Matrix, MatrixPartitioning
from streamiter.parameter_server.storage import Block, make_block
from streamiter.parameter_server.storage import dense as frozen_arrays
from streamiter.parameter_server.storage import sparse as filled_cells
from streamiter.parameter_server.storage import sparse as frozen_cells
from streamiter.parameter_server.storage import sparse as hashed_cells

__all__ = ["KINDS", "PLAIN", "block_of", "columns_of", "decoded", "deferred_of", "restored", "small_frames"]

PLAIN = PlainData()

KINDS = [(is_sparse, dtype) for is_sparse in (False, True) for dtype in ("float32", "float64", "int64")]


def block_of(matrix: Matrix, row: int = 0, column: int = 0) -> tuple[Block, BlockRange]:
    """The block of a matrix that a number lies in."""
    for block in MatrixPartitioning(matrix, shards=2).blocks:
        if row in block.rows and column in block.columns:
            return make_block(matrix, block), block
    raise AssertionError((row, column))


def columns_of(*columns: int) -> np.ndarray[Any, np.dtype[np.int64]]:
    return np.array(columns, np.int64)


def decoded(state: dict[str, Any]) -> tuple[dict[str, Any], list[bytes]]:
    """A frozen state as a restore is given it, and the frames it went through."""
    data, deferred = PLAIN.encode_state(state)
    frames: list[bytes] = []

    def resolve(number: int) -> Any:
        frames.extend(deferred[number].frames())
        return map(PLAIN.decode, frames)

    return PLAIN.decode_state(data, resolve), frames


def restored(matrix: Matrix, block: BlockRange, state: dict[str, Any]) -> Block:
    """A new block that has taken over a frozen state."""
    other = make_block(matrix, block)
    other.restore(decoded(state)[0])
    return other


def deferred_of(state: dict[str, Any]) -> Deferred:
    """The large piece of a frozen state."""
    (deferred,) = (part for part in state.values() if isinstance(part, Deferred))
    return deferred


def small_frames(monkeypatch: pytest.MonkeyPatch) -> None:
    """Frames of a few numbers, so that small blocks have many."""
    monkeypatch.setattr(frozen_arrays, "_FRAME_BYTES", 64)
    monkeypatch.setattr(frozen_cells, "_FRAME_BYTES", 64)
    monkeypatch.setattr(frozen_cells, "_FRAME_SEGMENTS", 2)
    monkeypatch.setattr(filled_cells, "PART_COLUMNS", 16)
    monkeypatch.setattr(hashed_cells, "PART_COLUMNS", 16)
