"""Owners of the parameters in offline training: as online, and they tell the loss of each step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from streamiter.errors import ModelError
from streamiter.learn.linear.gradients import Gradient
from streamiter.learn.linear.model import LinearModel
from streamiter.learn.linear.parameter_owner import EpochGradients, ParameterOwner
from streamiter.operators.context import Context
from streamiter.operators.operator import IterationListener
from streamiter.operators.output import Output
from streamiter.records import OutputTag

__all__ = ["LOSSES", "AsynchronousOfflineOwner", "SynchronousOfflineOwner"]

LOSSES: Final = OutputTag("losses")
"""The side output of an owner: for each step the mean loss before it."""


class SynchronousOfflineOwner(ParameterOwner, IterationListener):
    """A step in each epoch's callback, with the gradients of all workers, added in the workers' order."""

    def __init__(self, make_model: Callable[[], LinearModel], publish_every: int) -> None:
        super().__init__(make_model, publish_every)
        self._gradients = EpochGradients()

    def process(self, record: dict[str, Any], out: Output) -> None:
        """Take in what a worker reports; there is one epoch under way at a time."""
        if record["gradient"] is not None:
            self._gradients.add(record["worker"], Gradient.from_record(record["gradient"]), record["loss"])

    def on_epoch_watermark_incremented(self, epoch_watermark: int, context: Context, out: Output) -> None:
        if not self._gradients.gradients:
            raise _no_examples()
        gradient, loss = self._gradients.total()
        self._gradients = EpochGradients()
        self.step(gradient, loss, out)
        if gradient.weight:
            out.emit(loss / gradient.weight, tag=LOSSES)
        out.emit(self._model.parameters())

    def snapshot(self) -> dict[str, Any]:
        return super().snapshot() | {"gradients": self._gradients.to_record()}

    def restore(self, state: dict[str, Any]) -> None:
        super().restore(state)
        self._gradients = EpochGradients.from_record(state["gradients"])


class AsynchronousOfflineOwner(ParameterOwner):
    """A step for each gradient, as it comes; the answer goes to the worker that sent it.

    The loss is that of the last mini-batch of each worker; once it is as small as the tolerance nobody gets an
    answer any more, and the iteration ends.
    """

    def __init__(
        self,
        make_model: Callable[[], LinearModel],
        publish_every: int,
        *,
        workers: int,
        tolerance: float | None,
    ) -> None:
        super().__init__(make_model, publish_every)
        self._workers = workers
        self._tolerance = tolerance
        self._last: dict[int, tuple[float, float] | None] = {}
        """Losses and weights of the last mini-batch, each as a sum, by worker; None for one without examples."""

    def process(self, record: dict[str, Any], out: Output) -> None:
        """Take in a gradient, and answer."""
        worker = record["worker"]
        if record["gradient"] is None:
            self._last[worker] = None
            return
        gradient = Gradient.from_record(record["gradient"])
        self._last[worker] = (record["loss"], gradient.weight)
        self.step(gradient, record["loss"], out)
        if (mean := self._mean_loss()) is not None:
            out.emit(mean, tag=LOSSES)
        if not self._is_good_enough(mean):
            out.emit({"worker": worker, "parameters": self._model.parameters()})

    def _mean_loss(self) -> float | None:
        heard = [last for last in self._last.values() if last is not None]
        weight = sum(weight for _, weight in heard)
        return sum(loss for loss, _ in heard) / weight if weight else None

    def _is_good_enough(self, mean_loss: float | None) -> bool:
        if mean_loss is None or self._tolerance is None or len(self._last) < self._workers:
            return False
        return mean_loss <= self._tolerance

    def finish(self, out: Output) -> None:
        if not any(self._last.values()):
            raise _no_examples()
        super().finish(out)

    def snapshot(self) -> dict[str, Any]:
        return super().snapshot() | {"last": list(self._last.items())}

    def restore(self, state: dict[str, Any]) -> None:
        super().restore(state)
        self._last = dict(state["last"])


def _no_examples() -> ModelError:
    return ModelError("train_offline: expected examples to learn from, given none; look at what was read")
