"""Reading several files in turns."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress

from streamiter.errors import TopicError
from streamiter.topics.topic import TopicBatch, TopicReader
from streamiter_files.file_set import known_identities
from streamiter_files.partition import FilePartition
from streamiter_files.threads import OneAtATime

__all__ = ["FilesReader"]


class FilesReader(TopicReader):
    """Reads files to the end each had when the reader was opened.

    ``files_at_once`` files are open and take turns, the next one is opened when one of them ends: with 1,
    the files are read one after the other, in the order of their partitions.
    """

    def __init__(
        self, partitions: Sequence[FilePartition], *, topic: str, max_records: int, files_at_once: int
    ) -> None:
        self._topic = topic
        self._is_closed = False
        self._partitions = tuple(partitions)
        self._waiting = deque(partitions)
        self._open: deque[FilePartition] = deque()
        self._max_records = max_records
        self._files_at_once = files_at_once
        self._calls = OneAtATime()

    async def read(self) -> TopicBatch | None:
        """The next records of some file, None when all files have ended."""
        if self._is_closed:
            raise TopicError(f"topic {self._topic!r}: expected an open reader, this one was closed")
        await self._calls.settle()
        while partition := self._next_partition():
            if not partition.has_records and not partition.is_ended:
                await self._calls.run(partition.fill)
            if partition.has_records:
                self._open.rotate(-1)
                return partition.take(self._max_records)
            partition.close()
            self._open.popleft()
        return None

    def _next_partition(self) -> FilePartition | None:
        while self._waiting and len(self._open) < self._files_at_once:
            self._open.append(self._waiting.popleft())
        return self._open[0] if self._open else None

    def positions(self) -> Mapping[int, int]:
        return {partition.number: partition.next_offset for partition in self._partitions}

    def identities(self) -> Mapping[int, str]:
        return known_identities({partition.number: partition.identity for partition in self._partitions})

    def lag(self) -> Mapping[int, int]:
        """Estimated by the bytes left; a file of which nothing was read yet is missing."""
        lags = {partition.number: partition.lag() for partition in self._partitions}
        return {number: lag for number, lag in lags.items() if lag is not None}

    async def close(self) -> None:
        """Close the files."""
        self._is_closed = True
        self._waiting.clear()
        try:
            with suppress(TopicError):  # of a read that was cancelled: nobody waits for it any more
                await self._calls.settle()
        finally:
            while self._open:
                self._open.pop().close()
