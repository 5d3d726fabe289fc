"""The last record of a key: what a topic says about it now."""

from __future__ import annotations

import logging
from typing import Final

from streamiter.clock import Clock
from streamiter.topics.backwards import BackwardReading
from streamiter.topics.topic import Topic, TopicBatch, TopicRecord

__all__ = ["last_value"]

_log = logging.getLogger("streamiter.topics")

# A transaction at the end of a topic takes milliseconds to be decided unless its owner is gone.
_LOG_AFTER_S: Final = 3.0


async def last_value(topic: Topic, key: bytes, *, clock: Clock) -> TopicRecord | None:
    """The last committed record with ``key``, or None; its value is None where the key was deleted.

    The topic is read back from its end, so it takes no longer because of what lies before that record.
    What is committed when this is called is found. Where records of an open transaction lie at the end,
    it waits until they are decided: at most for that transaction's timeout. So not to be called within a
    transaction of one's own that writes to the topic.

    Raises what the topic raises, :class:`~streamiter.errors.TopicNotFound` above all.

    >>> import asyncio
    >>> from streamiter.clock import SystemClock
    >>> from streamiter.topics import MemoryBroker, OutgoingBatch
    >>> async def main():
    ...     topic = MemoryBroker().topic("settings")
    ...     await topic.create()
    ...     writer = await topic.open_writer()
    ...     await writer.write(OutgoingBatch([b"1", b"2", b"3"], keys=[b"rate", b"rate", b"size"]))
    ...     print(await last_value(topic, b"rate", clock=SystemClock()))
    >>> asyncio.run(main())  # doctest: +ELLIPSIS
    TopicRecord(partition=0, offset=1, timestamp_ms=..., key=b'rate', value=b'2', headers=())
    """
    description = await topic.describe()
    found: TopicRecord | None = None
    for number in sorted(description.offsets):
        search = _Search(topic, key, BackwardReading(topic, description, number, clock, waits=True))
        record = await search.run(clock)
        # A key is in one partition; in several only where some were added since.
        if record is not None and (found is None or record.timestamp_ms > found.timestamp_ms):
            found = record
    return found


class _Search:
    """The search in one partition."""

    def __init__(self, topic: Topic, key: bytes, reading: BackwardReading) -> None:
        self._topic = topic
        self._key = key
        self._reading = reading
        self._found: TopicRecord | None = None

    async def run(self, clock: Clock) -> TopicRecord | None:
        """The last record of the key in the partition."""
        timer = clock.call_later(_LOG_AFTER_S, self._tell_of_waiting)
        try:
            while self._found is None and not self._reading.is_at_beginning:
                await self._reading.read_window(self._take)
        finally:
            timer.cancel()
        return self._found

    def _take(self, batch: TopicBatch) -> None:
        index = _last_index(batch, self._key)
        if index is not None:
            self._found = batch[index : index + 1].records()[0]

    def _tell_of_waiting(self) -> None:
        _log.warning(
            "topic %r, partition %d: still looking for the last record of %r; an open transaction of a "
            "writer that is gone holds it up until its timeout, or the topic has many records",
            self._topic.name,
            self._reading.number,
            self._key,
        )


def _last_index(batch: TopicBatch, key: bytes) -> int | None:
    keys = batch.keys
    return next((index for index in reversed(range(len(keys))) if keys[index] == key), None)
