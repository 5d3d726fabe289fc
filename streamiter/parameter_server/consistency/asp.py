"""Asynchronous parallel: nobody waits for anybody."""

from __future__ import annotations

from typing import TypeVar, final

from streamiter.parameter_server.consistency.model import ConsistencyModel

__all__ = ["AsynchronousModel"]

A = TypeVar("A")
G = TypeVar("G")


@final
class AsynchronousModel(ConsistencyModel[A, G]):
    """Adds are applied and gets answered as they come; clocks are counted, no more."""

    def add(self, worker: int, request: A, observed: int = -1) -> bool:
        """Always now."""
        self.tracker.check_worker_valid(worker)
        return True

    def get(self, worker: int, request: G, observed: int = -1, held_clocks: int = 0) -> bool:
        """Always now."""
        self.tracker.check_worker_valid(worker)
        return True
