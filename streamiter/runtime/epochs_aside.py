"""Records of epochs whose turn has not come, kept in epoch order."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from streamiter.checkpoints.spill import SpillQueue, SpillStatistics
from streamiter.deferred import Deferred
from streamiter.records import DataBatch

__all__ = ["EpochsAside"]


class EpochsAside:
    """What an operator with ``epochs_in_order`` has been sent too early; one queue for each port.

    Batches wait in the order they came, which is mostly that of their epochs: then they are taken one by one.
    Where it is not, the whole queue is gone through once, and the epoch is in memory as a whole.
    """

    def __init__(self, make_queue: Callable[[], SpillQueue]) -> None:
        self._make_queue = make_queue
        self._queues: dict[int, SpillQueue] = {}
        self._batches: dict[int, dict[int, int]] = {}
        """By port: how many batches of each epoch wait."""

    def put(self, port: int, batch: DataBatch) -> None:
        """Set a batch aside."""
        self._queue(port).put(batch)
        batches = self._batches[port]
        batches[batch.epoch] = batches.get(batch.epoch, 0) + 1

    def lowest_epoch(self, port: int) -> int | None:
        """The lowest epoch of which something of this port is set aside."""
        return min(self._batches.get(port, ()), default=None)

    def has(self, port: int, epoch: int) -> bool:
        """Whether something of this port and this epoch is set aside."""
        return epoch in self._batches.get(port, ())

    def take_next(self, port: int, epoch: int) -> list[DataBatch]:
        """What came first of one port for this epoch; nothing where nothing is left.

        It is one batch, so that the others stay where they are until they are asked for; where batches of other
        epochs lie before it, it is all of the epoch.
        """
        if not self.has(port, epoch):
            return []
        queue, batches = self._queues[port], self._batches[port]
        first = queue.peek()
        assert isinstance(first, DataBatch)
        if first.epoch != epoch:
            return self._take_from_between(queue, epoch, batches.pop(epoch))
        queue.take()
        batches[epoch] -= 1
        if not batches[epoch]:
            del batches[epoch]
        return [first]

    def _take_from_between(self, queue: SpillQueue, epoch: int, count: int) -> list[DataBatch]:
        """Go through the whole queue once, so that the others keep their order."""
        taken: list[DataBatch] = []
        for _ in range(len(queue)):
            batch = queue.take()
            assert isinstance(batch, DataBatch)
            if batch.epoch == epoch:
                taken.append(batch)
            else:
                queue.put(batch)
        assert len(taken) == count
        return taken

    def snapshot(self) -> list[tuple[int, Deferred, list[tuple[int, int]]]]:
        """All that is set aside, left where it is: port, what waits there, and how many batches of which epochs."""
        return [
            (port, queue.snapshot(), sorted(self._batches[port].items()))
            for port, queue in self._queues.items()
            if len(queue)
        ]

    def restore(self, state: Iterable[tuple[int, Iterable[Any], list[tuple[int, int]]]]) -> None:
        """Take over what ``snapshot`` gave; what waits as decoded frames, which are gone through one by one."""
        for port, frames, batches in state:
            self._queue(port).refill(frames)
            self._batches[port] = dict(batches)

    def statistics(self) -> list[SpillStatistics]:
        """Of each queue in use."""
        return [queue.statistics() for queue in self._queues.values()]

    def close(self) -> None:
        """Let go of files."""
        for queue in self._queues.values():
            queue.close()
        self._queues.clear()
        self._batches.clear()

    def _queue(self, port: int) -> SpillQueue:
        if port not in self._queues:
            self._queues[port] = self._make_queue()
            self._batches[port] = {}
        return self._queues[port]
