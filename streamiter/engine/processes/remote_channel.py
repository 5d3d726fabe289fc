"""A channel whose ends are in two processes: two halves, joined by a link; and the same for feedback.

Both halves are channels, so lanes, ports and inboxes use them as any other. The producer's half is a
:class:`DepartingChannel`. It counts the items that are not taken yet, and so admits batches by the rule of
``Channel``. The consumer's half is an :class:`ArrivingChannel`. It has the items, and reports the totals of items taken
and set aside, once in a turn of the event loop.

The producer's half of feedback is a :class:`DepartingFeedback`. It never blocks: feedback that the head's half has no
room for waits in a queue, which continues on the disk of the producer. It reports when the first batch has gone to
disk, and when none is left. The head's half is an :class:`ArrivingFeedback`, a ``FeedbackChannel`` that reports the
items that the head has taken. It spills while either half does, so the head reports the overload of both to its loop.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Final, final

from streamiter.engine.graph.channels import LIMIT_BYTES, LIMIT_RECORDS, Channel, Intake
from streamiter.engine.graph.feedback import FeedbackChannel
from streamiter.engine.plan.job_settings import ChannelLimits
from streamiter.engine.processes.frames import BATCH, CONTROL, TAKEN, Taken
from streamiter.engine.processes.link import ProcessLink, check_length
from streamiter.engine.storage.disk_batches import errors_with_name
from streamiter.engine.storage.disk_queue import SpillQueue
from streamiter.errors import InternalError, PlainDataError
from streamiter.values.deferred import PlainValue
from streamiter.values.records import WATERMARKS, Control, DataBatch

# A channel between processes has room for eight times the records of a channel within one, because batches are on their
# way while the consumer handles others. Measured with columns of 10,000 records: 101 instead of 168 µs for a batch. The
# limit in bytes is the limit of all channels.
TIMES_RECORDS: Final = 8
# Up to eight channels into a task have the full limits. More channels share the limits of eight, so that the memory of
# a task does not grow with the number of processes.
_FULL_WINDOWS: Final = 8
# Enough for a few batches under way, which are small where there are many channels.
_RECORDS_MIN: Final = 256
_BYTES_MIN: Final = 64 << 10


def window(
    channels: int, limit_records: int = LIMIT_RECORDS * TIMES_RECORDS, limit_bytes: int = LIMIT_BYTES
) -> tuple[int, int]:
    """Return the limits in records and bytes of a channel, if a task has ``channels`` from other processes.

    >>> window(8), window(16), window(1024)
    ((65536, 4194304), (32768, 2097152), (512, 65536))
    """
    share = max(channels, _FULL_WINDOWS)
    return (
        min(limit_records, max(_RECORDS_MIN, limit_records * _FULL_WINDOWS // share)),
        min(limit_bytes, max(_BYTES_MIN, limit_bytes * _FULL_WINDOWS // share)),
    )


class DepartingChannel(Channel):
    """The producer's half. It sends what it admits; its statistics count items that the consumer has not taken.

    ``shut_intakes`` names sources, and channels from other processes (``ArrivingChannel.intake``), before the producer.
    They are shut while too much is set aside behind the channel, or while a channel further downstream says so.

    A batch that is not plain data raises ``PlainDataError`` with the name of the channel, and is not counted.
    """

    def __init__(
        self,
        name: str,
        link: ProcessLink,
        number: int,
        *,
        limit_records: int = LIMIT_RECORDS * TIMES_RECORDS,
        limit_bytes: int = LIMIT_BYTES,
        neighbours: int = 1,
    ) -> None:
        """``neighbours``: the number of channels from other processes to the consumer, which share the limits."""
        records, size_bytes = window(neighbours, limit_records, limit_bytes)
        super().__init__(name, limit_records=records, limit_bytes=size_bytes)
        self._windows = math.ceil(max(limit_records / records, limit_bytes / size_bytes))
        self._link = link
        self._number = number
        self._last_watermark: tuple[type[Control], int] | None = None
        """The class of the watermark in the last frame, and its place in the link, if it has one."""
        link.attach(number, self.receive)

    def put_control(self, control: Control) -> None:
        body = self._link.encoding.encode_control(control)
        last = self._last_watermark
        if last is not None and type(control) is last[0] and self._link.replace(last[1], body):
            return
        place = self._link.send(self._number, CONTROL, [body])
        self._last_watermark = (type(control), place) if isinstance(control, WATERMARKS) else None

    def shut_intakes(self, intakes: Sequence[Intake], way: int) -> None:
        # The other channels on the way may have the full limits.
        super().shut_intakes(intakes, way * self._windows)

    def receive(self, kind: int, body: memoryview) -> None:
        """Take a report of the consumer's half."""
        if kind != TAKEN:
            raise InternalError(f"channel {self.name}: expected a report of its consumer, given a frame of kind {kind}")
        taken = Taken.decode(body)
        self.records = self._total_records - taken.records
        self._size_bytes = self._total_bytes - taken.size_bytes
        self._aside_records, self._aside_bytes = taken.aside_records, taken.aside_bytes
        self._makes_way = taken.makes_way
        self._is_overfull_downstream = taken.shuts_intakes
        self._check_intakes()
        self._wake_producer()

    def check(self, batch: DataBatch) -> None:
        """Raise ``PlainDataError`` for a batch that cannot be sent."""
        with errors_with_name(f"{self.name}, in another process"):
            check_length(self._link.encoding.encode_batch(batch, 0))

    def _admit(self, batch: DataBatch, count: int, size_bytes: int) -> None:
        try:  # As errors_with_name, which takes a tenth of the time of a small batch.
            self._link.send(self._number, BATCH, self._link.encoding.encode_batch(batch, size_bytes))
        except PlainDataError as error:
            raise PlainDataError(f"{self.name}, in another process: {error}") from error
        self._last_watermark = None
        super()._admit(batch, count, size_bytes)

    def _append(self, item: DataBatch | Control) -> None:
        self._sizes.clear()  # The other half has the items and their sizes.


@final
class ArrivingChannel(Channel):
    """The consumer's half. It admits all that arrives, because the producer's half keeps the limits."""

    def __init__(self, name: str, link: ProcessLink, number: int) -> None:
        super().__init__(name)
        self._link = link
        self._number = number
        self.intake: Intake = _RemoteIntake(self)
        """Stands for all sources before the channel, for ``shut_intakes`` of channels further downstream."""
        link.attach(number, self.receive)

    def receive(self, kind: int, body: memoryview) -> None:
        """Take a batch or a control record of the producer's half."""
        if kind == BATCH:
            batch, size_bytes = self._link.encoding.decode_batch(body)
            self._admit(batch, len(batch.records), size_bytes)
        elif kind == CONTROL:
            self.put_control(self._link.encoding.decode_control(body))
        else:
            raise InternalError(f"channel {self.name}: expected an item of its producer, given a frame of kind {kind}")

    def take(self) -> DataBatch | Control:
        item = super().take()
        self.report_later()
        return item

    def report(self) -> Taken:
        """Return the totals of items taken and set aside."""
        return Taken(
            self._total_records - self.records,
            self._total_bytes - self._size_bytes,
            self._aside_records,
            self._aside_bytes,
            self._makes_way,
            self.intake.is_shut,
        )

    def report_later(self) -> None:
        """Send a report to the producer's half at the end of this turn."""
        self._link.report_later(self._number, self.report)

    def _wake_producer(self) -> None:
        self.report_later()

    def _check_intakes(self) -> None:
        self.report_later()  # The producer's half decides; it knows the sources.


@final
class _RemoteIntake(Intake):
    """The intake of sources in another process."""

    def __init__(self, channel: ArrivingChannel) -> None:
        super().__init__()
        self._channel = channel

    def shut(self) -> None:
        super().shut()
        self._channel.report_later()

    def open(self) -> None:
        super().open()
        self._channel.report_later()


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
