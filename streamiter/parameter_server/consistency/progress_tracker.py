"""The clocks of the workers of a matrix, and the adds and gets that wait for them. Pure data structures.

The clock of a worker is the count of its finished iterations. The minimum clock is the count of iterations that all
workers have finished; it never decreases.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from operator import itemgetter
from typing import Any, Generic, TypeVar, final

from streamiter.errors import InternalError, ParameterServerError, UnknownWorker

_WORKERS_NAMED = 5
"""The most workers that an error lists; there may be thousands."""


@final
class ProgressTracker:
    """The clocks of the workers of one matrix, and their minimum, which never decreases.

    Workers are counted by clock, so a step costs the same for two workers and for thousands. A method on a worker that
    has not joined raises UnknownWorker, and changes nothing. Errors begin with ``name`` ("matrix 'w'").

    >>> tracker = ProgressTracker([2, 7])
    >>> [tracker.advance_and_get_changed_min_clock(worker) for worker in (2, 7, 7, 7, 2)]
    [-1, 1, -1, -1, 2]
    >>> tracker.get_progress(2), tracker.get_progress(7), tracker.get_min_clock()
    (2, 3, 2)
    """

    __slots__ = ("_highest", "_min_clock", "_progress", "_workers_at", "name")

    def __init__(self, workers: Iterable[int] = (), *, name: str = "") -> None:
        self.name = name
        self.init(workers)

    def init(self, workers: Iterable[int]) -> None:
        """Restart with these workers, all at clock 0."""
        self._set_clocks(dict.fromkeys(workers, 0), 0)

    def _set_clocks(self, progress: Mapping[int, int], min_clock: int) -> None:
        self._progress = dict(progress)
        self._min_clock = min_clock
        self._highest = min_clock
        """The highest clock of any worker so far, including workers that have left."""
        self._workers_at: dict[int, int] = {}
        for clock in self._progress.values():
            self._count_at(clock)

    @property
    def workers(self) -> tuple[int, ...]:
        """The workers, in the order of joining."""
        return tuple(self._progress)

    @property
    def num_workers(self) -> int:
        """The count of workers."""
        return len(self._progress)

    @property
    def where(self) -> str:
        """The beginning of error messages."""
        return f"{self.name}: " if self.name else ""

    def check_worker_valid(self, worker: int) -> None:
        """Raise UnknownWorker unless the worker has joined."""
        if worker not in self._progress:
            raise self._unknown(worker)

    def get_progress(self, worker: int) -> int:
        """Return the clock of the worker."""
        try:
            return self._progress[worker]
        except KeyError:
            raise self._unknown(worker) from None

    def get_min_clock(self) -> int:
        """Return the minimum clock; without workers, the last one."""
        return self._min_clock

    def is_unique_min(self, worker: int) -> bool:
        """Return whether this worker is the only one at the minimum clock."""
        return self.get_progress(worker) == self._min_clock and self._workers_at[self._min_clock] == 1

    def advance_and_get_changed_min_clock(self, worker: int) -> int:
        """Advance the clock of a worker by one; return the new minimum clock if it has moved, otherwise −1."""
        clock = self.get_progress(worker)
        self._uncount_at(clock)
        self._progress[worker] = clock + 1
        self._count_at(clock + 1)
        return self._moved_min_clock()

    def join(self, worker: int, at: int | None = None) -> int:
        """Add a worker, at the minimum clock or ``at`` a higher one; return its clock.

        Raises ParameterServerError if the worker has joined already, or if ``at`` is below the minimum clock.
        """
        if worker in self._progress:
            raise ParameterServerError(
                f"{self.where}expected a worker that takes no part yet, given {worker}, which does, at clock "
                f"{self._progress[worker]}; give every worker a number of its own, or let it leave first"
            )
        clock = self._min_clock if at is None else at
        if clock < self._min_clock:
            raise ParameterServerError(
                f"{self.where}worker {worker} joins: expected the minimum clock, {self._min_clock}, or a higher one, "
                f"given {clock}; leave it out to join at the minimum"
            )
        self._progress[worker] = clock
        self._count_at(clock)
        self._moved_min_clock()  # The first worker may be above the clock at which the last one left.
        return clock

    def raise_to(self, worker: int, clock: int) -> int:
        """Raise the clock of a worker, unless it is higher; return the new minimum clock if it moves, otherwise −1."""
        before = self.get_progress(worker)
        if clock <= before:
            return -1
        self._uncount_at(before)
        self._progress[worker] = clock
        self._count_at(clock)
        return self._moved_min_clock()

    def leave(self, worker: int) -> int:
        """Remove a worker; return the new minimum clock if it has moved, otherwise −1.

        When the last worker leaves, the minimum clock becomes the highest clock of any worker: all iterations up to it
        are complete.
        """
        self._uncount_at(self.get_progress(worker))
        del self._progress[worker]
        if self._progress:
            return self._moved_min_clock()
        if self._highest == self._min_clock:
            return -1
        self._min_clock = self._highest
        return self._min_clock

    def snapshot(self) -> dict[str, Any]:
        """Return plain data for :meth:`restore`."""
        return {
            "progress": dict(self._progress),
            "min_clock": self._min_clock,
            "highest": self._highest,
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restore a :meth:`snapshot`."""
        self._set_clocks(state["progress"], state["min_clock"])
        self._highest = state["highest"]

    def _count_at(self, clock: int) -> None:
        self._highest = max(self._highest, clock)
        self._workers_at[clock] = self._workers_at.get(clock, 0) + 1

    def _uncount_at(self, clock: int) -> None:
        left = self._workers_at[clock] - 1
        if left:
            self._workers_at[clock] = left
        else:
            del self._workers_at[clock]

    def _moved_min_clock(self) -> int:
        if self._min_clock in self._workers_at or not self._progress:
            return -1
        if self._min_clock + 1 in self._workers_at:  # The usual case, which needs no look at all clocks.
            self._min_clock += 1
        else:
            self._min_clock = min(self._workers_at)
        return self._min_clock

    def _unknown(self, worker: int) -> UnknownWorker:
        known = ", ".join(map(str, islice(self._progress, _WORKERS_NAMED)))
        more = len(self._progress) - _WORKERS_NAMED
        expected = (
            f"one of {known}{f' and {more} more' if more > 0 else ''}"
            if known
            else "none, as no worker has joined"
        )
        return UnknownWorker(
            f"{self.where}worker {worker!r} takes no part: expected {expected}; make a client for it first"
        )


A = TypeVar("A")

_arrival = itemgetter(0)


@final
class PendingAdds(Generic[A]):
    """Adds that wait for the end of their iteration, by the clock at which they were made, and by worker.

    >>> adds = PendingAdds()
    >>> adds.keep(0, 7, "a"); adds.keep(0, 2, "b"); adds.keep(0, 7, "c")
    >>> adds.merge(0, 7, lambda mine: ["".join(mine)])
    >>> adds.take(0)
    ['ac', 'b']
    """

    __slots__ = ("_arrived", "_by_clock")

    def __init__(self) -> None:
        self._arrived = 0
        self._by_clock: dict[int, dict[int, list[tuple[int, A]]]] = {}
        """By clock, by worker: the number of arrival and the add."""

    def keep(self, clock: int, worker: int, request: A) -> None:
        """Keep an add that was made at ``clock``."""
        self._arrived += 1
        self._by_clock.setdefault(clock, {}).setdefault(worker, []).append((self._arrived, request))

    def take(self, clock: int) -> list[A]:
        """Remove and return the adds that were made at this clock or before, in order of arrival."""
        entries = [
            entry
            for earlier in [c for c in self._by_clock if c <= clock]
            for of_worker in self._by_clock.pop(earlier).values()
            for entry in of_worker
        ]
        entries.sort(key=_arrival)
        return [request for _, request in entries]

    def end(self) -> int:
        """Return the clock after that of the latest add; 0 if there are no adds."""
        return max(self._by_clock, default=-1) + 1

    def of(self, worker: int) -> Iterator[A]:
        """Yield the adds of a worker in order of arrival, which is the order of its clocks."""
        for clock in sorted(self._by_clock):
            for _, request in self._by_clock[clock].get(worker, ()):
                yield request

    def all(self) -> list[A]:
        """Return the adds of all workers in order of arrival."""
        return [request for _, _, request in self.snapshot()]

    def merge(self, clock: int, worker: int, merge: Callable[[list[A]], Sequence[A]]) -> None:
        """Replace a worker's adds of one clock with the result of ``merge``: at least one add, and no more than before.

        They take the places of the first ones in the order of arrival.
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
        """Remove and return all adds, in order of arrival."""
        return self.take(self.end())

    def snapshot(self) -> list[tuple[int, int, A]]:
        """Return (clock, worker, add) in order of arrival, for :meth:`restore`."""
        entries = [
            (arrival, clock, worker, request)
            for clock, by_worker in self._by_clock.items()
            for worker, of_worker in by_worker.items()
            for arrival, request in of_worker
        ]
        entries.sort(key=_arrival)
        return [(clock, worker, request) for _, clock, worker, request in entries]

    def restore(self, state: Sequence[Any]) -> None:
        """Restore a :meth:`snapshot`."""
        self._by_clock.clear()
        for clock, worker, request in state:
            self.keep(clock, worker, request)


G = TypeVar("G")


@final
class WaitingGets(Generic[G]):
    """Gets that wait for a minimum clock, by that clock, in order of arrival. A get is found by its identity.

    >>> gets = WaitingGets()
    >>> first, second = ["first"], ["second"]
    >>> gets.park(1, first); gets.park(1, second); gets.forget(first)
    >>> gets.take(1), len(gets)
    ([['second']], 0)
    """

    __slots__ = ("_all", "_by_clock")

    def __init__(self) -> None:
        self._all: dict[int, tuple[int, G]] = {}
        """By identity, in order of arrival: the clock and the get."""
        self._by_clock: dict[int, dict[int, G]] = {}
        """By clock, then by identity in order of arrival."""

    def __len__(self) -> int:
        return len(self._all)

    def park(self, clock: int, request: G) -> None:
        """Keep a get until the minimum clock is ``clock``."""
        self._all[id(request)] = clock, request
        self._by_clock.setdefault(clock, {})[id(request)] = request

    def take(self, clock: int) -> list[G]:
        """Remove and return the gets that waited for this clock, in order of arrival."""
        waited = self._by_clock.pop(clock, {})
        for identity in waited:
            del self._all[identity]
        return list(waited.values())

    def forget(self, request: G) -> None:
        """Drop a get; do nothing if it is not kept."""
        place = self._all.pop(id(request), None)
        if place is not None:
            clock, _ = place
            gets = self._by_clock[clock]
            del gets[id(request)]
            if not gets:
                del self._by_clock[clock]

    def clear(self) -> list[G]:
        """Remove and return all gets, in order of arrival."""
        gets = [request for _, request in self._all.values()]
        self._all.clear()
        self._by_clock.clear()
        return gets
