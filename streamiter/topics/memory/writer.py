"""Writing to a topic in memory."""

from __future__ import annotations

from streamiter.errors import TopicError
from streamiter.topics.memory.store import MemoryStore
from streamiter.topics.memory.topic_log import TopicLog, append, check_not_deleted
from streamiter.topics.topic import OutgoingBatch, TopicWriter

__all__ = ["MemoryWriter"]


class MemoryWriter(TopicWriter):
    """Writes to a memory topic: what is handed over can be read at once."""

    def __init__(self, store: MemoryStore, log: TopicLog) -> None:
        self._store = store
        self._log = log
        self._turn = 0
        self._is_closed = False

    async def write(self, batch: OutgoingBatch) -> None:
        if self._is_closed:
            raise TopicError(f"writer of {self._log.name!r} is closed")
        with self._store.lock:
            append(self._log, batch, self._store.clock.now_ms(), unkeyed=self._turn)
            self._log.retain()
            self._log.waiters.wake()
        self._turn += 1

    async def flush(self) -> None:
        with self._store.lock:
            check_not_deleted(self._log)

    async def close(self) -> None:
        self._is_closed = True
