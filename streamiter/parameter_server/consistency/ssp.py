"""Stale synchronous parallel (Ho et al. 2013): the fastest reads no more than some clocks ahead of the slowest."""

from __future__ import annotations

from typing import TypeVar, final

from streamiter.parameter_server.consistency.model import ConsistencyModel
from streamiter.parameter_server.consistency.progress_tracker import ProgressTracker

__all__ = ["StaleSynchronousModel"]

A = TypeVar("A")
G = TypeVar("G")


@final
class StaleSynchronousModel(ConsistencyModel[A, G]):
    """Adds are applied as they come; a get waits while its worker is more than ``staleness`` clocks ahead.

    What a worker has ``observed`` does not matter: it reads what this shard was told, so the clocks have to be heard
    here.
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
