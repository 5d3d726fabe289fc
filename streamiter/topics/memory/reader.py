"""Reading a topic in memory."""

from __future__ import annotations

from collections.abc import Mapping

from streamiter.errors import OffsetOutOfRange, TopicError, TopicNotFound
from streamiter.topics.memory.partition_log import joined
from streamiter.topics.memory.store import MemoryStore
from streamiter.topics.positions import (
    check_identities,
    check_named_partitions,
    first_position,
    out_of_range_message,
    partitions_of,
    stop_offsets,
)
from streamiter.topics.topic import ReadRequest, TopicBatch, TopicReader

__all__ = ["MemoryReader"]


class MemoryReader(TopicReader):
    """Reads its share of a memory topic; waits without polling."""

    def __init__(self, store: MemoryStore, name: str, request: ReadRequest) -> None:
        self._store = store
        self._request = request
        self._is_closed = False
        with store.lock:
            self._log = store.log(name)
            check_named_partitions(request, len(self._log.partitions), topic=name)
            ends = {number: partition.ends for number, partition in enumerate(self._log.partitions)}
            check_identities(request, self._log.identities, ends, topic=name)
            # The order of the partitions here is the order of their turns: who was served goes to the end.
            self._positions = {
                number: first_position(request, number, partition.ends, partition.offset_at, topic=name)
                for number in partitions_of(request, len(self._log.partitions))
                for partition in [self._log.partitions[number]]
            }
            stable = {number: self._log.partitions[number].stable_offset for number in self._positions}
            self._stops = stop_offsets(request, stable)

    async def read(self) -> TopicBatch | None:
        while True:
            with self._store.lock:
                self._check_usable()
                batch = self._next_batch()
                if batch is not None or self._is_at_end():
                    return batch
                waiting = self._log.waiters.add()
            try:
                await waiting
            finally:
                with self._store.lock:
                    self._log.waiters.discard(waiting)

    def positions(self) -> Mapping[int, int]:
        with self._store.lock:
            return {number: self._positions[number] for number in sorted(self._positions)}

    def identities(self) -> Mapping[int, str]:
        with self._store.lock:
            return self._log.identities

    def lag(self) -> Mapping[int, int]:
        with self._store.lock:
            partitions = self._log.partitions
            return {
                number: max(
                    0, self._limit(number, partitions[number].stable_offset) - self._positions[number]
                )
                for number in sorted(self._positions)
                if number < len(partitions)
            }

    async def close(self) -> None:
        with self._store.lock:
            self._is_closed = True
            self._log.waiters.wake()

    def _check_usable(self) -> None:
        if self._is_closed:
            raise TopicError(f"reader of {self._log.name!r} is closed")
        if self._log.is_deleted:
            raise TopicNotFound(f"topic {self._log.name!r} was deleted while it was read")

    def _next_batch(self) -> TopicBatch | None:
        self._find_new_partitions()
        for number in list(self._positions):
            batch = self._batch_of(number)
            if batch is not None:
                return batch
        return None

    def _find_new_partitions(self) -> None:
        for number in partitions_of(self._request, len(self._log.partitions)):
            if number not in self._positions:
                self._positions[number] = self._log.partitions[number].start_offset

    def _batch_of(self, number: int) -> TopicBatch | None:
        partition, position = self._log.partitions[number], self._positions[number]
        limit = self._limit(number, partition.stable_offset)
        if position >= limit:
            return None
        if position < partition.start_offset:
            message = out_of_range_message(self._log.name, number, position, partition.ends)
            raise OffsetOutOfRange(message)
        parts, next_position = partition.read(position, limit, self._request.max_records)
        if parts:
            del self._positions[number]
        self._positions[number] = next_position
        return joined(number, parts) if parts else None

    def _limit(self, number: int, stable_offset: int) -> int:
        if self._stops is None:
            return stable_offset
        return min(stable_offset, self._stops.get(number, 0))

    def _is_at_end(self) -> bool:
        return self._stops is not None and all(
            position >= self._stops.get(number, 0) for number, position in self._positions.items()
        )
