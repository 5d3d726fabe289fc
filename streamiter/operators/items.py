"""A bounded source of given items."""

from __future__ import annotations

from typing import Final

from streamiter.operators.context import Context
from streamiter.operators.source import Positions, Source, SourceBatch
from streamiter.records import Batch

__all__ = ["ItemsSource"]

# As large as a topic reader's largest batch: the cost of a hop is lost in it.
_BATCH_RECORDS: Final = 8192
_DONE: Final = "items done"


class ItemsSource(Source):
    """Item i of a sequence, array or ``Columns`` goes to subtask i mod n."""

    def __init__(self, items: Batch) -> None:
        self._items = items
        self._done = 0

    def open(self, context: Context, positions: Positions | None) -> None:
        if context.parallelism > 1:
            self._items = self._items[context.subtask_index :: context.parallelism]
        if positions is not None:
            self._done = positions.get(_DONE, 0)

    def read(self) -> SourceBatch | None:
        batch = self._items[self._done : self._done + _BATCH_RECORDS]
        if len(batch) == 0:
            return None
        self._done += len(batch)
        return SourceBatch(batch, {_DONE: self._done})
