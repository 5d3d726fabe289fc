"""Feedback that belongs to a checkpoint: what comes between a head's snapshot and the barrier's return."""

from __future__ import annotations

from collections.abc import Sequence

from streamiter.records import CheckpointBarrier
from streamiter.runtime.gate_records import BarrierReturned
from streamiter.runtime.port import Logged, Port

__all__ = ["FeedbackLog"]


class FeedbackLog:
    """Logs what feedback ports bring, until each has brought the barrier back."""

    def __init__(self, ports: Sequence[Port]) -> None:
        self._ports = [port for port in ports if port.is_feedback]
        self._barrier: CheckpointBarrier | None = None
        self._log: Logged = []
        self._returned_early: dict[int, set[int]] = {}

    @property
    def ports(self) -> list[Port]:
        """The feedback ports."""
        return self._ports

    def start(self, barrier: CheckpointBarrier) -> None:
        """The snapshot is taken: log from now on, but what comes behind this barrier."""
        early = self._returned_early.pop(barrier.checkpoint, set())
        self._barrier = barrier
        self._log = []
        for port in self._ports:
            port.log = None if port.index in early else self._log

    def barrier_returned(self, port: Port, barrier: CheckpointBarrier) -> None:
        """A feedback port has brought a barrier back."""
        if self._barrier is None or self._barrier.checkpoint != barrier.checkpoint:
            # The barrier came round before this head has taken its own snapshot: nothing to log here. What
            # comes behind it would be in that snapshot, and come again from those who have taken theirs.
            self._returned_early.setdefault(barrier.checkpoint, set()).add(port.index)
            port.blocked = True
        else:
            port.log = None

    def complete(self) -> list[BarrierReturned]:
        """The log, once the barrier is back on all ports."""
        if self._barrier is None or any(port.log is not None for port in self._ports):
            return []
        returned = BarrierReturned(self._barrier.checkpoint, self._log)
        self._barrier = None
        self._log = []
        return [returned]
