"""The track: from where in the topic each thing has come that waits in a channel of a head.

So a snapshot can say which part of the topic belongs to it, however much lies there.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import NamedTuple, final

from streamiter.runtime.topic_feedback.ranges import Point, TopicRange

__all__ = ["Mark", "Restored", "Track"]


class Mark(NamedTuple):
    """A place in all that comes to a channel: the number of the part, and where in it."""

    part: int
    at: Point


@final
class Restored:
    """A range of an earlier run on its way into the channel."""

    def __init__(self, track: Track, part: int, lying: TopicRange) -> None:
        self.track = track
        self.part = part
        self.range = lying
        self.following = lying.start
        """Of its producer nothing before that comes any more."""


@final
class Track:
    """Of one channel: first come what earlier runs have left, range by range, then what this run feeds back."""

    def __init__(self, topic: str, run: str, producer: int) -> None:
        self._topic = topic
        self._run = run
        self._producer = producer
        self._partition = 0
        self._began = self._following = Point(0, 0)
        self.restored: list[Restored] = []
        self._waiting: deque[Mark] = deque()
        """Of what is in the channel."""
        self._last: Mark | None = None
        """Of what was taken last."""
        self._is_closed = False

    # -- by the pump -------------------------------------------------------------------------------------

    def restore(self, ranges: Iterable[TopicRange]) -> None:
        """These come before what this run feeds back."""
        for lying in ranges:
            self.restored.append(Restored(self, len(self.restored), lying))

    def begin(self, partition: int, offset: int) -> None:
        """What is fed back in this run will lie in that partition, from that offset on."""
        self._partition = partition
        self._began = self._following = Point(offset, 0)

    def passed(self, at: Point, restored: Restored | None = None) -> None:
        """A record of this producer was read."""
        if restored is None:
            self._following = at.behind
        else:
            restored.following = at.behind

    def put(self, at: Point, restored: Restored | None = None) -> None:
        """What it brought was put into the channel."""
        if not self._is_closed:
            self._waiting.append(Mark(self._own_part if restored is None else restored.part, at))

    # -- by the channel ----------------------------------------------------------------------------------

    def taken(self) -> None:
        """The first thing was taken from the channel."""
        self._last = self._waiting.popleft()

    def close(self) -> None:
        """The channel takes nothing more."""
        self._is_closed = True
        self._waiting.clear()

    # -- for snapshots -----------------------------------------------------------------------------------

    def mark(self) -> Mark:
        """Where what is taken next comes from."""
        if self._waiting:
            return self._waiting[0]
        for restored in self.restored:
            if restored.following.sequence < restored.range.stop.sequence:
                return Mark(restored.part, restored.following)
        return Mark(self._own_part, self._following)

    def since(self, mark: Mark) -> list[TopicRange]:
        """All from ``mark`` to before what was taken last, which is of this run."""
        last = self._last
        assert last is not None
        assert last.part == self._own_part
        ranges: list[TopicRange] = []
        for restored in self.restored[mark.part :]:
            start = mark.at if restored.part == mark.part else restored.range.start
            before = restored.range
            ranges.append(
                TopicRange(before.topic, before.run, before.producer, before.partition, start, before.stop)
            )
        start = mark.at if mark.part == self._own_part else self._began
        ranges.append(TopicRange(self._topic, self._run, self._producer, self._partition, start, last.at))
        return [lying for lying in ranges if not lying.is_empty]

    @property
    def _own_part(self) -> int:
        return len(self.restored)
