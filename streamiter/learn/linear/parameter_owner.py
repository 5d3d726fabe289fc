"""The owner of a model's parameters: gradients come in, parameters and published models go out."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final

from streamiter.errors import GraphError
from streamiter.flow.graph_checks import check_function
from streamiter.learn.linear.gradients import Gradient
from streamiter.learn.linear.model import LinearModel
from streamiter.models.update import ModelSnapshot
from streamiter.operators.context import Context
from streamiter.operators.operator import Operator
from streamiter.operators.output import Output
from streamiter.operators.rejection import shortened
from streamiter.records import OutputTag

__all__ = ["MODELS", "EpochGradients", "ParameterOwner", "check_makes_model"]

MODELS: Final = OutputTag("models")
"""The side output of an owner: a ``ModelSnapshot`` for each version (or each n-th)."""


class ParameterOwner(Operator):
    """Keeps the model with its optimizer's slots, and publishes it; parallelism 1.

    It emits the parameters that the workers go on with.
    """

    def __init__(self, make_model: Callable[[], LinearModel], publish_every: int) -> None:
        self._model = make_model()
        self._publish_every = publish_every
        self._published = 0
        self._loss: float | None = None

    def open(self, context: Context) -> None:
        self._context = context

    def step(self, gradient: Gradient, loss: float, out: Output) -> None:
        """One step; publishes the model when it is due."""
        self._model.apply(gradient)
        self._loss = loss / gradient.weight if gradient.weight else self._loss
        if self._model.version - self._published >= self._publish_every:
            self._publish(out)

    def finish(self, out: Output) -> None:
        """The last version is published in any case."""
        if self._model.version > self._published:
            self._publish(out)

    def _publish(self, out: Output) -> None:
        self._published = self._model.version
        metrics = {} if self._loss is None else {"loss": self._loss}
        parameters, records = self._model.parameters(), self._model.records
        out.emit(ModelSnapshot(parameters, records, metrics, self._context.epoch), tag=MODELS)

    def snapshot(self) -> dict[str, Any]:
        return {"model": self._model.state(), "published": self._published, "loss": self._loss}

    def restore(self, state: dict[str, Any]) -> None:
        self._model.restore(state["model"])
        self._published = state["published"]
        self._loss = state["loss"]


@dataclass
class EpochGradients:
    """What the workers have reported for one epoch."""

    gradients: dict[int, Gradient] = field(default_factory=dict)
    losses: dict[int, float] = field(default_factory=dict)

    def add(self, worker: int, gradient: Gradient, loss: float) -> None:
        before = self.gradients.get(worker)
        self.gradients[worker] = gradient if before is None else before + gradient
        self.losses[worker] = self.losses.get(worker, 0.0) + loss

    def total(self) -> tuple[Gradient, float]:
        workers = sorted(self.gradients)
        gradient = self.gradients[workers[0]]
        for worker in workers[1:]:
            gradient = gradient + self.gradients[worker]
        return gradient, sum(self.losses[worker] for worker in workers)

    def to_record(self) -> list[tuple[int, dict[str, Any], float]]:
        return [
            (worker, gradient.to_record(), self.losses[worker]) for worker, gradient in self.gradients.items()
        ]

    @classmethod
    def from_record(cls, record: list[tuple[int, dict[str, Any], float]]) -> EpochGradients:
        gradients = {worker: Gradient.from_record(gradient) for worker, gradient, _ in record}
        return cls(gradients, {worker: loss for worker, _, loss in record})


def check_makes_model(owner: str, make_model: Any) -> None:
    """Raise GraphError for what is no function, such as a model itself."""
    if isinstance(make_model, LinearModel) or not callable(make_model):
        raise GraphError(
            f"{owner}: expected a function that makes the model, given {shortened(make_model)}; each worker needs one "
            "of its own: write lambda: LogisticRegression(…)"
        )
    check_function(make_model, f"{owner}(model)", [])
