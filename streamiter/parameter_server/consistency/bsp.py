"""Bulk synchronous parallel: all workers are in the same iteration, and see what all did in those before."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar, final

from streamiter.errors import OutOfTurn
from streamiter.parameter_server.consistency.model import ConsistencyModel
from streamiter.parameter_server.consistency.pending_adds import PendingAdds
from streamiter.parameter_server.consistency.progress_tracker import ProgressTracker

__all__ = ["BulkSynchronousModel"]

A = TypeVar("A")
G = TypeVar("G")


@final
class BulkSynchronousModel(ConsistencyModel[A, G]):
    """Adds wait for the end of their iteration, gets for the end of the iteration before theirs.

    A worker may clock once ahead of the slowest, and then has to get before it goes on: any other call is out of turn.
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
