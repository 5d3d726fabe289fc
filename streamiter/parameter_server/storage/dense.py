"""Arrays as they are now, to be encoded later."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Final, cast, final

import numpy as np
import numpy.typing as npt

from streamiter.deferred import Deferred, Encode
from streamiter.errors import CheckpointError, InternalError
from streamiter.parameter_server.matrix import BlockRange, Matrix
from streamiter.parameter_server.storage.block import (
    Block,
    Columns,
    Numbers,
    SparseRow,
    block_shape,
    check_shape,
    gathered,
)

__all__ = [
    "DenseBlock",
]


# About a millisecond to encode and to write: what may be done between two turns of the event loop.
_FRAME_BYTES: Final = 1 << 20


@final
class FrozenArrays(Deferred):
    """One-dimensional arrays, one after the other, copied at once; a frame is a part of one of them.

    The copies are cut into frames at once, so memory is given back bit by bit while they are written.
    """

    def __init__(self, arrays: Iterable[npt.NDArray[Any]], *, name: str, encode: Encode) -> None:
        self.name = name
        self._encode = encode
        self._is_released = False
        parts = [part.copy() for array in arrays for part in _in_parts(array)]
        parts.reverse()
        self._parts = parts
        """The next one last."""

    def frames(self) -> Iterator[bytes]:
        left = len(self._parts)
        while left:
            if self._is_released:
                raise InternalError(f"the state of {self.name} was released before all of it was read")
            part = self._parts.pop()
            yield self._encode(part, name=f"state of {self.name}")
            left -= 1
        self.release()

    def release(self) -> None:
        self._is_released = True
        self._parts = []


def _in_parts(array: npt.NDArray[Any]) -> Iterator[npt.NDArray[Any]]:
    length = max(1, _FRAME_BYTES // array.itemsize)
    for begin in range(0, len(array), length):
        yield array[begin : begin + length]


def fill_from_frames(arrays: Iterable[npt.NDArray[Any]], frames: Iterable[Any], *, name: str) -> None:
    """Write decoded frames into one-dimensional arrays of the same dtypes and lengths as those that were frozen.

    Raises ``CheckpointError`` for frames of other arrays.
    """
    remaining = iter(frames)
    for array in arrays:
        filled = 0
        while filled < len(array):
            part = next(remaining, None)
            if (
                not isinstance(part, np.ndarray)
                or part.dtype != array.dtype
                or part.ndim != 1
                or not 0 < len(part) <= len(array) - filled
            ):
                raise CheckpointError(
                    f"state of {name}: expected {len(array) - filled} more numbers of {array.dtype}, given "
                    f"{_described(part)}; the snapshot is damaged, or of another matrix"
                )
            array[filled : filled + len(part)] = part
            filled += len(part)
    if (part := next(remaining, None)) is not None:
        raise CheckpointError(
            f"state of {name}: expected no more, given {_described(part)}; the snapshot is damaged, or of another "
            f"matrix"
        )


def _described(part: Any) -> str:
    if isinstance(part, np.ndarray):
        return f"an array of shape {part.shape} and dtype {part.dtype}"
    return "no more" if part is None else f"{type(part).__name__}"


_ROW_VIEWS_MAX: Final = 4096


@final
class DenseBlock(Block):
    """An array of rows × columns, C-contiguous; zeros at first.

    Blocks that hold every number.
    """

    is_sparse = False

    def __init__(self, matrix: Matrix, block: BlockRange) -> None:
        super().__init__(matrix, block)
        self._array = np.zeros((len(block.rows), len(block.columns)), self.dtype)
        # A view takes 100 ns to make, a third of what 100 numbers take to read, and 100 bytes to keep.
        self._row_views: Sequence[npt.NDArray[Any]] = (
            list(self._array) if len(block.rows) <= _ROW_VIEWS_MAX else cast(Any, self._array)
        )
        self._first_row = block.rows.start
        # An array without axes: a Python int would cost as much again to convert as 100 columns to move.
        self._first_column = np.array(block.columns.start)
        self._begins_at_0 = block.columns.start == 0

    def get(self, row: int, columns: Columns | None, out: Numbers | None = None) -> Numbers:
        numbers = self._row_views[row - self._first_row]
        if columns is not None:
            return gathered(numbers, self._local(columns), out)
        if out is None:
            return numbers.copy()
        np.copyto(out, numbers)
        return out

    def add(self, row: int, columns: Columns | None, values: Numbers) -> None:
        numbers = self._row_views[row - self._first_row]
        if columns is None:
            np.add(numbers, values, out=numbers)
            return
        # It counts duplicates, and takes half the time of `numbers[local] += values`, which does not: one pass over
        # the row in place of two. To look for duplicates first takes longer than to add (of 10,000 keys 55 and 50 µs).
        np.add.at(numbers, self._local(columns), values)

    def put(self, row: int, columns: Columns | None, values: Numbers) -> None:
        numbers = self._row_views[row - self._first_row]
        if columns is None:
            np.copyto(numbers, values)
        else:
            numbers[self._local(columns)] = values

    def dense_row(self, row: int) -> npt.NDArray[Any]:
        return self._row_views[row - self._first_row]

    def sparse_row(self, row: int) -> SparseRow:
        raise InternalError(f"{self._name}: expected a sparse block, row {row} lies in a dense one")

    def replace_row(self, row: int, content: SparseRow) -> None:
        raise InternalError(f"{self._name}: expected a sparse block, row {row} lies in a dense one")

    def _local(self, columns: Columns) -> Columns:
        return columns if self._begins_at_0 else columns - self._first_column

    def size_bytes(self) -> int:
        return self._array.nbytes

    def freeze(self, encode: Encode) -> dict[str, Any]:
        return {
            "shape": block_shape(self),
            "updates": self.updates,
            "numbers": FrozenArrays([self._array.reshape(-1)], name=self._name, encode=encode),
        }

    def restore(self, state: dict[str, Any]) -> None:
        check_shape(self, state["shape"], self._name)
        fill_from_frames([self._array.reshape(-1)], state["numbers"], name=self._name)
        self.updates = state["updates"]
