"""The consistencies of a matrix, ASP, BSP and SSP, and the model of one matrix: its rules as a pure data structure.

Each worker has a *clock*, the count of its finished iterations. The *minimum clock* is that of the slowest worker; it
never decreases. A consistency says how far workers may be apart, and what a read may miss. The model decides for each
add and each get whether the shard handles it now; if not, the model keeps it until the minimum clock has advanced.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, Generic, NamedTuple, TypeVar, final

from streamiter.errors import InternalError, OutOfTurn, ParameterServerError, UnknownWorker
from streamiter.operators.declared_state import COPIED, NESTED, DeclaredState, Form, declared
from streamiter.values.numbers import whole_number


@dataclass(frozen=True, slots=True)
class Consistency:
    """How far workers may be apart on a matrix: one of :class:`ASP`, :class:`BSP`, :class:`SSP`."""


@dataclass(frozen=True, slots=True)
class ASP(Consistency):
    """Asynchronous parallel: no worker waits. Adds are applied and gets are answered as they arrive.

    >>> ASP()
    ASP()
    """


@dataclass(frozen=True, slots=True)
class BSP(Consistency):
    """Bulk synchronous parallel: all workers are in the same iteration, and see all adds of the iterations before.

    A worker gets, adds and clocks, and then awaits a get before it adds again. A call in another order raises
    OutOfTurn.

    >>> BSP()
    BSP()
    """


@dataclass(frozen=True, slots=True)
class SSP(Consistency):
    """Stale synchronous parallel (Ho et al. 2013): a worker reads at most ``staleness`` clocks ahead of the slowest.

    A get of a worker that is further ahead waits. Adds and clocks never wait.

    >>> SSP(staleness=2)
    SSP(staleness=2)
    """

    staleness: int

    def __post_init__(self) -> None:
        object.__setattr__(self, "staleness", whole_number("SSP(staleness=)", self.staleness, 0))


class Rules(NamedTuple):
    """How adds and gets are treated under a consistency."""

    keeps_adds: bool
    """Whether adds wait for the end of their iteration; then a worker may be one clock ahead at most."""
    staleness: float
    """A get waits while its worker is more than this many clocks ahead of the slowest."""


def rules_of(consistency: Consistency) -> Rules:
    """Return the rules of a consistency.

    >>> rules_of(ASP()), rules_of(BSP()), rules_of(SSP(staleness=2))
    (Rules(keeps_adds=False, staleness=inf), Rules(keeps_adds=True, staleness=0), Rules(keeps_adds=False, staleness=2))
    """
    match consistency:
        case ASP():
            return Rules(False, math.inf)
        case BSP():
            return Rules(True, 0)
        case SSP(staleness):
            return Rules(False, staleness)
    raise InternalError(f"expected ASP(), BSP() or SSP(staleness=…), given {consistency!r}")


A = TypeVar("A")
"""An add, as the shard represents it."""
G = TypeVar("G")
"""A get that can wait, as the shard represents it."""


@dataclass(slots=True)
class Released(Generic[A, G]):
    """The work of a shard when the minimum clock advances: apply the adds, end the iteration, answer the gets."""

    clock: int
    """The new minimum clock."""
    adds: list[A] = field(default_factory=list)
    """Adds that waited for this clock, in the order of their workers."""
    gets: list[G] = field(default_factory=list)
    """Gets that waited for this clock, in order of arrival."""


@final
class ConsistencyModel(DeclaredState, Generic[A, G]):
    """The rules of one matrix on one shard. A method that raises UnknownWorker or OutOfTurn has changed nothing.

    - ASP: adds are applied and gets are answered as they arrive; clocks are only counted.
    - BSP: an add waits for the end of its iteration, a get for the end of the iteration before its own. A worker may be
      one clock ahead of the slowest. It must then await a get: any other call is out of turn.
    - SSP: adds are applied as they arrive; a get waits while its worker is more than ``staleness`` clocks ahead.

    Errors begin with ``name`` ("matrix 'w'"). The ``workers`` begin at clock 0. ``observed`` is the highest minimum
    clock of this matrix that any shard has told the worker (−1: none). A call that is in turn by that clock is in turn
    here, even if the clocks of other workers have not yet arrived at this shard. That clock does not end the wait of a
    get: the get reads the adds that have arrived at this shard, so the clocks must have arrived here, too.

    A method that advances the minimum clock returns one ``Released`` for each clock it has passed, in ascending order,
    also if no call waited for it: the shard ends one iteration for each.

    >>> model = ConsistencyModel(SSP(staleness=1), workers=[0, 1])
    >>> model.clock(0), model.clock(0), model.get(0, "a get that waits")
    ([], [], False)
    >>> model.clock(1)
    [Released(clock=1, adds=[], gets=['a get that waits'])]
    """

    tracker: ProgressTracker = declared(form=NESTED)
    _adds: PendingAdds[A] = declared(form=NESTED)

    def __init__(
        self,
        consistency: Consistency,
        workers: Iterable[int] = (),
        name: str = "",
        new_list: Callable[[], list[A]] = list,
    ) -> None:
        """``new_list`` makes the list for a worker's kept adds of one iteration."""
        self.rules = rules_of(consistency)
        self._keeps_adds, self._staleness = self.rules
        self.tracker = ProgressTracker(workers, name=name)
        self._adds = PendingAdds(new_list)
        self._gets: dict[int, tuple[float, G]] = {}
        """The gets that wait, each with the minimum clock it waits for, by identity, in order of arrival."""

    def add(self, worker: int, adds: Iterable[A], observed: int = -1) -> bool:
        """Return whether to apply adds now; if not, the model keeps them until a ``Released`` contains them.

        Under BSP it raises OutOfTurn if the worker is ahead.
        """
        if not self._keeps_adds:
            self.tracker.check_worker_valid(worker)
            return True
        clock = self._check_turn(worker, observed, "an add", ahead=0)
        self._adds.keep(clock, worker, adds)
        return False

    def get(self, worker: int, request: G, observed: int = -1, held_clocks: int = 0) -> bool:
        """Return whether to answer a get now; if not, the model keeps it until a ``Released`` contains it.

        ``held_clocks`` is the count of clocks that the worker called before and that a checkpoint still holds back.
        Under BSP it raises OutOfTurn if the worker is more than one clock ahead.
        """
        if self._keeps_adds:
            clock = self._check_turn(worker, observed, "a get", ahead=1)
        else:
            clock = self.tracker.get_progress(worker)
        wanted = clock + held_clocks - self._staleness
        if wanted <= self.tracker.get_min_clock():
            return True
        self._gets[id(request)] = wanted, request
        return False

    def _check_turn(self, worker: int, observed: int, call: str, ahead: int) -> int:
        """Return the worker's clock; raise OutOfTurn if it is more than ``ahead`` of the minimum clock."""
        clock = self.tracker.get_progress(worker)
        min_clock = max(self.tracker.get_min_clock(), observed)
        if clock > min_clock + ahead:
            expected = f"at most clock {min_clock + ahead}" if ahead else f"clock {min_clock}"
            raise OutOfTurn(
                f"{self.tracker.where}{call} of worker {worker} is out of turn under BSP: expected it at {expected}, "
                f"given clock {clock}, while the minimum clock is {min_clock}; await a get after each clock, it waits "
                f"for the others"
            )
        return clock

    def clock(self, worker: int, observed: int = -1) -> list[Released[A, G]]:
        """Advance the clock of a worker; return the work that follows (mostly none).

        Under BSP it raises OutOfTurn if the worker is ahead already.
        """
        if self._keeps_adds:
            self._check_turn(worker, observed, "a clock", ahead=0)
        before = self.tracker.get_min_clock()
        return self._released(before, self.tracker.advance_and_get_changed_min_clock(worker))

    def join(self, worker: int) -> int:
        """Add a worker at the minimum clock; return its clock."""
        return self.tracker.join(worker)

    def raise_worker(self, worker: int, clock: int) -> list[Released[A, G]]:
        """Do the second step of joining: raise the clock of the worker to ``clock``, unless it is higher."""
        before = self.tracker.get_min_clock()
        return self._released(before, self.tracker.raise_to(worker, clock))

    def leave(self, worker: int) -> list[Released[A, G]]:
        """Remove a worker, so that it holds no other worker back; its adds stay.

        Before this call, the caller calls ``forget`` for the worker's waiting gets, and fails them. After this call, it
        calls ``take_orphaned_adds``.
        """
        before = self.tracker.get_min_clock()
        return self._released(before, self.tracker.leave(worker))

    def take_orphaned_adds(self) -> list[A]:
        """Return the kept adds to apply now, after a worker has left, because no worker is left to end their iteration.

        These adds end no iteration: the minimum clock depends on clocks only, which all shards receive, while each
        shard knows its own adds only.
        """
        return [] if self.tracker.workers else self._adds.clear()

    def forget(self, request: G) -> None:
        """Drop a waiting get; do nothing if it is not kept."""
        self._gets.pop(id(request), None)

    def reset(self, workers: Iterable[int]) -> tuple[list[A], list[G]]:
        """Restart with these workers at clock 0; return the kept adds and gets for the caller to fail."""
        self.tracker.init(workers)
        waiting = self._take_gets(math.inf)
        return self._adds.clear(), waiting

    def pending_adds(self, worker: int | None = None) -> Iterator[A]:
        """Return the kept adds of one worker, or of all, by clock and by worker."""
        return iter(self._adds.all()) if worker is None else self._adds.of(worker)

    @property
    def waiting_gets(self) -> int:
        """The count of waiting gets."""
        return len(self._gets)

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restore a :meth:`state`. Adds and gets that are kept now are dropped; the caller has failed the gets."""
        super().restore(state)
        self._gets.clear()

    def _released(self, before: int, moved_to: int) -> list[Released[A, G]]:
        """Return one ``Released`` for each clock after ``before``; ``moved_to`` is −1 if the clock has not moved."""
        return [
            Released(clock, self._adds.take(clock - 1), self._take_gets(clock))
            for clock in range(before + 1, moved_to + 1)
        ]

    def _take_gets(self, clock: float) -> list[G]:
        """Remove and return the gets that waited for this clock or an earlier one, in order of arrival."""
        taken = [get for wanted, get in self._gets.values() if wanted <= clock]
        for get in taken:
            del self._gets[id(get)]
        return taken


_WORKERS_NAMED = 5
"""The most workers that an error lists; there may be thousands."""


@final
class ProgressTracker(DeclaredState):
    """The clocks of the workers of one matrix, and their minimum, which never decreases.

    Workers are counted by clock, so a step costs the same for two workers and for thousands. A method on a worker that
    has not joined raises UnknownWorker, and changes nothing. Errors begin with ``name`` ("matrix 'w'").

    >>> tracker = ProgressTracker([2, 7])
    >>> [tracker.advance_and_get_changed_min_clock(worker) for worker in (2, 7, 7, 7, 2)]
    [-1, 1, -1, -1, 2]
    >>> tracker.get_progress(2), tracker.get_progress(7), tracker.get_min_clock()
    (2, 3, 2)
    """

    _progress: dict[int, int] = declared(made=dict, form=COPIED)
    """The clock of each worker."""
    _min_clock = declared(0)
    _highest = declared(0)
    """The highest clock of any worker so far, including workers that have left."""

    def __init__(self, workers: Iterable[int] = (), *, name: str = "") -> None:
        self.name = name
        self.init(workers)

    def init(self, workers: Iterable[int]) -> None:
        """Restart with these workers, all at clock 0."""
        self.restore(self.at_start() | {"progress": dict.fromkeys(workers, 0)})

    def restore(self, state: Mapping[str, Any]) -> None:
        super().restore(state)
        self._workers_at: dict[int, int] = {}
        for clock in self._progress.values():
            self._count_at(clock)

    @property
    def workers(self) -> tuple[int, ...]:
        """The workers, in the order of joining."""
        return tuple(self._progress)

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
            f"one of {known}{f' and {more} more' if more > 0 else ''}" if known else "none, as no worker has joined"
        )
        return UnknownWorker(
            f"{self.where}worker {worker!r} takes no part: expected {expected}; make a client for it first"
        )


def _in_order(by_clock: Mapping[int, Mapping[int, list[A]]]) -> list[tuple[int, int, list[A]]]:
    return [
        (clock, worker, adds)
        for clock, by_worker in sorted(by_clock.items())
        for worker, adds in sorted(by_worker.items())
    ]


@final
class PendingAdds(DeclaredState, Generic[A]):
    """Adds that wait for the end of their iteration, by the clock at which they were made, and by worker.

    They are applied in this order, and not in the order of arrival, so that sums of floats do not depend on timing.

    >>> adds = PendingAdds()
    >>> adds.keep(0, 7, "a"); adds.keep(0, 2, "b"); adds.keep(0, 7, "c")
    >>> adds.take(0)
    ['b', 'a', 'c']
    """

    _by_clock: dict[int, dict[int, list[A]]] = declared(made=dict, form=Form(_in_order))
    """By clock, by worker, in order of arrival. In a snapshot (clock, worker, adds), by clock and by worker."""

    def __init__(self, new_list: Callable[[], list[A]] = list) -> None:
        self._new_list = new_list

    def keep(self, clock: int, worker: int, adds: Iterable[A]) -> None:
        """Keep adds that were made at ``clock``."""
        of_clock = self._by_clock.setdefault(clock, {})
        if worker not in of_clock:
            of_clock[worker] = self._new_list()
        of_clock[worker].extend(adds)

    def take(self, clock: int) -> list[A]:
        """Remove and return the adds that were made at this clock or before, by clock and by worker."""
        taken = [add for of_clock, _, adds in _in_order(self._by_clock) if of_clock <= clock for add in adds]
        self._by_clock = {later: adds for later, adds in self._by_clock.items() if later > clock}
        return taken

    def of(self, worker: int) -> Iterator[A]:
        """Yield the adds of a worker in order of arrival, which is the order of its clocks."""
        for clock in sorted(self._by_clock):
            yield from self._by_clock[clock].get(worker, ())

    def all(self) -> list[A]:
        """Return the adds of all workers, by clock and by worker."""
        return [add for _, _, adds in _in_order(self._by_clock) for add in adds]

    def clear(self) -> list[A]:
        """Remove and return all adds."""
        taken, self._by_clock = self.all(), {}
        return taken

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restore a :meth:`state`."""
        self._by_clock = {}
        for clock, worker, adds in state["by clock"]:
            self.keep(clock, worker, adds)
