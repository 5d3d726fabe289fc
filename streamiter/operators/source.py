"""Sources: where records enter a flow. A source reads batches and tells the positions at which reading resumes.

The source of given items and the operator that collects results in memory are here, too.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from typing import Any, ClassVar, Final, Generic, final

import numpy as np
import numpy.typing as npt

from streamiter.errors import ConfigurationError, GraphError
from streamiter.operators.declared_state import JOINED, Form, SharedOperator, declared
from streamiter.operators.event_time import PartState
from streamiter.operators.operator import Context, MaybeAwaitable
from streamiter.operators.output import Output
from streamiter.values.helpers.importing import need_package
from streamiter.values.origins import BatchOrigin
from streamiter.values.records import BATCH_RECORDS, Batch, Record, take
from streamiter.values.tables import arrow_table

Positions = dict[Any, Any]
"""The positions at which reading resumes: plain data by partition, or by another part of the source."""


class SourceBatch:
    """A batch that was read, with the positions at which reading resumes after it.

    ``records`` is a batch, a table of pandas, polars or Arrow (its rows are the records), or any object with a length
    that the next operator takes. ``positions_after(n)`` returns the positions after the first n records, for at least
    one and not all of them. If it is given and ``records`` can be sliced, the engine cuts the batch where the next
    steps are slow, so a barrier need not wait for all of it. ``origin`` says in dead letters where the records were
    read, or is None.

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
        """The number of records of the original batch that come before these."""

    def cut(self, records: int) -> tuple[SourceBatch, SourceBatch]:
        """Return the first ``records`` records and the rest. The batch must have ``positions_after``."""
        assert self.positions_after is not None
        after = self._before + records
        first = SourceBatch(self.records[:records], self.positions_after(after), self.origin)
        rest = SourceBatch(self.records[records:], self.positions, self.origin, positions_after=self.positions_after)
        rest._before = after
        return first, rest


class Source:
    """Base class of sources: one instance for each subtask, used by one task.

    ``read`` returns the next batch (at least one record), and None at the end; a coroutine function may wait for
    records. The engine may call it before the records are needed, and may cancel it while it waits; then no record
    may be lost. The engine remembers the positions of the batches that were passed on, merged by key, and passes them
    to ``open`` when a job resumes from a snapshot.

    An optional method ``redistribute(positions, parallelism) -> positions`` distributes the positions of all old
    subtasks over another number of subtasks. The engine calls it on a new, unopened instance when a job resumes from
    a checkpoint with another parallelism. One of the new subtasks must read each record that was not read before.

    >>> class Countdown(Source):
    ...     def open(self, context, positions):
    ...         self.left = (positions or {}).get("left", 3)
    ...     def read(self):
    ...         self.left -= 1
    ...         return None if self.left < 0 else SourceBatch([self.left], {"left": self.left})
    """

    bounded: ClassVar[bool] = True
    """Whether ``read`` returns None at some time. A factory may have this attribute, too."""

    topic_name: str | None = None
    """The name of the topic that the source reads, for statistics."""

    brings_events: bool = True
    """Whether the records are events, for statistics; False for records that only pass through the flow."""

    def open(self, context: Context, positions: Positions | None) -> MaybeAwaitable:
        """Prepare to read. Called once, first; ``positions`` are those of a snapshot, or None."""

    def read(self) -> Awaitable[SourceBatch | None] | SourceBatch | None:
        """Return the next :class:`SourceBatch`, or None at the end. May be ``async``."""
        raise NotImplementedError

    def positions(self) -> Positions:
        """Return the positions at which reading begins. Called when the source is open.

        A snapshot holds them until the first batch is passed on. Without them a source that begins elsewhere than at
        its start would begin at its start after a restore.
        """
        return {}

    def settled(self, positions: Positions) -> Positions:
        """Return the positions for a snapshot; ``positions`` follow the last records that were passed on.

        They may be later ones if no record is between. Otherwise retention could drop a position of an idle source.
        """
        return positions

    def is_idle(self) -> bool:
        """Return whether no records are expected for now. Called once, when the source is open.

        This is so where a topic has fewer partitions than the source has subtasks: then no step waits for this subtask.
        """
        return False

    def lag(self) -> Mapping[int, int]:
        """Return the number of records not yet read, by partition, as far as known."""
        return {}

    def read_records(self) -> int | None:
        """Return about how many records a source that ends has read since its first start; None: not known."""
        return None

    def parts(self, handled: Positions) -> Mapping[int | None, PartState] | None:
        """Return how far each partition has been read, for event time by partition; None: they count as one.

        ``handled`` are the positions behind the records that the flow has handled.
        """
        return None

    def timestamps_ms(self) -> Mapping[int, int]:
        """Return the time stamp of the record read last, by partition, as far as known."""
        return {}

    def unanswered_since_s(self) -> float | None:
        """Return since when a server owes an answer, also an empty one, by the clock's seconds; None: it owes none."""
        return None

    def report_positions(self, group: str, positions: Positions) -> MaybeAwaitable:
        """Tell tools that show lag that a checkpoint with these positions is committed. May be ``async``.

        The engine does not depend on it.
        """

    def close(self) -> MaybeAwaitable:
        """Release resources. Called once, last, in every case."""


class TellsEnd(Source):
    """Base of the sources that can say when they have read what a topic had at their start."""

    tells_end: bool = False
    """Set before ``open`` if a step waits for the records that the topic has then: ``read`` returns None behind these
    records, and reading continues after ``read_on``."""

    async def read_on(self) -> bool:
        """Continue behind the end that was found last; return whether the topic has no records there yet."""
        raise NotImplementedError

    async def find_end(self) -> None:
        """Find the end of the topic again: ``read`` returns None behind it."""
        raise NotImplementedError


SourceFactory = Callable[[], Source]
"""A source class, or a callable without arguments that returns a source. Called once for each subtask."""


_DONE: Final = "items done"
# For each earlier run with another number of subtasks, the number of items that each subtask had done.
_BEFORE: Final = "items done before"


class ItemsSource(Source):
    """Reads given items: item i of a sequence, array or ``Columns`` belongs to subtask i mod n.

    After a restore with another number of subtasks, the i-th of the items that are left belongs to subtask i mod n.
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
        batch = self._items[self._done : self._done + BATCH_RECORDS]
        if len(batch) == 0:
            return None
        before, self._done = self._done, self._done + len(batch)
        return SourceBatch(batch, {_DONE: self._done}, positions_after=lambda records: {_DONE: before + records})

    @staticmethod
    def redistribute(positions: Sequence[Positions], parallelism: int) -> list[Positions]:
        """Give each new subtask the counts of the old ones, from which the items that are left follow."""
        before: list[Any] = next((each[_BEFORE] for each in positions if _BEFORE in each), [])
        done = [each.get(_DONE, 0) for each in positions]
        return [{_DONE: 0, _BEFORE: [*before, done]} for _ in range(parallelism)]


def _left(items: int, before: Sequence[Sequence[int]]) -> npt.NDArray[np.int64]:
    """Return the indices of the items that are left, in order.

    >>> _left(7, [[2, 1]])
    array([3, 4, 5, 6])
    """
    left = np.arange(items)
    for done in before:
        place = np.arange(len(left))
        left = left[place // len(done) >= np.array(done)[place % len(done)]]
    return left


@final
class Collected(Generic[Record]):
    """The result of ``stream.collect()``: ``items`` holds the records when the flow runs.

    A new run of the flow starts empty; a run that restores a checkpoint starts with the checkpoint's items.

    >>> Collected()
    Collected(0 items)
    """

    def __init__(self) -> None:
        self._parts: dict[int, list[Any]] = {}

    @property
    def items(self) -> list[Record]:
        """The records so far in a new list: in order, subtask after subtask. Raises GraphError before the first run."""
        if not self._parts:
            raise GraphError(
                "collect: expected .items after the flow has started, given a flow that has not run; call flow.run() "
                "first"
            )
        return [record for subtask in sorted(self._parts) for record in self._parts[subtask]]

    def to_arrow(self) -> Any:
        """Return the records as a ``pyarrow.Table``; needs pyarrow (extra ``arrow``).

        The fields of dicts, structs and dataclasses are its columns; a field that a record does not have is null.
        Other records, such as numbers, are in the column ``value``.

        Raises ``ConfigurationError`` without pyarrow, and for fields whose values have no common type.
        """
        need_package("collect", "pyarrow", "arrow")
        try:
            return arrow_table("collect", self.items, ConfigurationError, is_mixed=True)
        except (TypeError, ValueError) as error:
            raise ConfigurationError(
                f"collect: expected records that make a table, given others: {error}; use .items, or make the values "
                "of a field alike"
            ) from None

    def to_pandas(self) -> Any:
        """Return the records as a ``pandas.DataFrame``, as :meth:`to_arrow` does; needs pandas and pyarrow."""
        return self.to_arrow().to_pandas()

    def __len__(self) -> int:
        return sum(len(part) for part in self._parts.values())

    def __iter__(self) -> Iterator[Record]:
        return iter(self.items)

    def __repr__(self) -> str:
        return f"Collected({len(self)} items)"


def begin_collecting(collected: Collected, subtask: int, parallelism: int) -> list[Any]:
    """Return the list that a subtask of a new run fills."""
    collected._parts = {index: part for index, part in collected._parts.items() if index < parallelism}
    collected._parts[subtask] = []
    return collected._parts[subtask]


def collected_parts(collected: Collected) -> dict[int, list[Any]]:
    """Return the list of each subtask."""
    return dict(collected._parts)


def _replace_items(items: list[Any], kept: list[Any]) -> None:
    items[:] = kept


class Collect(SharedOperator):
    """Appends all records to ``into.items``, for tests and small results.

    State: all records, in memory. Each checkpoint writes them again, so use a sink for more than a few records.
    """

    _items: list[Any] = declared(made=list, form=Form(list, take_on=_replace_items), share=JOINED)

    def __init__(self, into: Collected) -> None:
        self.into = into

    def open(self, context: Context) -> None:
        self._items = begin_collecting(self.into, context.subtask_index, context.parallelism)

    def process_batch(self, batch: Batch, out: Output) -> None:
        self._items.extend(batch)
