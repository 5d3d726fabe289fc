"""The last update of a model, found from the end of its topic: in windows that go back and grow.

The end of a log is not always its newest update: a superseded writer may have written after the one that
took over, chunks may lie across windows, other models between, and a partition may be silent. So the
search does not stop at the first update it meets but goes back in each partition until

* it has read a good stretch (``_RECORDS`` records or ``_BYTES`` bytes) and awaits no chunk, and
* what it reads is older than the update found,

or the partition's beginning is reached. Each record is read once, a small batch at a time.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from streamiter.clock import Clock
from streamiter.errors import DecodeError
from streamiter.models.encoder import ChunkSet
from streamiter.models.headers import UpdateHeaders, deleted_rank, is_key_of
from streamiter.models.intake import UpdateIntake
from streamiter.models.update import ModelUpdate, Rank
from streamiter.topics.backwards import BackwardReading
from streamiter.topics.topic import Topic, TopicBatch, TopicRecord

__all__ = ["Tail", "TailSearch"]

# How far back a superseded writer's records may hide the newest update: at ten updates a second 1,024
# records are over a minute, and a superseded writer that is fenced writes none at all. 64 MiB are read
# in under a second.
_RECORDS: Final = 1024
_BYTES: Final = 64 * 1024 * 1024

# Writers whose records may lie between the chunks of an update, it included. Chunks are written at once.
_INTERLEAVED_WRITERS: Final = 4

# Updates remembered for the chunks that a new run is to delete: the last one, and those of crashes before
# it. Beyond that some stay in the topic, which costs its space and nothing else.
_LEFTOVERS_MAX: Final = 1024

_Place = tuple[int, int]
"""Time stamp and offset: where a record lies, comparable also between partitions."""


@dataclass(frozen=True, slots=True)
class Tail:
    """What the search found.

    ``update``: the last one, or None. ``error``: why a record after it could not be read. ``rank``: the
    highest generation and version that any record of the model names, be it of an incomplete update; zeros
    for none. ``leftovers``: the chunks that a new run is to delete. ``positions``: where to read on, by
    partition, and ``identities`` to which topic these offsets belong.
    """

    update: ModelUpdate | None
    error: DecodeError | None
    rank: Rank
    leftovers: list[ChunkSet]
    positions: dict[int, int]
    identities: Mapping[int, str]


@dataclass(slots=True)
class _SeenChunks:
    """An update in chunks: how many, and where the last of them lies that was met."""

    count: int
    last_place: _Place


class _PartitionTail:
    """How far back one partition has been read, and how much that was."""

    def __init__(self, reading: BackwardReading) -> None:
        self.reading = reading
        self.records = 0
        self.size_bytes = 0
        self.oldest_ms: int | None = None

    def add(self, batch: TopicBatch) -> None:
        self.records += len(batch)
        self.size_bytes += sum(len(value) for value in batch.values if value is not None)
        first_ms = batch.timestamps_ms[0]
        self.oldest_ms = first_ms if self.oldest_ms is None else min(self.oldest_ms, first_ms)


class TailSearch:
    """One search. ``intake`` can be used on for what comes after: it knows the chunks seen so far."""

    def __init__(self, topic: Topic, model: str, clock: Clock) -> None:
        self.intake = UpdateIntake(topic, model)
        self._topic = topic
        self._model = model
        self._clock = clock
        self._update: tuple[_Place, ModelUpdate] | None = None
        self._error: tuple[_Place, DecodeError] | None = None
        self._rank: Rank = (0, 0)
        self._chunk_sets: dict[Rank, _SeenChunks] = {}
        self._deleted: dict[Rank, None] = {}

    async def run(self) -> Tail:
        """Search. Raises what the topic raises, :class:`~streamiter.errors.TopicNotFound` above all."""
        description = await self._topic.describe()
        partitions = [
            _PartitionTail(BackwardReading(self._topic, description, number, self._clock, waits=False))
            for number in sorted(description.offsets)
        ]
        while unfinished := [partition for partition in partitions if not self._is_searched(partition)]:
            for partition in unfinished:
                await partition.reading.read_window(functools.partial(self._take, partition))
        return Tail(
            update=self._update[1] if self._update else None,
            error=self._error_after_update(),
            rank=self._rank,
            leftovers=self._leftovers(),
            positions={each.reading.number: each.reading.position for each in partitions},
            identities=description.identities,
        )

    def _is_searched(self, partition: _PartitionTail) -> bool:
        if partition.reading.is_at_beginning:
            return True
        if self._update is None or partition.oldest_ms is None:
            return False
        return partition.oldest_ms < self._update[0][0] and self._is_far_enough(partition)

    def _is_far_enough(self, partition: _PartitionTail) -> bool:
        chunks = self.intake.closed_chunks
        if chunks:  # all lie before the last one, with records of a few other writers between them
            return partition.records >= _RECORDS + _INTERLEAVED_WRITERS * chunks
        return partition.records >= _RECORDS or partition.size_bytes >= _BYTES

    def _take(self, partition: _PartitionTail, batch: TopicBatch) -> None:
        partition.add(batch)
        for record in batch.records():
            self._take_record(record)

    def _take_record(self, record: TopicRecord) -> None:
        place = (record.timestamp_ms, record.offset)
        if record.value is None:
            self._note_deletion(record)
            return
        try:
            update = self.intake.take(record, functools.partial(self._note_headers, place))
        except DecodeError as error:
            if self._error is None or self._error[0] < place:
                self._error = (place, error)
            return
        if update is not None:
            seen = self._chunk_sets.get(update.rank)
            self._update = (place if seen is None else seen.last_place, update)

    def _note_headers(self, place: _Place, headers: UpdateHeaders) -> None:
        self._rank = max(self._rank, headers.rank)
        seen = self._chunk_sets.get(headers.rank)
        if seen is not None:
            seen.last_place = max(seen.last_place, place)
        elif headers.chunk is not None and len(self._chunk_sets) < _LEFTOVERS_MAX:
            self._chunk_sets[headers.rank] = _SeenChunks(headers.chunk.count, place)

    def _note_deletion(self, record: TopicRecord) -> None:
        rank = deleted_rank(record.headers)
        if rank is not None and is_key_of(self._model, record.key) and len(self._deleted) < _LEFTOVERS_MAX:
            self._deleted[rank] = None

    def _leftovers(self) -> list[ChunkSet]:
        ranks = sorted(rank for rank in self._chunk_sets if rank not in self._deleted)
        return [(*rank, self._chunk_sets[rank].count) for rank in ranks]

    def _error_after_update(self) -> DecodeError | None:
        if self._error is None or (self._update is not None and self._update[0] > self._error[0]):
            return None
        return self._error[1]
