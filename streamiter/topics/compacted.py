"""Compacted topics: the last value of a key, read backwards, and the commit topic."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence, Set
from typing import Final, Literal

from streamiter.clock import Clock
from streamiter.errors import OffsetOutOfRange, TopicDenied, TopicNotFound
from streamiter.topics.topic import ReadRequest, Topic, TopicBatch, TopicDescription, TopicRecord

__all__ = [
    "COMMIT_TOPIC",
    "COMPACTED_BLOCKS",
    "READ_RECORDS",
    "BackwardReading",
    "ensure_commit_topic",
    "is_superseded",
    "last_value",
]


COMPACTED_BLOCKS: Final = 256
"""More keys than flows write to one file; as blocks of one record they are looked through in a millisecond."""


def is_superseded(keys: Sequence[bytes | None] | None, newer: Set[bytes]) -> bool:
    """Whether each of these records has a key that is among the ``newer`` ones.

    Compaction as the connectors without a server do it: what is stored together is dropped together.

    With each write they look at the last ``COMPACTED_BLOCKS`` things stored and drop those all of whose records
    have a newer one of their key. So a topic of few keys, each written alone (commit records), has hardly more
    blocks than keys, whatever was written; a topic of many keys keeps more than it needs.

    >>> is_superseded([b"a", b"b"], {b"a", b"b", b"c"}), is_superseded([b"a", None], {b"a"})
    (True, False)
    """
    return keys is not None and all(key is not None and key in newer for key in keys)


# Records may be a megabyte each (updates of models), and a batch of them is in memory at once.
READ_RECORDS: Final = 64

# The first window, in offsets: one round trip, and mostly all of what a compacted topic has.
_WINDOW: Final = 32

_Stop = Literal["latest"] | Mapping[int, int]


class BackwardReading:
    """Goes back in one partition from the end that ``description`` tells.

    At the very end there may be records of a transaction that is still open. With ``waits`` the first
    window ends when they are decided; without, they are left out, and lie behind ``position``.

    Reading a partition from its end: in windows that go back and grow, each record once.

    Whoever looks for something near the end stops after the window that has it, so the time does not depend on
    what lies before. Windows double without limit: a compacted partition has few records in very many offsets.
    """

    def __init__(
        self, topic: Topic, description: TopicDescription, number: int, clock: Clock, *, waits: bool
    ) -> None:
        self.number = number
        self._topic = topic
        self._partitions = description.partitions
        self._identities = description.identities
        self._clock = clock
        self._waits = waits
        self._earliest, self._read_from = description.offsets[number]
        self._next_offset: int | None = None
        self._window = _WINDOW

    @property
    def is_at_beginning(self) -> bool:
        """Whether all has been read that the partition has."""
        return self._read_from <= self._earliest

    @property
    def position(self) -> int:
        """Where to read on after what was found."""
        return self._read_from if self._next_offset is None else self._next_offset

    async def read_window(self, take: Callable[[TopicBatch], None]) -> None:
        """Read the next window, which lies before all that was read, from its beginning to its end."""
        start = max(self._earliest, self._read_from - self._window)
        try:
            await self._read(start, take)
        except OffsetOutOfRange:
            if not await self._has_lost_records():
                raise
        else:
            self._read_from = start
            self._window *= 2

    async def _read(self, start: int, take: Callable[[TopicBatch], None]) -> None:
        reader = await self._topic.open_reader(self._request(start))
        try:
            while (batch := await reader.read()) is not None:
                if batch.partition == self.number:  # not one that was just added
                    self._next_offset = max(self._next_offset or 0, batch.next_offset)
                    take(batch)
        finally:
            await reader.close()

    def _request(self, start: int) -> ReadRequest:
        return ReadRequest(
            subtask=self.number,
            subtasks=self._partitions,
            start={self.number: start},
            identities=self._identities,
            stop=self._stop(),
            max_records=READ_RECORDS,
            clock=self._clock,
        )

    def _stop(self) -> _Stop:
        """Reading up to an offset waits until all before it is decided, which a record found there tells."""
        if self._waits or self._next_offset is not None:
            return {self.number: self._read_from}
        return "latest"

    async def _has_lost_records(self) -> bool:
        """Whether retention has just dropped what was to be read; then the rest is to be."""
        earliest, _ = (await self._topic.describe()).offsets[self.number]
        lost, self._earliest = earliest > self._earliest, earliest
        return lost


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

    The last record of a key: what a topic says about it now.
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


COMMIT_TOPIC: Final = "streamiter-commits"
"""One for all flows that write to a server or file; a record's key is its flow."""


async def ensure_commit_topic(beside: Topic) -> Topic:
    """The topic of the commit records in the commit domain of ``beside``, created where it is missing.

    It has one partition, so that the last record of it is the last commit, and keeps the last record of
    each key. Several may create it at once. One that was created otherwise is used as it is.

    Raises :class:`~streamiter.errors.TopicDenied`, which says how to create it, where that is not allowed.

    >>> import asyncio
    >>> from streamiter.topics import MemoryBroker
    >>> asyncio.run(ensure_commit_topic(MemoryBroker().topic("outputs")))
    MemoryTopic('streamiter-commits')

    The topic of the commit records, beside the outputs they are committed with.
    """
    commits = beside.beside(COMMIT_TOPIC)
    settings = {**commits.compaction_settings, **commits.eager_compaction_settings}
    try:
        description = await _described_or_created(commits, settings)
    except TopicDenied as denied:
        raise TopicDenied(
            f"topic {COMMIT_TOPIC!r}, in which flows that write to {beside.url} keep their commits: {denied}. "
            f"Have it created with 1 partition and {_listed(settings)}, and allow this user to describe, read "
            "and write it"
        ) from denied
    _warn_of_deletion(commits, description)
    return commits


async def _described_or_created(commits: Topic, settings: Mapping[str, str]) -> TopicDescription:
    # Created first: it changes nothing where the topic is, and a missing one is waited for when it is asked about.
    try:
        await commits.create(partitions=1, settings=settings)
    except TopicDenied as denied:
        try:
            return await commits.describe()
        except TopicNotFound:
            raise denied from None
    return await commits.describe()


def _warn_of_deletion(commits: Topic, description: TopicDescription) -> None:
    for name, value in commits.compaction_settings.items():
        given = description.settings.get(name, value if not description.settings else None)
        if given != value:
            _log.warning(
                "topic %r: expected %s=%s, found %s; a commit record that is deleted makes its flow refuse to "
                "go on from its checkpoints, and records that are never dropped fill the disk. Change the "
                "topic's settings, or delete it while no flow runs that is to go on",
                commits.url,
                name,
                value,
                given,
            )


def _listed(settings: Mapping[str, str]) -> str:
    return ", ".join(f"{name}={value}" for name, value in settings.items()) or "no settings"
