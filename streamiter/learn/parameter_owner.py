"""The owner of a model's parameters: gradients come in, parameters and published models go out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from streamiter.learn.gradients import Gradient
from streamiter.learn.linear import LinearModel
from streamiter.models.update import ModelSnapshot
from streamiter.operators.context import Context
from streamiter.operators.operator import IterationListener, Operator
from streamiter.operators.output import Output
from streamiter.records import OutputTag

__all__ = ["MODELS", "AsynchronousOwner", "SynchronousOwner"]

MODELS: Final = OutputTag("models")
"""The side output of an owner: a ``ModelSnapshot`` for each version (or each n-th)."""


class _Owner(Operator):
    """Keeps the model with its optimizer's slots; parallelism 1.

    Records are the start (None, bare weights or a model's parameters), then gradients as the workers
    make them.
    """

    def __init__(self, make_model: Callable[[], LinearModel], publish_every: int) -> None:
        self._model = make_model()
        self._publish_every = publish_every
        self._published = 0
        self._loss: float | None = None

    def open(self, context: Context) -> None:
        self._context = context

    def process(self, record: Any, out: Output) -> None:
        """Take in the start or a gradient."""
        if isinstance(record, dict) and "gradient" in record:
            self.take_in(Gradient.from_record(record["gradient"]), record["loss"], out)
            return
        if record is not None:
            self._model.start_from(record)
        out.emit(self._model.parameters())

    def take_in(self, gradient: Gradient, loss: float, out: Output) -> None:
        """Handle a gradient and the sum of its rows' losses."""
        raise NotImplementedError

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
        snapshot = ModelSnapshot(self._model.parameters(), self._model.records, metrics, self._context.epoch)
        out.emit(snapshot, tag=MODELS)

    def snapshot(self) -> dict[str, Any]:
        return {"model": self._model.state(), "published": self._published, "loss": self._loss}

    def restore(self, state: dict[str, Any]) -> None:
        self._model.restore(state["model"])
        self._published = state["published"]
        self._loss = state["loss"]


class AsynchronousOwner(_Owner):
    """A step for each gradient, as it comes."""

    def take_in(self, gradient: Gradient, loss: float, out: Output) -> None:
        self.step(gradient, loss, out)
        out.emit(self._model.parameters())


class SynchronousOwner(_Owner, IterationListener):
    """A step for each epoch, with the gradients of all workers together.

    Parameters go out for every epoch, also where no gradient came: the workers wait for them.
    """

    def __init__(self, make_model: Callable[[], LinearModel], publish_every: int) -> None:
        super().__init__(make_model, publish_every)
        self._sums: dict[int, tuple[Gradient, float]] = {}

    def take_in(self, gradient: Gradient, loss: float, out: Output) -> None:
        epoch = self._context.epoch or 0
        if epoch in self._sums:
            before, loss_before = self._sums[epoch]
            gradient, loss = before + gradient, loss_before + loss
        self._sums[epoch] = (gradient, loss)

    def on_epoch_watermark_incremented(self, epoch_watermark: int, context: Context, out: Output) -> None:
        self._step_for(epoch_watermark, out)
        out.emit(self._model.parameters())

    def on_iteration_terminated(self, context: Context, out: Output) -> None:
        for epoch in sorted(self._sums):
            self._step_for(epoch, out)

    def _step_for(self, epoch: int, out: Output) -> None:
        if epoch in self._sums:
            gradient, loss = self._sums.pop(epoch)
            self.step(gradient, loss, out)

    def snapshot(self) -> dict[str, Any]:
        sums = [(epoch, gradient.to_record(), loss) for epoch, (gradient, loss) in self._sums.items()]
        return super().snapshot() | {"sums": sums}

    def restore(self, state: dict[str, Any]) -> None:
        super().restore(state)
        self._sums = {epoch: (Gradient.from_record(record), loss) for epoch, record, loss in state["sums"]}
