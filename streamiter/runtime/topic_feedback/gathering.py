"""What lies in ranges of a feedback topic, taken out of it: for heads that are others than before."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import aclosing
from typing import Final

from streamiter.checkpoints.plain_data import PlainData
from streamiter.checkpoints.spill import SpillQueue
from streamiter.clock import Clock
from streamiter.errors import TopicNotFound
from streamiter.records import CheckpointBarrier, DataBatch
from streamiter.runtime.topic_feedback.message import DATA, START, control_of
from streamiter.runtime.topic_feedback.ranges import TopicRange, check_is_there
from streamiter.runtime.topic_feedback.restored import restored_records
from streamiter.runtime.topic_feedback.track import Track
from streamiter.topics.topic import Topic

__all__ = ["gather"]

# Of one read, all of them are in memory: each may be a batch of up to a megabyte.
_RECORDS_PER_READ: Final = 64


async def gather(
    queue: SpillQueue, topic: Topic, ranges: Sequence[TopicRange], *, plain_data: PlainData, clock: Clock
) -> None:
    """Put what lies in the ranges into a queue, in order. Raises CheckpointError where some is missing."""
    try:
        description = await topic.describe()
    except TopicNotFound:
        description = None
    track = Track(topic.name, "", 0)
    track.restore(ranges)
    for restored in track.restored:
        check_is_there(restored.range, topic, description)
        records = restored_records(topic, [restored], max_records=_RECORDS_PER_READ, clock=clock)
        async with aclosing(records):
            async for record in records:
                kind, number = record.message.kind, record.message.number
                if kind == DATA:
                    queue.put(DataBatch(plain_data.decode_batch(record.value), number))
                elif kind != START and not isinstance(control := control_of(kind, number), CheckpointBarrier):
                    queue.put(control)
