"""A warm start: the last published model as the initial variable of an iteration."""

from __future__ import annotations

from typing import Any

from streamiter.models.last import last_update
from streamiter.operators.context import Context
from streamiter.operators.source import Positions, Source, SourceBatch
from streamiter.topics.topic import Topic

__all__ = ["InitialModel", "initial_model"]


def initial_model(topic: Topic, *, model: str, default: Any) -> InitialModel:
    """A source of one record: the parameters last published, or ``default`` where there are none.

    >>> from streamiter import Flow
    >>> from streamiter.models import initial_model
    >>> from streamiter.topics import MemoryBroker
    >>> flow = Flow("warm start")
    >>> updates = MemoryBroker().topic("model-updates")
    >>> initial = flow.from_source(initial_model(updates, model="ctr", default=[0.0]), parallelism=1)
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
