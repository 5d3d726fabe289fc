"""Compacted topics: they keep the last record of each key.

`last_value` finds the last record of a key. The commit topic is such a topic: it holds the commit record of each flow.
Both read a partition backwards (`BackwardReading`), so their time does not grow with the length of the topic.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence, Set
from typing import Final, Literal

import orjson

from streamiter.errors import OffsetOutOfRange, TopicDenied, TopicNotFound
from streamiter.topics.topic import (
    GroupPositions,
    OutgoingBatch,
    ReadRequest,
    Topic,
    TopicBatch,
    TopicDescription,
    TopicRecord,
    Transactions,
)
from streamiter.values.helpers.clock import Clock
from streamiter.values.helpers.closing import closed_after

COMMIT_TOPIC: Final = "streamiter-commits"
"""The one topic for all flows that write to a server or file. The key of a record is a flow, or a group and a topic
whose positions the record has."""


async def ensure_commit_topic(beside: Topic) -> Topic:
    """Return the topic of the commit records in the commit domain of ``beside``; create it where it is missing.

    The topic has one partition, so its last record is the last commit, and it keeps the last record of each key.
    Several flows may create it at once. An existing topic with other settings is used as it is.

    Raises :class:`~streamiter.errors.TopicDenied` where it may not be created; the message says how to create it.

    >>> import asyncio
    >>> from streamiter.topics import MemoryBroker
    >>> asyncio.run(ensure_commit_topic(MemoryBroker().topic("outputs")))
    MemoryTopic('memory://streamiter-commits')
    """
    commits = beside.beside(COMMIT_TOPIC)
    purpose = f"in which flows that write to {beside.url} keep their commits"
    _warn_of_deletion(commits, await ensure_compacted(commits, purpose))
    return commits


async def ensure_compacted(topic: Topic, purpose: str) -> TopicDescription:
    """Create a topic of one partition that keeps the last record of each key, unless it exists; return what it is.

    Several programs may create it at once. Raises :class:`~streamiter.errors.TopicDenied` where it may not be created;
    the message has the ``purpose``, and says how to create it.
    """
    settings = {**topic.compaction_settings, **topic.eager_compaction_settings}
    try:
        return await _described_or_created(topic, settings)
    except TopicDenied as denied:
        raise TopicDenied(
            f"topic {topic.name!r}, {purpose}: {denied}. Have it created with 1 partition and {_listed(settings)}, "
            "and allow this user to describe, read and write it"
        ) from denied


async def _described_or_created(topic: Topic, settings: Mapping[str, str]) -> TopicDescription:
    # Creates first: this does not change an existing topic, and describing a missing topic would wait for it.
    try:
        await topic.create(partitions=1, settings=settings)
    except TopicDenied as denied:
        try:
            return await topic.describe()
        except TopicNotFound:
            raise denied from None
    return await topic.describe()


def _warn_of_deletion(commits: Topic, description: TopicDescription) -> None:
    for name, value in commits.compaction_settings.items():
        given = description.settings.get(name, value if not description.settings else None)
        if given != value:
            _log.warning(
                "topic %r: expected %s=%s, found %s; a flow whose commit record is deleted cannot resume from its "
                "checkpoints, and records that are never dropped fill the disk. Change the topic's settings, or "
                "delete the topic while no flow that must resume is running",
                commits.url,
                name,
                value,
                given,
            )


def _listed(settings: Mapping[str, str]) -> str:
    return ", ".join(f"{name}={value}" for name, value in settings.items()) or "no settings"


async def last_value(topic: Topic, key: bytes, *, clock: Clock) -> TopicRecord | None:
    """Return the last committed record with ``key``, or None; its value is None if the key was deleted.

    The topic is read backwards, so the time does not depend on earlier records. Every record that is committed at the
    time of the call is found. If records of an open transaction are at the end, the call waits until the transaction
    ends, at most for its timeout. So do not call it within a transaction of your own that writes to the topic.

    Raises the errors of the topic, mainly :class:`~streamiter.errors.TopicNotFound`.

    >>> import asyncio
    >>> from streamiter.values.helpers.clock import SystemClock
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
        reading = BackwardReading(topic, description, number, clock, waits=True)
        record = await _last_in(reading, topic.name, key, clock)
        # A key is in one partition, unless partitions were added since.
        if record is not None and (found is None or record.timestamp_ms > found.timestamp_ms):
            found = record
    return found


async def commit_positions(transactions: Transactions, topic: Topic, group: str, positions: GroupPositions) -> None:
    """Store within the open transaction where ``group`` resumes in a topic of the same commit domain.

    :func:`committed_positions` returns the positions when the transaction is committed. Call that once before the first
    transaction, because it creates the commit topic.
    """
    if topic.keeps_positions:
        await transactions.commit_positions(topic, group, positions)
    else:
        value = orjson.dumps(positions, option=orjson.OPT_NON_STR_KEYS)
        batch = OutgoingBatch([value], keys=[_key_of_positions(topic, group)])
        await transactions.write(topic.beside(COMMIT_TOPIC), batch)


async def committed_positions(topic: Topic, group: str, *, clock: Clock) -> GroupPositions | None:
    """Return what :func:`commit_positions` has committed for a topic and group; None for nothing.

    Waits until an open transaction that changes it has ended.
    """
    if topic.keeps_positions:
        return await topic.committed_positions(group)
    record = await last_value(await ensure_commit_topic(topic), _key_of_positions(topic, group), clock=clock)
    if record is None:
        return None
    value = orjson.loads(record.value or b"")
    offsets, identities = ({int(key): each for key, each in value[name].items()} for name in ("offsets", "identities"))
    return GroupPositions(offsets, value["run"], identities)


def _key_of_positions(topic: Topic, group: str) -> bytes:
    return f"{group} in {topic.name}".encode()


# A transaction at the end of a topic ends within milliseconds unless its writer is gone.
_LOG_AFTER_S: Final = 3.0


async def _last_in(reading: BackwardReading, topic: str, key: bytes, clock: Clock) -> TopicRecord | None:
    """Return the last record of the key in one partition."""
    found: list[TopicRecord] = []

    def take(batch: TopicBatch) -> None:
        index = _last_index(batch, key)
        if index is not None:
            found[:] = batch[index : index + 1].records()

    def tell_of_waiting() -> None:
        _log.warning(
            "topic %r, partition %d: still looking for the last record of %r; an open transaction of a "
            "writer that is gone delays it until its timeout, or the topic has many records",
            topic,
            reading.number,
            key,
        )

    async with closed_after(clock.call_later(_LOG_AFTER_S, tell_of_waiting).cancel):
        while not found and not reading.is_at_beginning:
            await reading.read_window(take)
    return found[0] if found else None


def _last_index(batch: TopicBatch, key: bytes) -> int | None:
    keys = batch.keys
    return next((index for index in reversed(range(len(keys))) if keys[index] == key), None)


# A record may have a megabyte (an update of a model), and a whole batch is in memory at once.
READ_RECORDS: Final = 64

# The first window, in offsets: one round trip, and usually all records of a compacted topic.
_WINDOW: Final = 32

_Stop = Literal["latest"] | Mapping[int, int]


class BackwardReading:
    """Reads one partition backwards from its end, in windows of growing size; each record is read once.

    A search for a record near the end stops after the window that has it, so its time does not depend on earlier
    records. The size of the windows doubles without limit, because a compacted partition has few records in very many
    offsets.

    The last records may be of an open transaction. With ``waits`` the first window waits until the transaction ends.
    Without it these records are left out; they come after ``position``.
    """

    def __init__(self, topic: Topic, description: TopicDescription, number: int, clock: Clock, *, waits: bool) -> None:
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
        """Whether the whole partition was read."""
        return self._read_from <= self._earliest

    @property
    def position(self) -> int:
        """The offset at which to read on after the records that were found."""
        return self._read_from if self._next_offset is None else self._next_offset

    async def read_window(self, take: Callable[[TopicBatch], None]) -> None:
        """Read the next window, which is before all records read so far, from its beginning to its end."""
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
        async with closed_after(reader.close):
            while (batch := await reader.read()) is not None:
                if batch.partition == self.number:  # and not a partition that was just added
                    self._next_offset = max(self._next_offset or 0, batch.next_offset)
                    take(batch)

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
        """Return where to stop: reading up to an offset waits until the transactions before it have ended."""
        # After a record was found, no transaction before it is open.
        if self._waits or self._next_offset is not None:
            return {self.number: self._read_from}
        return "latest"

    async def _has_lost_records(self) -> bool:
        """Return whether retention has just dropped records of the window; then the rest of it is read."""
        earliest, _ = (await self._topic.describe()).offsets[self.number]
        lost, self._earliest = earliest > self._earliest, earliest
        return lost


COMPACTED_BLOCKS: Final = 256
"""More than the number of flows that write to one file. This many blocks of one record are checked in a millisecond."""


def is_superseded(keys: Sequence[bytes | None] | None, newer: Set[bytes]) -> bool:
    """Return whether each of these records has a key that is among the ``newer`` keys.

    This is the compaction of connectors without a server. At each write they check the last ``COMPACTED_BLOCKS``
    blocks, and drop a block if each of its records has a newer record with its key. So a topic of few keys that are
    written one by one, such as commit records, has hardly more blocks than keys. A topic of many keys keeps more
    records than it needs.

    >>> is_superseded([b"a", b"b"], {b"a", b"b", b"c"}), is_superseded([b"a", None], {b"a"})
    (True, False)
    """
    return keys is not None and all(key is not None and key in newer for key in keys)


_log = logging.getLogger("streamiter.topics")
