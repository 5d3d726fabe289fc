"""Records of epochs whose turn has not come, kept in epoch order."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from streamiter.checkpoints.spill import SpillQueue, SpillStatistics
from streamiter.records import DataBatch

__all__ = ["EpochsAside"]


class EpochsAside:
    """What an operator with ``epochs_in_order`` has been sent too early; one queue for each port.

    Batches wait in the order they came, which is mostly that of their epochs: then taking an epoch costs
    what it holds. Where it is not, the whole queue is gone through once.
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

    def take(self, epoch: int) -> list[tuple[int, DataBatch]]:
        """All that was set aside for this epoch (and any before it), in epoch order."""
        taken = [
            (port, batch)
            for port, batches in self._batches.items()
            if batches
            for batch in self._take_from(port, batches, epoch)
        ]
        if len(taken) > 1:
            taken.sort(key=lambda item: item[1].epoch)
        return taken

    def take_of(self, port: int, epoch: int) -> list[DataBatch]:
        """All of one port that was set aside for this epoch (and any before it), in the order it came."""
        batches = self._batches.get(port)
        return self._take_from(port, batches, epoch) if batches else []

    def _take_from(self, port: int, batches: dict[int, int], epoch: int) -> list[DataBatch]:
        queue = self._queues[port]
        due = [waiting for waiting in batches if waiting <= epoch]
        left = sum(batches.pop(waiting) for waiting in due)
        taken: list[DataBatch] = []
        turned = False
        for _ in range(len(queue) if left else 0):
            if not left and not turned:
                break
            batch = queue.take()
            assert isinstance(batch, DataBatch)
            if batch.epoch <= epoch:
                taken.append(batch)
                left -= 1
            else:
                queue.put(batch)
                turned = True
        return taken

    def take_all(self) -> list[tuple[int, DataBatch]]:
        """All that was set aside, in epoch order."""
        return self.take(max((epoch for batches in self._batches.values() for epoch in batches), default=0))

    def snapshot(self) -> list[tuple[int, list[Any], list[tuple[int, int]]]]:
        """All that is set aside, left where it is, as plain data: port, what waits there, and its epochs."""
        return [
            (port, queue.snapshot(), sorted(self._batches[port].items()))
            for port, queue in self._queues.items()
            if len(queue)
        ]

    def restore(self, state: Iterable[tuple[int, list[Any], list[tuple[int, int]]]]) -> None:
        """Take over what ``snapshot`` gave."""
        for port, entries, batches in state:
            self._queue(port).refill(entries)
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
