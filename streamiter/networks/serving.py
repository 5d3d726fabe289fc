"""A network that follows its topic and answers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, final

from streamiter.clock import Clock
from streamiter.errors import ConfigurationError, ModelError
from streamiter.models.served import ServedModel
from streamiter.models.update import ModelUpdate
from streamiter.networks.prediction import NetworkPredictor
from streamiter.networks.versions import network_of_version
from streamiter.topics.topic import Topic

__all__ = ["ServedNetwork"]


@final
class ServedNetwork(ServedModel):
    """As :class:`~streamiter.models.ServedModel`, for networks: a version brings all that predictions take.

    ::

        async with ServedNetwork(topic("kafka://127.0.0.1:9092/models"), "census") as served:
            await served.ready(timeout_s=10)
            print(served.predict(([3, 9, 18], [1.0, 1.0, 1.0])).value)

    Rows and values are those of :class:`~streamiter.networks.NetworkPredictor`.
    """

    def __init__(
        self, topic: Topic, model: str, *, waiting_max: int = 1024, clock: Clock | None = None
    ) -> None:
        super().__init__(topic, model, waiting_max=waiting_max, clock=clock)

    def _predictor(self, update: ModelUpdate) -> Callable[[Any], Any]:
        subject = f"{self._subject}, update {update.generation}.{update.version}"
        try:
            network, arrays = network_of_version(update.parameters, subject)
        except ConfigurationError as error:  # Of a later release, say.
            raise ModelError(f"{subject}: expected a network, given {error}") from error
        return NetworkPredictor(network, arrays, subject)
