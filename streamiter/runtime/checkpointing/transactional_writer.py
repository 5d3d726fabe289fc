"""A sink's writer whose records become visible with the checkpoint they belong to."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Final, final

from streamiter.errors import StreamiterError
from streamiter.operators.rejection import RecordFailure
from streamiter.topics.outgoing import batch_bytes
from streamiter.topics.topic import OutgoingBatch, Topic, TopicWriter

__all__ = ["TransactionalWriter"]

# What one sink may hold between its barrier and the commit: some hundred milliseconds of a fast sink.
_HELD_BYTES_MAX: Final = 32 << 20

Write = Callable[[Topic, OutgoingBatch], Awaitable[None]]


@final
class TransactionalWriter(TopicWriter):
    """Writes into the open transaction; behind a barrier it holds what it is given until that is committed.

    When it holds ``_HELD_BYTES_MAX`` it waits. That cannot hold up the checkpoint it waits for: all that lies
    before a sink whose barrier has passed has passed that barrier, too.
    """

    def __init__(self, topic: Topic, write: Write, *, step: str) -> None:
        self._topic = topic
        self._step = step
        self._write = write
        self._held: deque[OutgoingBatch] = deque()
        self._held_bytes = 0
        self._is_sealed = False
        self._changed = asyncio.Event()

    async def write(self, batch: OutgoingBatch) -> None:
        while self._is_sealed and self._held_bytes >= _HELD_BYTES_MAX:
            self._changed.clear()
            await self._changed.wait()
        if self._is_sealed:
            self._held.append(batch)
            self._held_bytes += batch_bytes(batch)
        else:
            await self._write(self._topic, batch)

    async def flush(self) -> None:
        """Nothing to wait for: records are stored, and seen, with the commit."""

    async def close(self) -> None:
        """Nothing to let go of: what is held belongs to the job, which writes it or takes it back."""

    def seal(self) -> None:
        """The barrier has passed: what comes now belongs to the next transaction."""
        self._is_sealed = True

    async def unseal(self) -> None:
        """A transaction is open that what is held belongs to: write it there, in order, and go on.

        What cannot be written is a failure of the sink, as it would have been without a barrier: it may be part of the
        transaction nevertheless, so that nobody may write it again.
        """
        while self._held:
            batch = self._held[0]
            try:
                await self._write(self._topic, batch)
            except StreamiterError as error:
                raise RecordFailure(self._step) from error
            self._held.popleft()
            self._held_bytes -= batch_bytes(batch)
            self._changed.set()
        self._is_sealed = False
        self._changed.set()
