"""Adds that wait for the end of their iteration."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from operator import itemgetter
from typing import Any, Generic, TypeVar, final

from streamiter.errors import InternalError

__all__ = ["PendingAdds"]

A = TypeVar("A")

_arrival = itemgetter(0)


@final
class PendingAdds(Generic[A]):
    """Kept by the clock at which they were made, and by worker; given back in order of arrival.

    >>> adds = PendingAdds()
    >>> adds.keep(0, 7, "a"); adds.keep(0, 2, "b"); adds.keep(0, 7, "c")
    >>> adds.merge(0, 7, lambda mine: ["".join(mine)])
    >>> adds.take(0)
    ['ac', 'b']
    """

    __slots__ = ("_arrived", "_by_clock")

    def __init__(self) -> None:
        self._arrived = 0
        self._by_clock: dict[
            int, dict[int, list[tuple[int, A]]]
        ] = {}  # clock, worker: (number of arrival, add)

    def keep(self, clock: int, worker: int, request: A) -> None:
        """Keep an add that was made at ``clock``."""
        self._arrived += 1
        self._by_clock.setdefault(clock, {}).setdefault(worker, []).append((self._arrived, request))

    def take(self, clock: int) -> list[A]:
        """What was made at this clock, or earlier and is still here; it is kept no more."""
        entries = [
            entry
            for earlier in [c for c in self._by_clock if c <= clock]
            for of_worker in self._by_clock.pop(earlier).values()
            for entry in of_worker
        ]
        entries.sort(key=_arrival)
        return [request for _, request in entries]

    def end(self) -> int:
        """The clock behind the last one at which something was made that is still here; 0 where there is nothing."""
        return max(self._by_clock, default=-1) + 1

    def of(self, worker: int) -> Iterator[A]:
        """The adds of a worker, in order of arrival, for its clock only goes up."""
        for clock in sorted(self._by_clock):
            for _, request in self._by_clock[clock].get(worker, ()):
                yield request

    def all(self) -> list[A]:
        """Those of all workers, in order of arrival."""
        return [request for _, _, request in self.snapshot()]

    def merge(self, clock: int, worker: int, merge: Callable[[list[A]], Sequence[A]]) -> None:
        """Replace a worker's adds of one clock by what ``merge`` makes of them: no more than they were.

        They take the places of the first of them in the order of arrival.
        """
        entries = self._by_clock.get(clock, {}).get(worker)
        if not entries:
            return
        merged = merge([request for _, request in entries])
        if not 1 <= len(merged) <= len(entries):
            raise InternalError(
                f"merged adds of worker {worker} at clock {clock}: expected 1 to {len(entries)}, given {len(merged)}"
            )
        entries[:] = [(arrival, request) for (arrival, _), request in zip(entries, merged, strict=False)]

    def clear(self) -> list[A]:
        """All of them; none is kept."""
        return self.take(self.end())

    def snapshot(self) -> list[tuple[int, int, A]]:
        """(clock, worker, add) in order of arrival, for :meth:`restore`."""
        entries = [
            (arrival, clock, worker, request)
            for clock, by_worker in self._by_clock.items()
            for worker, of_worker in by_worker.items()
            for arrival, request in of_worker
        ]
        entries.sort(key=_arrival)
        return [(clock, worker, request) for _, clock, worker, request in entries]

    def restore(self, state: Sequence[Any]) -> None:
        """Take over what :meth:`snapshot` gave."""
        self._by_clock.clear()
        for clock, worker, request in state:
            self.keep(clock, worker, request)
