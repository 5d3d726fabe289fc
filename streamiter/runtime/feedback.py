"""The channel of a feedback edge: it never blocks its producer."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Protocol, final

from streamiter.checkpoints.disk_queue import SpillQueue
from streamiter.deferred import Deferred, entries_of
from streamiter.errors import CheckpointError
from streamiter.operators.operator import Boundary
from streamiter.operators.output import Origin
from streamiter.records import CheckpointBarrier, Control, DataBatch
from streamiter.runtime.controls import BarrierReturned
from streamiter.runtime.port import Port
from streamiter.topics.topic import Topic, TopicDescription

if TYPE_CHECKING:
    from streamiter.checkpoints.replay_cache import ReplayCache

__all__ = [
    "AttachedBoundary",
    "FeedbackChannel",
    "FeedbackLog",
    "FeedbackStatistics",
    "Point",
    "Surroundings",
    "TopicRange",
    "check_is_there",
    "missing_records",
]


class TopicSupply(Protocol):
    """Where feedback comes from that goes through a topic before it is put into a channel."""

    @property
    def is_behind(self) -> bool:
        """Whether more waits there than memory is given to."""

    def under_way(self, came: int) -> int:
        """Records fed back that have not come yet, where so many have come; 0 if that cannot be known."""

    def taken(self) -> None:
        """The first batch or control record was taken from the channel."""

    def mark(self) -> Any:
        """Where in the topic that lies which is taken next."""

    def since(self, mark: Any) -> list[bytes]:
        """From where to where that lies which was taken since, but for the last: frames of ``TopicRange`` entries."""

    def restore(self, ranges: Sequence[TopicRange]) -> None:
        """Bring what lies there into the channel before all else."""

    def closed(self) -> None:
        """The channel takes nothing more."""


@dataclass(frozen=True, slots=True)
class FeedbackStatistics:
    """A channel of a feedback edge at one moment."""

    name: str
    """Upstream subtask and head."""
    records: int
    """Records waiting in it, and on their way to it through a topic."""
    peak_records: int
    """The most records that ever waited."""
    total_records: int
    """Records fed back since the start."""
    last_epoch: int
    """The highest epoch any of them had; 0 before the first."""
    bytes_in_memory: int
    """Estimated size of what waits in memory."""
    peak_bytes_in_memory: int
    """The most that ever was."""
    bytes_on_disk: int
    """Size of the files in which the rest waits."""
    peak_bytes_on_disk: int
    """The most that ever was."""


@final
class FeedbackChannel:
    """A queue in memory that goes on on disk; one producer, one consumer, one event loop.

    It is what makes a loop free of deadlock: whoever feeds back can always go on. When the head has
    ended, what is still fed back is dropped.
    """

    __slots__ = (
        "_closed",
        "_last_epoch",
        "_on_ready",
        "_peak_records",
        "_total_records",
        "name",
        "queue",
        "records",
        "supply",
    )

    def __init__(self, name: str, queue: SpillQueue) -> None:
        self.name = name
        self.queue = queue
        self.records = 0
        self._peak_records = self._total_records = 0
        self._last_epoch = 0
        self._closed = False
        self._on_ready: Callable[[], None] | None = None
        self.supply: TopicSupply | None = None

    @property
    def total_records(self) -> int:
        """Records put into it since the start."""
        return self._total_records

    @property
    def is_spilling(self) -> bool:
        """Whether more has been fed back than its memory limit holds."""
        return self.queue.bytes_on_disk > 0 or (self.supply is not None and self.supply.is_behind)

    def attach(self, on_ready: Callable[[], None]) -> None:
        """Have ``on_ready`` called whenever the empty channel gets something."""
        self._on_ready = on_ready

    def put(self, batch: DataBatch) -> None:
        """Feed a batch back."""
        if self._closed:
            return
        self._append(batch)
        count = len(batch.records)
        self.records += count
        self._total_records += count
        if self.records > self._peak_records:
            self._peak_records = self.records
        if batch.epoch > self._last_epoch:
            self._last_epoch = batch.epoch

    def put_control(self, control: Control) -> None:
        """Feed a control record back, behind what was fed back before."""
        if not self._closed:
            self._append(control)

    def peek(self) -> DataBatch | Control | None:
        """What comes next, or None."""
        return self.queue.peek() if len(self.queue) else None

    def take(self) -> DataBatch | Control:
        """Take what comes next."""
        item = self.queue.take()
        if isinstance(item, DataBatch):
            self.records -= len(item.records)
        if self.supply is not None:
            self.supply.taken()
        return item

    def clear(self) -> None:
        """Drop all that waits."""
        while len(self.queue):
            self.take()

    def close(self) -> None:
        """Let go of files; what is fed back from now on is dropped."""
        self._closed = True
        self.records = 0
        self.queue.close()
        if self.supply is not None:
            self.supply.closed()

    def statistics(self) -> FeedbackStatistics:
        """The channel now."""
        spilled = self.queue.statistics()
        under_way = 0
        if self.supply is not None and not self._closed:
            under_way = self.supply.under_way(self._total_records)
        return FeedbackStatistics(
            name=self.name,
            records=self.records + under_way,
            peak_records=max(self._peak_records, self.records + under_way),
            total_records=self._total_records + under_way,
            last_epoch=self._last_epoch,
            bytes_in_memory=spilled.bytes_in_memory,
            peak_bytes_in_memory=spilled.bytes_in_memory_peak,
            bytes_on_disk=spilled.bytes_on_disk,
            peak_bytes_on_disk=spilled.bytes_on_disk_peak,
        )

    def _append(self, item: DataBatch | Control) -> None:
        self.queue.put(item)
        if len(self.queue) == 1 and self._on_ready is not None:
            self._on_ready()


class FeedbackLog:
    """Logs what feedback ports bring, until each has brought the barrier back.

    Of a port in memory the batches wait in a queue of its own, made by ``make_queue``: in memory, where they mostly
    are those that are handled anyway, and on disk beyond what memory is given to feedback. What comes through a
    topic lies there already: of it the range is logged.

    Feedback that belongs to a checkpoint: what comes between a head's snapshot and the barrier's return.
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
            port.stop_log()
            if port.index not in early:
                log = self._logs[port.index] = self._new_log(port)
                port.start_log(log)

    def barrier_returned(self, port: Port, barrier: CheckpointBarrier) -> None:
        """A feedback port has brought a barrier back."""
        if self._barrier is None or self._barrier.checkpoint != barrier.checkpoint:
            # The barrier came round before this head has taken its own snapshot: nothing to log here. What
            # comes behind it would be in that snapshot, and come again from those who have taken theirs.
            self._returned_early.setdefault(barrier.checkpoint, set()).add(port.index)
            port.block()
        else:
            port.stop_log()
            if port.index in self._logs:
                self._logs[port.index].barrier_returned()

    def drop(self) -> None:
        """The checkpoint is given up: forget what was logged, and log no more until the barrier is back."""
        self._forget()
        for port in self._ports:
            if port.log is not None:
                port.start_log(_Nothing())

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

    def __init__(self, supply: TopicSupply, restored: SpillQueue | None) -> None:
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
        return _FeedbackFrames(batches, self._ranges) if batches is not None or self._ranges else None

    def close(self) -> None:
        if self._batches is not None:
            self._batches.release()


@final
class _Nothing:
    """A log that keeps nothing."""

    def put(self, item: DataBatch | Control) -> None:
        pass


@final
class _FeedbackFrames(Deferred):
    """Frames of batches, if there are any, then those of ranges."""

    def __init__(self, batches: Deferred | None, ranges: Sequence[bytes]) -> None:
        self._batches = batches
        self._ranges = ranges

    def frames(self) -> Iterator[bytes]:
        return iter(self._ranges) if self._batches is None else chain(self._batches.frames(), self._ranges)

    def release(self) -> None:
        if self._batches is not None:
            self._batches.release()


def _supply_of(port: Port) -> TopicSupply | None:
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


_KIND: Final = "topic range"

# Begins a run in each partition: it brings nothing, and neither does a range that ends behind it.
_START_SEQUENCE: Final = 0

_CHOICES: Final = (
    "the topic's retention has taken it, or the topic was created anew. Begin anew (restore=None), or go on from a "
    "checkpoint whose feedback is still there; and let the topic keep records for longer than a job may stand still"
)


class Point(NamedTuple):
    """A record of one producer in a partition, or where its next one will lie at the earliest.

    Ranges of a feedback topic: what a snapshot says of feedback that lies there.

    >>> lying = TopicRange("loop", "run-1", producer=0, partition=2, start=Point(10, 4), stop=Point(30, 9))
    >>> TopicRange.of(lying.plain()) == lying, TopicRange.of(("idle",))
    (True, None)
    """

    offset: int
    sequence: int
    """Its number among those of this producer there."""

    @property
    def behind(self) -> Point:
        """The point behind a record that lies here."""
        return Point(self.offset + 1, self.sequence + 1)


@final
@dataclass(frozen=True, slots=True)
class TopicRange:
    """What one producer of one run has fed back to one head, from ``start`` to before ``stop``."""

    topic: str
    """Its name: the same topic may be found at another address later."""
    run: str
    producer: int
    partition: int
    start: Point
    stop: Point

    @property
    def is_empty(self) -> bool:
        """Whether nothing can lie in it."""
        return self.stop.sequence <= max(self.start.sequence, _START_SEQUENCE + 1)

    def plain(self) -> tuple[Any, ...]:
        """As an entry among those of a queue."""
        return (_KIND, self.topic, self.run, self.producer, self.partition, *self.start, *self.stop)

    @classmethod
    def of(cls, entry: Any) -> TopicRange | None:
        """The range that ``plain`` gave; None for another entry."""
        match entry:
            case [
                kind,
                str() as topic,
                str() as run,
                int() as producer,
                int() as partition,
                int() as offset,
                int() as sequence,
                int() as stop_offset,
                int() as stop_sequence,
            ] if kind == _KIND:
                return cls(
                    topic,
                    run,
                    producer,
                    partition,
                    Point(offset, sequence),
                    Point(stop_offset, stop_sequence),
                )
        return None


def check_is_there(lying: TopicRange, topic: Topic, description: TopicDescription | None) -> None:
    """Raise CheckpointError unless the topic, None if it is not there at all, has the offsets of a range."""
    if lying.topic != topic.name:
        raise CheckpointError(
            f"expected the topic {lying.topic!r}, in which feedback lies that the checkpoint goes on with, given "
            f"{topic.url}; feed back through the same topic again, or begin anew (restore=None)"
        )
    start, stop = lying.start.offset, lying.stop.offset
    ends = None if description is None else description.offsets.get(lying.partition)
    # The barrier at its stop is in the topic, too.
    if ends is None or not (ends[0] <= start and stop < ends[1]):
        given = "none of them" if ends is None or ends[0] == ends[1] else f"{ends[0]} to {ends[1] - 1}"
        raise CheckpointError(
            f"{topic.url}, partition {lying.partition}: expected the offsets {start} to {stop}, where feedback lies "
            f"that the checkpoint goes on with, given {given}; {_CHOICES}"
        )


def missing_records(lying: TopicRange, topic: Topic, following: int) -> CheckpointError:
    """The error for a range that is not complete; ``following`` is the number of the first record that is missing."""
    return CheckpointError(
        f"{Origin(topic.url, lying.partition, lying.stop.offset)}: expected the records {lying.start.sequence} to "
        f"{lying.stop.sequence - 1} of producer {lying.producer} in run {lying.run!r} before it (from offset "
        f"{lying.start.offset} on), with which the checkpoint goes on, given none of number {following}; {_CHOICES}"
    )


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What the plan of a job gives to a boundary operator, before the operator is opened."""

    feedback_channels: Sequence[FeedbackChannel]
    """The feedback channels that its task reads."""
    make_spill_queue: Callable[[], SpillQueue]
    """Makes a queue with the limits of the loop's feedback."""
    make_replay_cache: Callable[[int], ReplayCache]
    """Makes a cache with so many bytes in memory, and the limits of the loop on disk."""


class AttachedBoundary(Boundary):
    """Base of the boundary operators that need something of the plan: channels, queues or caches."""

    def attach(self, surroundings: Surroundings) -> None:
        """Take over what the plan gives; called once, before ``open``."""
        raise NotImplementedError
