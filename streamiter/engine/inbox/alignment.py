"""Barriers at an inbox: their alignment, and the feedback that belongs to a checkpoint.

A barrier passes a task when every channel has brought it (:class:`BarrierAlignment`). Feedback channels take no part:
the barrier returns there later, after one way through the loop. A checkpoint has the feedback between the snapshot of
the head and that return (:class:`FeedbackLog`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain
from typing import final

from streamiter.engine.graph.feedback import TopicRange
from streamiter.engine.inbox.port_log import Port
from streamiter.engine.storage.disk_queue import SpillQueue
from streamiter.errors import CheckpointError, InternalError
from streamiter.operators.frontier import Frontier
from streamiter.values.deferred import Deferred, PlainValue, entries_of
from streamiter.values.helpers.closing import close_now
from streamiter.values.records import CheckpointBarrier, Control, DataBatch


@final
class BarrierAlignment:
    """Waits until every channel except the feedback channels has brought the barrier of a checkpoint."""

    def __init__(self, ports: Sequence[Port]) -> None:
        self._ports = [port for port in ports if not port.is_feedback]
        self._brought = Frontier((port.index for port in self._ports), 0)
        """By port: its last barrier. A port has ended if its channel has brought the end of its input."""
        self._barrier: CheckpointBarrier | None = None
        """The barrier that some ports have brought."""
        self._announced: CheckpointBarrier | None = None
        """A barrier that ports will bring."""
        self._triggered: CheckpointBarrier | None = None
        """A barrier that starts here if no port can bring it."""
        self._last = 0
        """The last checkpoint whose barrier a port has brought, or whose barrier started here."""

    @property
    def is_due(self) -> bool:
        """Whether a port has brought a barrier, or will bring one."""
        return self._barrier is not None or self._announced is not None

    def awaited(self) -> list[str]:
        """Return the channels that delay a barrier; none while no channel has brought one."""
        open_ports = (port for port in self._ports if not port.is_blocked and not self._brought.has_ended(port.index))
        return [] if self._barrier is None else [port.channel.name for port in open_ports]

    def announce(self, barrier: CheckpointBarrier, *, starts_here: bool = False) -> None:
        """Note a barrier that the ports will bring. ``starts_here``: it starts here if no port can bring it."""
        if barrier.checkpoint > self._last:  # A channel from another process may have brought it before.
            self._announced = barrier
            self._triggered = barrier if starts_here else self._triggered

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
        self._announced = self._triggered = None
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
        if self._triggered is not None and self._brought.all_ended:
            return self.inputs_ended()
        self._brought.settle()
        barrier = self._barrier
        if barrier is None or (self._brought.value < barrier.checkpoint and not self._brought.all_ended):
            return None
        self._barrier = None
        return barrier

    def inputs_ended(self) -> CheckpointBarrier | None:
        """Note that no port can bring a barrier; return the barrier that starts here instead, if there is one."""
        triggered = self._triggered
        self._last = self._last if triggered is None else triggered.checkpoint
        self._announced = self._triggered = None
        return triggered


@final
class BarrierReturned(Control):
    """The barrier of a checkpoint has returned on every feedback channel.

    ``logged`` is the feedback that arrived before it: the number of the port, and its log.
    """

    checkpoint: int
    logged: list[tuple[int, Deferred]]


@final
class FeedbackLog:
    """Records the feedback of all feedback ports between a head's snapshot and the return of its barrier."""

    def __init__(self, ports: Sequence[Port], make_queue: Callable[[], SpillQueue] | None) -> None:
        """``make_queue`` makes a queue for a log in memory, or for a restored one."""
        self.ports = [port for port in ports if port.is_feedback]
        """The feedback ports of the inbox."""
        self._make_queue = make_queue
        self._barrier: CheckpointBarrier | None = None
        self._logs: dict[int, _PortFeedback] = {}
        """By port."""
        self._returned = Frontier((port.index for port in self.ports), 0)
        """By port: the last barrier that has returned."""

    def start(self, barrier: CheckpointBarrier) -> None:
        """The head's snapshot is taken: record feedback from now on, until this barrier returns."""
        self._barrier = barrier
        self.close()
        for port in self.ports:
            port.log = None
            if self._returned.reached(port.index) < barrier.checkpoint and not port.has_ended:
                port.log = self._logs[port.index] = _PortFeedback(port, self._new_queue())

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
        """The log of a feedback port is complete: the barrier has returned, or the end of input instead of it."""
        port.log = None
        if port.index in self._logs:
            self._logs[port.index].barrier_returned()
        returned = self.complete()
        return [] if returned is None else [returned]

    def drop(self) -> None:
        """The checkpoint is abandoned: drop the log, and record nothing until the barrier returns."""
        close_now(log.close for log in self._logs.values())

    def complete(self) -> BarrierReturned | None:
        """Return the log if the barrier has returned on all ports; otherwise None."""
        if self._barrier is None or any(port.log is not None for port in self.ports):
            return None
        logged = [(index, snapshot) for index, log in self._logs.items() if (snapshot := log.snapshot()) is not None]
        returned = BarrierReturned(self._barrier.checkpoint, logged)
        self._barrier = None
        self.close()
        return returned

    def restore(self, logged: Iterable[tuple[int, Iterable[PlainValue]]]) -> None:
        """Let the ports first give the logged feedback of a checkpoint (decoded frames), then read their channels.

        Raises CheckpointError for feedback in a topic if the loop does not use a topic any more.
        """
        ports = {port.index: port for port in self.ports}
        for index, frames in logged:
            port, ranges, queue = ports[index], list[TopicRange](), self._new_queue()
            port.restored = queue
            for entry in entries_of(frames):
                if (topic_range := TopicRange.from_plain(entry)) is not None:
                    ranges.append(topic_range)
                else:
                    queue.put_plain(entry)
            if ranges and port.return_path is None:
                raise CheckpointError(
                    f"{port.channel.name}: expected feedback through the topic {ranges[0].topic!r}, where the "
                    "checkpoint has feedback, given a loop in memory; feed back through that topic again, or start "
                    "without state (restore=None)"
                )
            if ranges and port.return_path is not None:
                port.return_path.restore(ranges)

    def _new_queue(self) -> SpillQueue:
        assert self._make_queue is not None
        return self._make_queue()

    def close(self) -> None:
        """Forget all logs."""
        logs, self._logs = [*self._logs.values()], {}
        close_now(log.close for log in logs)


@final
class _PortFeedback:
    """The feedback of one port since a snapshot.

    In memory these are mostly batches that are being handled anyway, and beyond the memory limit they go to disk.
    Feedback through a topic is in the topic already, so only its ranges are noted. Batches with which the port was
    restored may not be in the topic (the loop was in memory before): they are logged, too.
    """

    def __init__(self, port: Port, queue: SpillQueue) -> None:
        self._port = port
        self._queue: SpillQueue | None = queue
        """None if the log is dropped."""
        self._mark = None if port.return_path is None else port.return_path.mark()
        self._ranges: list[bytes] = []

    def put(self, item: DataBatch | Control) -> None:
        if self._queue is not None and (self._mark is None or self._port.restored is not None):
            self._queue.put(item)

    def barrier_returned(self) -> None:
        if self._queue is not None and self._mark is not None and self._port.return_path is not None:
            self._ranges = self._port.return_path.since(self._mark)

    def snapshot(self) -> Deferred | None:
        items = self._queue.snapshot() if self._queue is not None and len(self._queue) else None
        return _FeedbackFrames(items, self._ranges) if self._ranges else items

    def close(self) -> None:
        """Drop the log, and note nothing more."""
        queue, self._queue = self._queue, None
        if queue is not None:
            queue.close()


@final
class _FeedbackFrames(Deferred):
    """The frames of batches, if there are any, then the frames of ranges."""

    def __init__(self, batches: Deferred | None, ranges: Sequence[bytes]) -> None:
        self._batches = batches
        self._ranges = ranges

    def frames(self) -> Iterator[bytes]:
        return iter(self._ranges) if self._batches is None else chain(self._batches.frames(), self._ranges)

    def release(self) -> None:
        if self._batches is not None:
            self._batches.release()
