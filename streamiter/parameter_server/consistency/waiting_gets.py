"""Gets that wait for the minimum clock to become a certain one."""

from __future__ import annotations

from typing import Generic, TypeVar, final

__all__ = ["WaitingGets"]

G = TypeVar("G")


@final
class WaitingGets(Generic[G]):
    """Parked by clock, in order of arrival. A get is known by its identity, and may be taken out wherever it is.

    >>> gets = WaitingGets()
    >>> first, second = ["first"], ["second"]
    >>> gets.park(1, first); gets.park(1, second); gets.forget(first)
    >>> gets.take(1), len(gets)
    ([['second']], 0)
    """

    __slots__ = ("_all", "_by_clock")

    def __init__(self) -> None:
        self._all: dict[int, tuple[int, G]] = {}  # by identity, by arrival: clock, get
        self._by_clock: dict[int, dict[int, G]] = {}

    def __len__(self) -> int:
        return len(self._all)

    def park(self, clock: int, request: G) -> None:
        """Keep it until the minimum clock is ``clock``."""
        self._all[id(request)] = clock, request
        self._by_clock.setdefault(clock, {})[id(request)] = request

    def take(self, clock: int) -> list[G]:
        """What waited for this clock, in order of arrival; it is kept no more."""
        waited = self._by_clock.pop(clock, {})
        for identity in waited:
            del self._all[identity]
        return list(waited.values())

    def forget(self, request: G) -> None:
        """Keep it no more; nothing happens if it is not kept."""
        place = self._all.pop(id(request), None)
        if place is not None:
            clock, _ = place
            gets = self._by_clock[clock]
            del gets[id(request)]
            if not gets:
                del self._by_clock[clock]

    def clear(self) -> list[G]:
        """All of them, in order of arrival; none is kept."""
        gets = [request for _, request in self._all.values()]
        self._all.clear()
        self._by_clock.clear()
        return gets
