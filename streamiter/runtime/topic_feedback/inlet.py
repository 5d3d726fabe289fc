"""Where what one producer feeds back to one head comes out of the topic."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, final

from streamiter.checkpoints.plain_data import PlainData
from streamiter.records import CheckpointBarrier, Control, DataBatch
from streamiter.runtime.feedback import FeedbackChannel
from streamiter.runtime.topic_feedback.ranges import Point, TopicRange
from streamiter.runtime.topic_feedback.track import Mark, Restored, Track

__all__ = ["Inlet", "Pump", "Supply"]


class Pump(Protocol):
    """What fills the channels of a head."""

    @property
    def is_paused(self) -> bool:
        """Whether the head has to take something before more is read."""

    def look_for_room(self) -> None:
        """Something was taken from one of the channels."""


@final
class Supply:
    """What a channel of a head is told of the topic behind it, and tells it."""

    def __init__(
        self, pump: Pump, outgoing: FeedbackChannel, track: Track, plain_data: PlainData, *, is_shared: bool
    ) -> None:
        """``outgoing`` is where this process feeds into the topic what comes back in the channel; where the
        channel ``is_shared``, what comes from other processes does, too.
        """
        self.track = track
        self._pump = pump
        self._outgoing = outgoing
        self._plain_data = plain_data
        self._is_shared = is_shared
        self.restored_records = 0
        """Those that earlier runs had fed back."""

    @property
    def is_behind(self) -> bool:
        return self._pump.is_paused or self._outgoing.is_spilling

    def under_way(self, came: int) -> int:
        return 0 if self._is_shared else self._outgoing.total_records + self.restored_records - came

    def taken(self) -> None:
        self.track.taken()
        self._pump.look_for_room()

    def closed(self) -> None:
        self.track.close()
        self._pump.look_for_room()
        self._outgoing.close()

    # -- for snapshots: of a loop that is shared there are none ------------------------------------------

    def mark(self) -> Mark:
        return self.track.mark()

    def since(self, mark: Mark) -> list[bytes]:
        ranges = self.track.since(mark)
        return [self._plain_data.encode([lying.plain() for lying in ranges])] if ranges else []

    def restore(self, ranges: Sequence[TopicRange]) -> None:
        self.track.restore(ranges)


@final
class Inlet:
    """A channel of the head's gate, and the track of what is put into it."""

    def __init__(
        self, channel: FeedbackChannel, supply: Supply, *, takes_barriers: bool, takes_epochs: bool
    ) -> None:
        """``takes_barriers``: not those of another worker. ``takes_epochs``: whether watermarks count."""
        self.channel = channel
        self.track = supply.track
        self._supply = supply
        self._takes_barriers = takes_barriers
        self._takes_epochs = takes_epochs

    def put(self, batch: DataBatch, at: Point, restored: Restored | None = None) -> None:
        """Bring a batch that lies there in the topic to the head."""
        if restored is not None:
            self._supply.restored_records += len(batch.records)
        self.track.put(at, restored)
        self.channel.put(batch)

    def put_control(self, control: Control, at: Point, restored: Restored | None = None) -> None:
        """Bring a control record to the head, if it concerns it."""
        is_barrier = isinstance(control, CheckpointBarrier)
        if is_barrier and restored is not None:
            return  # Of a checkpoint that was taken before, or given up.
        if self._takes_barriers if is_barrier else self._takes_epochs:
            self.track.put(at, restored)
            self.channel.put_control(control)
