"""Records of epochs whose turn has not come, kept in epoch order."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from streamiter.checkpoints.spill import SpillQueue
from streamiter.records import DataBatch

__all__ = ["EpochsAside"]


class EpochsAside:
    """What an operator with ``epochs_in_order`` has been sent too early; a queue for each epoch and port."""

    def __init__(self, make_queue: Callable[[], SpillQueue]) -> None:
        self._make_queue = make_queue
        self._queues: dict[int, dict[int, SpillQueue]] = {}

    def put(self, port: int, batch: DataBatch) -> None:
        """Set a batch aside."""
        ports = self._queues.setdefault(batch.epoch, {})
        if port not in ports:
            ports[port] = self._make_queue()
        ports[port].put(batch)

    def lowest_epoch(self, port: int) -> int | None:
        """The lowest epoch of which something of this port is set aside."""
        return min((epoch for epoch, ports in self._queues.items() if port in ports), default=None)

    def take(self, epoch: int) -> list[tuple[int, DataBatch]]:
        """All that was set aside for this epoch (and any before it), in order."""
        taken = []
        for due in sorted(waiting for waiting in self._queues if waiting <= epoch):
            for port, queue in self._queues.pop(due).items():
                while len(queue):
                    batch = queue.take()
                    assert isinstance(batch, DataBatch)
                    taken.append((port, batch))
                queue.close()
        return taken

    def take_all(self) -> list[tuple[int, DataBatch]]:
        """All that was set aside, in epoch order."""
        return self.take(max(self._queues, default=0))

    def snapshot(self) -> list[tuple[int, int, list[Any]]]:
        """All that is set aside, left where it is, as plain data: epoch, port and what waits there."""
        return [
            (epoch, port, queue.snapshot())
            for epoch in sorted(self._queues)
            for port, queue in self._queues[epoch].items()
        ]

    def restore(self, state: Iterable[tuple[int, int, list[Any]]]) -> None:
        """Take over what ``snapshot`` gave."""
        for epoch, port, entries in state:
            queue = self._queues.setdefault(epoch, {})[port] = self._make_queue()
            queue.refill(entries)

    def close(self) -> None:
        """Let go of files."""
        for ports in self._queues.values():
            for queue in ports.values():
                queue.close()
        self._queues.clear()
