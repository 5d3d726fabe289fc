"""Feedback that a head has received and does not admit yet: it is set aside, in the logs of its ports."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, final

from streamiter.engine.inbox.port_log import Port
from streamiter.values.records import Batch, DataBatch

if TYPE_CHECKING:
    from streamiter.engine.storage.disk_queue import SpillQueue, SpillStatistics


@final
class FeedbackAside:
    """The feedback of an inbox that is set aside, and who is told of it. Without ``received``, nobody is."""

    def __init__(self, ports: Sequence[Port], make_queue: Callable[[], SpillQueue] | None) -> None:
        """``ports`` bring feedback. ``make_queue`` makes a queue for what one of them sets aside."""
        self._ports = ports
        self._make_queue = make_queue
        self.received: Callable[[int, int], bool] | None = None
        """Takes the epoch and the number of records of feedback that is set aside; returns whether it is kept. Only the
        inbox sets it."""
        self.count: Callable[[Batch], object] = len
        """Counts feedback that is set aside as input of the operator. The task sets it."""

    def begin(self, received: Callable[[int, int], bool]) -> None:
        """Set feedback aside that is not admitted. ``received`` gets its epoch and the number of its records.

        If it returns False, the feedback is dropped: the iteration has ended before that epoch.

        Control records of feedback pass it: the loop must know that an epoch was received before it is admitted.
        """
        self.received = received
        for port in self._ports:
            assert self._make_queue is not None
            port.set_aside_by_epoch(self._make_queue)

    def takes(self, batch: DataBatch) -> bool:
        """Tell of a batch that is set aside; return whether it is kept."""
        if self.received is None:
            return True
        self.count(batch.records)
        return self.received(batch.epoch, len(batch.records))

    def drop(self) -> None:
        """Keep nothing more, and count nothing more."""
        self.received, self.count = lambda epoch, records: False, len

    def take(self, up_to_epoch: int) -> DataBatch | None:
        """Take the next feedback of these epochs that was set aside, by (epoch, port); None if there is none."""
        first, lowest = None, up_to_epoch + 1
        for port in self._ports:
            if port.held or (port.later is not None and port.later.counts):
                epoch = port.first_epoch if port.held or port.later is None else min(port.later.counts)
                if epoch is not None and epoch < lowest:
                    first, lowest = port, epoch
        if first is None:
            return None
        if not first.held and first.later is not None and first.later.counts[lowest] == 1:
            return first.later.take_next(lowest)[0]
        first.load(lowest)
        batch = first.take()
        assert isinstance(batch, DataBatch)
        return batch

    def statistics(self) -> list[SpillStatistics]:
        """Return the numbers of the queues."""
        return [port.later.statistics() for port in self._ports if port.later is not None]
