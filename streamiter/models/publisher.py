"""Publishing every model of a stream as an update."""

from __future__ import annotations

from typing import Any

from streamiter.models.encoder import EncoderState, ModelUpdateEncoder, record_limit
from streamiter.models.formats import UpdateFormat
from streamiter.models.last import next_run
from streamiter.operators.context import Context
from streamiter.topics.topic import OutgoingBatch, Topic
from streamiter.topics.topic_sink import TopicSink

__all__ = ["ModelPublisher"]


class ModelPublisher(TopicSink):
    """Writes one update for each record: an array, a dict of parameters or a ``ModelSnapshot``.

    A run that restores nothing begins a new generation, the topic's last one + 1; one that is restored
    goes on with its generation and the next version.
    """

    def __init__(
        self,
        topic: Topic,
        model: str,
        format: UpdateFormat = "auto",  # noqa: A002
        *,
        at_least_once: bool = False,
    ) -> None:
        super().__init__(topic, _NotOpenYet(), at_least_once=at_least_once)
        self._model = model
        self._format: UpdateFormat = format

    async def open(self, context: Context) -> None:
        run = await next_run(self.topic, self._model)
        self._updates = ModelUpdateEncoder(
            self._model,
            run.generation,
            clock=context.clock,
            format=self._format,
            record_bytes_max=record_limit(await self.topic.describe()),
            leftovers=run.leftovers,
        )
        self._encoder = self._updates
        await super().open(context)

    async def snapshot(self) -> EncoderState:
        await super().snapshot()
        return self._updates.snapshot()

    def restore(self, state: EncoderState) -> None:
        self._updates.restore(state)


class _NotOpenYet:
    """Stands where the encoder will be once the topic's last generation is known."""

    def encode(self, batch: Any) -> OutgoingBatch:
        raise NotImplementedError
