"""Results kept in memory, for tests and small results."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, final

from streamiter.operators.context import Context
from streamiter.operators.operator import Operator
from streamiter.operators.output import Output
from streamiter.records import Batch

__all__ = ["Collect", "Collected"]


@final
class Collected:
    """What ``stream.collect()`` gives: ``items`` holds the records once the flow runs.

    A new run of the flow begins anew; one that restores a checkpoint begins with that checkpoint's items.

    >>> Collected()
    Collected(0 items)
    """

    __slots__ = ("_parts",)

    def __init__(self) -> None:
        self._parts: dict[int, list[Any]] = {}

    @property
    def items(self) -> list[Any]:
        """The records so far, in order, in a new list; those of the first subtask first, and so on."""
        return [record for subtask in sorted(self._parts) for record in self._parts[subtask]]

    def begin(self, subtask: int, parallelism: int) -> list[Any]:
        """For the engine: the list that one of the subtasks of a new run fills."""
        self._parts = {index: part for index, part in self._parts.items() if index < parallelism}
        self._parts[subtask] = []
        return self._parts[subtask]

    def __len__(self) -> int:
        return sum(len(part) for part in self._parts.values())

    def __iter__(self) -> Iterator[Any]:
        return iter(self.items)

    def __repr__(self) -> str:
        return f"Collected({len(self)} items)"


class Collect(Operator):
    """Appends all records to ``into.items``.

    State: all records, in memory, written again by each checkpoint; for more than a few, use a sink.
    """

    def __init__(self, into: Collected) -> None:
        self._into = into
        self._items: list[Any] = []

    def open(self, context: Context) -> None:
        self._items = self._into.begin(context.subtask_index, context.parallelism)

    def process_batch(self, batch: Batch, out: Output) -> None:
        self._items.extend(batch)

    def snapshot(self) -> list[Any]:
        return self._items.copy()

    def restore(self, state: list[Any]) -> None:
        self._items[:] = state

    @staticmethod
    def redistribute(states: Sequence[list[Any]], parallelism: int) -> list[list[Any]]:
        """The items of old subtask i become those of i modulo ``parallelism``."""
        return [
            [item for state in states[subtask::parallelism] for item in state]
            for subtask in range(parallelism)
        ]
