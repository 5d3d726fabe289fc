"""Training row by row in a flow: workers read the rows, and one owner learns.

The owner has the only model, so it predicts each row with everything that was learned before, and the result does not
depend on the mini-batches: these only decide how often a version is published. The workers do what can be done in
parallel: they find fields, hash texts and call the user's functions. *Asynchronous*, the owner takes mini-batches as
they arrive. *Synchronous*, it takes the mini-batches of an epoch in the order of the stream, so the result depends
neither on timing nor on the number of workers. Where labels come later, the owner predicts a question when it arrives,
and learns from its row when the answer arrives.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Hashable, Sequence
from operator import itemgetter
from typing import Any, Final, NamedTuple, cast

import numpy as np

from streamiter.errors import ModelError
from streamiter.learn.adaptive import AdaptiveLinearModel, Label
from streamiter.learn.expert_weights import ExpertWeights, ModelRows, RowSteps
from streamiter.learn.model_owner import ModelOwner, OwnerOptions
from streamiter.learn.row_reading import EventsToLearn, RowsToLearn, features_of_record, missing_values_of
from streamiter.learn.rows import BadRows, without
from streamiter.learn.validation import PredictedRows, ValidationKind, loss_of
from streamiter.models.update import ModelUpdate
from streamiter.named_rows import is_missing
from streamiter.numbers import Floats, Indices
from streamiter.operators.operator import Context
from streamiter.operators.output import Output
from streamiter.records import Batch

# A version costs about as much time as a row for each fifteen columns, so publishing takes a fifth of the time at most.
_ROWS_FOR_A_COLUMN: Final = 0.25
_MANY_COLUMNS: Final = 1_000
_PUBLISHED_AFTER_S: Final = 1.0


class _Waiting(NamedTuple):
    """A question without an answer: its row, by columns of the model, and its prediction."""

    indices: list[int]
    values: list[float]
    prediction: list[float]
    """The probability of True or the number, or the probability of each class; NaN before the first label."""
    scores: list[float]
    """The scores of the experts; empty before the first label."""

    def by(self, column_of: Callable[[int], int | None]) -> _Waiting:
        """Return the question by the columns of another model, without a prediction."""
        columns = ((column_of(index), value) for index, value in zip(self.indices, self.values, strict=True))
        kept = sorted((column, value) for column, value in columns if column is not None)
        return _Waiting([column for column, _ in kept], [value for _, value in kept], [math.nan], [])


class RowOwner(ModelOwner):
    """Predicts each row, and learns from it.

    Input ``rows`` brings what the workers have read. ``in_epochs``: the mini-batches of an epoch are learned at its
    end, in the order of the stream.
    """

    def __init__(
        self, make_model: Callable[[], AdaptiveLinearModel], options: OwnerOptions, *, waiting_max: int = 0
    ) -> None:
        super().__init__(options)
        self._make_model = make_model
        self._model = make_model()
        self._in_epochs = self.needs_epochs = self.epochs_in_order = self.any_order = options.in_epochs
        self._waiting_max = waiting_max
        self._raises_rates = options.raises_rates
        self._held: list[RowsToLearn | EventsToLearn] = []
        """Mini-batches of the epoch under way."""
        self._waiting: dict[Hashable, _Waiting] = {}
        """Questions without an answer, the oldest first."""
        self._missing = 0
        """The number of missing values since a version was published."""

    async def open(self, context: Context) -> None:
        """Compile in a thread, where that is needed: it takes ten seconds, in which all other tasks continue."""
        await asyncio.to_thread(ExpertWeights, "binary", scores=1, hashed=1, rates=self._model.rates)
        await super().open(context)

    def start_from(self, parameters: Any) -> None:
        self._model.start_from(parameters)

    def records(self) -> int:
        return self._model.records

    def parameters(self) -> object:
        return self._model.parameters()

    def process_rows(self, given: RowsToLearn | EventsToLearn, out: Output) -> None:
        """Learn from a mini-batch, or keep it until its epoch ends."""
        if self._in_epochs:
            self._held.append(given)
        else:
            self._learn(given, out)
            self.count_step(out)

    def on_epoch_watermark_incremented(self, epoch_watermark: int, context: Context, out: Output) -> None:
        self._learn_held(out)

    def on_iteration_terminated(self, context: Context, out: Output) -> None:
        self._learn_held(out)

    def _learn_held(self, out: Output) -> None:
        if self._held:
            held, self._held = sorted(self._held, key=itemgetter("position")), []
            for given in held:
                self._learn(given, out)
            self.count_step(out)

    def _learn(self, given: RowsToLearn | EventsToLearn, out: Output) -> None:
        self._rollbacks.take_over(self._start_again)
        if "is_answer" in given:
            self._learn_events(given, out)
        else:
            self._learn_rows(given, out)

    def _start_again(self, update: ModelUpdate) -> None:
        """Start from an update; questions that wait keep their rows, but their predictions are of another model."""
        model = self._make_model()
        model.start_from(cast(dict[str, Any], update.parameters), records=update.records or 0)
        column_of = model.columns_from(self._model)
        self._waiting = {key: question.by(column_of) for key, question in self._waiting.items()}
        self._model = model
        self.begin_version()

    # ---- rows with their labels

    def _learn_rows(self, given: RowsToLearn, out: Output) -> None:
        records, labels, weights = given["records"], given["labels"], given["weights"]
        numbers = given["numbers"]
        features = features_of_record(given["features"])
        while len(records):
            try:
                rows = self._model.rows(features)
                steps = RowSteps.one_each(rows.length, learns=True, weights=weights)
                predictions = self._model.step(rows, steps, labels)
            except BadRows as bad:
                refused = set(bad.rows)
                kept = [row for row in range(len(records)) if row not in refused]
                records = without(records, bad, out)
                labels = [labels[row] for row in kept]
                weights = None if weights is None else weights[kept]
                numbers = numbers[kept]
                features = features[kept]
            else:
                self._missing += missing_values_of(features)
                self._emit_predictions(predictions, self._model.targets(labels), steps.weights, numbers, out)
                return

    def _emit_predictions(
        self, predictions: Floats, targets: Floats, weights: Floats, numbers: Indices, out: Output
    ) -> None:
        task: ValidationKind = self._model.task or "classification"
        classes = None
        if predictions.ndim == 2:
            task, classes = "classes", targets.astype(np.intp)
            predictions, targets = _hits(predictions, classes)
        self._weight += float(weights.sum())
        self._loss += loss_of(task, predictions, targets, weights)
        rows = PredictedRows(task=task, predictions=predictions, targets=targets, weights=weights, numbers=numbers)
        if classes is not None:
            rows["classes"] = classes
        if self.emit_predictions(rows, out) and self._raises_rates:
            self._model.raise_rates()

    # ---- questions and answers

    def _learn_events(self, given: EventsToLearn, out: Output) -> None:
        """Predict the questions and learn from the answers, in the order of the events."""
        plan = _EventPlan(*self._question_rows(given, out))
        for event, key in enumerate(given["keys"]):
            if event in plan.row_of_question:
                self._waiting.pop(key, None)  # A question that is asked again becomes the youngest.
                plan.ask(event, key)
                if len(self._waiting) + len(plan.asked) > self._waiting_max:
                    oldest: dict[Hashable, Any] = self._waiting or plan.asked
                    del oldest[next(iter(oldest))]
            elif given["is_answer"][event]:
                question = plan.asked.pop(key, None) or self._waiting.pop(key, None)
                if question is None:
                    out.reject(given["records"][event], ModelError("an answer without a question that waits for it"))
                elif given["labels"][event] is not None:
                    plan.answer(event, question, given["labels"][event])
        scores = plan.earlier_scores()
        predictions = self._make_steps(plan, scores, given["records"], out)
        for key, question in plan.asked.items():
            self._waiting[key] = plan.waiting(question, predictions, scores)
        self._emit_answered(plan, predictions, given["numbers"], out)

    def _question_rows(self, given: EventsToLearn, out: Output) -> tuple[ModelRows, dict[int, int]]:
        """Return the rows of the questions, and which row each question has; others are refused."""
        asked = [event for event, is_answer in enumerate(given["is_answer"]) if not is_answer]
        features = features_of_record(given["features"])
        while True:
            try:
                rows = self._model.rows(features)
                self._missing += missing_values_of(features)
                return rows, {event: row for row, event in enumerate(asked)}
            except BadRows as bad:
                for row in bad.rows:
                    out.reject(given["records"][asked[row]], bad)
                refused = set(bad.rows)
                kept = [row for row in range(len(asked)) if row not in refused]
                asked, features = [asked[row] for row in kept], features[kept]

    def _make_steps(
        self, plan: _EventPlan, scores: dict[int, list[float]], records: Batch, out: Output
    ) -> list[list[float]]:
        """Make the steps of the plan, without answers whose label is refused; return the predictions by step."""
        while True:
            try:
                predictions = self._model.step(plan.rows(), plan.steps(), plan.labels, scores)
            except BadRows as bad:
                for step in bad.rows:
                    out.reject(records[plan.events[step]], bad)
                plan.skip(bad.rows)
            else:
                return [np.atleast_1d(prediction).tolist() for prediction in predictions]

    def _emit_answered(self, plan: _EventPlan, predictions: list[list[float]], numbers: Indices, out: Output) -> None:
        """Emit the predictions of the questions that were answered; one made before the first label does not count."""
        known = [
            (prediction, label, event)
            for prediction, label, event in plan.answered(predictions)
            if not math.isnan(prediction[0])
        ]
        if not known:
            return
        targets = self._model.targets([label for _, label, _ in known])
        width = max(len(prediction) for prediction, _, _ in known)
        matrix = np.zeros((len(known), width))
        for row, (prediction, _, _) in enumerate(known):
            matrix[row, : len(prediction) - 1], matrix[row, -1] = prediction[:-1], prediction[-1]
        shaped = matrix if self._model.classes else matrix[:, 0]
        of_answers = numbers[[event for _, _, event in known]]
        self._emit_predictions(shaped, targets, np.ones(len(known)), of_answers, out)

    # ---- publishing, state

    def due_in_s(self) -> float:
        """Return in how many seconds a version is due, and does not cost a large part of the time of learning."""
        due_s = super().due_in_s()
        columns, rows = self._model.columns, self._model.records - self._records_published
        is_cheap = columns < _MANY_COLUMNS or rows >= _ROWS_FOR_A_COLUMN * columns
        if is_cheap or self._in_epochs or self._schedule.mini_batches is not None:
            return due_s
        return max(due_s, self.seconds_left(_PUBLISHED_AFTER_S))

    def metrics(self) -> dict[str, float]:
        return {"missing_values": float(self._missing)} | super().metrics()

    def begin_version(self) -> None:
        super().begin_version()
        self._missing = 0

    def finish(self, out: Output) -> None:
        self._learn_held(out)
        super().finish(out)

    def snapshot(self) -> dict[str, object]:
        return super().snapshot() | {
            "model": self._model.state(),
            "held": list(self._held),
            "waiting": [(key, *question) for key, question in self._waiting.items()],
            "missing": self._missing,
        }

    def restore(self, state: dict[str, Any]) -> None:
        super().restore(state)
        self._model.restore(state["model"])
        self._held = list(state["held"])
        self._waiting = {key: _Waiting(*question) for key, *question in state["waiting"]}
        self._missing = state["missing"]


class _Asked(NamedTuple):
    """A question of the mini-batch under way: its row, and the step that predicts it."""

    row: int
    step: int


class _EventPlan:
    """The steps for the events of a mini-batch, and the rows that they need."""

    def __init__(self, rows: ModelRows, row_of_question: dict[int, int]) -> None:
        self.row_of_question = row_of_question
        self.asked: dict[Hashable, _Asked] = {}
        """The questions of this mini-batch that are without an answer so far."""
        self.events: list[int] = []
        """The event of each step."""
        self.labels: list[Label] = []
        """The label of each step, None for a prediction."""
        self._answered: dict[int, _Asked | _Waiting] = {}
        """The question of each step that learns."""
        self._own = rows
        self._earlier: list[_Waiting] = []
        self._rows: list[int] = []
        """The row of each step."""

    def ask(self, event: int, key: Hashable) -> None:
        """Predict a question."""
        self.asked.pop(key, None)
        self.asked[key] = _Asked(self.row_of_question[event], len(self.events))
        self._add(event, self.row_of_question[event], None)

    def answer(self, event: int, question: _Asked | _Waiting, label: Label) -> None:
        """Learn from the row of a question."""
        row = question.row if isinstance(question, _Asked) else self._own.length + len(self._earlier)
        if isinstance(question, _Waiting):
            self._earlier.append(question)
        self._answered[len(self.events)] = question
        self._add(event, row, label)

    def _add(self, event: int, row: int, label: Label) -> None:
        self.events.append(event)
        self._rows.append(row)
        self.labels.append(label)

    def skip(self, steps: Sequence[int]) -> None:
        """Learn nothing in these steps."""
        for step in steps:
            del self._answered[step]
            self.labels[step] = None

    def rows(self) -> ModelRows:
        """Return the rows of the mini-batch, then those of earlier questions."""
        if not self._earlier:
            return self._own
        lengths = [len(question.indices) for question in self._earlier]
        indices = [index for question in self._earlier for index in question.indices]
        values = [value for question in self._earlier for value in question.values]
        return ModelRows(
            np.concatenate([self._own.indptr, self._own.indptr[-1] + np.cumsum(lengths)]),
            np.concatenate([self._own.indices, np.array(indices, dtype=np.intp)]),
            np.concatenate([self._own.values, np.array(values, dtype=np.float64)]),
        )

    def steps(self) -> RowSteps:
        """Return the steps: questions are predicted, answers are learned from."""
        count = len(self.events)
        learns = np.zeros(count, dtype=np.bool_)
        learns[list(self._answered)] = True
        predicts = np.zeros(count, dtype=np.bool_)
        predicts[[step for step, event in enumerate(self.events) if event in self.row_of_question]] = True
        questions = np.arange(count)
        for step, question in self._answered.items():
            questions[step] = question.step if isinstance(question, _Asked) else step
        return RowSteps(np.array(self._rows, dtype=np.intp), predicts, learns, np.ones(count), questions)

    def earlier_scores(self) -> dict[int, list[float]]:
        """Return the experts' scores of earlier questions, by the step of the answer."""
        return {step: question.scores for step, question in self._answered.items() if isinstance(question, _Waiting)}

    def waiting(self, question: _Asked, predictions: list[list[float]], scores: dict[int, list[float]]) -> _Waiting:
        """Return a question of this mini-batch, to wait for its answer."""
        part = slice(self._own.indptr[question.row], self._own.indptr[question.row + 1])
        indices, values = self._own.indices[part], self._own.values[part]
        is_there = ~is_missing(values)
        return _Waiting(
            indices[is_there].tolist(),
            values[is_there].tolist(),
            predictions[question.step],
            scores.get(question.step, []),
        )

    def answered(self, predictions: list[list[float]]) -> list[tuple[list[float], Label, int]]:
        """Return prediction, label and event of each answer."""
        return [
            (
                question.prediction if isinstance(question, _Waiting) else predictions[question.step],
                self.labels[step],
                self.events[step],
            )
            for step, question in self._answered.items()
        ]


def _hits(predictions: Floats, classes: Indices) -> tuple[Floats, Floats]:
    """Return the probability of the true class of each row, and 1 where no other class is more probable.

    A class that had not come yet had the probability of the last column.
    """
    rows = np.arange(len(classes))
    found = predictions[rows, np.minimum(classes, predictions.shape[1] - 1)]
    probabilities = np.where(found > 0.0, found, predictions[:, -1])
    return probabilities, (found > 0.0) * (found >= predictions.max(axis=1)).astype(np.float64)
