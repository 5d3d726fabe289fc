"""Publishing every model of a stream as an update."""

from __future__ import annotations

import logging
from typing import Any

from streamiter.models.encoder import EncoderState, ModelUpdateEncoder, record_limit
from streamiter.models.formats import UpdateFormat
from streamiter.models.last import last_update, next_run
from streamiter.operators.operator import Context
from streamiter.operators.source import Positions, Source, SourceBatch
from streamiter.topics.topic import OutgoingBatch, Topic
from streamiter.topics.topic_sink import TopicSink

__all__ = [
    "InitialModel",
    "ModelPublisher",
    "initial_model",
]


_log = logging.getLogger("streamiter.models")


class ModelPublisher(TopicSink):
    """Writes one update for each record: an array, a dict of parameters or a ``ModelSnapshot``.

    A run that restores nothing begins a new generation, the topic's last one + 1; one that is restored
    goes on with its generation and the next version. Where the topic has later updates than it was restored
    with, as of an older checkpoint or before a crash at least once, it begins a new generation, too: readers
    would take its updates for old ones until its versions had caught up.
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
        run = self._fresh = await next_run(self.topic, self._model)
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
        restored = (state["generation"], state["next_version"] - 1)
        if self._fresh.last_rank > restored:
            _log.info(
                "model %r: %s has update %d.%d, later than the restored %d.%d: going on with generation %d",
                self._model,
                self.topic.url,
                *self._fresh.last_rank,
                *restored,
                self._fresh.generation,
            )
            return  # As it was opened, which is with the chunks to delete that are in the topic now.
        self._updates.restore(state)


class _NotOpenYet:
    """Stands where the encoder will be once the topic's last generation is known."""

    def encode(self, batch: Any) -> OutgoingBatch:
        raise NotImplementedError


def initial_model(topic: Topic, *, model: str, default: Any) -> InitialModel:
    """A source of one record: the parameters last published, or ``default`` where there are none.

    >>> from streamiter import Flow
    >>> from streamiter.models import initial_model
    >>> from streamiter.topics import MemoryBroker
    >>> flow = Flow("warm start")
    >>> updates = MemoryBroker().topic("model-updates")
    >>> initial = flow.from_source(initial_model(updates, model="ctr", default=[0.0]), parallelism=1)

    A warm start: the last published model as the initial variable of an iteration.
    """
    return InitialModel(topic, model, default)


class InitialModel:
    """What :func:`initial_model` gives: makes the source, as ``flow.from_source`` asks."""

    bounded = True

    def __init__(self, topic: Topic, model: str, default: Any) -> None:
        self._topic = topic
        self._model = model
        self._default = default
        self.__name__ = f"initial {model}"

    def __call__(self) -> Source:
        return _InitialModelSource(self._topic, self._model, self._default)


class _InitialModelSource(Source):
    def __init__(self, topic: Topic, model: str, default: Any) -> None:
        self._topic = topic
        self._model = model
        self._default = default
        self._given = False

    def open(self, context: Context, positions: Positions | None) -> None:
        self._given = context.subtask_index > 0 or bool(positions)

    async def read(self) -> SourceBatch | None:
        if self._given:
            return None
        self._given = True
        update = await last_update(self._topic, self._model)
        parameters = self._default if update is None else update.parameters
        return SourceBatch([parameters], {"given": True})
