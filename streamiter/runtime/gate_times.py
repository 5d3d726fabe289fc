"""Event time at a gate: the watermark of a task from those of its channels. Pure data, no I/O.

A watermark never overtakes a record. Records leave a channel before the watermark behind them, but a gate that hands
over records by epoch may set them aside. :class:`GateTimes` then keeps the watermark until they have been handled.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple, final

from streamiter.operators.frontier import Frontier
from streamiter.records import EventTimeWatermark
from streamiter.times import MAX_TIME, MIN_TIME


class WithheldTime(NamedTuple):
    """A watermark that waits until the records of some epochs have been handled."""

    epoch: int
    """The highest epoch of the records that were set aside when it arrived."""
    watermark: EventTimeWatermark
    is_behind_epoch: bool
    """Whether an epoch watermark of the same port waits, too, and was first."""


@final
class GateTimes:
    """Follows the event-time watermarks of the ports that bring any.

    A port that has ended, or has reached ``MAX_TIME``, holds back nothing.

    >>> times = GateTimes([0, 2])
    >>> times.bring(0, EventTimeWatermark(5)), times.bring(2, EventTimeWatermark(7))
    ([], [EventTimeWatermark(5)])
    >>> times.bring(0, EventTimeWatermark(9), pending=3), times.settle(0, lowest_pending=3)
    ([], [])
    >>> times.settle(0, lowest_pending=None), times.bring(2, EventTimeWatermark(8, True))
    ([EventTimeWatermark(7)], [EventTimeWatermark(9)])
    """

    def __init__(self, ports: Iterable[int]) -> None:
        self._ports = frozenset(ports)
        self._parts = Frontier(sorted(self._ports), MIN_TIME)
        self._told = MIN_TIME, False
        self._withheld: dict[int, list[WithheldTime]] = {}

    @property
    def slowest(self) -> int | None:
        """The port that holds back the watermark."""
        return self._parts.slowest

    def bring(
        self, port: int, watermark: EventTimeWatermark, *, pending: int | None = None, is_behind_epoch: bool = False
    ) -> list[EventTimeWatermark]:
        """Note a watermark of a port; return what the task must handle: the new watermark, or nothing.

        ``pending`` is the highest epoch of the records of the port that are set aside.
        """
        if port not in self._ports:
            return []
        if pending is not None:
            waiting = self._withheld.setdefault(port, [])
            if waiting and waiting[-1].epoch >= pending:
                pending = waiting.pop().epoch
            waiting.append(WithheldTime(pending, watermark, is_behind_epoch))
            return []
        self._count(port, watermark)
        return self._changed()

    def waits(self, port: int) -> bool:
        """Return whether a watermark of the port waits."""
        return port in self._withheld

    def is_behind_epoch(self, port: int) -> bool:
        """Return whether the first watermark of the port that waits comes behind an epoch watermark that waits."""
        return self._withheld[port][0].is_behind_epoch

    def settle(self, port: int, lowest_pending: int | None) -> list[EventTimeWatermark]:
        """Count the watermarks of a port whose records have been handled; ``lowest_pending`` is their lowest epoch."""
        waiting = self._withheld.get(port, [])
        while waiting and (lowest_pending is None or waiting[0].epoch < lowest_pending):
            self._count(port, waiting.pop(0).watermark)
        if not waiting:
            self._withheld.pop(port, None)
        return self._changed()

    def settle_all(self) -> list[EventTimeWatermark]:
        """Count all watermarks that wait: no records are set aside any more."""
        for port in list(self._withheld):
            for withheld in self._withheld.pop(port):
                self._count(port, withheld.watermark)
        return self._changed()

    def _count(self, port: int, watermark: EventTimeWatermark) -> None:
        if watermark.time == MAX_TIME:
            self._parts.end(port, MAX_TIME)
        else:
            self._parts.reach(port, watermark.time)
            if watermark.is_idle:
                self._parts.idle(port)

    def _changed(self) -> list[EventTimeWatermark]:
        self._parts.settle()
        now = self._parts.value, self._parts.is_idle
        if now == self._told:
            return []
        self._told = now
        return [EventTimeWatermark(*now)]
