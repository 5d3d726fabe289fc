"""Workers of offline training: from the parameters of each round to the gradient of its mini-batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from streamiter.learn.linear.gradients import Gradient
from streamiter.learn.linear.model import LinearModel
from streamiter.learn.offline.example_blocks import ExampleBlocks, MiniBatches
from streamiter.learn.rows.examples import CheckedExamples, Extract, as_examples
from streamiter.learn.rows.good_rows import blaming_rows, of_good_rows
from streamiter.operators.context import Context
from streamiter.operators.operator import IterationListener, Operator
from streamiter.operators.output import Output
from streamiter.records import Batch

__all__ = [
    "AsynchronousWorker",
    "OfflineExtract",
    "OfflineWorkerOptions",
    "ReplayingWorker",
    "SynchronousWorker",
]


OfflineExtract = Extract | Callable[[Any], CheckedExamples]
"""What has been checked already is not checked again."""


class OfflineWorkerOptions(NamedTuple):
    """What every worker of one training is given."""

    make_model: Callable[[], LinearModel]
    extract: OfflineExtract
    mini_batch: int | None
    """Rows in a round of all workers together; None: all there are."""
    rounds: int


class _OfflineWorker(Operator):
    """Input ``examples``: records that ``extract`` makes examples of; input ``model``: parameters to go on with."""

    def __init__(self, options: OfflineWorkerOptions) -> None:
        self._options = options
        self._model = options.make_model()
        self._mini_batches = MiniBatches(None)

    def open(self, context: Context) -> None:
        self._context = context
        if self._options.mini_batch is not None:
            each, more = divmod(self._options.mini_batch, context.parallelism)
            self._mini_batches = MiniBatches(each + (context.subtask_index < more))

    def checked(self, batch: Batch, out: Output) -> CheckedExamples | None:
        """The examples that a batch of records holds, without those that are none."""
        return of_good_rows(lambda rows: blaming_rows(self._checked, rows, self._checked), batch, out)

    def _checked(self, batch: Batch) -> CheckedExamples:
        examples = self._options.extract(batch)
        if isinstance(examples, CheckedExamples):
            return examples
        return self._model.checked_examples(as_examples("train_offline(extract=)", examples))

    def follow(self, parameters: Any) -> None:
        """Go on with these; None: as the model was made."""
        if parameters is not None:
            self._model.follow(parameters)

    def report(self, gradients: _Sum, out: Output) -> None:
        """Tell the owner, also that there is nothing to tell."""
        gradient = None if gradients.gradient is None else gradients.gradient.to_record()
        out.emit({"worker": self._context.subtask_index, "gradient": gradient, "loss": gradients.loss})


class _KeepingWorker(_OfflineWorker):
    """Keeps its examples, which come once, in epoch 0."""

    def __init__(self, options: OfflineWorkerOptions) -> None:
        super().__init__(options)
        self._examples = ExampleBlocks()

    def process_examples_batch(self, batch: Batch, out: Output) -> None:
        """Keep them."""
        examples = self.checked(batch, out)
        if examples is not None:
            self._examples.add(examples)

    def report_next(self, out: Output) -> None:
        """The gradient of the next mini-batch."""
        gradients = _Sum()
        for part in self._examples.between(*self._mini_batches.now()):
            gradients.add(*self._model.gradient_and_loss(part))
        self._mini_batches.next(len(self._examples))
        self.report(gradients, out)

    def snapshot(self) -> dict[str, Any]:
        return {
            "parameters": self._model.parameters(),
            "examples": self._examples.to_records(),
            "next": self._mini_batches.start,
        }

    def restore(self, state: dict[str, Any]) -> None:
        self._model.follow(state["parameters"])
        self._examples = ExampleBlocks.from_records(state["examples"])
        self._mini_batches.start = state["next"]


class SynchronousWorker(_KeepingWorker, IterationListener):
    """One mini-batch in the callback of each epoch, with the parameters of that epoch."""

    def process_model(self, parameters: Any, out: Output) -> None:
        """Go on with these."""
        self.follow(parameters)

    def on_epoch_watermark_incremented(self, epoch_watermark: int, context: Context, out: Output) -> None:
        self.report_next(out)


class AsynchronousWorker(_KeepingWorker):
    """One mini-batch for each answer of the owner, as soon as it is there; ``rounds`` of them."""

    def __init__(self, options: OfflineWorkerOptions) -> None:
        super().__init__(options)
        self._reports = 0
        self._examples_ended = False

    def wanted_inputs(self) -> tuple[str, ...] | None:
        """All examples first."""
        return None if self._examples_ended else ("examples",)

    def input_ended(self, name: str, out: Output) -> None:
        """The examples are all there."""
        self._examples_ended = self._examples_ended or name == "examples"

    def process_model(self, answer: dict[str, Any], out: Output) -> None:
        """Answer with a gradient."""
        self.follow(answer["parameters"])
        if self._reports < self._options.rounds:
            self._reports += 1
            self.report_next(out)

    def snapshot(self) -> dict[str, Any]:
        return super().snapshot() | {"reports": self._reports, "examples ended": self._examples_ended}

    def restore(self, state: dict[str, Any]) -> None:
        super().restore(state)
        self._reports, self._examples_ended = state["reports"], state["examples ended"]


class ReplayingWorker(_OfflineWorker, IterationListener):
    """Keeps nothing: the examples come again in every epoch, behind its parameters."""

    epochs_in_order = True

    def __init__(self, options: OfflineWorkerOptions) -> None:
        super().__init__(options)
        self._turn = 0
        """The epoch whose examples come now."""
        self._model_epoch = -1
        self._seen = 0
        """Rows of this epoch."""
        self._gradients = _Sum()

    def wanted_inputs(self) -> tuple[str, ...] | None:
        return ("model",) if self._model_epoch < self._turn else None

    def process_model(self, parameters: Any, out: Output) -> None:
        """Go on with these."""
        self.follow(parameters)
        self._model_epoch = self._context.epoch or 0

    def process_examples_batch(self, batch: Batch, out: Output) -> None:
        """Add the gradient of those that belong to this round's mini-batch."""
        # Those that are none come again in every epoch, and are refused once.
        examples = self.checked(batch, out if self._turn == 0 else Output(policy="skip"))
        if examples is None:
            return
        first, behind_last = (max(row - self._seen, 0) for row in self._mini_batches.now())
        self._seen += len(examples)
        if len(part := examples[first:behind_last]):
            self._gradients.add(*self._model.gradient_and_loss(part))

    def on_epoch_watermark_incremented(self, epoch_watermark: int, context: Context, out: Output) -> None:
        self.report(self._gradients, out)
        self._mini_batches.next(self._seen)
        self._gradients, self._seen, self._turn = _Sum(), 0, epoch_watermark + 1

    def snapshot(self) -> dict[str, Any]:
        gradient = self._gradients.gradient
        return {
            "parameters": self._model.parameters(),
            "turn": self._turn,
            "model epoch": self._model_epoch,
            "seen": self._seen,
            "next": self._mini_batches.start,
            "gradient": None if gradient is None else gradient.to_record(),
            "loss": self._gradients.loss,
        }

    def restore(self, state: dict[str, Any]) -> None:
        self._model.follow(state["parameters"])
        self._turn, self._model_epoch = state["turn"], state["model epoch"]
        self._seen, self._mini_batches.start = state["seen"], state["next"]
        if state["gradient"] is not None:
            self._gradients.add(Gradient.from_record(state["gradient"]), state["loss"])


class _Sum:
    """Gradients and losses of several parts."""

    def __init__(self) -> None:
        self.gradient: Gradient | None = None
        self.loss = 0.0

    def add(self, gradient: Gradient, loss: float) -> None:
        self.gradient = gradient if self.gradient is None else self.gradient + gradient
        self.loss += loss
