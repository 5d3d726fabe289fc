"""Feedback that belongs to a checkpoint: what comes between a head's snapshot and the barrier's return."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain
from typing import TYPE_CHECKING, Any, final

from streamiter.checkpoints.deferred_entries import entries_of
from streamiter.deferred import Deferred
from streamiter.errors import CheckpointError
from streamiter.records import CheckpointBarrier, Control, DataBatch
from streamiter.runtime.feedback import FeedbackChannel, Supply
from streamiter.runtime.gate_records import BarrierReturned
from streamiter.runtime.port import Port
from streamiter.runtime.topic_feedback.ranges import TopicRange

if TYPE_CHECKING:
    from streamiter.checkpoints.spill import SpillQueue

__all__ = ["FeedbackLog"]


class FeedbackLog:
    """Logs what feedback ports bring, until each has brought the barrier back.

    Of a port in memory the batches wait in a queue of its own, made by ``make_queue``: in memory, where they mostly
    are those that are handled anyway, and on disk beyond what memory is given to feedback. What comes through a
    topic lies there already: of it the range is logged.
    """

    def __init__(self, ports: Sequence[Port], make_queue: Callable[[], SpillQueue] | None) -> None:
        self._ports = [port for port in ports if port.is_feedback]
        self._make_queue = make_queue
        self._barrier: CheckpointBarrier | None = None
        self._logs: dict[int, _Batches | _Ranges] = {}
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
                port.log = self._logs[port.index] = self._new_log(port)

    def barrier_returned(self, port: Port, barrier: CheckpointBarrier) -> None:
        """A feedback port has brought a barrier back."""
        if self._barrier is None or self._barrier.checkpoint != barrier.checkpoint:
            # The barrier came round before this head has taken its own snapshot: nothing to log here. What
            # comes behind it would be in that snapshot, and come again from those who have taken theirs.
            self._returned_early.setdefault(barrier.checkpoint, set()).add(port.index)
            port.blocked = True
        else:
            port.log = None
            if port.index in self._logs:
                self._logs[port.index].barrier_returned()

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
        logged = [
            (index, snapshot) for index, log in self._logs.items() if (snapshot := log.snapshot()) is not None
        ]
        returned = BarrierReturned(self._barrier.checkpoint, logged)
        self._barrier = None
        self._forget()
        return [returned]

    def restore(self, logged: Iterable[tuple[int, Iterable[Any]]]) -> None:
        """Have ports give what was logged for a checkpoint, as decoded frames, before what their channels bring.

        Raises CheckpointError for what lies in a topic where the feedback stays in memory now.
        """
        ports = {port.index: port for port in self._ports}
        for index, frames in logged:
            port, ranges, queue = ports[index], list[TopicRange](), self._new_queue()
            port.restore(queue)
            queue.refill(_without_ranges(frames, ranges))
            if ranges:
                _restore_ranges(port, ranges)

    def close(self) -> None:
        """Let go of files."""
        self._forget()
        for port in self._ports:
            port.close()

    def _new_log(self, port: Port) -> _Batches | _Ranges:
        supply = _supply_of(port)
        return _Batches(self._new_queue()) if supply is None else _Ranges(supply, port.restored)

    def _new_queue(self) -> SpillQueue:
        assert self._make_queue is not None
        return self._make_queue()

    def _forget(self) -> None:
        for log in self._logs.values():
            log.close()
        self._logs = {}


@final
class _Batches:
    """The log of a port in memory: all that it brings."""

    def __init__(self, queue: SpillQueue) -> None:
        self._queue = queue

    def put(self, item: DataBatch | Control) -> None:
        self._queue.put(item)

    def barrier_returned(self) -> None:
        pass

    def snapshot(self) -> Deferred | None:
        return self._queue.snapshot() if len(self._queue) else None

    def close(self) -> None:
        self._queue.close()


@final
class _Ranges:
    """The log of a port behind a topic: from where to where what it brings lies there.

    What it was restored with otherwise, as the batches of a loop that was in memory before, is there once only.
    """

    def __init__(self, supply: Supply, restored: SpillQueue | None) -> None:
        self._supply = supply
        self._mark = supply.mark()
        self._batches = restored.snapshot() if restored is not None and len(restored) else None
        self._ranges: list[bytes] = []

    def put(self, item: DataBatch | Control) -> None:
        pass

    def barrier_returned(self) -> None:
        self._ranges = self._supply.since(self._mark)

    def snapshot(self) -> Deferred | None:
        batches, self._batches = self._batches, None
        return _Frames(batches, self._ranges) if batches is not None or self._ranges else None

    def close(self) -> None:
        if self._batches is not None:
            self._batches.release()


@final
class _Nothing:
    """A log that keeps nothing."""

    def put(self, item: DataBatch | Control) -> None:
        pass


@final
class _Frames(Deferred):
    """Frames of batches, if there are any, then those of ranges."""

    def __init__(self, batches: Deferred | None, ranges: Sequence[bytes]) -> None:
        self._batches = batches
        self._ranges = ranges

    def frames(self) -> Iterator[bytes]:
        return iter(self._ranges) if self._batches is None else chain(self._batches.frames(), self._ranges)

    def release(self) -> None:
        if self._batches is not None:
            self._batches.release()


def _supply_of(port: Port) -> Supply | None:
    return port.channel.supply if isinstance(port.channel, FeedbackChannel) else None


def _without_ranges(frames: Iterable[Any], ranges: list[TopicRange]) -> Iterator[list[Any]]:
    """Frames of batches and control records; what else there is goes into ``ranges``."""
    for entry in entries_of(frames):
        if (lying := TopicRange.of(entry)) is not None:
            ranges.append(lying)
        else:
            yield [entry]


def _restore_ranges(port: Port, ranges: list[TopicRange]) -> None:
    supply = _supply_of(port)
    if supply is None:
        raise CheckpointError(
            f"{port.channel.name}: expected feedback through the topic {ranges[0].topic!r}, where some lies that the "
            "checkpoint goes on with, given a loop in memory; feed back through that topic again, or begin anew "
            "(restore=None)"
        )
    supply.restore(ranges)
