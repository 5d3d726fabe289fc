"""The workers of online training by gradients: they predict mini-batches, and compute gradients for the owner."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from streamiter.errors import CheckpointError, GraphError, ModelError
from streamiter.learn.row_reading import DelayedLabels
from streamiter.learn.rows import (
    BadRows,
    Examples,
    Extract,
    as_examples,
    blaming_rows,
    checked_rows,
    of_numbered_rows,
    row_weights,
    without,
)
from streamiter.learn.training import GradientSum, GradientWorker, MakeModel, gradients_under_way
from streamiter.learn.validation import PREDICTIONS, PredictedRows
from streamiter.numbers import Floats, Indices
from streamiter.operators.operator import Context
from streamiter.operators.output import Output
from streamiter.records import Batch
from streamiter.sparse_rows import SparseRows


def function_of_features(owner: str, features: Sequence[str] | Callable[[Any], Any] | None) -> Callable[[Any], Any]:
    """Return the function; GraphError for names of fields, of which a model of a fixed width knows nothing."""
    if callable(features):
        return features
    raise GraphError(
        f"{owner}(features=): expected a function that returns a matrix or SparseRows, because model= has a fixed "
        f"number of features, given {features!r}; leave out model= for a model that finds its columns"
    )


class OnlineWorkerOptions(NamedTuple):
    """The options that all workers of one training share."""

    make_model: MakeModel
    extract: Extract
    synchronous: bool


class OnlineWorker(GradientWorker):
    """Predicts the rows of each mini-batch, then computes their gradient.

    A worker begins when the first parameters have arrived. Asynchronous, it waits while its parameters lack too many of
    its own gradients: these are under way. Synchronous, it waits for the parameters of each epoch.
    """

    def __init__(self, options: OnlineWorkerOptions) -> None:
        super().__init__(options.make_model, in_epochs=options.synchronous)
        self._extract = options.extract
        self._reported_epoch = -1
        self._gradients_under_way = 0
        """The gradients that no received parameters contain."""
        self._records_read = 0
        """The number of records, or events, refused ones included."""

    def wanted_inputs(self) -> tuple[str, ...] | None:
        if not self._in_epochs and self._gradients_under_way >= gradients_under_way(self._context.parallelism):
            return ("model",)
        return super().wanted_inputs()

    def process_model(self, parameters: Any, out: Output) -> None:
        """Continue with these parameters."""
        self.follow(parameters)
        if isinstance(parameters, Mapping) and "contained" in parameters:
            contained = parameters["contained"].get(self._context.subtask_index, 0)
            # An answer from before two changes of the parallelism may contain more than this worker has sent.
            self._gradients_under_way = max(0, self._gradients_under_way - contained)

    def on_epoch_watermark_incremented(self, epoch_watermark: int, context: Context, out: Output) -> None:
        """Report an epoch without rows, too, while more examples may arrive.

        All workers wait for the parameters of the next epoch, and the owner sends them when a worker has reported. When
        no worker reports any more, the iteration ends.
        """
        super().on_epoch_watermark_incremented(epoch_watermark, context, out)
        if self._in_epochs and self._reported_epoch < epoch_watermark and not self._examples_ended:
            self.report(GradientSum(), out)

    def process_examples(self, mini_batch: Batch, out: Output) -> None:
        """Predict the rows of a mini-batch, then report their gradient."""

        def learn(rows: Batch, numbers: Indices) -> None:
            examples = blaming_rows(self._extracted, rows, self._check_alone)
            self.report_examples(examples, self._model.predict(examples.features), numbers, out)

        of_numbered_rows(learn, mini_batch, self._records_read, out)
        self._records_read += len(mini_batch)

    def _extracted(self, rows: Batch) -> Examples:
        return as_examples("train_online(extract=)", self._extract(rows))

    def _check_alone(self, row: Batch) -> None:
        checked_rows("train", self._extracted(row).features, self._model.width)

    def report_examples(self, examples: Examples, predictions: Floats, numbers: Indices, out: Output) -> None:
        """Report the gradient of these examples, and emit the earlier predictions for them."""
        gradient = self._model.gradient(examples.features, examples.targets, examples.weights)
        targets = self._model.checked_targets(examples.targets, len(predictions))
        given = np.ones(len(targets)) if examples.weights is None else examples.weights
        weights = row_weights("train", given, len(targets))
        loss = float((self._model.loss.values(predictions, targets) * weights).sum())
        self._reported_epoch = self._context.epoch or 0
        self._gradients_under_way += not self._in_epochs
        self.report(GradientSum(gradient, loss), out)
        validated, task = self._model.loss.validated(predictions), self._model.loss.task
        rows = PredictedRows(task=task, predictions=validated, targets=targets, weights=weights, numbers=numbers)
        rows["is_mean"] = self._model.loss.predicts_mean
        out.emit(rows, tag=PREDICTIONS)

    def snapshot(self) -> dict[str, object]:
        return super().snapshot() | {
            "reported epoch": self._reported_epoch,
            "gradients under way": self._gradients_under_way,
            "records read": self._records_read,
        }

    def restore(self, state: dict[str, Any]) -> None:
        super().restore(state)
        self._reported_epoch = state["reported epoch"]
        self._gradients_under_way = state["gradients under way"]
        self._records_read = state["records read"]

    def redistribute(self, states: Sequence[dict[str, Any]], parallelism: int) -> list[dict[str, Any]]:
        """Repeat no number of a record; the answers under way count for the workers of the same number."""
        progress = {
            "reported epoch": min(state["reported epoch"] for state in states),
            "records read": max(state["records read"] for state in states),
        }
        under_way = [state["gradients under way"] for state in states] + [0] * parallelism
        divided = super().redistribute(states, parallelism)
        return [
            state | progress | {"gradients under way": count} for state, count in zip(divided, under_way, strict=False)
        ]


# Indices and values, as lists: numpy arrays of about eight features each would take ten times as long.
_Row = tuple[list[int], list[float]]


_Answered = tuple[Any, _Row, float, float, int]
"""The answer, the features and prediction of its question, the target, the number of the answer."""


class DelayedLabelsWorker(OnlineWorker):
    """Predicts each question when it arrives, and learns from it when its answer arrives.

    Validation counts that first prediction.
    """

    def __init__(self, options: OnlineWorkerOptions, labels: DelayedLabels) -> None:
        super().__init__(options)
        self._labels = labels
        self._features = function_of_features("DelayedLabels", labels.features)
        self._waiting: dict[Hashable, tuple[_Row, float]] = {}
        """Features and prediction of the questions without an answer, the oldest first."""

    def process_examples(self, mini_batch: Batch, out: Output) -> None:
        """Predict all questions together, then match the events in order; learn from all answers together."""
        predicted = self._predict_questions([event for event in mini_batch if not self._labels.is_answer(event)], out)
        answered: list[_Answered] = []
        for number, event in enumerate(mini_batch, start=self._records_read):
            if not self._labels.is_answer(event):
                question = next(predicted)
                if question is not None:
                    self._wait(event, *question)
            elif (answer := self._answered(event, number, out)) is not None:
                answered.append(answer)
        self._learn_from(answered, out)
        self._records_read += len(mini_batch)

    def _predict_questions(self, questions: list[Any], out: Output) -> Iterator[tuple[_Row, float] | None]:
        """Yield features and prediction of each question, None for a question without features."""
        if not questions:
            return iter(())
        try:
            rows, predictions = blaming_rows(self._predicted, questions, self._features)
        except BadRows as bad:
            good = iter(self._predict_questions(list(without(questions, bad, out)), out))
            return iter([None if row in bad.rows else next(good) for row in range(len(questions))])
        return zip(rows.rows(), predictions, strict=True)

    def _predicted(self, questions: Sequence[Any]) -> tuple[SparseRows, list[float]]:
        rows: SparseRows = self._features(questions)
        return rows, self._model.predict(rows).tolist()

    def _wait(self, question: Any, row: _Row, prediction: float) -> None:
        key = self._labels.key_of(question)
        self._waiting.pop(key, None)  # A question that is asked again becomes the youngest.
        self._waiting[key] = (row, prediction)
        if len(self._waiting) > self._labels.waiting_max:
            del self._waiting[next(iter(self._waiting))]

    def _answered(self, answer: Any, number: int, out: Output) -> _Answered | None:
        waiting = self._waiting.pop(self._labels.key_of(answer), None)
        if waiting is None:
            out.reject(answer, ModelError("an answer without a question that waits for it"))
            return None
        try:
            target = self._labels.target_of(answer)
            return None if target is None else (answer, *waiting, float(target), number)
        except Exception as error:
            out.reject(answer, error)
            return None

    def _learn_from(self, answered: list[_Answered], out: Output) -> None:
        while answered:
            events, rows, predictions, targets, numbers = zip(*answered, strict=True)
            try:
                examples = Examples(SparseRows.from_rows(rows, self._model.width), np.array(targets))
                self.report_examples(examples, np.array(predictions), np.array(numbers), out)
            except BadRows as bad:
                without(list(events), bad, out)
                answered = [entry for row, entry in enumerate(answered) if row not in bad.rows]
            else:
                return

    def snapshot(self) -> dict[str, object]:
        waiting = [(key, *row, prediction) for key, (row, prediction) in self._waiting.items()]
        return super().snapshot() | {"waiting": waiting}

    def restore(self, state: dict[str, Any]) -> None:
        super().restore(state)
        self._waiting = {key: ((indices, values), prediction) for key, indices, values, prediction in state["waiting"]}

    def redistribute(self, states: Sequence[dict[str, Any]], parallelism: int) -> list[dict[str, Any]]:
        """Give all questions to a single worker."""
        if parallelism > 1:
            # A mini-batch on its way has events of many keys, and cannot be divided among the owners of the keys.
            raise CheckpointError("only one worker can take over questions that wait for labels")
        [shared] = super().redistribute(states, parallelism)
        return [shared | {"waiting": [question for state in states for question in state["waiting"]]}]
