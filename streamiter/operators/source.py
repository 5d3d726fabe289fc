"""Sources: where batches come from, items in memory, and results that are collected."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, ClassVar, Final, final

import numpy as np
import numpy.typing as npt

from streamiter.operators.operator import Context, Operator
from streamiter.operators.output import Output
from streamiter.records import Batch, BatchOrigin, take

__all__ = [
    "Collect",
    "Collected",
    "ItemsSource",
    "Positions",
    "Source",
    "SourceBatch",
    "SourceFactory",
]


Positions = dict[Any, Any]
"""Where reading goes on: plain data by partition (or whatever the source is split into)."""


class SourceBatch:
    """A batch that was read, with the positions from which reading goes on after it.

    ``records`` is a batch, a table of pandas, polars or Arrow, whose rows they are, or whatever has a length and the
    operator behind the source takes. ``positions_after`` gives the positions after the first so many of its records (at
    least one, and not all). With it, and ``records`` that can be sliced, the batch is cut where the steps behind the
    source are slow: then a barrier need not wait for all of it. ``origin`` tells dead letters where the records were
    read; None where there is nothing to tell.

    >>> batch = SourceBatch([10, 20, 30], {"read": 3}, positions_after=lambda records: {"read": records})
    >>> first, rest = batch.cut(2)
    >>> first.records, first.positions, rest.records, rest.positions
    ([10, 20], {'read': 2}, [30], {'read': 3})
    """

    __slots__ = ("_before", "origin", "positions", "positions_after", "records")

    def __init__(
        self,
        records: Any,
        positions: Mapping[Any, Any],
        origin: BatchOrigin | None = None,
        *,
        positions_after: Callable[[int], Mapping[Any, Any]] | None = None,
    ) -> None:
        self.records = records
        self.positions = positions
        self.origin = origin
        self.positions_after = positions_after
        self._before = 0
        """Records of the batch that was read which come before these."""

    def cut(self, records: int) -> tuple[SourceBatch, SourceBatch]:
        """The first so many records, and the others. Only where it has ``positions_after``."""
        assert self.positions_after is not None
        after = self._before + records
        first = SourceBatch(self.records[:records], self.positions_after(after), self.origin)
        rest = SourceBatch(
            self.records[records:], self.positions, self.origin, positions_after=self.positions_after
        )
        rest._before = after
        return first, rest


class Source:
    """Base class of sources: one instance for each subtask, used by one task.

    ``read`` returns the next batch (at least one record), waiting for it if it is a coroutine function,
    and None at the end. It may be called ahead of need, and cancelled while it waits without losing
    anything. ``positions`` of the batches that were passed on are remembered by the engine, merged by
    key, and given to ``open`` when a job goes on from a snapshot.

    ``redistribute(positions, parallelism) -> positions``, if it is there, shares out those of all old subtasks for
    another number of them, when a job goes on from a checkpoint with another parallelism. It is asked of a new
    instance, which is not open. Each record must be read by one of the new subtasks, whoever would have read it before.

    >>> class Countdown(Source):
    ...     def open(self, context, positions):
    ...         self.left = (positions or {}).get("left", 3)
    ...     def read(self):
    ...         self.left -= 1
    ...         return None if self.left < 0 else SourceBatch([self.left], {"left": self.left})

    The Source: where records enter a flow.
    """

    bounded: ClassVar[bool] = True
    """Whether ``read`` ever returns None. A factory may carry it as well."""

    def open(self, context: Context, positions: Positions | None) -> Any:
        """Called once, first; ``positions`` from a snapshot, else None."""

    def read(self) -> Any:
        """The next :class:`SourceBatch`, or None at the end. May be ``async``."""
        raise NotImplementedError

    def positions(self) -> Positions:
        """Where reading begins, once it is open: what a snapshot names until the first batch is passed on.

        Without it a source that begins anywhere but at its start would begin there after a restore.
        """
        return {}

    def is_idle(self) -> bool:
        """Whether nothing is to be expected here for now; asked once, when it is open.

        So where a topic has fewer partitions than the source has subtasks: the others must not wait for it.
        """
        return False

    def lag(self) -> Mapping[int, int]:
        """Records not yet read, by partition, as far as known."""
        return {}

    def report_positions(self, group: str, positions: Positions) -> Any:
        """A checkpoint with these positions is committed: tell tools that show lag. May be ``async``.

        Nothing depends on it.
        """

    def close(self) -> Any:
        """Called once, last, whatever happened."""


SourceFactory = Callable[[], Source]
"""A source class, or a callable without arguments: called once for each subtask."""


# As large as a topic reader's largest batch: the cost of a hop is lost in it.
_BATCH_RECORDS: Final = 8192
_DONE: Final = "items done"
# What was done before with other numbers of subtasks: for each of these runs, how many items each subtask had.
_BEFORE: Final = "items done before"


class ItemsSource(Source):
    """Item i of a sequence, array or ``Columns`` goes to subtask i mod n.

    With another number of subtasks, so do those that are left: the i-th of these to subtask i mod n.

    A bounded source of given items.
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

    Results kept in memory, for tests and small results.
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
