"""Records that wait in an operator."""

from __future__ import annotations

from typing import Any

import numpy as np

from streamiter.records import Batch, Columns, can_concatenate, concatenate

__all__ = ["HeldInput"]


class HeldInput:
    """Records set aside, in order. Arrays and ``Columns`` are kept as they came, without copies.

    >>> held = HeldInput()
    >>> held.add([1, 2]), held.add([3])
    (None, None)
    >>> len(held), held.merged()
    (3, [1, 2, 3])
    """

    __slots__ = ("_length", "_pieces")

    def __init__(self) -> None:
        self._pieces: list[Batch] = []
        self._length = 0

    def __len__(self) -> int:
        return self._length

    def add(self, batch: Batch) -> None:
        """Set the records of a batch aside, behind the others."""
        self._length += len(batch)
        if isinstance(batch, (np.ndarray, Columns)):
            self._pieces.append(batch)
        elif self._pieces and isinstance(self._pieces[-1], list):
            self._pieces[-1].extend(batch)
        else:
            self._pieces.append(list(batch))

    def merged(self) -> Batch:
        """All records as one batch; a list, unless all came as arrays, or ``Columns``, of one type."""
        if not self._pieces:
            return []
        first, *others = self._pieces
        if all(can_concatenate(first, piece) for piece in others):
            return concatenate(self._pieces)
        return [record for piece in self._pieces for record in piece]

    def taken(self) -> Batch:
        """As :meth:`merged`; nothing is held any more."""
        merged = self.merged()
        self._pieces, self._length = [], 0
        return merged

    def snapshot(self) -> list[Batch]:
        """The records as plain data."""
        return [list(piece) if isinstance(piece, list) else piece for piece in self._pieces]

    def restore(self, state: list[Any]) -> None:
        """Take over what ``snapshot`` gave."""
        for batch in state:
            self.add(batch)
