"""Reading a partition from its end: in windows that go back and grow, each record once.

Whoever looks for something near the end stops after the window that has it, so the time does not depend on
what lies before. Windows double without limit: a compacted partition has few records in very many offsets.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final, Literal

from streamiter.clock import Clock
from streamiter.errors import OffsetOutOfRange
from streamiter.topics.topic import ReadRequest, Topic, TopicBatch, TopicDescription

__all__ = ["READ_RECORDS", "BackwardReading"]

# Records may be a megabyte each (updates of models), and a batch of them is in memory at once.
READ_RECORDS: Final = 64

# The first window, in offsets: one round trip, and mostly all of what a compacted topic has.
_WINDOW: Final = 32

_Stop = Literal["latest"] | Mapping[int, int]


class BackwardReading:
    """Goes back in one partition from the end that ``description`` tells.

    At the very end there may be records of a transaction that is still open. With ``waits`` the first
    window ends when they are decided; without, they are left out, and lie behind ``position``.
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
