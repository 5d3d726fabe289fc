"""Arrays as they are now, to be encoded later."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, Final, final

import numpy as np
import numpy.typing as npt

from streamiter.deferred import Deferred, Encode
from streamiter.errors import CheckpointError, InternalError

__all__ = ["FrozenArrays", "fill_from_frames"]

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
