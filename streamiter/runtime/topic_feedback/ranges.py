"""Ranges of a feedback topic: what a snapshot says of feedback that lies there.

>>> lying = TopicRange("loop", "run-1", producer=0, partition=2, start=Point(10, 4), stop=Point(30, 9))
>>> TopicRange.of(lying.plain()) == lying, TopicRange.of(("idle",))
(True, None)
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final, NamedTuple, final

from streamiter.errors import CheckpointError
from streamiter.operators.rejection import Origin
from streamiter.topics.topic import Topic, TopicDescription

__all__ = ["Point", "TopicRange", "check_is_there", "missing_records"]

_KIND: Final = "topic range"

# Begins a run in each partition: it brings nothing, and neither does a range that ends behind it.
_START_SEQUENCE: Final = 0

_CHOICES: Final = (
    "the topic's retention has taken it, or the topic was created anew. Begin anew (restore=None), or go on from a "
    "checkpoint whose feedback is still there; and let the topic keep records for longer than a job may stand still"
)


class Point(NamedTuple):
    """A record of one producer in a partition, or where its next one will lie at the earliest."""

    offset: int
    sequence: int
    """Its number among those of this producer there."""

    @property
    def behind(self) -> Point:
        """The point behind a record that lies here."""
        return Point(self.offset + 1, self.sequence + 1)


@final
@dataclass(frozen=True, slots=True)
class TopicRange:
    """What one producer of one run has fed back to one head, from ``start`` to before ``stop``."""

    topic: str
    """Its name: the same topic may be found at another address later."""
    run: str
    producer: int
    partition: int
    start: Point
    stop: Point

    @property
    def is_empty(self) -> bool:
        """Whether nothing can lie in it."""
        return self.stop.sequence <= max(self.start.sequence, _START_SEQUENCE + 1)

    def plain(self) -> tuple[Any, ...]:
        """As an entry among those of a queue."""
        return (_KIND, self.topic, self.run, self.producer, self.partition, *self.start, *self.stop)

    @classmethod
    def of(cls, entry: Any) -> TopicRange | None:
        """The range that ``plain`` gave; None for another entry."""
        match entry:
            case [
                kind,
                str() as topic,
                str() as run,
                int() as producer,
                int() as partition,
                int() as offset,
                int() as sequence,
                int() as stop_offset,
                int() as stop_sequence,
            ] if kind == _KIND:
                return cls(
                    topic,
                    run,
                    producer,
                    partition,
                    Point(offset, sequence),
                    Point(stop_offset, stop_sequence),
                )
        return None


def check_is_there(lying: TopicRange, topic: Topic, description: TopicDescription | None) -> None:
    """Raise CheckpointError unless the topic, None if it is not there at all, has the offsets of a range."""
    if lying.topic != topic.name:
        raise CheckpointError(
            f"expected the topic {lying.topic!r}, in which feedback lies that the checkpoint goes on with, given "
            f"{topic.url}; feed back through the same topic again, or begin anew (restore=None)"
        )
    start, stop = lying.start.offset, lying.stop.offset
    ends = None if description is None else description.offsets.get(lying.partition)
    # The barrier at its stop is in the topic, too.
    if ends is None or not (ends[0] <= start and stop < ends[1]):
        given = "none of them" if ends is None or ends[0] == ends[1] else f"{ends[0]} to {ends[1] - 1}"
        raise CheckpointError(
            f"{topic.url}, partition {lying.partition}: expected the offsets {start} to {stop}, where feedback lies "
            f"that the checkpoint goes on with, given {given}; {_CHOICES}"
        )


def missing_records(lying: TopicRange, topic: Topic, following: int) -> CheckpointError:
    """The error for a range that is not complete; ``following`` is the number of the first record that is missing."""
    return CheckpointError(
        f"{Origin(topic.url, lying.partition, lying.stop.offset)}: expected the records {lying.start.sequence} to "
        f"{lying.stop.sequence - 1} of producer {lying.producer} in run {lying.run!r} before it (from offset "
        f"{lying.start.offset} on), with which the checkpoint goes on, given none of number {following}; {_CHOICES}"
    )
