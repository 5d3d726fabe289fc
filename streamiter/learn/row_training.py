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
from collections.abc import Callable
from operator import itemgetter
from typing import Any, Final, NamedTuple

import numpy as np

from streamiter.learn.adaptive import AdaptiveLinearModel, Label
from streamiter.learn.expert_weights import ExpertWeights, ModelRows, RowSteps
from streamiter.learn.late_labels import NO_EVENTS, WAIT_IS_OVER, EventsToLearn, LabelJoin, Pair
from streamiter.learn.model_owner import ModelOwner, OwnerOptions
from streamiter.learn.row_reading import RowsToLearn, features_of_record, missing_values_of
from streamiter.learn.rows import BadRows, without
from streamiter.learn.validation import PredictedRows, ValidationKind, loss_of
from streamiter.named_rows import is_missing
from streamiter.numbers import Floats, Indices
from streamiter.operators.operator import Context
from streamiter.operators.output import Output
from streamiter.operators.timed.joining import LEFT, RIGHT

# A version costs about as much time as a row for each fifteen columns, so publishing takes a fifth of the time at most.
_ROWS_FOR_A_COLUMN: Final = 0.25
# Measured for 82,078 columns: 4 ms, and 16 ms with the state of the learner.
_TIMES_WITH_STATE: Final = 4
_MANY_COLUMNS: Final = 1_000
_PUBLISHED_AFTER_S: Final = 1.0


class _Predicted(NamedTuple):
    """A question that waits for its answer: its row, by columns of the model, and its prediction."""

    indices: list[int]
    values: list[float]
    prediction: list[float]
    """The probability of True or the number, or the probability of each class; NaN before the first label."""
    scores: list[float]
    """The scores of the experts; empty before the first label."""

    def by(self, column_of: Callable[[int], int | None]) -> _Predicted:
        """Return the question by the columns of another model, without a prediction."""
        columns = ((column_of(index), value) for index, value in zip(self.indices, self.values, strict=True))
        kept = sorted((column, value) for column, value in columns if column is not None)
        return _Predicted([column for column, _ in kept], [value for _, value in kept], [math.nan], [])


class _Question:
    """A question: ``predicted``, or in the mini-batch under way, with its row there and the step that predicts it."""

    __slots__ = ("predicted", "row", "step")

    def __init__(self, predicted: _Predicted | None = None, row: int = -1, step: int = -1) -> None:
        self.predicted = predicted
        self.row = row
        self.step = step


_Answer = tuple[Label, int, Any]
"""The label of an answer, its number, and its record."""


class RowOwner(ModelOwner):
    """Predicts each row, and learns from it.

    Input ``rows`` brings what the workers have read. ``in_epochs``: the mini-batches of an epoch are learned at its
    end, in the order of the stream.
    """

    learner = "AdaptiveLinearModel"

    def __init__(
        self, make_model: Callable[[], AdaptiveLinearModel], options: OwnerOptions, labels: LabelJoin | None = None
    ) -> None:
        """``labels`` joins questions with labels that come later."""
        super().__init__(options)
        self._make_model = make_model
        self._model = make_model()
        self._in_epochs = self.needs_epochs = self.epochs_in_order = self.any_order = options.in_epochs
        self._labels = labels
        self._raises_rates = options.raises_rates
        self._held: list[RowsToLearn | EventsToLearn] = []
        """Mini-batches of the epoch under way."""
        self._now: int | None = None
        """How far time was when the first of them arrived."""
        self._missing = 0
        """The number of missing values since a version was published."""

    async def open(self, context: Context) -> None:
        """Compile in a thread, where that is needed: it takes ten seconds, in which all other tasks continue."""
        if self._labels is not None:
            self._labels.open(context)
        await asyncio.to_thread(ExpertWeights, "binary", scores=1, hashed=1, rates=self._model.rates)
        await super().open(context)

    def start_from(self, parameters: Any, records: int) -> None:
        """Start from a version; questions that wait keep their rows, but their predictions are of another model."""
        model = self._make_model()
        model.start_from(parameters, records=records)
        column_of = model.columns_from(self._model)
        for question in [] if self._labels is None else self._labels.questions():
            question.predicted = question.predicted.by(column_of)
        self._model = model

    def records(self) -> int:
        return self._model.records

    def parameters(self) -> object:
        return self._model.parameters()

    def state(self) -> dict[str, object]:
        return {"model": self._model.state()}

    def process_rows(self, given: RowsToLearn | EventsToLearn, out: Output) -> None:
        """Learn from a mini-batch, or keep it until its epoch ends."""
        if self._labels is not None and not self._held:
            self._now = self._labels.now()
        if self._in_epochs:
            self._held.append(given)
        else:
            self._learn(given, out)
            self.count_step(out)

    def on_timer(self, payload: object, out: Output) -> None:
        """Learn from questions whose wait is over, or publish the version that waited."""
        if payload != WAIT_IS_OVER:
            super().on_timer(payload, out)
        elif self._labels is not None:
            self._labels.heard()
            self.process_rows(NO_EVENTS, out)

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
        self.take_over_rollback()
        if "is_answer" in given:
            assert self._labels is not None
            self._learn_events(given, self._labels.advance(self._now), out)
            self._labels.wait()
        else:
            self._learn_rows(given, out)

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
        classes = probabilities = None
        if predictions.ndim == 2:
            task, classes = "classes", targets.astype(np.intp)
            probabilities = _widened(predictions, self._model.scores)
            predictions, targets = _hits(probabilities, classes)
        self._weight += float(weights.sum())
        rows = PredictedRows(task=task, predictions=predictions, targets=targets, weights=weights, numbers=numbers)
        if classes is not None and probabilities is not None:
            rows |= {"classes": classes, "labels": self._model.classes or [], "probabilities": probabilities}
        self._loss += loss_of(rows)
        if self.emit_predictions(rows, out) and self._raises_rates:
            self._model.raise_rates()

    # ---- questions and answers

    def _learn_events(self, given: EventsToLearn, over: list[tuple[int, Pair]], out: Output) -> None:
        """Predict the questions and learn from the answers, in the order of the events; before them, from ``over``."""
        assert self._labels is not None
        plan = _EventPlan(*self._question_rows(given, out))
        numbers = given["numbers"].tolist()
        for _, (question, answer) in over:
            if question is None:
                self._labels.refuse(answer[2], out)
            elif (label := self._labels.otherwise) is not None:
                plan.answer(question, (label, numbers[0] if numbers else 0, {"otherwise": label}))
        records, labels, join = given["records"], given["labels"], self._labels.join
        for event, (key, time) in enumerate(zip(given["keys"], self._labels.times(given["times"]), strict=False)):
            if event in plan.row_of_question:
                join.add(LEFT, key, time, plan.ask(event))
            elif given["is_answer"][event]:
                join.add(RIGHT, key, time, (labels[event], numbers[event], records[event]))
            if not join.results:
                continue
            for _, (question, answer) in join.take_results():
                if question is None:
                    self._labels.refuse(answer[2], out)
                    continue
                plan.asked.pop(question.step, None)
                if answer is not None and answer[0] is not None:
                    # The pair has the number of the event that completes it.
                    plan.answer(question, (answer[0], numbers[event], answer[2]))
        scores = plan.earlier_scores()
        predictions = self._make_steps(plan, scores, out)
        plan.keep_waiting(predictions, scores)
        self._emit_answered(plan, predictions, out)

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

    def _make_steps(self, plan: _EventPlan, scores: dict[int, list[float]], out: Output) -> list[list[float]]:
        """Make the steps of the plan, without answers whose label is refused; return the predictions by step."""
        while True:
            try:
                predictions = self._model.step(plan.rows(), plan.steps(), plan.labels, scores)
            except BadRows as bad:
                for step in bad.rows:
                    out.reject(plan.skipped(step), bad)
            else:
                return [np.atleast_1d(prediction).tolist() for prediction in predictions]

    def _emit_answered(self, plan: _EventPlan, predictions: list[list[float]], out: Output) -> None:
        """Emit the predictions of the questions that were answered; one made before the first label does not count."""
        known = [
            (prediction, label, number)
            for prediction, (label, number, _) in plan.answered(predictions)
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
        numbers = np.array([number for _, _, number in known])
        self._emit_predictions(shaped, targets, np.ones(len(known)), numbers, out)

    # ---- publishing, state

    def due_in_s(self) -> float:
        """Return in how many seconds a version is due, and does not cost a large part of the time of learning."""
        due_s = super().due_in_s()
        columns, rows = self._model.columns, self._model.records - self._records_published
        rows_for_a_column = _ROWS_FOR_A_COLUMN * (_TIMES_WITH_STATE if self._publishes_state else 1)
        is_cheap = columns < _MANY_COLUMNS or rows >= rows_for_a_column * columns
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
        if self._labels is not None and (over := self._labels.end()):
            self._learn_events(NO_EVENTS, over, out)
        super().finish(out)

    def snapshot(self) -> dict[str, object]:
        return super().snapshot() | {
            **self.state(),
            "held": list(self._held),
            "now": self._now,
            "waiting": []
            if self._labels is None
            else self._labels.snapshot(lambda question: tuple(question.predicted)),
            "missing": self._missing,
        }

    def restore(self, state: dict[str, Any]) -> None:
        super().restore(state)
        self._model.restore(state["model"])
        self._held = list(state["held"])
        self._now = state["now"]
        if self._labels is not None:
            self._labels.restore(state["waiting"], lambda record: _Question(_Predicted(*record)))
        self._missing = state["missing"]


class _EventPlan:
    """The steps for the events of a mini-batch, and the rows that they need."""

    def __init__(self, rows: ModelRows, row_of_question: dict[int, int]) -> None:
        self.row_of_question = row_of_question
        self.asked: dict[int, _Question] = {}
        """The questions of this mini-batch that wait for an answer, by their step."""
        self.labels: list[Label] = []
        """The label of each step, None for a prediction."""
        self._answers: dict[int, tuple[_Question, _Answer]] = {}
        """Question and answer of each step that learns."""
        self._own = rows
        self._earlier: list[_Predicted] = []
        self._rows: list[int] = []
        """The row of each step."""
        self._predicts: list[bool] = []

    def ask(self, event: int) -> _Question:
        """Predict a question."""
        question = _Question(None, self.row_of_question[event], len(self._rows))
        self.asked[question.step] = question
        self._add(question.row, None)
        return question

    def answer(self, question: _Question, answer: _Answer) -> None:
        """Learn from the row of a question."""
        row = question.row
        if question.predicted is not None:
            row = self._own.length + len(self._earlier)
            self._earlier.append(question.predicted)
        self._answers[len(self._rows)] = question, answer
        self._add(row, answer[0])

    def _add(self, row: int, label: Label) -> None:
        self._rows.append(row)
        self.labels.append(label)
        self._predicts.append(label is None)

    def skipped(self, step: int) -> Any:
        """Learn nothing in this step; return the record of the answer."""
        self.labels[step] = None
        return self._answers.pop(step)[1][2]

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
        count = len(self._rows)
        learns = np.zeros(count, dtype=np.bool_)
        learns[list(self._answers)] = True
        questions = np.arange(count)
        for step, (question, _) in self._answers.items():
            if question.predicted is None:
                questions[step] = question.step
        predicts = np.array(self._predicts, dtype=np.bool_)
        return RowSteps(np.array(self._rows, dtype=np.intp), predicts, learns, np.ones(count), questions)

    def earlier_scores(self) -> dict[int, list[float]]:
        """Return the experts' scores of earlier questions, by the step of the answer."""
        return {
            step: question.predicted.scores
            for step, (question, _) in self._answers.items()
            if question.predicted is not None
        }

    def keep_waiting(self, predictions: list[list[float]], scores: dict[int, list[float]]) -> None:
        """Keep rows and predictions in the questions of this mini-batch that wait for an answer."""
        if not self.asked:
            return
        places = np.flatnonzero(~is_missing(self._own.values))
        indices, values = self._own.indices[places].tolist(), self._own.values[places].tolist()
        starts = np.searchsorted(places, self._own.indptr).tolist()
        for step, question in self.asked.items():
            part = slice(starts[question.row], starts[question.row + 1])
            question.predicted = _Predicted(indices[part], values[part], predictions[step], scores.get(step, []))
            question.row = question.step = -1

    def answered(self, predictions: list[list[float]]) -> list[tuple[list[float], _Answer]]:
        """Return the prediction and the answer of each step that learns."""
        return [
            (predictions[question.step] if question.predicted is None else question.predicted.prediction, answer)
            for question, answer in self._answers.values()
        ]


def _widened(predictions: Floats, width: int) -> Floats:
    """Return the probabilities of all classes: 0 for those that came after the predictions; the last stays the last."""
    known = predictions.shape[1]
    if known == width:
        return predictions
    return np.insert(predictions, [known - 1] * (width - known), 0.0, axis=1)


def _hits(predictions: Floats, classes: Indices) -> tuple[Floats, Floats]:
    """Return the probability of the true class of each row, and 1 where no other class is more probable.

    A class that had not come yet had the probability of the last column.
    """
    rows = np.arange(len(classes))
    found = predictions[rows, classes]
    probabilities = np.where(found > 0.0, found, predictions[:, -1])
    return probabilities, (found > 0.0) * (found >= predictions.max(axis=1)).astype(np.float64)
