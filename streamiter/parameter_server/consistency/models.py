"""The consistencies of a matrix, ASP, BSP and SSP, and the model of each: its rules as a pure data structure.

Each worker has a *clock*, the count of its finished iterations. The *minimum clock* is that of the slowest worker. A
consistency says how far workers may be apart, and what a read may miss. A model decides for each add and each get
whether the shard handles it now; if not, the model keeps it until the minimum clock has advanced.
"""

from __future__ import annotations

import abc
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar, final

from streamiter.errors import InternalError, OutOfTurn
from streamiter.numbers import whole_number
from streamiter.parameter_server.consistency.progress_tracker import PendingAdds, ProgressTracker, WaitingGets


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
    """Adds that waited for this clock, in order of arrival."""
    gets: list[G] = field(default_factory=list)
    """Gets that waited for this clock, in order of arrival."""


class ConsistencyModel(abc.ABC, Generic[A, G]):
    """The rules of one matrix on one shard. A method that raises UnknownWorker or OutOfTurn has changed nothing.

    ``observed`` is the highest minimum clock of this matrix that any shard has told the worker (−1: none). A call that
    is in turn by that clock is in turn here, even if the clocks of other workers have not yet arrived at this shard.

    A method that advances the minimum clock returns one ``Released`` for each clock it has passed, in ascending order,
    also if no call waited for it: the shard ends one iteration for each.
    """

    def __init__(self, tracker: ProgressTracker) -> None:
        self.tracker = tracker
        self._gets: WaitingGets[G] = WaitingGets()

    @abc.abstractmethod
    def add(self, worker: int, request: A, observed: int = -1) -> bool:
        """Return whether to apply an add now; if not, the model keeps it until a ``Released`` contains it."""

    @abc.abstractmethod
    def get(self, worker: int, request: G, observed: int = -1, held_clocks: int = 0) -> bool:
        """Return whether to answer a get now; if not, the model keeps it until a ``Released`` contains it.

        ``held_clocks`` is the count of clocks that the worker called before and that a checkpoint still holds back.
        """

    def clock(self, worker: int, observed: int = -1) -> list[Released[A, G]]:
        """Advance the clock of a worker; return the work that follows (mostly none)."""
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
        return []

    def forget(self, request: G) -> None:
        """Drop a waiting get; do nothing if it is not kept."""
        self._gets.forget(request)

    def reset(self, workers: Iterable[int]) -> tuple[list[A], list[G]]:
        """Restart with these workers at clock 0; return the kept adds and gets, by arrival, for the caller to fail."""
        self.tracker.init(workers)
        return self._clear_adds(), self._gets.clear()

    def pending_adds(self, worker: int | None = None) -> Iterator[A]:
        """Return the kept adds of one worker, or of all, in order of arrival."""
        return iter(())

    def merge_pending(self, worker: int, merge: Callable[[list[A]], Sequence[A]]) -> None:
        """Replace the kept adds of the worker's current iteration with the result of ``merge``.

        ``merge`` takes these adds in order of arrival, and returns at least one add and at most as many as it took.
        They take the places of the first ones. It is not called if there are none. Adds of older iterations stay.
        """
        self.tracker.check_worker_valid(worker)

    @property
    def waiting_gets(self) -> int:
        """The count of waiting gets."""
        return len(self._gets)

    def snapshot(self) -> dict[str, Any]:
        """Return plain data: the tracker and the kept adds. Waiting gets are not part of the state."""
        return {"tracker": self.tracker.snapshot()}

    def restore(self, state: dict[str, Any]) -> list[G]:
        """Restore a ``snapshot``; drop the adds kept until now, and return the waiting gets for the caller to fail."""
        self.tracker.restore(state["tracker"])
        return self._gets.clear()

    def _released(self, before: int, moved_to: int) -> list[Released[A, G]]:
        """Return one ``Released`` for each clock after ``before``; ``moved_to`` is −1 if the clock has not moved."""
        return [
            Released(clock, self._adds_before(clock), self._gets.take(clock))
            for clock in range(before + 1, moved_to + 1)
        ]

    def _adds_before(self, clock: int) -> list[A]:
        """Take the adds that waited for the minimum clock to become ``clock``."""
        return []

    def _clear_adds(self) -> list[A]:
        return []


@final
class AsynchronousModel(ConsistencyModel[A, G]):
    """ASP: adds are applied and gets are answered as they arrive; clocks are only counted."""

    def add(self, worker: int, request: A, observed: int = -1) -> bool:
        """Return True."""
        self.tracker.check_worker_valid(worker)
        return True

    def get(self, worker: int, request: G, observed: int = -1, held_clocks: int = 0) -> bool:
        """Return True."""
        self.tracker.check_worker_valid(worker)
        return True


@final
class BulkSynchronousModel(ConsistencyModel[A, G]):
    """BSP: an add waits for the end of its iteration, a get for the end of the iteration before its own.

    A worker may be one clock ahead of the slowest. It must then await a get: any other call is out of turn.
    """

    def __init__(self, tracker: ProgressTracker) -> None:
        super().__init__(tracker)
        self._adds: PendingAdds[A] = PendingAdds()

    def add(self, worker: int, request: A, observed: int = -1) -> bool:
        """Keep the add until the minimum clock passes the worker's; raise OutOfTurn if the worker is ahead."""
        clock = self._check_turn(worker, observed, "an add", ahead=0)
        self._adds.keep(clock, worker, request)
        return False

    def get(self, worker: int, request: G, observed: int = -1, held_clocks: int = 0) -> bool:
        """Return True at the minimum clock; one clock ahead, keep the get; further ahead, raise OutOfTurn."""
        clock = self._check_turn(worker, observed, "a get", ahead=1)
        if clock <= self.tracker.get_min_clock():
            return True
        self._gets.park(clock, request)
        return False

    def clock(self, worker: int, observed: int = -1) -> list[Released[A, G]]:
        """Advance the clock of a worker; raise OutOfTurn if it is ahead already."""
        self._check_turn(worker, observed, "a clock", ahead=0)
        return super().clock(worker, observed)

    def pending_adds(self, worker: int | None = None) -> Iterator[A]:
        """Return the kept adds of one worker, or of all, in order of arrival."""
        return iter(self._adds.all()) if worker is None else self._adds.of(worker)

    def merge_pending(self, worker: int, merge: Callable[[list[A]], Sequence[A]]) -> None:
        """Replace the kept adds of the worker's current iteration with the result of ``merge``."""
        self._adds.merge(self.tracker.get_progress(worker), worker, merge)

    def snapshot(self) -> dict[str, Any]:
        """Return plain data: the tracker and the kept adds."""
        return {**super().snapshot(), "adds": self._adds.snapshot()}

    def restore(self, state: dict[str, Any]) -> list[G]:
        """Restore a ``snapshot``; return the waiting gets."""
        self._adds.restore(state["adds"])
        return super().restore(state)

    def take_orphaned_adds(self) -> list[A]:
        """Return the adds of the unfinished iteration if the last worker has left: no clock would apply them."""
        return [] if self.tracker.num_workers else self._adds.clear()

    def _adds_before(self, clock: int) -> list[A]:
        return self._adds.take(clock - 1)

    def _clear_adds(self) -> list[A]:
        return self._adds.clear()

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


@final
class StaleSynchronousModel(ConsistencyModel[A, G]):
    """SSP: adds are applied as they arrive; a get waits while its worker is more than ``staleness`` clocks ahead.

    ``observed`` does not count: a get reads the adds that have arrived at this shard, so the clocks must have arrived
    here, too.
    """

    def __init__(self, tracker: ProgressTracker, staleness: int) -> None:
        super().__init__(tracker)
        self._staleness = staleness

    def add(self, worker: int, request: A, observed: int = -1) -> bool:
        """Return True."""
        self.tracker.check_worker_valid(worker)
        return True

    def get(self, worker: int, request: G, observed: int = -1, held_clocks: int = 0) -> bool:
        """Return True unless the worker is more than ``staleness`` clocks ahead; keep the get of such a worker."""
        wanted = self.tracker.get_progress(worker) + held_clocks - self._staleness
        if wanted <= self.tracker.get_min_clock():
            return True
        self._gets.park(wanted, request)
        return False


def model_of(
    consistency: Consistency, workers: Iterable[int] = (), name: str = ""
) -> ConsistencyModel[Any, Any]:
    """Return the model of a consistency with these workers at clock 0; errors begin with ``name`` ("matrix 'w'").

    >>> model = model_of(SSP(staleness=1), workers=[0, 1])
    >>> model.clock(0), model.clock(0), model.get(0, "a get that waits")
    ([], [], False)
    >>> model.clock(1)
    [Released(clock=1, adds=[], gets=['a get that waits'])]
    """
    tracker = ProgressTracker(workers, name=name)
    match consistency:
        case ASP():
            return AsynchronousModel(tracker)
        case BSP():
            return BulkSynchronousModel(tracker)
        case SSP(staleness):
            return StaleSynchronousModel(tracker, staleness)
    raise InternalError(f"expected ASP(), BSP() or SSP(staleness=…), given {consistency!r}")
