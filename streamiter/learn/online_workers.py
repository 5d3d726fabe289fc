"""The workers of online training by gradients: they predict mini-batches, and compute gradients for the owner."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from streamiter.errors import CheckpointError, GraphError
from streamiter.learn.late_labels import DelayedLabels, LabelJoin, Pair, answers_and_keys, unstamped
from streamiter.learn.losses import plain_loss
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
from streamiter.operators.timed.joining import LEFT, RIGHT
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
        if (plain := plain_loss(self._model.loss)) is not None and plain[0] != "squared":
            rows["loss"] = plain
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

    def __init__(self, options: OnlineWorkerOptions, labels: DelayedLabels, *, is_timed: bool = False) -> None:
        super().__init__(options)
        self._labels = labels
        self._features = function_of_features("DelayedLabels", labels.features)
        self._join = LabelJoin(labels, is_timed=is_timed)
        """Its questions are their row and prediction."""

    def open(self, context: Context) -> None:
        super().open(context)
        self._join.open(context)

    def process_examples(self, mini_batch: Batch, out: Output) -> None:
        """Predict all questions together, then match the events in order; learn from all answers together."""
        answered = self._over(self._join.advance(self._join.now()), out)
        times: list[int] = []
        if self._join.is_timed:
            times, mini_batch = unstamped(mini_batch)
        first = self._records_read

        def match(events: Batch, numbers: Indices) -> None:
            of_events = [times[number - first] for number in numbers.tolist()] if times else None
            self._match(events, numbers.tolist(), of_events, answered, out)

        of_numbered_rows(match, mini_batch, first, out)
        self._learn_from(answered, out)
        self._records_read += len(mini_batch)
        self._join.wait()

    def on_timer(self, payload: object, out: Output) -> None:
        """Learn from questions whose wait is over."""
        self._join.heard()
        self._learn_from(self._over(self._join.advance(self._join.now()), out), out)
        self._join.wait()

    def _match(
        self, events: Batch, numbers: list[int], timestamps: list[int] | None, answered: list[_Answered], out: Output
    ) -> None:
        """Predict the questions, and join the events; append the questions with an answer to ``answered``."""
        are_answers, keys = answers_and_keys(self._labels, events)
        questions = [event for event, is_answer in zip(events, are_answers, strict=True) if not is_answer]
        predicted, join, target_of = self._predict_questions(questions, out), self._join.join, self._labels.target_of
        times = self._join.times(timestamps)
        for event, is_answer, key, time, number in zip(events, are_answers, keys, times, numbers, strict=False):
            if is_answer:
                join.add(RIGHT, key, time, event)
            elif (question := next(predicted)) is not None:
                join.add(LEFT, key, time, question)
            if not join.results:
                continue
            for _, (question, answer) in join.take_results():
                if question is None:
                    self._join.refuse(answer, out)
                elif answer is not None:
                    try:
                        if (target := target_of(answer)) is not None:
                            answered.append((answer, *question, float(target), number))
                    except Exception as error:
                        out.reject(answer, error)

    def input_ended(self, name: str, out: Output) -> None:
        super().input_ended(name, out)
        if name == "examples":
            self._learn_from(self._over(self._join.end(), out), out)

    def _over(self, pairs: list[tuple[int, Pair]], out: Output) -> list[_Answered]:
        """Return the questions whose wait is over, with the label for that; refuse the answers."""
        answered: list[_Answered] = []
        for _, (question, answer) in pairs:
            if question is None:
                self._join.refuse(answer, out)
            elif (label := self._labels.otherwise) is not None:
                answered.append(({"otherwise": label}, *question, float(label), self._records_read))
        return answered

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
        return super().snapshot() | {"waiting": self._join.snapshot(lambda question: question)}

    def restore(self, state: dict[str, Any]) -> None:
        super().restore(state)
        self._join.restore(state["waiting"], lambda question: question)

    def redistribute(self, states: Sequence[dict[str, Any]], parallelism: int) -> list[dict[str, Any]]:
        """Give all questions to a single worker."""
        if parallelism > 1:
            # A mini-batch on its way has events of many keys, and cannot be divided among the owners of the keys.
            raise CheckpointError("only one worker can take over questions that wait for labels")
        [shared] = super().redistribute(states, parallelism)
        return [shared | {"waiting": [event for state in states for event in state["waiting"]]}]
