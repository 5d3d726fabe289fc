"""The port: one channel of a task as its gate sees it."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Protocol, final

from streamiter.channels import LIMIT_BYTES, Channel
from streamiter.operators.source import SourceBatch
from streamiter.records import (
    CheckpointBarrier,
    Control,
    DataBatch,
    can_concatenate,
    concatenate,
    estimated_bytes,
    slice_batch,
)
from streamiter.runtime.watermarks import BEFORE_ALL_EPOCHS

if TYPE_CHECKING:
    from streamiter.checkpoints.spill import SpillQueue

__all__ = ["Log", "Port", "PortOrigin", "ReadableChannel"]

# Small batches that wait in a channel are joined up to this many records, so that work comes in larger
# pieces the further an operator has fallen behind. As large as a topic reader's largest batch.
_JOINED_RECORDS: Final = 8192


class Log(Protocol):
    """Takes what comes on a feedback port between a snapshot and the return of its barrier."""

    def put(self, item: DataBatch | Control) -> None: ...


class PortOrigin(NamedTuple):
    """Where what a port brings comes from; so a snapshot finds the port again when others are beside it."""

    input_name: str
    upstream: str
    """The name of the step."""
    tag: str | None
    """Of its side output."""
    edge: int
    """Which one, if there are several such edges."""
    subtask: int
    """Of the upstream step."""


class ReadableChannel(Protocol):
    """The consumer's side of a channel."""

    name: str

    def attach(self, on_ready: Any) -> None: ...
    def peek(self) -> DataBatch | SourceBatch | Control | None: ...
    def take(self) -> DataBatch | SourceBatch | Control: ...
    def clear(self) -> None: ...


@final
class Port:
    """One channel, with what was taken from it and waits to be handled; used by its gate only."""

    __slots__ = (
        "_bounded",
        "_held_bytes",
        "_in_hand",
        "blocked",
        "channel",
        "data_ended",
        "data_epoch",
        "deferred",
        "end_held",
        "ended",
        "held",
        "idle",
        "index",
        "input_name",
        "is_feedback",
        "listed",
        "log",
        "one_at_a_time",
        "origin",
        "parked",
        "restored",
    )

    def __init__(
        self,
        index: int,
        input_name: str,
        channel: ReadableChannel,
        *,
        is_feedback: bool,
        one_at_a_time: bool = False,
        origin: PortOrigin | None = None,
        reads_ahead: bool = False,
    ) -> None:
        """``reads_ahead``: whether the gate takes what the channel has, whatever is held of earlier epochs."""
        self.index = index
        self.origin = origin
        """None for what a source reads."""
        self.one_at_a_time = one_at_a_time
        """Hand over single records (mini-batches in a loop), so that what is fed back is met in between."""
        self.input_name = input_name
        self.channel = channel
        self.is_feedback = is_feedback
        self.held: deque[DataBatch | Control] = deque()
        """Taken from the channel already, still to be handled, before what is in the channel."""
        self._held_bytes: deque[int] = deque()
        """The estimated size of each, where it takes room in the channel."""
        self._in_hand: tuple[int, int] | None = None
        """Records of those that are handled now, and their estimated size."""
        # Where the gate reads ahead, what is held is a part of what is set aside in a spill queue, which has limits of
        # its own: were the channel full because of it, the end of its epoch could not come.
        self._bounded = channel if isinstance(channel, Channel) and not reads_ahead else None
        self.log: Log | None = None
        """Where what leaves the channel is logged, while that is done."""
        self.restored: SpillQueue | None = None
        """Feedback that was logged for the checkpoint from which the job goes on; it comes before the channel."""
        self.blocked = False
        """Has brought the barrier that others have not brought yet."""
        self.listed = False
        """Is in the gate's list of ports to look at."""
        self.parked = False
        """Has something, but its input is not wanted now."""
        self.idle = False
        """Nothing is to be expected on it for now."""
        self.data_ended = False
        self.data_epoch = BEFORE_ALL_EPOCHS
        """The epoch that the end of its data completes."""
        self.ended = False
        self.end_held = False
        """Its end is among what is held: it brings no barrier any more."""
        self.deferred: float | None = None
        """The watermark it has brought (infinity: the end of its data) while records of epochs up to it
        still wait to be handled; it counts once they are."""

    @property
    def is_aligned(self) -> bool:
        """Whether the barrier under way need not wait for it."""
        return self.blocked or self.ended or self.end_held

    def peek(self) -> DataBatch | SourceBatch | Control | None:
        """What comes first, or None."""
        if self.held:
            return self.held[0]
        return self.channel.peek() if self.restored is None else self._peek_restored(self.restored)

    def take(self) -> DataBatch | SourceBatch | Control:
        """Take what comes first; it is logged when it leaves the channel, so only once."""
        if self.held:
            return self._take_held()
        item = self.channel.take() if self.restored is None else self.restored.take()
        if self.log is not None and not isinstance(item, CheckpointBarrier):
            assert not isinstance(item, SourceBatch)
            self.log.put(item)
        return item

    def hold(self, item: DataBatch | Control) -> None:
        """Keep what was taken from the channel, behind what is held already."""
        self.held.append(item)
        if self._bounded is not None:
            self._held_bytes.append(self._take_room(self._bounded, item))

    def put_back(self, item: DataBatch) -> None:
        """Keep the rest of what was taken, before all else."""
        self.held.appendleft(item)
        if self._bounded is not None:
            self._held_bytes.appendleft(self._take_room(self._bounded, item))

    def make_way(self, makes_way: bool) -> None:
        """Whether the channel is to admit what comes before a barrier, however much is held."""
        if self._bounded is not None:
            self._bounded.make_way(makes_way)

    @property
    def has_in_hand(self) -> bool:
        """Whether something that was held is being handled, and takes room until it is."""
        return self._in_hand is not None

    def release(self) -> None:
        """What was taken is handled, or put back."""
        if self._in_hand is not None:
            assert self._bounded is not None
            self._bounded.release(*self._in_hand)
            self._in_hand = None

    def _take_held(self) -> DataBatch | Control:
        """Were its room free at once, a slow step that takes all that is held would seem to hold nothing."""
        item = self.held.popleft()
        if self._bounded is not None:
            size_bytes = self._held_bytes.popleft()
            if isinstance(item, DataBatch):
                records, before_bytes = self._in_hand or (0, 0)
                self._in_hand = records + len(item.records), before_bytes + size_bytes
        return item

    @staticmethod
    def _take_room(channel: Channel, item: DataBatch | Control) -> int:
        if not isinstance(item, DataBatch):
            return 0
        size_bytes = estimated_bytes(item.records)
        channel.set_aside(len(item.records), size_bytes)
        return size_bytes

    def restore(self, feedback: SpillQueue) -> None:
        """Give this feedback, which was logged for a checkpoint, before what the channel brings."""
        self.restored = feedback

    @property
    def held_records(self) -> int:
        """Records that are here and not in the channel."""
        restored = 0 if self.restored is None else self.restored.statistics().records
        return restored + sum(len(item.records) for item in self.held if isinstance(item, DataBatch))

    def close(self) -> None:
        """Let go of files."""
        if self.restored is not None:
            self.restored.close()
            self.restored = None

    def _peek_restored(self, restored: SpillQueue) -> DataBatch | SourceBatch | Control | None:
        if len(restored):
            return restored.peek()
        self.close()
        return self.channel.peek()

    def take_data(self) -> DataBatch:
        """Take the batch that comes first, joined with small ones that follow it, or cut."""
        # What was put back is not joined with what is still in the channel: that would empty the channel
        # at every turn, and its limit would bound nothing.
        from_held = bool(self.held)
        first = self.take()
        assert isinstance(first, DataBatch)
        if self.one_at_a_time:
            return self._first_record(first)
        following = self.peek()
        if not isinstance(following, DataBatch) or len(first.records) >= _JOINED_RECORDS:
            return first
        return self._joined(first, following, from_held)

    def _joined(self, first: DataBatch, following: object, from_held: bool) -> DataBatch:
        joined, length = [first.records], len(first.records)
        # Feedback may wait on disk because it is more than memory is given to: it comes back in pieces.
        room_bytes = LIMIT_BYTES - estimated_bytes(first.records) if self.is_feedback else None
        while (
            isinstance(following, DataBatch)
            and bool(self.held) == from_held
            and following.epoch == first.epoch
            and length + len(following.records) <= _JOINED_RECORDS
            and can_concatenate(first.records, following.records)
        ):
            if room_bytes is not None and (room_bytes := room_bytes - estimated_bytes(following.records)) < 0:
                break
            self.take()
            joined.append(following.records)
            length += len(following.records)
            following = self.peek()
        return DataBatch(concatenate(joined), first.epoch)

    def _first_record(self, batch: DataBatch) -> DataBatch:
        """The first record; the others are held one by one, so that each is cut out only once."""
        records, epoch = batch.records, batch.epoch
        for index in range(len(records) - 1, 0, -1):
            self.put_back(DataBatch(slice_batch(records, index, index + 1), epoch))
        return batch if len(records) == 1 else DataBatch(slice_batch(records, 0, 1), epoch)
