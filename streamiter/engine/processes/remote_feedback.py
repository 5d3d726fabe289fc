"""A feedback channel whose ends are in two processes.

The producer's half is a :class:`DepartingFeedback`. It never blocks: feedback that the head's half has no room for
waits in a queue, which continues on the disk of the producer. It reports when the first batch has gone to disk, and
when none is left. The head's half is an :class:`ArrivingFeedback`, a ``FeedbackChannel`` that reports the items that
the head has taken. It spills while either half does, so the head reports the overload of both to its loop.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping
from typing import final

from streamiter.engine.graph.channels import Intake
from streamiter.engine.graph.feedback import FeedbackChannel
from streamiter.engine.plan.job_settings import ChannelLimits
from streamiter.engine.processes.frames import BATCH, TAKEN, Taken
from streamiter.engine.processes.link import ProcessLink
from streamiter.engine.processes.remote_channel import TIMES_RECORDS, ArrivingChannel, DepartingChannel
from streamiter.engine.storage.disk_queue import SpillQueue
from streamiter.values.deferred import PlainValue
from streamiter.values.records import Control, DataBatch


@final
class DepartingFeedback:
    """The producer's half, which a ``FeedbackWriter`` uses. ``queue`` has the limits of the loop."""

    def __init__(self, name: str, link: ProcessLink, number: int, queue: SpillQueue) -> None:
        self.name = name
        self.queue = queue
        self._way = _FeedbackWay(self, link, number)
        queue.on_limit = lambda: link.report_later(number, self.report)
        self._queued_records = self._last_epoch = 0
        self._is_closed = False

    @property
    def is_spilling(self) -> bool:
        """Whether more feedback waits in this process than fits into the memory limit."""
        return self.queue.bytes_on_disk > 0

    def report(self) -> Taken:
        """Return whether feedback waits on disk; then the data of the loop is throttled in all processes."""
        return Taken(0, 0, 0, 0, makes_way=False, shuts_intakes=self.is_spilling)

    def put(self, batch: DataBatch) -> None:
        """Send a batch, or let it wait; no effect after :meth:`close`.

        Raises ``PlainDataError`` for a batch that is not plain data, and ``LoopOverflow`` above the disk limit.
        """
        if self._is_closed:
            return
        if len(self.queue) or not self._way.try_put(batch):
            self._way.check(batch)  # Later, the error would not belong to a step.
            self.queue.put(batch)
            self._queued_records += len(batch.records)
        self._last_epoch = max(self._last_epoch, batch.epoch)

    def put_control(self, control: Control) -> None:
        """Send a control record behind all earlier items; no effect after :meth:`close`."""
        if self._is_closed:
            return
        if len(self.queue):
            self.queue.put(control)
        else:
            self._way.put_control(control)

    def send_waiting(self) -> None:
        """Send waiting items while there is room."""
        while len(self.queue):
            item = self.queue.peek()
            if isinstance(item, Control):
                self._way.put_control(item)
            elif self._way.try_put(item):
                self._queued_records -= len(item.records)
            else:
                return
            self.queue.take()

    def close(self) -> None:
        """Close the files; feedback is dropped from now on."""
        self._is_closed, self._queued_records = True, 0
        self.queue.close()

    def waiting(self) -> Mapping[str, int]:
        """Return for the statistics of the loop the feedback that was not sent yet."""
        return {
            "epoch_reached": self._last_epoch,
            "fed_back_records": self._queued_records,
            "waiting_records": self._queued_records,
            "bytes_in_memory": self.queue.bytes_in_memory,
            "bytes_on_disk": self.queue.bytes_on_disk,
        }


@final
class _FeedbackWay(DepartingChannel):
    """The window of feedback that is on its way to the head, or waits there."""

    def __init__(self, feedback: DepartingFeedback, link: ProcessLink, number: int) -> None:
        super().__init__(feedback.name, link, number)
        self._feedback = feedback

    def _wake_producer(self) -> None:
        self._feedback.send_waiting()


@final
class ArrivingFeedback(FeedbackChannel):
    """The head's half. ``queue`` holds no more than one window of a channel, behind restored feedback."""

    is_at_hand = False

    def __init__(self, name: str, link: ProcessLink, number: int, queue: SpillQueue) -> None:
        super().__init__(name, queue)
        self._link = link
        self._number = number
        self._waiting: deque[tuple[int, int]] = deque()
        """The records and the size of each item in the queue."""
        self._taken_records = self._taken_bytes = 0
        self._spills_before = False
        """Whether feedback waits on the disk of the producer."""
        self._on_limit: Callable[[], None] = lambda: None
        link.attach(number, self.receive)

    @property
    def is_spilling(self) -> bool:
        return self._spills_before or super().is_spilling

    def call_at_limit(self, call: Callable[[], None]) -> None:
        super().call_at_limit(call)
        self._on_limit = call

    def receive(self, kind: int, body: memoryview) -> None:
        """Take a batch, a control record or a report of the producer's half."""
        if kind == TAKEN:
            self._spills_before = Taken.decode(body).shuts_intakes
            self._on_limit()
            return
        if kind == BATCH:
            batch, size_bytes = self._link.encoding.decode_batch(body)
            self._waiting.append((len(batch.records), size_bytes))
            self.put(batch)
        else:
            self._waiting.append((0, 0))
            self.put_control(self._link.encoding.decode_control(body))
        self._count_taken()  # It is dropped if the channel is closed.

    def take(self) -> DataBatch | Control:
        item = super().take()
        self._count_taken()
        return item

    def restore(self, items: Iterable[PlainValue], ranges: Iterable[PlainValue]) -> None:
        super().restore(items, ranges)
        self._waiting.extendleft([(0, 0)] * self._restored)  # They take no room of the window.

    def close(self) -> None:
        """Close the files; feedback is dropped from now on, and frees its room."""
        super().close()
        self._count_taken()

    def report(self) -> Taken:
        """Return the totals of items taken."""
        return Taken(self._taken_records, self._taken_bytes, 0, 0, makes_way=False, shuts_intakes=False)

    def _count_taken(self) -> None:
        """Count the items that are no longer in the queue."""
        while len(self._waiting) > self.waiting:
            records, size_bytes = self._waiting.popleft()
            self._taken_records += records
            self._taken_bytes += size_bytes
            self._link.report_later(self._number, self.report)


@final
class LinkChannels:
    """Makes the halves of the channels to and from another process, at the link to it (``RemoteChannels``)."""

    def __init__(self, link: ProcessLink) -> None:
        self._link = link

    def departing(self, number: int, name: str, limits: ChannelLimits, *, neighbours: int) -> DepartingChannel:
        """Return the producer's half of the channel with this number."""
        records = limits.records * TIMES_RECORDS
        return DepartingChannel(
            name, self._link, number, limit_records=records, limit_bytes=limits.size_bytes, neighbours=neighbours
        )

    def arriving(self, number: int, name: str, limits: ChannelLimits) -> tuple[ArrivingChannel, Intake]:
        """Return the consumer's half of the channel with this number, and the intake of its sources."""
        channel = ArrivingChannel(name, self._link, number)
        return channel, channel.intake

    def departing_feedback(self, number: int, name: str, queue: SpillQueue) -> DepartingFeedback:
        """Return the producer's half of the feedback channel with this number."""
        return DepartingFeedback(name, self._link, number, queue)

    def arriving_feedback(self, number: int, name: str, queue: SpillQueue) -> ArrivingFeedback:
        """Return the head's half of the feedback channel with this number."""
        return ArrivingFeedback(name, self._link, number, queue)
