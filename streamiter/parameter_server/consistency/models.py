"""Consistency models: BSP, SSP, ASP."""

from __future__ import annotations

import abc
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar, final

from streamiter.errors import OutOfTurn
from streamiter.numbers import whole_number
from streamiter.parameter_server.consistency.progress_tracker import PendingAdds, ProgressTracker, WaitingGets

__all__ = [
    "ASP",
    "BSP",
    "SSP",
    "AsynchronousModel",
    "BulkSynchronousModel",
    "Consistency",
    "ConsistencyModel",
    "Released",
    "StaleSynchronousModel",
]


@dataclass(frozen=True, slots=True)
class Consistency:
    """How far workers may be apart on a matrix: one of :class:`ASP`, :class:`BSP`, :class:`SSP`.

    Which consistency a matrix has: how far workers may be apart, and what a read may miss.
    """


@dataclass(frozen=True, slots=True)
class ASP(Consistency):
    """Asynchronous parallel: nobody waits for anybody. Adds are applied and gets answered as they come.

    >>> ASP()
    ASP()
    """


@dataclass(frozen=True, slots=True)
class BSP(Consistency):
    """Bulk synchronous parallel: all workers are in the same iteration, and see what all did in those before.

    A worker gets, adds, clocks, and awaits a get before it adds again; what comes in another order is OutOfTurn.

    >>> BSP()
    BSP()
    """


@dataclass(frozen=True, slots=True)
class SSP(Consistency):
    """Stale synchronous parallel (Ho et al. 2013): a get waits more than ``staleness`` clocks ahead of the slowest.

    Adds are applied at once and never wait; clocks neither.

    >>> SSP(staleness=2)
    SSP(staleness=2)
    """

    staleness: int

    def __post_init__(self) -> None:
        object.__setattr__(self, "staleness", whole_number("SSP(staleness=)", self.staleness, 0))


A = TypeVar("A")
"""An add, as the shard has it."""
G = TypeVar("G")
"""A get that can wait."""


@dataclass(slots=True)
class Released(Generic[A, G]):
    """The minimum clock has become ``clock``: apply the adds, finish the iteration, then answer the gets.

    What all consistency models have in common: pure data structures that say what may happen now.
    """

    clock: int
    adds: list[A] = field(default_factory=list)
    gets: list[G] = field(default_factory=list)


class ConsistencyModel(abc.ABC, Generic[A, G]):
    """One for each matrix on each shard. Raises UnknownWorker and OutOfTurn, and then nothing has changed.

    ``observed`` is the highest minimum clock of this matrix that the worker has been told of, by any shard (−1: none):
    what was in turn there is in turn here, even if this shard has yet to hear the clocks of others.

    Whatever moves the minimum clock gives one ``Released`` for each clock it has passed, ascending, even where nobody
    waited: the shard finishes an iteration for each of them.
    """

    def __init__(self, tracker: ProgressTracker) -> None:
        self.tracker = tracker
        self._gets: WaitingGets[G] = WaitingGets()

    @abc.abstractmethod
    def add(self, worker: int, request: A, observed: int = -1) -> bool:
        """Whether to apply it now; otherwise the model keeps it until a ``Released`` has it."""

    @abc.abstractmethod
    def get(self, worker: int, request: G, observed: int = -1, held_clocks: int = 0) -> bool:
        """Whether to answer it now; otherwise the model keeps it until a ``Released`` has it.

        ``held_clocks`` the worker has called before, and a checkpoint keeps them from this model.
        """

    def clock(self, worker: int, observed: int = -1) -> list[Released[A, G]]:
        """The worker has finished an iteration; what follows from that (mostly nothing)."""
        before = self.tracker.get_min_clock()
        return self._released(before, self.tracker.advance_and_get_changed_min_clock(worker))

    def join(self, worker: int) -> int:
        """A worker takes part from now on, at the minimum clock; gives where it stands."""
        return self.tracker.join(worker)

    def raise_worker(self, worker: int, clock: int) -> list[Released[A, G]]:
        """The second step of joining: the worker stands at ``clock`` if it is not there or further."""
        before = self.tracker.get_min_clock()
        return self._released(before, self.tracker.raise_to(worker, clock))

    def leave(self, worker: int) -> list[Released[A, G]]:
        """The worker holds nobody back any more; what it has added stays, and counts.

        Its own waiting gets are for the caller to ``forget`` and fail beforehand; ``take_orphaned_adds`` comes next.
        """
        before = self.tracker.get_min_clock()
        return self._released(before, self.tracker.leave(worker))

    def take_orphaned_adds(self) -> list[A]:
        """After a worker has left: the kept adds to apply now, because no worker is left to finish their iteration.

        They end no iteration: the minimum clock is a matter of clocks alone, which all shards hear of, while each shard
        knows its own adds only.
        """
        return []

    def forget(self, request: G) -> None:
        """Nobody waits for this get any more; nothing happens if it is not kept."""
        self._gets.forget(request)

    def reset(self, workers: Iterable[int]) -> tuple[list[A], list[G]]:
        """Start over with these workers at clock 0; gives what was kept, by arrival, for the caller to fail."""
        self.tracker.init(workers)
        return self._clear_adds(), self._gets.clear()

    def pending_adds(self, worker: int | None = None) -> Iterator[A]:
        """The adds that are kept, of one worker or of all, in order of arrival."""
        return iter(())

    def merge_pending(self, worker: int, merge: Callable[[list[A]], Sequence[A]]) -> None:
        """Have ``merge`` sum up what is kept of the iteration that the worker is in; older ones cannot grow any more.

        It is given these adds in order of arrival, and gives at least one and no more than they were, which take the
        places of the first ones. It is not called where there are none.
        """
        self.tracker.check_worker_valid(worker)

    @property
    def waiting_gets(self) -> int:
        """How many gets are kept."""
        return len(self._gets)

    def snapshot(self) -> dict[str, Any]:
        """Plain data: the tracker, and the adds that are kept, as they are. Gets are not state."""
        return {"tracker": self.tracker.snapshot()}

    def restore(self, state: dict[str, Any]) -> list[G]:
        """Take over what ``snapshot`` gave; adds kept until now are gone, the gets are given for the caller to fail."""
        self.tracker.restore(state["tracker"])
        return self._gets.clear()

    def _released(self, before: int, moved_to: int) -> list[Released[A, G]]:
        """One for each clock after ``before``; ``moved_to`` is −1 where the minimum clock stays."""
        return [
            Released(clock, self._adds_before(clock), self._gets.take(clock))
            for clock in range(before + 1, moved_to + 1)
        ]

    def _adds_before(self, clock: int) -> list[A]:
        """The adds that were kept for the minimum clock to become ``clock``."""
        return []

    def _clear_adds(self) -> list[A]:
        return []


@final
class AsynchronousModel(ConsistencyModel[A, G]):
    """Adds are applied and gets answered as they come; clocks are counted, no more.

    Asynchronous parallel: nobody waits for anybody.
    """

    def add(self, worker: int, request: A, observed: int = -1) -> bool:
        """Always now."""
        self.tracker.check_worker_valid(worker)
        return True

    def get(self, worker: int, request: G, observed: int = -1, held_clocks: int = 0) -> bool:
        """Always now."""
        self.tracker.check_worker_valid(worker)
        return True


@final
class BulkSynchronousModel(ConsistencyModel[A, G]):
    """Adds wait for the end of their iteration, gets for the end of the iteration before theirs.

    A worker may clock once ahead of the slowest, and then has to get before it goes on: any other call is out of turn.

    Bulk synchronous parallel: all workers are in the same iteration, and see what all did in those before.
    """

    def __init__(self, tracker: ProgressTracker) -> None:
        super().__init__(tracker)
        self._adds: PendingAdds[A] = PendingAdds()

    def add(self, worker: int, request: A, observed: int = -1) -> bool:
        """Never now: it is kept until the minimum clock passes the worker's. OutOfTurn when the worker is ahead."""
        clock = self._check_turn(worker, observed, "an add", ahead=0)
        self._adds.keep(clock, worker, request)
        return False

    def get(self, worker: int, request: G, observed: int = -1, held_clocks: int = 0) -> bool:
        """Now at the minimum clock, later when the worker is one ahead. OutOfTurn when it is further ahead."""
        clock = self._check_turn(worker, observed, "a get", ahead=1)
        if clock <= self.tracker.get_min_clock():
            return True
        self._gets.park(clock, request)
        return False

    def clock(self, worker: int, observed: int = -1) -> list[Any]:
        """The worker has finished an iteration. OutOfTurn when it is ahead already."""
        self._check_turn(worker, observed, "a clock", ahead=0)
        return super().clock(worker, observed)

    def pending_adds(self, worker: int | None = None) -> Iterator[A]:
        """The adds that are kept, of one worker or of all, in order of arrival."""
        return iter(self._adds.all()) if worker is None else self._adds.of(worker)

    def merge_pending(self, worker: int, merge: Callable[[list[A]], Sequence[A]]) -> None:
        """Have ``merge`` sum up what is kept of the iteration that the worker is in."""
        self._adds.merge(self.tracker.get_progress(worker), worker, merge)

    def snapshot(self) -> dict[str, Any]:
        """Plain data: the tracker and the adds that are kept."""
        return {**super().snapshot(), "adds": self._adds.snapshot()}

    def restore(self, state: dict[str, Any]) -> list[G]:
        """Take over what ``snapshot`` gave."""
        self._adds.restore(state["adds"])
        return super().restore(state)

    def take_orphaned_adds(self) -> list[A]:
        """The adds of the unfinished iteration of the last worker that has left: no clock would apply them."""
        return [] if self.tracker.num_workers else self._adds.clear()

    def _adds_before(self, clock: int) -> list[A]:
        return self._adds.take(clock - 1)

    def _clear_adds(self) -> list[A]:
        return self._adds.clear()

    def _check_turn(self, worker: int, observed: int, call: str, ahead: int) -> int:
        """The worker's clock; raises OutOfTurn if it is more than ``ahead`` of the minimum clock."""
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
    """Adds are applied as they come; a get waits while its worker is more than ``staleness`` clocks ahead.

    What a worker has ``observed`` does not matter: it reads what this shard was told, so the clocks have to be heard
    here.

    Stale synchronous parallel (Ho et al. 2013): the fastest reads no more than some clocks ahead of the slowest.
    """

    def __init__(self, tracker: ProgressTracker, staleness: int) -> None:
        super().__init__(tracker)
        self._staleness = staleness

    def add(self, worker: int, request: A, observed: int = -1) -> bool:
        """Always now."""
        self.tracker.check_worker_valid(worker)
        return True

    def get(self, worker: int, request: G, observed: int = -1, held_clocks: int = 0) -> bool:
        """Now, unless the worker is too far ahead; equal to the bound is not."""
        wanted = self.tracker.get_progress(worker) + held_clocks - self._staleness
        if wanted <= self.tracker.get_min_clock():
            return True
        self._gets.park(wanted, request)
        return False
