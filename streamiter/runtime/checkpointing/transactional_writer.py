"""A sink's writer whose records become visible with the checkpoint they belong to."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import final

from streamiter.errors import StreamiterError
from streamiter.operators.rejection import RecordFailure
from streamiter.runtime.checkpointing.held_batches import HeldBatches
from streamiter.topics.topic import OutgoingBatch, Topic, TopicWriter

__all__ = ["TransactionalWriter"]

Write = Callable[[Topic, OutgoingBatch], Awaitable[None]]


@final
class TransactionalWriter(TopicWriter):
    """Writes into the open transaction; behind a barrier it holds what it is given until that is committed.

    What it holds goes on on disk when memory is used up, since it must not wait: behind a loop, the barrier comes back
    only when all feedback before it has passed the body, and what the body emits comes here. Only when the disk
    limit is reached, too, does it wait; the checkpoint of a loop is then given up.
    """

    def __init__(self, topic: Topic, write: Write, held: HeldBatches, *, step: str) -> None:
        self._topic = topic
        self._step = step
        self._write = write
        self._held = held
        self._is_sealed = False
        self._is_draining = False
        self._changed = asyncio.Event()

    async def write(self, batch: OutgoingBatch) -> None:
        # While what is held is written, nothing is added to it: a fast sink would never let it end.
        while self._is_draining or (self._is_sealed and not self._held.put(batch)):
            self._changed.clear()
            await self._changed.wait()
        if not self._is_sealed:
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
        self._is_draining = True
        while (batch := self._held.first()) is not None:
            try:
                await self._write(self._topic, batch)
            except StreamiterError as error:
                raise RecordFailure(self._step) from error
            self._held.drop_first()
        self._is_sealed = self._is_draining = False
        self._changed.set()

    def let_go(self) -> None:
        """Drop what is held."""
        self._held.close()
