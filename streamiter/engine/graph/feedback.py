"""The channel of a feedback edge, and the feedback that belongs to a checkpoint.

A *feedback edge* closes a loop: it goes from the end of the body back to the *head*, the first step of the loop. Its
channel, :class:`FeedbackChannel`, never blocks its producer; beyond a limit in memory it continues on disk. So a loop
cannot deadlock.

A checkpoint has feedback, too (:mod:`~streamiter.engine.inbox.alignment`): the batches themselves, or, for feedback
through a topic, the :class:`TopicRange` where they are stored in the topic. The channel logs both while they are taken,
and a restored channel begins with them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, NamedTuple, Protocol, final

from streamiter.engine.storage.disk_queue import SpillQueue, SpillStatistics
from streamiter.engine.storage.replay_cache import ReplayCache
from streamiter.errors import CheckpointError, GraphError
from streamiter.operators.operator import Boundary
from streamiter.operators.output import Origin
from streamiter.topics.topic import Topic, TopicDescription
from streamiter.values.deferred import Deferred, PlainValue
from streamiter.values.helpers.closing import close_now
from streamiter.values.numbers import whole_number
from streamiter.values.records import CheckpointBarrier, Control, DataBatch

if TYPE_CHECKING:
    from streamiter.values.plain_data import PlainData


@dataclass(frozen=True, slots=True)
class FeedbackLimits:
    """How much feedback may wait in one channel of a feedback edge: from one subtask to one head.

    A forward edge has one channel for each head; an edge that repartitions has one channel from each subtask to each
    head. Each channel may hold as much. The same limits hold for each queue of records whose epoch is not due.
    """

    memory_bytes: int = 64 << 20
    """Above this size feedback goes to disk, and sources are throttled to one batch in sixteen. 64 MiB: a few seconds
    of a fast loop, and little memory for a machine that trains."""
    disk_bytes: int = 8 << 30
    """Above this size the job fails. 8 GiB: minutes of a loop that has run away."""
    directory: str | None = None
    """The folder for feedback on disk; None is the system's folder for temporary files."""

    def __post_init__(self) -> None:
        for name, limit in (("memory_bytes", self.memory_bytes), ("disk_bytes", self.disk_bytes)):
            whole_number(f"FeedbackLimits({name}=)", limit, 0, error=GraphError, remedy="it is a number of bytes")


@dataclass(frozen=True, slots=True)
class FeedbackStatistics:
    """The numbers of a feedback channel at one moment."""

    name: str
    """The upstream subtask and the head."""
    records: int
    """Records that wait in the channel, or in the topic before it."""
    peak_records: int
    """The highest ``records``."""
    total_records: int
    """Records fed back since the start."""
    last_epoch: int
    """The highest epoch of these records; 0 before the first one."""
    bytes_in_memory: int
    """Estimated bytes of the batches that wait in memory."""
    peak_bytes_in_memory: int
    """The highest ``bytes_in_memory``."""
    bytes_on_disk: int
    """Size of the files with the other batches."""
    peak_bytes_on_disk: int
    """The highest ``bytes_on_disk``."""


class WritableFeedback(Protocol):
    """The end of a feedback channel that its producer uses; ``put`` never waits."""

    def put(self, batch: DataBatch) -> None: ...
    def put_control(self, control: Control) -> None: ...


class FeedbackDeparture(WritableFeedback, Protocol):
    """The producer's half of a feedback channel that leads to another process."""

    def waiting(self) -> Mapping[str, int]:
        """Return for the statistics of the loop the feedback that has not left this process."""

    def close(self) -> None:
        """Close the files; feedback is dropped from now on."""


class ReturnPath(Protocol):
    """The way of feedback into a channel of a head, where it goes through a topic."""

    @property
    def is_behind(self) -> bool:
        """Whether more feedback waits in the topic than fits into the memory limit."""

    def call_at_limit(self, call: Callable[[], None]) -> None:
        """Call ``call`` whenever ``is_behind`` may have changed."""

    def under_way(self, received: int) -> int:
        """Return the records in the topic that are not among the ``received`` ones."""

    def taken(self) -> None:
        """Note that an item was taken from the channel."""

    def closed(self) -> None:
        """Note that the channel is closed."""

    def restore(self, ranges: Iterable[TopicRange]) -> None:
        """Bring these ranges into the channel before all other feedback."""

    def start_log(self) -> None:
        """Note the place in the topic of the item that is taken next."""

    def end_log(self) -> Sequence[TopicRange]:
        """Return the ranges of the topic taken since the log was started, without the last item."""


LoggedFeedback = tuple[Deferred | None, Sequence[PlainValue]]
"""The feedback of one channel in a checkpoint: items, if there are any, and ranges of a topic as plain data."""


class FeedbackChannel:
    """A channel that continues on disk, with one producer and one consumer in one event loop.

    ``put`` never waits, so a loop cannot deadlock. After the end of the head, feedback is dropped.
    """

    is_at_hand = True
    """Whether its producer is in this process."""

    def __init__(self, name: str, queue: SpillQueue, return_path: ReturnPath | None = None) -> None:
        """``return_path``: the way of the feedback into the channel, if it goes through a topic."""
        self.name = name
        self.queue = queue
        self.records = self.waiting = 0
        """The records, and the batches and control records, that wait."""
        self.total_records = self._peak_records = 0
        """``total_records`` were fed back since the start."""
        self._last_epoch = 0
        self._closed = False
        self._on_ready: Callable[[], None] | None = None
        self.return_path = return_path
        self._restored = 0
        """The items at its front that a checkpoint had."""
        self._log: SpillQueue | None = None
        """Gets the items that are taken, while a checkpoint needs them."""
        self.hand_over: Callable[[DataBatch | Control], bool] | None = None
        """Handles an item in the place of the consumer, if the consumer waits for it; returns whether it has. While the
        channel logs its items, they go through the channel."""

    @property
    def is_spilling(self) -> bool:
        """Whether more feedback waits than fits into the memory limit."""
        return self.queue.bytes_on_disk > 0 or (self.return_path is not None and self.return_path.is_behind)

    def attach(self, on_ready: Callable[[], None]) -> None:
        """Call ``on_ready`` whenever an item is put into the empty channel."""
        self._on_ready = on_ready

    def call_at_limit(self, call: Callable[[], None]) -> None:
        """Call ``call`` whenever ``is_spilling`` may have changed."""
        self.queue.on_limit = call
        if self.return_path is not None:
            self.return_path.call_at_limit(call)

    def put(self, batch: DataBatch) -> None:
        """Add a batch; no effect after :meth:`close`."""
        if self._closed:
            return
        count = len(batch.records)
        self.total_records += count
        if self.records + count > self._peak_records:
            self._peak_records = self.records + count
        if batch.epoch > self._last_epoch:
            self._last_epoch = batch.epoch
        if self.hand_over is not None and not self.waiting and self._log is None and self.hand_over(batch):
            return
        self.queue.put(batch)
        self.records += count
        self.waiting += 1
        if self.waiting == 1 and self._on_ready is not None:
            self._on_ready()

    def put_control(self, control: Control) -> None:
        """Add a control record behind all earlier items; no effect after :meth:`close`."""
        if self._closed:
            return
        if self.hand_over is not None and not self.waiting and self._log is None and self.hand_over(control):
            return
        self.queue.put(control)
        self.waiting += 1
        if self.waiting == 1 and self._on_ready is not None:
            self._on_ready()

    def peek(self) -> DataBatch | Control | None:
        if memory := self.queue.memory:
            return memory[0][0]
        return self.queue.peek() if self.waiting else None

    def take(self) -> DataBatch | Control:
        item = self.queue.take()
        self.waiting -= 1
        if isinstance(item, DataBatch):
            self.records -= len(item.records)
        if self.return_path is not None or self._log is not None or self._restored:
            self._note_taken(item)
        return item

    def _note_taken(self, item: DataBatch | Control) -> None:
        """Log an item that no topic has, unless it is a barrier, and note that it was taken."""
        in_topic = self.return_path is not None and not self._restored
        if self._restored:
            self._restored -= 1
        elif self.return_path is not None:
            self.return_path.taken()
        if self._log is not None and not in_topic and not isinstance(item, CheckpointBarrier):
            self._log.put(item)

    # -- for checkpoints ---------------------------------------------------------------------------------

    def restore(self, items: Iterable[PlainValue], ranges: Iterable[PlainValue]) -> None:
        """Begin with the logged feedback of a checkpoint: its items, then its ranges of a topic.

        Raises CheckpointError for ranges if the loop does not use a topic any more.
        """
        for entry in items:
            before = self.queue.records
            self.queue.put_plain(entry)
            self.records += self.queue.records - before
            self.waiting += 1
            self._restored += 1
        self._peak_records = max(self._peak_records, self.records)
        in_topic = [TopicRange.from_plain(plain) for plain in ranges]
        if self.return_path is not None:
            self.return_path.restore(in_topic)
        elif in_topic:
            raise CheckpointError(
                f"{self.name}: expected feedback through the topic {in_topic[0].topic!r}, where the checkpoint has "
                "feedback, given a loop in memory; feed back through that topic again, or start without state "
                "(restore=None)"
            )

    def start_log(self, log: SpillQueue) -> None:
        """Log what is taken from now on: items in this queue, or their ranges in the topic."""
        self._log = log
        if self.return_path is not None:
            self.return_path.start_log()

    def end_log(self) -> LoggedFeedback | None:
        """End the log before the item that was taken last; return its content, if it has any, and close it."""
        log, self._log = self._log, None
        if log is None:
            return None
        items = log.snapshot() if len(log) else None
        log.close()
        ranges = () if self.return_path is None else self.return_path.end_log()
        return (items, [topic_range.plain() for topic_range in ranges]) if items is not None or ranges else None

    def close_log(self) -> None:
        """Log nothing more, and drop what was logged."""
        log, self._log = self._log, None
        if log is not None:
            log.close()

    def close(self) -> None:
        """Close the files; feedback is dropped from now on."""
        self._closed = True
        self.records = self.waiting = self._restored = 0
        path_closed = [] if self.return_path is None else [self.return_path.closed]
        close_now([self.close_log, self.queue.close, *path_closed])

    def statistics(self) -> FeedbackStatistics:
        """Return the numbers of the channel now."""
        spilled = self.queue.statistics()
        under_way = 0
        if self.return_path is not None and not self._closed:
            under_way = self.return_path.under_way(self.total_records)
        return FeedbackStatistics(
            name=self.name,
            records=self.records + under_way,
            peak_records=max(self._peak_records, self.records + under_way),
            total_records=self.total_records + under_way,
            last_epoch=self._last_epoch,
            bytes_in_memory=spilled.bytes_in_memory,
            peak_bytes_in_memory=spilled.bytes_in_memory_peak,
            bytes_on_disk=spilled.bytes_on_disk,
            peak_bytes_on_disk=spilled.bytes_on_disk_peak,
        )


# The number of the start record of a run in each partition. A range with only this record has no feedback.
_START_SEQUENCE: Final = 0

_CHOICES: Final = (
    "the topic's retention has removed it, or the topic was deleted and created again. Start without state "
    "(restore=None), or resume from a checkpoint whose feedback is still there; and let the topic keep records for "
    "longer than a job may be stopped"
)


class RecordPoint(NamedTuple):
    """The place of a record of one producer in a partition, or the first possible place of its next record."""

    offset: int
    """Its offset in the partition."""
    sequence: int
    """Its number among the records of this producer in the partition."""

    @property
    def behind(self) -> RecordPoint:
        return RecordPoint(self.offset + 1, self.sequence + 1)


@final
@dataclass(frozen=True, slots=True)
class TopicRange:
    """The feedback of one producer of one run to one head in a topic, from ``start`` to before ``stop``.

    >>> first = TopicRange("loop", "run-1", producer=0, partition=2, start=RecordPoint(10, 4), stop=RecordPoint(30, 9))
    >>> TopicRange.from_plain(first.plain()) == first
    True
    """

    topic: str
    """The name of the topic: its address may change."""
    run: str
    """The id of the run."""
    producer: int
    """The number of the subtask that feeds back."""
    partition: int
    """The partition of the topic."""
    start: RecordPoint
    """The first record."""
    stop: RecordPoint
    """The point behind the last record."""

    @property
    def is_empty(self) -> bool:
        """Whether the range has no feedback."""
        return self.stop.sequence <= max(self.start.sequence, _START_SEQUENCE + 1)

    def plain(self) -> tuple[PlainValue, ...]:
        return (self.topic, self.run, self.producer, self.partition, *self.start, *self.stop)

    @classmethod
    def from_plain(cls, plain: PlainValue) -> TopicRange:
        topic, run, producer, partition, *points = plain
        return cls(topic, run, producer, partition, RecordPoint(*points[:2]), RecordPoint(*points[2:]))


def check_range_in_topic(topic_range: TopicRange, topic: Topic, description: TopicDescription | None) -> None:
    """Raise CheckpointError unless the topic has the offsets of a range; no ``description``: the topic is missing."""
    if topic_range.topic != topic.name:
        raise CheckpointError(
            f"expected the topic {topic_range.topic!r}, which has feedback of the checkpoint, given "
            f"{topic.url}; feed back through the same topic again, or start without state (restore=None)"
        )
    start, stop = topic_range.start.offset, topic_range.stop.offset
    ends = None if description is None else description.offsets.get(topic_range.partition)
    # The barrier behind the range is in the topic too.
    if ends is None or not (ends[0] <= start and stop < ends[1]):
        given = "none of them" if ends is None or ends[0] == ends[1] else f"{ends[0]} to {ends[1] - 1}"
        raise CheckpointError(
            f"{topic.url}, partition {topic_range.partition}: expected the offsets {start} to {stop}, where the "
            f"feedback of the checkpoint is, given {given}; {_CHOICES}"
        )


def missing_records_error(topic_range: TopicRange, topic: Topic, following: int) -> CheckpointError:
    """Return the error for an incomplete range; ``following`` is the number of the first missing record."""
    start, stop = topic_range.start, topic_range.stop
    return CheckpointError(
        f"{Origin(topic.url, topic_range.partition, stop.offset)}: expected the records {start.sequence} to "
        f"{stop.sequence - 1} of producer {topic_range.producer} in run {topic_range.run!r} before it (from offset "
        f"{start.offset} on), which the checkpoint needs, given none of number {following}; {_CHOICES}"
    )


def spill_queue(name: str, limits: FeedbackLimits, plain_data: PlainData) -> SpillQueue:
    """Return a new queue with the limits of a loop's feedback."""
    import tempfile  # imported only by jobs: it takes 4 ms

    return SpillQueue(
        name=name,
        plain_data=plain_data,
        memory_limit_bytes=limits.memory_bytes,
        disk_limit_bytes=limits.disk_bytes,
        directory=limits.directory or tempfile.gettempdir(),
    )


class SetAside(Protocol):
    """Feedback that waits in the inbox of a head, because its epoch is not admitted."""

    def begin(self, received: Callable[[int, int], bool | None]) -> None: ...
    def take(self, up_to_epoch: int) -> tuple[DataBatch | None, bool]: ...
    def statistics(self) -> list[SpillStatistics]: ...


class BorderInbox(Protocol):
    """The inbox of an operator at the border of a loop, which decides how far data and feedback may run ahead."""

    def hand_over_feedback(self, complete: Callable[[int], None]) -> None: ...
    def admit_up_to(self, epoch: float) -> None: ...
    @property
    def aside(self) -> SetAside: ...
    @property
    def is_ahead(self) -> bool: ...


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What the plan of a job gives to a boundary operator, before the operator is opened."""

    feedback_channels: Sequence[FeedbackChannel]
    """The feedback channels that its task reads."""
    inbox: BorderInbox
    """The inbox of its task."""
    make_replay_cache: Callable[[int], ReplayCache]
    """Makes a cache with this many bytes in memory, and the limits of the loop on disk."""
    member: int
    """The number of the operator among the members of its loop, in all processes."""


class AttachedBoundary(Boundary):
    """Base of the boundary operators that need something of the plan: a number, channels, queues or caches."""

    surroundings: Surroundings

    def attach(self, surroundings: Surroundings) -> None:
        """Keep what the plan gives; called once, before ``open``."""
        self.surroundings = surroundings
