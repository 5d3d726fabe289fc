"""What earlier runs have left in the topic, as far as a checkpoint says that it belongs to it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from typing import NamedTuple

from streamiter.clock import Clock
from streamiter.runtime.topic_feedback.message import RUN_HEADER, Message, not_fed_back
from streamiter.runtime.topic_feedback.ranges import Point, missing_records
from streamiter.runtime.topic_feedback.track import Restored
from streamiter.topics.topic import ReadRequest, Topic, TopicBatch

__all__ = ["RestoredRecord", "restored_records"]


class RestoredRecord(NamedTuple):
    """A record that belongs to one of the ranges."""

    restored: Restored
    message: Message
    at: Point
    partition: int
    value: bytes


async def restored_records(
    topic: Topic, ranges: Sequence[Restored], *, max_records: int, clock: Clock
) -> AsyncGenerator[RestoredRecord, None]:
    """All records of the ranges, each in its order, in one pass. Raises CheckpointError where some are missing.

    What lies between them is skipped: records of other runs, of this one that are not part of the
    checkpoint, and what a writer has stored twice.
    """
    wanted = {(each.range.run.encode(), each.range.producer, each.range.partition): each for each in ranges}
    partitions = {each.range.partition for each in ranges}
    request = ReadRequest(
        positions={number: _first(ranges, number) for number in partitions},
        stop={number: _end(ranges, number) for number in partitions},
        max_records=max_records,
        clock=clock,
    )
    reader = await topic.open_reader(request)
    try:
        while (batch := await reader.read()) is not None:
            for record in _of_ranges(batch, wanted, topic):
                yield record
            await asyncio.sleep(0)  # A reader that always has something must leave others their turn.
    finally:
        await reader.close()
    for each in ranges:
        if each.following.sequence < each.range.stop.sequence:
            raise missing_records(each.range, topic, each.following.sequence)


def _first(ranges: Sequence[Restored], partition: int) -> int:
    return min(each.range.start.offset for each in ranges if each.range.partition == partition)


def _end(ranges: Sequence[Restored], partition: int) -> int:
    return max(each.range.stop.offset for each in ranges if each.range.partition == partition)


def _of_ranges(
    batch: TopicBatch, wanted: Mapping[tuple[bytes, int, int], Restored], topic: Topic
) -> Iterator[RestoredRecord]:
    runs = {run for run, _, _ in wanted}
    for offset, headers, value in zip(batch.offsets, batch.headers, batch.values, strict=True):
        run = next((content for name, content in headers if name == RUN_HEADER), b"")
        if run not in runs:
            continue
        try:
            message = Message.of(headers)
        except ValueError as error:
            raise not_fed_back(topic, batch.partition, offset, error) from None
        restored = wanted.get((run, message.producer, batch.partition))
        if restored is None or not restored.range.start.offset <= offset < restored.range.stop.offset:
            continue
        at = Point(offset, message.sequence)
        following = restored.following.sequence
        if at.sequence > following:
            raise missing_records(restored.range, topic, following)
        if at.sequence == following:
            restored.track.passed(at, restored)
            yield RestoredRecord(restored, message, at, batch.partition, value or b"")
