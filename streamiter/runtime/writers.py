"""The output side of a task: what its operators emit, on its way into channels."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from typing import Final, Protocol, final

from streamiter.channels import Channel
from streamiter.clock import Clock
from streamiter.errors import OutputOverflow, StreamiterError
from streamiter.operators.operator import Progress
from streamiter.operators.rejection import RecordFailure
from streamiter.records import (
    Batch,
    Control,
    DataBatch,
    EndOfData,
    EndOfInput,
    EpochWatermark,
    estimated_bytes,
    slice_batch,
)
from streamiter.runtime.feedback import FeedbackChannel
from streamiter.runtime.partitioning import Splitter, Turns

__all__ = ["ChannelOutput", "EdgeWriter", "FeedbackWriter", "Writer", "restore_turns", "turns_of"]


# What one call may emit beyond what its channel holds: generous for any batch, small beside the memory of
# a machine, and reached in a second or two by an operator that never stops emitting.
LANE_LIMIT_BYTES: Final = 1 << 30


@final
class ChannelOutput:
    """One channel as its producer sees it, with what found no room in it yet.

    An operator that is called directly cannot wait in the middle of a call, so what it emits beyond the
    channel's limit is kept here, and its task handles no further input until the lane is clear: at most
    the output of one call waits, and that must stay below ``LANE_LIMIT_BYTES``.
    """

    __slots__ = ("_waiting_bytes", "blocked_s", "channel", "waiting")

    def __init__(self, channel: Channel) -> None:
        self.channel = channel
        self.waiting: deque[DataBatch | Control] = deque()
        self.blocked_s = 0.0
        self._waiting_bytes = 0

    @property
    def waiting_records(self) -> int:
        """Records that found no room in the channel yet."""
        return sum(len(item.records) for item in self.waiting if isinstance(item, DataBatch))

    def put(self, batch: DataBatch) -> None:
        if not self.waiting and self.channel.try_put(batch):
            return
        self.waiting.append(batch)
        self._waiting_bytes += estimated_bytes(batch.records)
        if self._waiting_bytes > LANE_LIMIT_BYTES:
            raise OutputOverflow(
                f"{self.channel.name}: expected a call of an operator to emit at most {LANE_LIMIT_BYTES >> 20} MiB, "
                f"given {self._waiting_bytes >> 20} MiB and no end of it; emit less for each record, or read it "
                "from a source"
            )

    def put_control(self, control: Control) -> None:
        if self.waiting:
            self.waiting.append(control)
        else:
            self.channel.put_control(control)

    async def clear(self, clock: Clock) -> None:
        """Wait until all that waits has found room."""
        began_s = clock.monotonic_s()
        try:
            while self.waiting:
                item = self.waiting[0]
                if isinstance(item, Control):
                    self.channel.put_control(item)
                elif not self.channel.try_put(item):
                    await self.channel.wait_for_room()
                    continue
                self.waiting.popleft()
            self._waiting_bytes = 0
        finally:
            self.blocked_s += clock.monotonic_s() - began_s


class Writer(Protocol):
    """Takes what one output of one operator emits."""

    lanes: Sequence[ChannelOutput]
    split: Splitter | None

    def __call__(self, batch: Batch) -> None: ...
    def control(self, control: Control) -> None: ...


@final
class EdgeWriter:
    """Distributes batches over the channels of an edge, stamped with the epoch of the task."""

    __slots__ = ("_keeps_origin", "_progress", "_step", "_tells_of_epochs", "lanes", "split")

    def __init__(
        self,
        split: Splitter | None,
        lanes: Sequence[ChannelOutput],
        progress: Progress,
        step: str,
        *,
        tells_of_epochs: bool = True,
        keeps_origin: bool = False,
    ) -> None:
        """``split`` is None where there is but one channel; ``step`` is the one that reads.

        ``keeps_origin``: what is emitted while a batch is handled was read where that batch was read.
        """
        self._keeps_origin = keeps_origin
        self._tells_of_epochs = tells_of_epochs
        self.split = split
        self.lanes = lanes
        self._progress = progress
        self._step = step

    def __call__(self, batch: Batch) -> None:
        epoch = self._progress.epoch
        origin = self._progress.origin if self._keeps_origin else None
        if self.split is None:
            self.lanes[0].put(DataBatch(batch, epoch, origin))
            return
        for subtask, part in _parts(self.split, batch, self._step):
            self.lanes[subtask].put(DataBatch(part, epoch, origin))

    def control(self, control: Control) -> None:
        """Into every channel: progress concerns all who may get records."""
        if not self._tells_of_epochs and isinstance(control, (EpochWatermark, EndOfData)):
            return
        for lane in self.lanes:
            lane.put_control(control)


@final
class FeedbackWriter:
    """The same on the edge that closes a loop: epochs grow by one, and nothing ever blocks."""

    __slots__ = ("_channels", "_progress", "_step", "lanes", "split")

    def __init__(
        self, split: Splitter | None, channels: Sequence[FeedbackChannel], progress: Progress, step: str
    ) -> None:
        self.split = split
        self._channels = channels
        self._progress = progress
        self._step = step
        self.lanes: Sequence[ChannelOutput] = ()

    def __call__(self, batch: Batch) -> None:
        epoch = self._progress.epoch + 1
        parts = ((0, batch),) if self.split is None else _parts(self.split, batch, self._step)
        try:
            for subtask, part in parts:
                self._channels[subtask].put(DataBatch(part, epoch))
        except StreamiterError as error:  # Past its disk limit, or not plain data.
            raise RecordFailure(self._step) from error

    def control(self, control: Control) -> None:
        if isinstance(control, EndOfInput):
            return  # The heads were the first to end; nobody is left to be told.
        if isinstance(control, (EpochWatermark, EndOfData)):
            control = type(control)(control.epoch + 1)
        for channel in self._channels:
            channel.put_control(control)


def turns_of(writers: Iterable[Writer]) -> list[int | None]:
    """Whose turn it is at each writer that gives records in turn, for a snapshot."""
    return [writer.split.following if isinstance(writer.split, Turns) else None for writer in writers]


def restore_turns(writers: Iterable[Writer], state: Iterable[int | None]) -> None:
    """Go on with those whose turn it was."""
    for writer, following in zip(writers, state, strict=True):
        if isinstance(writer.split, Turns) and following is not None:
            writer.split.following = following


def _parts(split: Splitter, batch: Batch, step: str) -> Iterable[tuple[int, Batch]]:
    """The parts of a batch; a failure names the step that reads them and the record."""
    try:
        return split(batch)
    except Exception as error:
        for index in range(len(batch)):
            try:
                split(slice_batch(batch, index, index + 1))
            except Exception as single:
                raise RecordFailure(step, batch[index], has_record=True) from single
        raise RecordFailure(step) from error
