"""Workers: from parameters and mini-batches to gradients, predicting before they learn."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from streamiter.learn.checks import BadRows, Floats, row_weights
from streamiter.learn.examples import Examples, Extract
from streamiter.learn.linear import LinearModel
from streamiter.operators.context import Context
from streamiter.operators.operator import IterationListener, Operator
from streamiter.operators.output import Output
from streamiter.records import Batch, OutputTag, take

__all__ = ["PREDICTIONS", "GradientWorker", "WorkerOptions", "without"]

PREDICTIONS: Final = OutputTag("predictions")
"""The side output of a worker: predictions made before learning, with targets and weights (dicts of arrays)."""


@dataclass(frozen=True, slots=True)
class WorkerOptions:
    """What every worker of one training is given."""

    make_model: Callable[[], LinearModel]
    extract: Extract
    synchronous: bool


class GradientWorker(Operator, IterationListener):
    """Makes the gradient of each mini-batch with the parameters it has.

    It begins when the first parameters have come. Asynchronous, it never waits again; synchronous, it
    takes epoch after epoch, and begins the examples of each when the parameters of that epoch are there.
    """

    def __init__(self, options: WorkerOptions) -> None:
        self._extract = options.extract
        self._synchronous = options.synchronous
        self.epochs_in_order = options.synchronous
        self._model = options.make_model()
        self._needed_epoch = 0
        self._model_epoch = -1

    def open(self, context: Context) -> None:
        self._context = context

    def wanted_inputs(self) -> tuple[str, ...] | None:
        """Parameters first; then both, or what is next in turn."""
        return ("model",) if self._model_epoch < self._needed_epoch else None

    def process_model(self, parameters: Any, out: Output) -> None:
        """Go on with these parameters."""
        self._model.follow(parameters)
        self._model_epoch = self._context.epoch or 0

    def on_epoch_watermark_incremented(self, epoch_watermark: int, context: Context, out: Output) -> None:
        if self._synchronous:
            self._needed_epoch = epoch_watermark + 1

    def process_examples(self, mini_batch: Batch, out: Output) -> None:
        """Predict, then make the gradient."""
        while len(mini_batch):
            try:
                self._learn(self._extract(mini_batch), out)
                return
            except BadRows as bad:
                mini_batch = without(mini_batch, bad, out)

    def _learn(self, examples: Examples, out: Output) -> None:
        predictions = self._model.predict(examples.features)
        self.emit_gradient(examples, predictions, out)

    def emit_gradient(self, examples: Examples, predictions: Floats, out: Output) -> None:
        """The gradient of these examples, and what was predicted for them before."""
        gradient = self._model.gradient(examples.features, examples.targets, examples.weights)
        targets = self._model.checked_targets(examples.targets, len(predictions))
        given = np.ones(len(targets)) if examples.weights is None else examples.weights
        weights = row_weights("train", given, len(targets))
        loss = float((self._model.loss.values(predictions, targets) * weights).sum())
        out.emit({"gradient": gradient.to_record(), "loss": loss})
        out.emit({"predictions": predictions, "targets": targets, "weights": weights}, tag=PREDICTIONS)

    def snapshot(self) -> dict[str, Any]:
        return {
            "parameters": self._model.parameters(),
            "needed epoch": self._needed_epoch,
            "model epoch": self._model_epoch,
        }

    def restore(self, state: dict[str, Any]) -> None:
        self._model.follow(state["parameters"])
        self._needed_epoch = state["needed epoch"]
        self._model_epoch = state["model epoch"]


def without(mini_batch: Batch, bad: BadRows, out: Output) -> Batch:
    """Rows that are no examples follow the step's policy; the others stay."""
    rows = set(bad.rows)
    for row in bad.rows:
        out.reject(mini_batch[row], bad)
    return take(mini_batch, [row for row in range(len(mini_batch)) if row not in rows])
