"""Writing a stream into a topic."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, Final

from streamiter.errors import EncodeError
from streamiter.operators.context import Context
from streamiter.operators.functions import FunctionResultError
from streamiter.operators.operator import Operator
from streamiter.operators.output import Output
from streamiter.operators.record_loop import apply_to_each
from streamiter.operators.rejection import shortened
from streamiter.records import Batch, take
from streamiter.topics.dead_letters import DeadLetterEncoder
from streamiter.topics.outputs import Outputs
from streamiter.topics.topic import Encoder, OutgoingBatch, SizeLimit, Topic, TopicWriter

__all__ = ["TopicSink"]

KeyFunction = Callable[[Any], bytes | str | None]

# A write that fails in the background is raised by the next write or flush; where no further record
# comes, a flush this long after the last one finds it. Far below the deadlines of the connectors.
_FLUSH_AFTER_S: Final = 1.0


class TopicSink(Operator):
    """Encodes records and writes them: into the job's transaction where it has one for this topic, else at once.

    What is written at once is stored when it returns from a barrier or from the end.
    """

    def __init__(
        self, topic: Topic, encoder: Encoder, key: KeyFunction | None = None, *, at_least_once: bool = False
    ) -> None:
        self.topic = topic
        self.at_least_once = at_least_once
        self._encoder = encoder
        self._key_bytes = None if key is None else _bytes_of(key)
        self._writer: TopicWriter | None = None
        self._context: Context | None = None
        self._flush_is_due = False
        self._limit: SizeLimit | None = None
        self._limit_is_known = False

    @property
    def is_for_dead_letters(self) -> bool:
        """Whether it writes what steps have refused, and no results."""
        return isinstance(self._encoder, DeadLetterEncoder)

    async def open(self, context: Context) -> None:
        self._context = context
        self._outputs = context.scope.get(Outputs, Outputs)
        self._writer = await self._outputs.open_writer(
            self.topic, at_least_once=self.at_least_once, step=context.name
        )
        if isinstance(self._encoder, DeadLetterEncoder):
            self._encoder.cut_to(await self.topic.size_limit(), self.topic.name)

    async def process_batch(self, batch: Batch, out: Output) -> None:
        """Write the records of the batch."""
        assert self._writer is not None
        assert self._context is not None
        if out.tolerates_rejections and not self._limit_is_known:
            self._limit, self._limit_is_known = await self.topic.size_limit(), True
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
        if self._writer is not None:
            await self._outputs.barrier_passed(self._writer)

    async def close(self) -> None:
        if self._writer is not None:
            writer, self._writer = self._writer, None
            await writer.close()

    async def _flush(self) -> None:
        if self._writer is not None:
            await self._writer.flush()

    def _encode(self, batch: Batch, out: Output) -> OutgoingBatch | None:
        """What is to be written; records that have no good key or cannot be encoded are refused."""
        keys: list[bytes | None] | None = None
        if self._key_bytes is not None:
            batch, keys = apply_to_each(self._key_bytes, batch, out)
        while len(batch):
            try:
                outgoing = self._encoder.encode(batch)
                self._check_sizes(outgoing if keys is None else replace(outgoing, keys=keys))
            except EncodeError as error:
                for index, reason in error.failures.items():
                    out.reject(batch[index], reason, origin=out.batch_origin)
                good = [index for index in range(len(batch)) if index not in error.failures]
                batch = take(batch, good)
                keys = None if keys is None else [keys[index] for index in good]
            else:
                return outgoing if keys is None else replace(outgoing, keys=keys)
        return None

    def _check_sizes(self, outgoing: OutgoingBatch) -> None:
        """Where records may be refused, refuse those that the topic would not take; else its own error ends the job."""
        if self._limit is not None and (too_large := self._limit.exceeded_by(outgoing)):
            limit_bytes = self._limit.size_bytes
            raise EncodeError(
                {
                    index: f"it takes {size_bytes} bytes in topic {self.topic.name!r}, which takes {limit_bytes}"
                    for index, size_bytes in too_large.items()
                }
            )


def _bytes_of(key: KeyFunction) -> Callable[[Any], bytes | None]:
    def key_bytes(record: Any) -> bytes | None:
        given = key(record)
        if isinstance(given, str):
            return given.encode()
        if given is None or type(given) is bytes:
            return given
        if isinstance(given, bytes):
            return bytes(given)  # Of numpy, say: topics take nothing but bytes themselves.
        raise FunctionResultError(
            f"key: expected the function to return bytes, str or None, given {shortened(given)} "
            f"({type(given).__name__}); return str(…) or its bytes"
        )

    return key_bytes
