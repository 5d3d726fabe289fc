"""Who has finished how many iterations, and how many all have finished: no I/O, no tasks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from operator import itemgetter
from typing import Any, Generic, TypeVar, final

from streamiter.errors import InternalError, ParameterServerError, UnknownWorker

__all__ = [
    "PendingAdds",
    "ProgressTracker",
    "WaitingGets",
]


_WORKERS_NAMED = 5
"""An error lists so many of the known workers; there may be thousands."""


@final
class ProgressTracker:
    """The clocks of the workers of one matrix, and their minimum, which never goes back.

    Workers are counted by clock, so a step costs the same for two workers and for thousands. Methods on a worker raise
    UnknownWorker if it takes no part, and then nothing has changed. ``name`` is what errors begin with ("matrix 'w'").

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
        """Start over: these workers, all at clock 0."""
        self._take_over(dict.fromkeys(workers, 0), 0)

    def _take_over(self, progress: Mapping[int, int], min_clock: int) -> None:
        self._progress = dict(progress)
        self._min_clock = min_clock
        self._highest = min_clock
        """The highest clock that a worker has come to, whether or not it still takes part."""
        self._workers_at: dict[int, int] = {}
        for clock in self._progress.values():
            self._arrive(clock)

    @property
    def workers(self) -> tuple[int, ...]:
        """Who takes part, in the order of joining."""
        return tuple(self._progress)

    @property
    def num_workers(self) -> int:
        """How many take part."""
        return len(self._progress)

    @property
    def where(self) -> str:
        """What error messages begin with."""
        return f"{self.name}: " if self.name else ""

    def check_worker_valid(self, worker: int) -> None:
        """Raise UnknownWorker unless it takes part."""
        if worker not in self._progress:
            raise self._unknown(worker)

    def get_progress(self, worker: int) -> int:
        """How many iterations the worker has finished."""
        try:
            return self._progress[worker]
        except KeyError:
            raise self._unknown(worker) from None

    def get_min_clock(self) -> int:
        """How many iterations every worker has finished; without workers, the last there was."""
        return self._min_clock

    def is_unique_min(self, worker: int) -> bool:
        """Whether this worker alone holds the minimum clock where it is."""
        return self.get_progress(worker) == self._min_clock and self._workers_at[self._min_clock] == 1

    def advance_and_get_changed_min_clock(self, worker: int) -> int:
        """The worker has finished one more iteration; the new minimum clock if that moves it, otherwise −1."""
        clock = self.get_progress(worker)
        self._depart(clock)
        self._progress[worker] = clock + 1
        self._arrive(clock + 1)
        return self._moved_min_clock()

    def join(self, worker: int, at: int | None = None) -> int:
        """A worker takes part from now on, at the minimum clock or ``at`` a higher one; gives where it stands.

        It is an error if the worker takes part already, or if ``at`` is below the minimum clock.
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
        self._arrive(clock)
        self._moved_min_clock()  # the first one of all may be above where the last one left
        return clock

    def raise_to(self, worker: int, clock: int) -> int:
        """The worker stands at ``clock``, unless it is further; the new minimum clock if that moves it, or −1."""
        before = self.get_progress(worker)
        if clock <= before:
            return -1
        self._depart(before)
        self._progress[worker] = clock
        self._arrive(clock)
        return self._moved_min_clock()

    def leave(self, worker: int) -> int:
        """The worker takes part no more; the new minimum clock if that moves it, otherwise −1.

        With the last one it goes to the highest clock that any has come to: what was done up to there is complete.
        """
        self._depart(self.get_progress(worker))
        del self._progress[worker]
        if self._progress:
            return self._moved_min_clock()
        if self._highest == self._min_clock:
            return -1
        self._min_clock = self._highest
        return self._min_clock

    def snapshot(self) -> dict[str, Any]:
        """Plain data for :meth:`restore`."""
        return {
            "progress": dict(self._progress),
            "min_clock": self._min_clock,
            "highest": self._highest,
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Take over what :meth:`snapshot` gave."""
        self._take_over(state["progress"], state["min_clock"])
        self._highest = state["highest"]

    def _arrive(self, clock: int) -> None:
        self._highest = max(self._highest, clock)
        self._workers_at[clock] = self._workers_at.get(clock, 0) + 1

    def _depart(self, clock: int) -> None:
        left = self._workers_at[clock] - 1
        if left:
            self._workers_at[clock] = left
        else:
            del self._workers_at[clock]

    def _moved_min_clock(self) -> int:
        if self._min_clock in self._workers_at or not self._progress:
            return -1
        if self._min_clock + 1 in self._workers_at:  # nearly always, and without a look at all the clocks
            self._min_clock += 1
        else:
            self._min_clock = min(self._workers_at)
        return self._min_clock

    def _unknown(self, worker: int) -> UnknownWorker:
        known = ", ".join(map(str, islice(self._progress, _WORKERS_NAMED)))
        more = len(self._progress) - _WORKERS_NAMED
        expected = (
            f"one of {known}{f' and {more} more' if more > 0 else ''}" if known else "nobody: none has joined"
        )
        return UnknownWorker(
            f"{self.where}worker {worker!r} takes no part: expected {expected}; make a client for it first"
        )


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

    Adds that wait for the end of their iteration.
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


G = TypeVar("G")


@final
class WaitingGets(Generic[G]):
    """Parked by clock, in order of arrival. A get is known by its identity, and may be taken out wherever it is.

    >>> gets = WaitingGets()
    >>> first, second = ["first"], ["second"]
    >>> gets.park(1, first); gets.park(1, second); gets.forget(first)
    >>> gets.take(1), len(gets)
    ([['second']], 0)

    Gets that wait for the minimum clock to become a certain one.
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
