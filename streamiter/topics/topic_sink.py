"""Writing a stream into a topic."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, Final

from streamiter.errors import EncodeError
from streamiter.operators.context import Context
from streamiter.operators.operator import Operator
from streamiter.operators.output import Output
from streamiter.records import Batch, take
from streamiter.topics.topic import Encoder, OutgoingBatch, Topic, TopicWriter

__all__ = ["TopicSink"]

KeyFunction = Callable[[Any], bytes | str | None]

# A write that fails in the background is raised by the next write or flush; where no further record
# comes, a flush this long after the last one finds it. Far below the deadlines of the connectors.
_FLUSH_AFTER_S: Final = 1.0


class TopicSink(Operator):
    """Encodes records and writes them; at least once: what is written is readable at once.

    At a barrier and at the end it returns when all that was written is stored.
    """

    def __init__(self, topic: Topic, encoder: Encoder, key: KeyFunction | None = None) -> None:
        self._topic = topic
        self._encoder = encoder
        self._key = key
        self._writer: TopicWriter | None = None
        self._context: Context | None = None
        self._flush_is_due = False

    async def open(self, context: Context) -> None:
        self._context = context
        self._writer = await self._topic.open_writer()

    async def process_batch(self, batch: Batch, out: Output) -> None:
        """Write the records of the batch."""
        assert self._writer is not None
        assert self._context is not None
        outgoing = self._encode(batch, out)
        if outgoing is None:
            return
        await self._writer.write(outgoing)
        if not self._flush_is_due:
            self._flush_is_due = True
            self._context.set_timer(_FLUSH_AFTER_S)

    async def on_timer(self, payload: object, out: Output) -> None:
        """Flush, so that a failure in the background is not silent."""
        self._flush_is_due = False
        await self._flush()

    async def finish(self, out: Output) -> None:
        await self._flush()

    async def snapshot(self) -> Any:
        await self._flush()

    async def close(self) -> None:
        if self._writer is not None:
            writer, self._writer = self._writer, None
            await writer.close()

    async def _flush(self) -> None:
        if self._writer is not None:
            await self._writer.flush()

    def _encode(self, batch: Batch, out: Output) -> OutgoingBatch | None:
        try:
            outgoing = self._encoder.encode(batch)
        except EncodeError as error:
            for index, reason in error.failures.items():
                out.reject(batch[index], reason)
            good = [index for index in range(len(batch)) if index not in error.failures]
            return self._encode(take(batch, good), out) if good else None
        if self._key is None:
            return outgoing
        return replace(outgoing, keys=[_key_bytes(self._key(record)) for record in batch])


def _key_bytes(key: bytes | str | None) -> bytes | None:
    return key.encode() if isinstance(key, str) else key
