"""The Source: where records enter a flow."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, ClassVar

from streamiter.operators.context import Context
from streamiter.records import BatchOrigin

__all__ = ["Positions", "Source", "SourceBatch", "SourceFactory"]

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
