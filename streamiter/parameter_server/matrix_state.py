"""The part of a snapshot that says what one matrix holds."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from streamiter.deferred import Encode
from streamiter.errors import ParameterServerError
from streamiter.parameter_server.matrix import Matrix
from streamiter.parameter_server.storage.block import Block

__all__ = ["check_state", "frozen_blocks", "restore_blocks"]

_SETTINGS = ("rows", "columns", "dtype", "sparse")
"""Those that numbers cannot be taken over without."""

_Span = tuple[int, int]


def frozen_blocks(matrix: Matrix, blocks: Iterable[Block], encode: Encode) -> dict[str, Any]:
    """The matrix and these of its blocks as they are now: plain data, with ``Deferred`` pieces."""
    return {
        "settings": {name: getattr(matrix, name) for name in _SETTINGS},
        "blocks": [
            {
                "rows": [block.rows.start, block.rows.stop],
                "columns": [block.columns.start, block.columns.stop],
                "content": block.freeze(encode),
            }
            for block in blocks
        ],
    }


def check_state(matrix: Matrix, blocks: Iterable[Block], state: Mapping[str, Any]) -> None:
    """Raise what keeps these blocks from taking over a state of all blocks."""
    for name, value in state["settings"].items():
        if (now := getattr(matrix, name)) != value:
            raise ParameterServerError(
                f"matrix {matrix.name!r}: expected {name}={value!r} as in the snapshot, given {now!r}; "
                "make it as it was, or begin without the snapshot"
            )
    saved = _by_place(state)
    for block in blocks:
        rows, columns = _place(block)
        if (rows, columns) not in saved:
            (of_rows, of_columns) = next(iter(saved))
            raise ParameterServerError(
                f"matrix {matrix.name!r}: expected a snapshot of blocks such as rows {_shown(rows)}, columns "
                f"{_shown(columns)}, given blocks such as rows {_shown(of_rows)}, columns {_shown(of_columns)}; "
                f"make the matrix with block=({of_rows[1] - of_rows[0]}, {of_columns[1] - of_columns[0]})"
            )


def restore_blocks(blocks: Iterable[Block], state: Mapping[str, Any]) -> None:
    """Have each of these blocks hold what it holds in a state of all blocks, which has been checked."""
    saved = _by_place(state)
    for block in blocks:
        block.restore(saved[_place(block)])


def _by_place(state: Mapping[str, Any]) -> dict[tuple[_Span, _Span], Any]:
    return {(tuple(block["rows"]), tuple(block["columns"])): block["content"] for block in state["blocks"]}


def _place(block: Block) -> tuple[_Span, _Span]:
    return (block.rows.start, block.rows.stop), (block.columns.start, block.columns.stop)


def _shown(ends: _Span) -> str:
    return f"{ends[0]:,} to {ends[1] - 1:,}"
