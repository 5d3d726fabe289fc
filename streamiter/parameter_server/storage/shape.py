"""Of what block a frozen state is."""

from __future__ import annotations

from typing import Any

from streamiter.errors import CheckpointError
from streamiter.parameter_server.storage.block import Block

__all__ = ["block_shape", "check_shape"]


def block_shape(block: Block) -> tuple[str, int, int, int, int]:
    """Its dtype, first and last row, first and last column (half-open)."""
    rows, columns = block.rows, block.columns
    return (str(block.dtype), rows.start, rows.stop, columns.start, columns.stop)


def check_shape(block: Block, given: Any, name: str) -> None:
    """Raise CheckpointError unless the state is of this very block."""
    expected = block_shape(block)
    if given != expected:
        raise CheckpointError(
            f"state of {name}: expected a block of (dtype, first row, end of rows, first column, end of columns) "
            f"{expected}, given {given}; make the matrix with the settings it had"
        )
