"""Workers that wait for each other: ``client.barrier``."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, final

from streamiter.errors import OutOfTurn, StreamiterError
from streamiter.parameter_server.consistency.progress_tracker import ProgressTracker
from streamiter.parameter_server.waiting import Waiting

__all__ = ["Arrivals"]


@final
class Arrivals:
    """Barrier ``t`` opens when every worker has arrived at it. On one shard only; a pure data structure."""

    def __init__(self) -> None:
        self._tracker = ProgressTracker()
        self._tracker.init(())
        self._waiting: dict[int, tuple[int, Waiting[None]]] = {}
        """By worker: the barrier it waits at."""

    def arrive(self, worker: int, number: int) -> Waiting[None] | None:
        """A worker is at a barrier: 0, 1, 2, …; below 0: the next one. None if it is open."""
        self._tracker.check_worker_valid(worker)
        expected = self._tracker.get_progress(worker)
        if worker in self._waiting:
            raise _out_of_turn(worker, f"the end of its wait at barrier {expected - 1}", number)
        if number not in (expected, -1):
            raise _out_of_turn(worker, f"barrier {expected}", number)
        self._tracker.advance_and_get_changed_min_clock(worker)
        self._open()
        if self._tracker.get_min_clock() > expected:
            return None
        waiting: Waiting[None] = Waiting(lambda: self._give_up(worker))
        self._waiting[worker] = (expected, waiting)
        return waiting

    def _give_up(self, worker: int) -> None:
        """Its wait was cancelled: it may come again, and counts as arrived all the same."""
        self._waiting.pop(worker, None)

    def join(self, worker: int) -> None:
        """A worker takes part: the first barrier it meets is the one that others are before, or wait at."""
        self._tracker.join(worker)

    def leave(self, worker: int, error: StreamiterError) -> None:
        """A worker takes part no more: its own wait fails, those of others may end."""
        if (waits := self._waiting.pop(worker, None)) is not None:
            waits[1].fail(error)
        self._tracker.leave(worker)
        self._open()

    def reset(self, workers: Iterable[int], error: StreamiterError) -> None:
        """Start over with these workers; all waits fail."""
        self.fail(error)
        self._tracker.init(workers)

    def fail(self, error: StreamiterError) -> None:
        """No wait will end."""
        waiting, self._waiting = self._waiting, {}
        for _, one in waiting.values():
            one.fail(error)

    def _open(self) -> None:
        lowest = self._tracker.get_min_clock()
        for worker, (number, waiting) in list(self._waiting.items()):
            if number < lowest:
                del self._waiting[worker]
                waiting.succeed(None)

    def snapshot(self) -> dict[str, Any]:
        """Plain data: how many barriers each worker has passed. A worker that waits will arrive again."""
        return {
            "passed": [
                [worker, self._tracker.get_progress(worker) - (worker in self._waiting)]
                for worker in self._tracker.workers
            ]
        }

    def restore(self, state: Mapping[str, Any], workers: Iterable[int], error: StreamiterError) -> None:
        """Take over what ``snapshot`` gave; all waits fail.

        A worker that was not there is before the first closed barrier.
        """
        self.fail(error)
        passed = dict(state["passed"])
        lowest = min(passed.values(), default=0)
        self._tracker.init(())
        for worker in workers:
            self._tracker.join(worker, passed.get(worker, lowest))


def _out_of_turn(worker: int, expected: str, number: int) -> OutOfTurn:
    return OutOfTurn(
        f"barrier of worker {worker}: expected {expected}, given "
        f"{'the next one' if number < 0 else f'barrier {number}'}; "
        "every worker passes every barrier, one after the other"
    )
