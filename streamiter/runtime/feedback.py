"""The channel of a feedback edge: it never blocks its producer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, final

from streamiter.checkpoints.spill import SpillQueue
from streamiter.records import Control, DataBatch

if TYPE_CHECKING:
    from streamiter.runtime.topic_feedback.ranges import TopicRange

__all__ = ["FeedbackChannel", "FeedbackStatistics", "Supply"]


class Supply(Protocol):
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
        self.supply: Supply | None = None

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
