"""Where the records of a subtask are cut into epochs, one class for each way."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Protocol, final

from streamiter.operators.output import Output
from streamiter.operators.record_loop import fail_at, records_of
from streamiter.records import Batch, slice_batch

__all__ = ["Groups", "GroupsOf", "GroupsUpToMarks"]


class Groups(Protocol):
    """A way to cut. It keeps nothing between two batches."""

    def cut(self, batch: Batch, count: int, step: str) -> Iterator[tuple[Batch, bool]]:
        """The pieces of a batch (some may be empty), each with whether its epoch ends behind it.

        ``count`` is how many records the epoch has already; ``step`` is for errors.
        """


@final
class GroupsOf:
    """Groups of so many records.

    >>> list(GroupsOf(3).cut(["b", "c", "d", "e"], 1, "stamp"))
    [(['b', 'c'], True), (['d', 'e'], False)]
    """

    def __init__(self, records: int) -> None:
        self._records = records

    def cut(self, batch: Batch, count: int, step: str) -> Iterator[tuple[Batch, bool]]:
        """See :class:`Groups`."""
        start, length = 0, len(batch)
        while start < length:
            # A restored step may have been told to make smaller groups than the one it is in.
            missing = max(0, self._records - count)
            stop = min(length, start + missing)
            yield slice_batch(batch, start, stop), stop - start == missing
            start, count = stop, 0


@final
class GroupsUpToMarks:
    """Groups of the records between two marks, which are left out.

    >>> list(GroupsUpToMarks(lambda record: record == "|").cut(["a", "b", "|", "c"], 0, "stamp"))
    [(['a', 'b'], True), (['c'], False)]
    """

    def __init__(self, marks: Callable[[Any], object]) -> None:
        self._marks = marks

    def cut(self, batch: Batch, count: int, step: str) -> Iterator[tuple[Batch, bool]]:
        """See :class:`Groups`."""
        start = 0
        for mark in self._places(batch, step):
            yield slice_batch(batch, start, mark), True
            start = mark + 1
        yield slice_batch(batch, start, len(batch)) if start else batch, False

    def _places(self, batch: Batch, step: str) -> list[int]:
        marks = self._marks
        records, progress = records_of(batch)
        try:
            return [index for index, record in enumerate(records) if marks(record)]
        except Exception as error:
            fail_at(batch, progress, error, Output(step))
