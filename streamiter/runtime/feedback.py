"""The channel of a feedback edge: it never blocks its producer."""

from __future__ import annotations

from collections.abc import Callable
from typing import final

from streamiter.checkpoints.spill import SpillQueue
from streamiter.records import Control, DataBatch

__all__ = ["FeedbackChannel"]


@final
class FeedbackChannel:
    """A queue in memory that goes on on disk; one producer, one consumer, one event loop.

    It is what makes a loop free of deadlock: whoever feeds back can always go on. When the head has
    ended, what is still fed back is dropped.
    """

    __slots__ = ("_closed", "_on_ready", "name", "queue", "records", "total_records")

    def __init__(self, name: str, queue: SpillQueue) -> None:
        self.name = name
        self.queue = queue
        self.records = 0
        self.total_records = 0
        self._closed = False
        self._on_ready: Callable[[], None] | None = None

    @property
    def is_spilling(self) -> bool:
        """Whether more has been fed back than its memory limit holds."""
        return self.queue.bytes_on_disk > 0

    def attach(self, on_ready: Callable[[], None]) -> None:
        """Have ``on_ready`` called whenever the empty channel gets something."""
        self._on_ready = on_ready

    def put(self, batch: DataBatch) -> None:
        """Feed a batch back."""
        self.records += len(batch.records)
        self.total_records += len(batch.records)
        self._append(batch)

    def put_control(self, control: Control) -> None:
        """Feed a control record back, behind what was fed back before."""
        self._append(control)

    def peek(self) -> DataBatch | Control | None:
        """What comes next, or None."""
        return self.queue.peek() if len(self.queue) else None

    def take(self) -> DataBatch | Control:
        """Take what comes next."""
        item = self.queue.take()
        if isinstance(item, DataBatch):
            self.records -= len(item.records)
        return item

    def clear(self) -> None:
        """Drop all that waits."""
        while len(self.queue):
            self.take()

    def close(self) -> None:
        """Let go of files; what is fed back from now on is dropped."""
        self._closed = True
        self.queue.close()

    def _append(self, item: DataBatch | Control) -> None:
        if self._closed:
            return
        self.queue.put(item)
        if len(self.queue) == 1 and self._on_ready is not None:
            self._on_ready()
