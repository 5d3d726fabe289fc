"""Feedback that belongs to a checkpoint: what comes between a head's snapshot and the barrier's return."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, final

from streamiter.records import CheckpointBarrier, Control, DataBatch
from streamiter.runtime.gate_records import BarrierReturned
from streamiter.runtime.port import Port

if TYPE_CHECKING:
    from streamiter.checkpoints.spill import SpillQueue

__all__ = ["FeedbackLog"]


class FeedbackLog:
    """Logs what feedback ports bring, until each has brought the barrier back.

    What is logged of a port waits in a queue of its own, made by ``make_queue``: in memory, where it mostly is the
    batches that are handled anyway, and on disk beyond what memory is given to feedback.
    """

    def __init__(self, ports: Sequence[Port], make_queue: Callable[[], SpillQueue] | None) -> None:
        self._ports = [port for port in ports if port.is_feedback]
        self._make_queue = make_queue
        self._barrier: CheckpointBarrier | None = None
        self._queues: dict[int, SpillQueue] = {}
        """By port."""
        self._returned_early: dict[int, set[int]] = {}

    @property
    def ports(self) -> list[Port]:
        """The feedback ports."""
        return self._ports

    def start(self, barrier: CheckpointBarrier) -> None:
        """The snapshot is taken: log from now on, but what comes behind this barrier."""
        early = self._returned_early.pop(barrier.checkpoint, set())
        self._barrier = barrier
        self._forget()
        for port in self._ports:
            port.log = None
            if port.index not in early:
                port.log = self._queues[port.index] = self._new_queue()

    def barrier_returned(self, port: Port, barrier: CheckpointBarrier) -> None:
        """A feedback port has brought a barrier back."""
        if self._barrier is None or self._barrier.checkpoint != barrier.checkpoint:
            # The barrier came round before this head has taken its own snapshot: nothing to log here. What
            # comes behind it would be in that snapshot, and come again from those who have taken theirs.
            self._returned_early.setdefault(barrier.checkpoint, set()).add(port.index)
            port.blocked = True
        else:
            port.log = None

    def drop(self) -> None:
        """The checkpoint is given up: forget what was logged, and log no more until the barrier is back."""
        self._forget()
        for port in self._ports:
            if port.log is not None:
                port.log = _Nothing()

    def complete(self) -> list[BarrierReturned]:
        """The log, once the barrier is back on all ports."""
        if self._barrier is None or any(port.log is not None for port in self._ports):
            return []
        logged = [(index, queue.snapshot()) for index, queue in self._queues.items() if len(queue)]
        returned = BarrierReturned(self._barrier.checkpoint, logged)
        self._barrier = None
        self._forget()
        return [returned]

    def restore(self, logged: Iterable[tuple[int, Iterable[Any]]]) -> None:
        """Have ports give what was logged for a checkpoint, as decoded frames, before what their channels bring."""
        ports = {port.index: port for port in self._ports}
        for index, frames in logged:
            queue = self._new_queue()
            ports[index].restore(queue)
            queue.refill(frames)

    def close(self) -> None:
        """Let go of files."""
        self._forget()
        for port in self._ports:
            port.close()

    def _new_queue(self) -> SpillQueue:
        assert self._make_queue is not None
        return self._make_queue()

    def _forget(self) -> None:
        for queue in self._queues.values():
            queue.close()
        self._queues = {}


@final
class _Nothing:
    """A log that keeps nothing."""

    def put(self, item: DataBatch | Control) -> None:
        pass
