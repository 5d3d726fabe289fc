"""Columns of records that are joined: values in one buffer, without a Python object for each, and other columns."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final, Protocol, TypeVar, final, overload

import numpy as np
import numpy.typing as npt

from streamiter.values.numbers import Indices

LINE_FEED: Final = 10

Entry = TypeVar("Entry")


class DecodedAhead(Protocol):
    """The result of a decoder that decoded values ahead of time."""

    def part(self, start: int, stop: int) -> DecodedAhead:
        """Return the result for the values from ``start`` to ``stop``."""


@final
class JoinedValues(Sequence[bytes | None]):
    r"""Values in one buffer, each followed by a line feed. A value becomes an object when it is asked for.

    ``ends`` has the index of the line feed after each value. ``nulls`` has the indices of the values that are None;
    each takes one byte, the line feed. A slice has a buffer of its own, so a few values never keep a large buffer
    alive. The buffer becomes read-only.

    >>> values = JoinedValues(np.frombuffer(bytearray(b"ab\n\nc\n"), np.uint8), np.array([2, 3, 5]), np.array([1]))
    >>> list(values), values[-1], list(values[1:])
    ([b'ab', None, b'c'], b'c', [None, b'c'])
    """

    __slots__ = ("buffer", "decoded", "ends", "nulls")

    def __init__(self, buffer: npt.NDArray[np.uint8], ends: Indices, nulls: Indices) -> None:
        buffer.flags.writeable = False
        self.buffer = buffer
        self.ends = ends
        self.nulls = nulls
        self.decoded: DecodedAhead | None = None

    @property
    def nbytes(self) -> int:
        """The bytes of memory."""
        return self.buffer.nbytes + self.ends.nbytes

    def __len__(self) -> int:
        return len(self.ends)

    def __iter__(self) -> Iterator[bytes | None]:
        joined = self.buffer.tobytes()
        values: list[bytes | None] = [*joined.split(b"\n")]
        values.pop()
        if len(values) != len(self.ends):  # a value contains a line feed
            ends = self.ends.tolist()
            values = [joined[start:end] for start, end in zip([0, *(end + 1 for end in ends)], ends, strict=False)]
        for index in self.nulls:
            values[index] = None
        return iter(values)

    @overload
    def __getitem__(self, which: int) -> bytes | None: ...

    @overload
    def __getitem__(self, which: slice) -> Sequence[bytes | None]: ...

    def __getitem__(self, which: int | slice) -> bytes | Sequence[bytes | None] | None:
        indices = range(len(self))[which]
        if isinstance(indices, int):
            start, end = self._start(indices), int(self.ends[indices])
            # A null is empty.
            return None if start == end and indices in self.nulls else self.buffer[start:end].tobytes()
        if indices.step != 1:
            return list(self)[which]
        start = self._start(indices.start)
        stop = max(start, self._start(indices.stop))
        nulls = self.nulls[(self.nulls >= indices.start) & (self.nulls < indices.stop)]
        ends = self.ends[indices.start : indices.stop]
        part = JoinedValues(self.buffer[start:stop].copy(), ends - start, nulls - indices.start)
        part.decoded = None if self.decoded is None else self.decoded.part(indices.start, indices.stop)
        return part

    def _start(self, index: int) -> int:
        return int(self.ends[index - 1]) + 1 if index else 0


def lengths_of(values: Sequence[bytes | None]) -> Indices:
    """Return the length of each value, 0 for None."""
    if isinstance(values, JoinedValues):
        lengths = values.ends.copy()
        lengths[1:] -= values.ends[:-1] + 1
        return lengths
    return np.fromiter(map(len, [value or b"" for value in values]), np.int64, len(values))


def joined_column(
    columns: Sequence[Sequence[Entry] | None], lengths: Sequence[int], missing: Entry
) -> list[Entry] | None:
    """Return the column of all batches, ``missing`` for records of a batch without it; None if no batch has it.

    >>> joined_column([[b"a"], None], [1, 2], None)
    [b'a', None, None]
    """
    if all(column is None for column in columns):
        return None
    joined: list[Entry] = []
    for column, length in zip(columns, lengths, strict=True):
        joined.extend([missing] * length if column is None else column)
    return joined
