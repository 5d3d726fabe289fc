"""Which partitions a reader reads, from which offset to which: pure functions on a `ReadRequest`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime

from streamiter.errors import ConfigurationError, OffsetOutOfRange
from streamiter.topics.topic import ReadRequest

__all__ = [
    "PartitionEnds",
    "check_identities",
    "check_named_partitions",
    "check_request",
    "first_position",
    "named_positions",
    "out_of_range_message",
    "partitions_of",
    "recreated_message",
    "stop_offsets",
    "timestamp_of",
]


@dataclass(frozen=True, slots=True)
class PartitionEnds:
    """The offsets of one partition: the earliest record, the last stable offset, the one after the last."""

    earliest: int
    stable: int
    end: int


def check_request(request: ReadRequest, topic: str) -> None:
    """Raise ``ConfigurationError`` for a request that no reader could serve on any topic."""
    if not 0 <= request.subtask < request.subtasks:
        raise ConfigurationError(
            f"reader of {topic!r}: expected 0 <= subtask < subtasks, "
            f"given subtask {request.subtask} of {request.subtasks}"
        )
    if request.max_records < 1:
        raise ConfigurationError(
            f"reader of {topic!r}: expected max_records >= 1, given {request.max_records}"
        )
    if isinstance(request.start, str) and request.start not in ("earliest", "latest"):
        raise ConfigurationError(
            f"reader of {topic!r}: expected start 'earliest', 'latest', offsets by partition or an aware "
            f"datetime, given {request.start!r}"
        )
    if isinstance(request.start, datetime) and request.start.tzinfo is None:
        raise ConfigurationError(
            f"reader of {topic!r}: expected an aware datetime as start, given {request.start} without a time "
            "zone; say which one, e.g. start.replace(tzinfo=UTC)"
        )


def partitions_of(request: ReadRequest, partitions: int) -> range:
    """The share of the partitions that the request's subtask reads.

    >>> list(partitions_of(ReadRequest(subtask=1, subtasks=3), 8))
    [1, 4, 7]
    """
    return range(request.subtask, partitions, request.subtasks)


def check_named_partitions(request: ReadRequest, partitions: int, *, topic: str) -> None:
    """Raise ``OffsetOutOfRange`` for positions of partitions that the topic does not have.

    A topic never loses partitions: it was deleted and created anew, and its offsets mean other records.
    """
    missing = [number for number in named_positions(request) if number >= partitions]
    if missing:
        raise OffsetOutOfRange(
            f"topic {topic!r}: it has {partitions} partitions, given a position for partition {missing[0]}; "
            "was the topic created anew? Start from 'earliest' or 'latest', or from offsets of this topic"
        )


def named_positions(request: ReadRequest) -> Mapping[int, int]:
    """The offsets that a request names by partition; empty where it names none."""
    named = request.positions if request.positions is not None else request.start
    return named if isinstance(named, Mapping) else {}


def check_identities(
    request: ReadRequest, identities: Mapping[int, str], ends: Mapping[int, PartitionEnds], *, topic: str
) -> None:
    """Raise ``OffsetOutOfRange`` where the offsets of a request belong to a topic that was deleted.

    ``identities`` are those of the topic as it is now. A partition whose identity is not known, now or in the
    request, is taken to be the same.
    """
    for number, position in named_positions(request).items():
        known, found = (request.identities or {}).get(number), identities.get(number)
        if number in ends and known is not None and found is not None and known != found:
            raise OffsetOutOfRange(recreated_message(topic, number, position, ends[number]))


def timestamp_of(start: datetime) -> int:
    """Milliseconds since 1970-01-01 UTC, rounded up: a record of an earlier millisecond is earlier.

    >>> timestamp_of(datetime(1970, 1, 1, 0, 0, 1, 500_001, tzinfo=UTC))
    1501
    """
    elapsed = start - datetime(1970, 1, 1, tzinfo=UTC)
    microseconds = (elapsed.days * 86_400 + elapsed.seconds) * 1_000_000 + elapsed.microseconds
    return -(-microseconds // 1000)


def first_position(
    request: ReadRequest,
    partition: int,
    ends: PartitionEnds,
    offset_at: Callable[[int], int],
    *,
    topic: str,
) -> int:
    """Where reading of a partition begins that is there as the reader is opened.

    ``offset_at`` gives the offset of the first record at or after a time stamp.
    Raises ``OffsetOutOfRange`` for an offset that the partition does not have.
    """
    if request.positions is not None:
        return _named_position(request.positions, partition, ends, topic)
    if isinstance(request.start, datetime):
        return offset_at(timestamp_of(request.start))
    if isinstance(request.start, Mapping):
        return _named_position(request.start, partition, ends, topic)
    return ends.stable if request.start == "latest" else ends.earliest


def _named_position(positions: Mapping[int, int], partition: int, ends: PartitionEnds, topic: str) -> int:
    position = positions.get(partition, ends.earliest)
    if not ends.earliest <= position <= ends.end:
        raise OffsetOutOfRange(out_of_range_message(topic, partition, position, ends))
    return position


def out_of_range_message(topic: str, partition: int, position: int, ends: PartitionEnds) -> str:
    """What has happened to an offset that is gone or not there yet, with the numbers and the choices."""
    what = "fell out of retention" if position < ends.earliest else "is not there yet"
    return (
        f"topic {topic!r}, partition {partition}: offset {position} {what}; expected {ends.earliest} to "
        f"{ends.end}. Start from 'earliest' or 'latest', or restore a snapshot that is "
        f"{'newer' if position < ends.earliest else 'of this topic'}"
    )


def recreated_message(topic: str, partition: int, position: int, ends: PartitionEnds) -> str:
    """What has happened to an offset of a topic that was deleted and created again."""
    return (
        f"topic {topic!r}, partition {partition}: offset {position} belongs to a topic of this name that was deleted; "
        f"the topic was created again, with other records, and has the offsets {ends.earliest} to {ends.end}. Start "
        "from 'earliest' or 'latest', or restore a snapshot that is of this topic"
    )


def stop_offsets(request: ReadRequest, stable: Mapping[int, int]) -> dict[int, int] | None:
    """The offset before which reading ends for each partition, or None where it never ends.

    ``stable`` holds the last stable offset of each partition of the share as the reader is opened.
    A partition that the result does not name is not read.
    """
    if request.stop is None:
        return None
    if isinstance(request.stop, Mapping):
        return dict(request.stop)
    return dict(stable)
