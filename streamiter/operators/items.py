"""A bounded source of given items."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from streamiter.operators.context import Context
from streamiter.operators.source import Positions, Source, SourceBatch
from streamiter.records import Batch, take

__all__ = ["ItemsSource"]

# As large as a topic reader's largest batch: the cost of a hop is lost in it.
_BATCH_RECORDS: Final = 8192
_DONE: Final = "items done"
# What was done before with other numbers of subtasks: for each of these runs, how many items each subtask had.
_BEFORE: Final = "items done before"


class ItemsSource(Source):
    """Item i of a sequence, array or ``Columns`` goes to subtask i mod n.

    With another number of subtasks, so do those that are left: the i-th of these to subtask i mod n.
    """

    def __init__(self, items: Batch) -> None:
        self._items = items
        self._done = 0

    def open(self, context: Context, positions: Positions | None) -> None:
        before: Sequence[Sequence[int]] = () if positions is None else positions.get(_BEFORE, ())
        if before:
            left = _left(len(self._items), before)
            self._items = take(self._items, left[context.subtask_index :: context.parallelism])
        elif context.parallelism > 1:
            self._items = self._items[context.subtask_index :: context.parallelism]
        if positions is not None:
            self._done = positions.get(_DONE, 0)

    def read(self) -> SourceBatch | None:
        batch = self._items[self._done : self._done + _BATCH_RECORDS]
        if len(batch) == 0:
            return None
        before, self._done = self._done, self._done + len(batch)
        return SourceBatch(
            batch, {_DONE: self._done}, positions_after=lambda records: {_DONE: before + records}
        )

    @staticmethod
    def redistribute(positions: Sequence[Positions], parallelism: int) -> list[Positions]:
        """How many items each of the old subtasks had passed on tells which ones are left."""
        before: list[Any] = next((each[_BEFORE] for each in positions if _BEFORE in each), [])
        done = [each.get(_DONE, 0) for each in positions]
        return [{_DONE: 0, _BEFORE: [*before, done]} for _ in range(parallelism)]


def _left(items: int, before: Sequence[Sequence[int]]) -> npt.NDArray[np.int64]:
    """The items that are left, in order.

    >>> _left(7, [[2, 1]])
    array([3, 4, 5, 6])
    """
    left = np.arange(items)
    for done in before:
        place = np.arange(len(left))
        left = left[place // len(done) >= np.array(done)[place % len(done)]]
    return left
