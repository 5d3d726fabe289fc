"""Barriers at an inbox: their alignment, and the feedback that belongs to a checkpoint.

A barrier passes a task when every channel has brought it (:class:`BarrierAlignment`). Feedback channels take no part:
the barrier returns there later, after one way through the loop. A checkpoint has the feedback between the snapshot of
the head and that return (:class:`FeedbackLog`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import final

from streamiter.engine.graph.feedback import LoggedFeedback
from streamiter.engine.inbox.port_log import Port
from streamiter.engine.storage.disk_queue import SpillQueue
from streamiter.errors import InternalError
from streamiter.operators.frontier import Frontier
from streamiter.values.deferred import Deferred, PlainValue, entries_of
from streamiter.values.helpers.closing import close_now
from streamiter.values.records import CheckpointBarrier, Control


@final
class BarrierAlignment:
    """Waits until every channel except the feedback channels has brought the barrier of a checkpoint."""

    def __init__(self, ports: Sequence[Port]) -> None:
        self._ports = [port for port in ports if not port.is_feedback]
        self._brought = Frontier((port.index for port in self._ports), 0)
        """By port: its last barrier. A port has ended if its channel has brought the end of its input."""
        self._barrier: CheckpointBarrier | None = None
        """The barrier that some ports have brought."""
        self._expected: CheckpointBarrier | None = None
        """A barrier that ports will bring."""
        self._starts_here = False
        """Whether the expected barrier starts here if no port can bring it."""
        self._last = 0
        """The last checkpoint whose barrier a port has brought, or whose barrier started here."""

    @property
    def is_due(self) -> bool:
        """Whether a port has brought a barrier, or will bring one."""
        return self._barrier is not None or self._expected is not None

    def awaited(self) -> list[str]:
        """Return the channels that delay a barrier; none while no channel has brought one."""
        open_ports = (port for port in self._ports if not port.is_blocked and not self._brought.has_ended(port.index))
        return [] if self._barrier is None else [port.channel.name for port in open_ports]

    def expect(self, barrier: CheckpointBarrier, *, starts_here: bool) -> None:
        """Note a barrier that the ports will bring. ``starts_here``: it starts here if no port can bring it."""
        if barrier.checkpoint > self._last:  # A channel from another process may have brought it before.
            self._expected, self._starts_here = barrier, starts_here

    def bring(self, port: Port, barrier: CheckpointBarrier) -> bool:
        """Note that a port has brought the barrier; return whether it is the first port."""
        if port.is_blocked or self._brought.has_ended(port.index):
            state = "blocked" if port.is_blocked else "ended"
            raise InternalError(
                f"{port.channel.name}: expected a barrier on an open channel only, given one on a channel that is "
                f"{state}"
            )
        port.is_blocked = True
        self._brought.reach(port.index, barrier.checkpoint)
        if self._barrier is not None:
            return False
        self._barrier, self._last = barrier, barrier.checkpoint
        self._expected = None
        return True

    def end(self, port: Port) -> None:
        """Note that the channel of a port has brought the end of its input. Its end may still wait in its log."""
        if port.index in self._brought:
            self._brought.end(port.index)

    def complete(self) -> CheckpointBarrier | None:
        """Return the barrier if no port delays it any more, and end the alignment; otherwise return None.

        A barrier that starts here is complete when no port can bring it. The ends of the inputs may still wait behind
        data that is not wanted, because the wanted input may wait for this barrier.
        """
        self._brought.settle()
        barrier, can_come = self._barrier, not self._brought.all_ended
        if barrier is not None and not (can_come and self._brought.value < barrier.checkpoint):
            self._barrier = None
            return barrier
        if can_come or self._expected is None:
            return None
        expected, self._expected = self._expected, None
        if not self._starts_here:
            return None
        self._last = expected.checkpoint
        return expected


Logged = list[tuple[int, Iterable[PlainValue] | None, Sequence[PlainValue]]]
"""The feedback of a checkpoint as it is read back: the number of a port, the frames of its items, its ranges."""


@final
class BarrierReturned(Control):
    """The barrier of a checkpoint has returned on every feedback channel.

    ``logged`` is the feedback that arrived before it: the number of the port, its items, its ranges of a topic.
    """

    checkpoint: int
    logged: list[tuple[int, Deferred | None, Sequence[PlainValue]]]


@final
class FeedbackLog:
    """Records the feedback of all feedback ports between a head's snapshot and the return of its barrier."""

    def __init__(self, ports: Sequence[Port], make_queue: Callable[[], SpillQueue] | None) -> None:
        """``make_queue`` makes a queue for the log of one port."""
        self.ports = [port for port in ports if port.is_feedback]
        """The feedback ports of the inbox."""
        self._channels = {port.index: port.feedback for port in ports if port.feedback is not None}
        self._make_queue = make_queue
        self._barrier: CheckpointBarrier | None = None
        self._logged: dict[int, LoggedFeedback] = {}
        """What a port has logged on which the barrier has returned."""
        self._returned = Frontier((port.index for port in self.ports), 0)
        """By port: the last barrier that has returned."""

    def start(self, barrier: CheckpointBarrier) -> None:
        """The head's snapshot is taken: record feedback from now on, until this barrier returns."""
        self.close()
        self._barrier = barrier
        for port in self.ports:
            if self._awaits(barrier, port):
                assert self._make_queue is not None
                self._channels[port.index].start_log(self._make_queue())

    def _awaits(self, barrier: CheckpointBarrier, port: Port) -> bool:
        """Return whether a barrier has still to return on a port."""
        return not port.has_ended and self._returned.reached(port.index) < barrier.checkpoint

    def barrier_returned(self, port: Port, barrier: CheckpointBarrier) -> list[Control]:
        """Note that a barrier has returned on a feedback port; return the complete log, if this completes it."""
        self._returned.reach(port.index, barrier.checkpoint)
        if self._barrier is None or self._barrier.checkpoint != barrier.checkpoint:
            # The barrier has returned before this head has taken its snapshot, so this port has nothing to record.
            # Feedback behind the barrier must wait: it would be in the snapshot, and be sent again after a restart.
            port.is_blocked = True
            return []
        return self.ended(port)

    def ended(self, port: Port) -> list[Control]:
        """End the log of a port, because the barrier has returned, or the end of input instead of it.

        Return the complete log, if this completes it.
        """
        if (logged := self._channels[port.index].end_log()) is not None:
            self._logged[port.index] = logged
        returned = self.complete()
        return [] if returned is None else [returned]

    def complete(self) -> BarrierReturned | None:
        """Return the log if the barrier has returned on all ports; otherwise None."""
        barrier = self._barrier
        if barrier is None or any(self._awaits(barrier, port) for port in self.ports):
            return None
        logged, self._logged, self._barrier = self._logged, {}, None
        return BarrierReturned(barrier.checkpoint, [(index, *logged[index]) for index in sorted(logged)])

    def close(self) -> None:
        """Drop the log, and record nothing until the barrier returns: the checkpoint is abandoned, or the job ends."""
        logged, self._logged = self._logged, {}
        close_now(
            [
                *(channel.close_log for channel in self._channels.values()),
                *(items.release for items, _ in logged.values() if items is not None),
            ]
        )

    def restore(self, logged: Logged) -> None:
        """Let the channels begin with the logged feedback of a checkpoint (decoded frames)."""
        for index, frames, ranges in logged:
            self._channels[index].restore(entries_of(frames or ()), ranges)
