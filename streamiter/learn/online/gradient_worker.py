"""Workers: from parameters and mini-batches to gradients, predicting before they learn."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, NamedTuple

import numpy as np

from streamiter.learn.linear.model import LinearModel
from streamiter.learn.rows.checks import Floats, row_weights
from streamiter.learn.rows.examples import Examples, Extract, as_examples
from streamiter.learn.rows.feature_rows import checked_rows
from streamiter.learn.rows.good_rows import blaming_rows, of_good_rows
from streamiter.operators.context import Context
from streamiter.operators.operator import IterationListener, Operator
from streamiter.operators.output import Output
from streamiter.records import Batch, OutputTag

__all__ = [
    "MINI_BATCHES_WITH_ONE_MODEL",
    "PREDICTIONS",
    "GradientWorker",
    "WorkerOptions",
]

# Where all run in one process a model is one or two mini-batches old. While a job is suspended its model does not
# come at all, and a worker that went on through all that had been read would lead the model astray.
MINI_BATCHES_WITH_ONE_MODEL: Final = 8

PREDICTIONS: Final = OutputTag("predictions")
"""The side output of a worker: predictions made before learning, with targets and weights (dicts of arrays)."""


class WorkerOptions(NamedTuple):
    """What every worker of one training is given."""

    make_model: Callable[[], LinearModel]
    extract: Extract
    synchronous: bool


class GradientWorker(Operator, IterationListener):
    """Makes the gradient of each mini-batch with the parameters it has.

    It begins when the first parameters have come. Asynchronous, it goes on meanwhile with those it has, for
    eight mini-batches at most; synchronous, it takes epoch after epoch, and begins the examples of each when
    the parameters of that epoch are there.
    """

    def __init__(self, options: WorkerOptions) -> None:
        self._extract = options.extract
        self._synchronous = options.synchronous
        self.epochs_in_order = self.needs_epochs = options.synchronous
        self._model = options.make_model()
        self._needed_epoch = 0
        self._model_epoch = -1
        self._reported_epoch = -1
        self._gradients_since_model = 0
        self._examples_ended = False

    def open(self, context: Context) -> None:
        self._context = context

    def wanted_inputs(self) -> tuple[str, ...] | None:
        """Parameters first; then both, or what is next in turn."""
        waits = self._model_epoch < self._needed_epoch or (
            not self._synchronous and self._gradients_since_model >= MINI_BATCHES_WITH_ONE_MODEL
        )
        return ("model",) if waits else None

    def process_model(self, parameters: Any, out: Output) -> None:
        """Go on with these parameters."""
        if parameters is not None:  # None: begin as the model was made.
            self._model.follow(parameters)
        self._model_epoch = self._context.epoch or 0
        self._gradients_since_model = 0

    def on_epoch_watermark_incremented(self, epoch_watermark: int, context: Context, out: Output) -> None:
        """Report also where there was nothing to learn, as long as there are examples to come.

        All workers wait for the parameters of the next epoch, and the owner sends them when it has heard
        of one; when nobody has anything to say any more the iteration ends.
        """
        if self._synchronous:
            self._needed_epoch = epoch_watermark + 1
            if self._reported_epoch < epoch_watermark and not self._examples_ended:
                out.emit({"worker": context.subtask_index, "gradient": None, "loss": 0.0})

    def input_ended(self, name: str, out: Output) -> None:
        """No report is owed any more when the examples have ended."""
        self._examples_ended = self._examples_ended or name == "examples"

    def process_examples(self, mini_batch: Batch, out: Output) -> None:
        """Predict, then make the gradient."""

        def learn(rows: Batch) -> None:
            self._learn(blaming_rows(self._extracted, rows, self._check_alone), out)

        of_good_rows(learn, mini_batch, out)

    def _extracted(self, rows: Batch) -> Examples:
        return as_examples("train_online(extract=)", self._extract(rows))

    def _check_alone(self, row: Batch) -> None:
        checked_rows("train", self._extracted(row).features, self._model.width)

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
        self._reported_epoch = self._context.epoch or 0
        self._gradients_since_model += 1
        out.emit({"worker": self._context.subtask_index, "gradient": gradient.to_record(), "loss": loss})
        out.emit({"predictions": predictions, "targets": targets, "weights": weights}, tag=PREDICTIONS)

    def snapshot(self) -> dict[str, Any]:
        return {
            "parameters": self._model.parameters(),
            "needed epoch": self._needed_epoch,
            "model epoch": self._model_epoch,
            "reported epoch": self._reported_epoch,
            "gradients since model": self._gradients_since_model,
            "examples ended": self._examples_ended,
        }

    def restore(self, state: dict[str, Any]) -> None:
        self._model.follow(state["parameters"])
        self._needed_epoch = state["needed epoch"]
        self._model_epoch = state["model epoch"]
        self._reported_epoch = state["reported epoch"]
        self._gradients_since_model = state["gradients since model"]
        self._examples_ended = state["examples ended"]
