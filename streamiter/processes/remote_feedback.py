"""A feedback channel whose ends are in two processes.

The producer's half is a :class:`DepartingFeedback`. It never blocks: feedback that the head's half has no room for
waits in a queue, which continues on the disk of the producer. The head's half is an :class:`ArrivingFeedback`, a
``FeedbackChannel`` that reports the items that the head has taken.
"""

from __future__ import annotations

from collections import deque
from typing import final

from streamiter.checkpoints.disk_queue import SpillQueue
from streamiter.processes.frames import BATCH, Taken
from streamiter.processes.link import ProcessLink
from streamiter.processes.remote_channel import DepartingChannel
from streamiter.records import Control, DataBatch
from streamiter.runtime.feedback import FeedbackChannel, FeedbackStatistics


@final
class DepartingFeedback:
    """The producer's half, which a ``FeedbackWriter`` uses. The limits of the loop are those of ``queue``."""

    def __init__(self, name: str, link: ProcessLink, number: int, queue: SpillQueue) -> None:
        self.name = name
        self.queue = queue
        self._link = link
        self._way = _FeedbackWay(self, link, number)
        self._queued_records = self._peak_records = self._total_records = self._last_epoch = 0
        self._is_closed = False

    @property
    def is_spilling(self) -> bool:
        """Whether more feedback waits in this process than fits into the memory limit."""
        return self.queue.bytes_on_disk > 0

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
        self._total_records += len(batch.records)
        self._last_epoch = max(self._last_epoch, batch.epoch)
        self._peak_records = max(self._peak_records, self._queued_records + self._way.records)

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

    def statistics(self) -> FeedbackStatistics:
        """Return the numbers of both halves: records waiting here, under way, and at the head."""
        spilled, way = self.queue.statistics(), self._way.statistics()
        return FeedbackStatistics(
            name=self.name,
            records=self._queued_records + self._way.records,
            peak_records=self._peak_records,
            total_records=self._total_records,
            last_epoch=self._last_epoch,
            bytes_in_memory=spilled.bytes_in_memory + way.size_bytes,
            peak_bytes_in_memory=spilled.bytes_in_memory_peak + way.peak_bytes,
            bytes_on_disk=spilled.bytes_on_disk,
            peak_bytes_on_disk=spilled.bytes_on_disk_peak,
        )


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
    """The head's half. ``queue`` holds no more than one window of a channel."""

    def __init__(self, name: str, link: ProcessLink, number: int, queue: SpillQueue) -> None:
        super().__init__(name, queue)
        self._link = link
        self._number = number
        self._waiting: deque[tuple[int, int]] = deque()
        """The records and the size of each item in the queue."""
        self._taken_records = self._taken_bytes = 0
        link.attach(number, self.receive)

    def receive(self, kind: int, body: memoryview) -> None:
        """Take a batch or a control record of the producer's half."""
        if kind == BATCH:
            batch, size_bytes = self._link.encoding.decode_batch(body)
            self._waiting.append((len(batch.records), size_bytes))
            self.put(batch)
        else:
            self._waiting.append((0, 0))
            self.put_control(self._link.encoding.decode_control(body))
        if self._closed:
            self._count_taken()

    def take(self) -> DataBatch | Control:
        item = super().take()
        self._count_taken()
        return item

    def close(self) -> None:
        """Close the files; feedback is dropped from now on, and frees its room."""
        super().close()
        while self._waiting:
            self._count_taken()

    def report(self) -> Taken:
        """Return the totals of items taken."""
        return Taken(self._taken_records, self._taken_bytes, 0, 0, makes_way=False, shuts_intakes=False)

    def _count_taken(self) -> None:
        records, size_bytes = self._waiting.popleft()
        self._taken_records += records
        self._taken_bytes += size_bytes
        self._link.report_later(self._number, self.report)
