"""Reading a topic of an SQLite file."""

from __future__ import annotations

import sqlite3
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Final

from streamiter.errors import TopicError
from streamiter.topics.positions import (
    PartitionEnds,
    check_identities,
    check_named_partitions,
    first_position,
    partitions_of,
    stop_offsets,
)
from streamiter.topics.topic import ReadRequest, TopicBatch, TopicReader
from streamiter_sqlite.database import Database
from streamiter_sqlite.locking import read_transaction
from streamiter_sqlite.log import TopicRow, find_topic, partition_ends
from streamiter_sqlite.options import SqliteOptions
from streamiter_sqlite.scan import Wanted, fetch, offset_at

__all__ = ["SqliteReader"]

# Packed bytes that one look brings into memory, for all partitions together: four full blocks.
_FETCH_BYTES: Final = 4 << 20

# How much longer the pause gets with each empty look: from 20 ms to 200 ms within a second. Waking up an idle
# process for a look costs about 0.5 ms of CPU here: 2.5 % at 50 looks a second, 0.25 % at 5.
_PAUSE_GROWTH: Final = 1.2


@dataclass(frozen=True, slots=True)
class Beginning:
    """What a reader begins with."""

    topic: TopicRow
    positions: dict[int, int]
    stops: dict[int, int] | None
    ends: dict[int, PartitionEnds]


def _begin(connection: sqlite3.Connection, name: str, request: ReadRequest) -> Beginning:
    with read_transaction(connection):
        topic = find_topic(connection, name)
        all_ends = partition_ends(connection, topic)
        check_named_partitions(request, len(all_ends), topic=name)
        check_identities(request, topic.identities(all_ends), all_ends, topic=name)
        ends = {number: all_ends[number] for number in partitions_of(request, len(all_ends))}
        positions = {
            number: first_position(
                request, number, its_ends, partial(offset_at, connection, topic, number, its_ends), topic=name
            )
            for number, its_ends in ends.items()
        }
    stops = stop_offsets(request, {number: its_ends.stable for number, its_ends in ends.items()})
    return Beginning(topic, positions, stops, ends)


@dataclass(slots=True)
class Buffered:
    """Fetched records of one partition, of which the first ``taken`` were returned."""

    batch: TopicBatch
    taken: int = 0


class SqliteReader(TopicReader):
    """Reads its share of a topic; looks for new records at intervals, whoever writes them."""

    def __init__(
        self, database: Database, beginning: Beginning, request: ReadRequest, options: SqliteOptions
    ) -> None:
        self._database = database
        self._topic = beginning.topic
        # The order of the partitions here is the order of their turns: who was served goes to the end.
        self._positions = beginning.positions
        self._stops = beginning.stops
        self._ends: Mapping[int, PartitionEnds] = beginning.ends
        self._request = request
        self._options = options
        self._buffers: dict[int, Buffered] = {}
        self._seen_version: int | None = None
        self._pause_s = options.poll_interval_s
        self._is_closed = False

    @classmethod
    async def open(
        cls, database: Database, name: str, request: ReadRequest, options: SqliteOptions
    ) -> SqliteReader:
        """A reader at its start position; it owns ``database`` from here on."""
        try:
            return cls(database, await database.run(_begin, name, request), request, options)
        except BaseException:
            await database.close()
            raise

    async def read(self) -> TopicBatch | None:
        while True:
            if self._is_closed:
                raise TopicError(f"reader of {self._topic.name!r} is closed")
            batch = self._take()
            if batch is not None or self._is_at_end():
                return batch
            if not await self._look():
                await self._request.clock.sleep(self._pause_s)
                self._pause_s = min(self._options.poll_interval_max_s, self._pause_s * _PAUSE_GROWTH)

    def positions(self) -> Mapping[int, int]:
        return {number: self._positions[number] for number in sorted(self._positions)}

    def identities(self) -> Mapping[int, str]:
        return self._topic.identities(self._positions)

    def lag(self) -> Mapping[int, int]:
        return {
            number: max(0, self._limit(number) - self._positions[number])
            for number in sorted(self._positions)
        }

    async def close(self) -> None:
        self._is_closed = True
        await self._database.close()

    def _take(self) -> TopicBatch | None:
        """The next records that are in memory, of the partition whose turn it is."""
        for number in self._positions:
            if number in self._buffers:
                return self._take_from(number, self._buffers[number])
        return None

    def _take_from(self, number: int, buffered: Buffered) -> TopicBatch:
        start, stop = buffered.taken, buffered.taken + self._request.max_records
        batch = buffered.batch if stop - start >= len(buffered.batch) else buffered.batch[start:stop]
        buffered.taken = stop
        if stop >= len(buffered.batch):
            del self._buffers[number]
        del self._positions[number]
        self._positions[number] = batch.next_offset
        return batch

    def _is_at_end(self) -> bool:
        return self._stops is not None and all(
            position >= self._stops.get(number, 0) for number, position in self._positions.items()
        )

    def _limit(self, number: int) -> int:
        end = self._ends[number].end
        return end if self._stops is None else min(end, self._stops.get(number, 0))

    async def _look(self) -> bool:
        """Fetch into the buffers; whether it is worth while to go on without a pause."""
        wanted = Wanted(
            self._positions, self._stops, self._request.max_records, _FETCH_BYTES, self._seen_version
        )
        fetched = await self._database.run(fetch, self._topic, wanted)
        if fetched is None:
            return False
        self._ends = fetched.ends
        self._buffers = {number: Buffered(batch) for number, batch in fetched.batches.items()}
        self._positions.update(fetched.passed)
        has_news = self._add_partitions() or bool(fetched.batches)
        # Where there were records there may be more than fitted into one look: look again in any case.
        self._seen_version = None if has_news else fetched.version
        if has_news:
            self._pause_s = self._options.poll_interval_s
        return has_news

    def _add_partitions(self) -> bool:
        share = partitions_of(self._request, len(self._ends))
        added = [number for number in share if number not in self._positions]
        self._positions.update({number: self._ends[number].earliest for number in added})
        return bool(added)
