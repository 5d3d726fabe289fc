"""The steps of a mini-batch of questions and answers: which rows are predicted, learned from, corrected or taken back.

:class:`EventPlan` turns what happened to questions into ``RowSteps`` of the model that learns row by row.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import numpy as np

from streamiter.learn.adaptive import AdaptiveLinearModel
from streamiter.learn.answer_delays import NOTHING_KNOWN, Prior
from streamiter.learn.labels import Label, is_label
from streamiter.learn.late_labels import LabelJoin, Outcome
from streamiter.learn.model_rows import ASSUMED, CONFIRMED, CORRECTED, WITHDRAWN, ModelRows, RowSteps
from streamiter.operators.declared_state import Form
from streamiter.values.named_rows import is_missing


class Predicted(NamedTuple):
    """A question that waits for its label: its row, by columns of the model, and its prediction."""

    indices: list[int]
    values: list[float]
    prediction: list[float]
    """The probability of True or the number, or the probability of each class; NaN before the first label."""
    scores: list[float]
    """The scores of the experts when it was asked, or learned as False; empty before the first label."""
    prior: Prior | None = None
    """Before the first label, what to count in place of a prediction."""

    def by(self, column_of: Callable[[int], int | None]) -> Predicted:
        """Return the question by the columns of another model, without the scores of the old one."""
        columns = ((column_of(index), value) for index, value in zip(self.indices, self.values, strict=True))
        kept = sorted((column, value) for column, value in columns if column is not None)
        return self._replace(indices=[column for column, _ in kept], values=[value for _, value in kept], scores=[])


@dataclass(slots=True, eq=False)
class Question:
    """A question: ``predicted``, or in the mini-batch under way, with its row there and the step that predicts it."""

    number: int
    """The number of its event in the stream."""
    predicted: Predicted | None = None
    row: int = -1
    step: int = -1
    label: LabelAnswer | None = None
    """Its label, which will be known later; None if the answer brings it."""
    is_assumed: bool = False
    """Whether this model has learned from it as False, before its label was known."""

    def to_record(self) -> tuple[Any, ...]:
        """Return a question that waits as plain data."""
        assert self.predicted is not None
        return self.number, tuple(self.predicted), self.label and tuple(self.label), self.is_assumed

    @classmethod
    def from_record(cls, record: Any) -> Question:
        """Return the question of a :meth:`to_record`."""
        number, predicted, label, is_assumed = record
        return cls(number, Predicted(*predicted), label=label and LabelAnswer(*label), is_assumed=is_assumed)


class LabelAnswer(NamedTuple):
    """The label of an answer, and its record."""

    label: Label
    record: Any
    weight: float = 1.0


QUESTIONS: Final = Form(Question.to_record, Question.from_record)
ANSWERS: Final = Form(tuple, lambda record: LabelAnswer(*record))
"""The forms in a snapshot of what waits."""


class Settled(NamedTuple):
    """A question whose label is known, for validation; ``answer`` is the step that learns it."""

    question: Question
    label: Label
    weight: float
    number: int
    answer: int
    has_share: bool
    """Whether the share of answers other than ``otherwise`` is the share of True."""


class EventPlan:
    """The steps for the events of a mini-batch, and the rows that they need."""

    def __init__(self, rows: ModelRows, row_of_question: dict[int, int], labels: LabelJoin) -> None:
        self.row_of_question = row_of_question
        self.asked: dict[int, Question] = {}
        """The questions of this mini-batch that wait for their label, by their step."""
        self.labels: list[Label] = []
        """The label of each step, None for a prediction."""
        self.settled: list[Settled] = []
        """The questions whose labels are known now."""
        self.priors: dict[int, Prior] = {}
        """The prediction that the answers so far suggest, by step of a question, while the model knows nothing."""
        self._is_weighted, self._otherwise = labels.schedule == "weighted", labels.otherwise
        self._false, self._labels = labels.false_label, labels
        self._assumed_at: dict[Question, int] = {}
        """The steps in which questions that wait are learned as False."""
        self._answers: dict[int, tuple[Question, LabelAnswer]] = {}
        """Question and answer of each step that learns a label."""
        self._withdrawn: set[int] = set()
        """The steps of questions that were assumed to be False, and have no label."""
        self.forgotten = 0
        """The number of questions that were asked again, or that too many others have replaced."""
        self._own = rows
        self._earlier: list[Predicted] = []
        self._rows: list[int] = []
        """The row of each step."""
        self._asks: list[bool] = []
        """Whether each step makes a prediction."""
        self._assumes: list[bool] = []
        """Whether each step learns its row as False, before the label is known."""

    def ask(self, event: int, number: int, prior: Prior | None) -> Question:
        """Predict a question; with weights, learn from it as if it had no answer."""
        question = Question(number, None, self.row_of_question[event], len(self._rows))
        question.is_assumed = self._is_weighted
        self.asked[question.step] = question
        if prior is not None:
            self.priors[question.step] = prior
        self._add(question.row, self._false if self._is_weighted else None, asks=True, assumes=self._is_weighted)
        return question

    def _assume(self, question: Question) -> None:
        """Learn from a question that waits as if it had no answer, and keep the scores with which it was learned."""
        question.is_assumed = True
        self._assumed_at[question] = len(self._rows)
        self._add(self._row_of(question), self._false, asks=True, assumes=True)

    def settle(self, outcomes: list[Outcome], number: int) -> list[LabelAnswer]:
        """Learn from the questions whose labels are known before, or with, the event ``number``.

        Returns the answers that have no question.
        """
        late: list[LabelAnswer] = []
        for question, answer, kind in outcomes:
            if question is None:
                late.append(answer)
                continue
            if kind == "assumed":
                self._assume(question)
                continue
            self.asked.pop(question.step, None)
            if question.label is not None:
                answer = question.label
            label = self._otherwise if answer is None else answer.label
            if kind == "forgotten":
                self.forgotten += 1
            if kind == "forgotten" or label is None:
                if question.is_assumed:
                    self._withdrawn.add(self._learn(question, LabelAnswer(self._false, None)))
                continue
            step = self._learn(question, answer or LabelAnswer(label, {"otherwise": label}))
            weight, has_share = 1.0 if answer is None else answer.weight, self._labels.has_share
            self.settled.append(Settled(question, label, weight, number, step, has_share))
        return late

    def _learn(self, question: Question, answer: LabelAnswer) -> int:
        """Learn from the row of a question; return the step."""
        step = len(self._rows)
        if question.is_assumed:
            answer = answer._replace(weight=1.0)  # As it was learned before the answer told a weight.
        self._answers[step] = question, answer
        self._add(self._row_of(question), answer.label, asks=False)
        return step

    def _row_of(self, question: Question) -> int:
        if question.predicted is None:
            return question.row
        self._earlier.append(question.predicted)
        return self._own.length + len(self._earlier) - 1

    def _add(self, row: int, label: Label, *, asks: bool, assumes: bool = False) -> None:
        self._rows.append(row)
        self.labels.append(label)
        self._asks.append(asks)
        self._assumes.append(assumes)

    def skipped(self, step: int) -> Any:
        """Learn no label in this step; return the record of the answer."""
        self.settled = [each for each in self.settled if each.answer != step]
        question, answer = self._answers[step]
        if question.is_assumed:
            self.labels[step], self._answers[step] = self._false, (question, LabelAnswer(self._false, None))
            self._withdrawn.add(step)
        else:
            self.labels[step] = None
            del self._answers[step]
        return answer.record

    def rows(self) -> ModelRows:
        """Return the rows of the mini-batch, then the rows of earlier questions."""
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
        count, answered = len(self._rows), list(self._answers)
        asks = np.array(self._asks, dtype=np.bool_)
        learns = np.array(self._assumes, dtype=np.bool_)
        learns[answered] = True
        assumed = np.array(self._assumes, dtype=np.uint8) * ASSUMED
        assumed[answered] = [self._kind_of(step, question) for step, (question, _) in self._answers.items()]
        questions = np.arange(count)
        for question, step in self._assumed_at.items():
            questions[step] = self._number_of(question, step)
        for step, (question, _) in self._answers.items():
            questions[step] = self._number_of(question, step)
        rows = np.array(self._rows, dtype=np.intp)
        weights = np.ones(count)
        weights[answered] = [answer.weight for _, answer in self._answers.values()]
        return RowSteps(rows, asks, learns, weights, questions, assumed if assumed.any() else None)

    def _number_of(self, question: Question, step: int) -> int:
        """Return the number under which a step of the question finds its scores: the step that made them."""
        return question.step if question.predicted is None else self._assumed_at.get(question, step)

    def _kind_of(self, step: int, question: Question) -> int:
        """Return the action of a step on an assumption; 0 if there is none."""
        if not question.is_assumed:
            return 0
        if step in self._withdrawn:
            return WITHDRAWN
        label = self.labels[step]
        return CONFIRMED if is_label(label) and label == self._false else CORRECTED

    def earlier_scores(self) -> dict[int, list[float]]:
        """Return the experts' scores of earlier questions, by the step of the answer; none if a step makes them."""
        return {
            step: question.predicted.scores
            for step, (question, _) in self._answers.items()
            if question.predicted is not None and question not in self._assumed_at
        }

    def keep_waiting(self, predictions: list[list[float]], scores: dict[int, list[float]]) -> None:
        """Keep rows, predictions and scores in the questions that wait for a label."""
        for question, step in self._assumed_at.items():
            if question.predicted is not None:
                question.predicted = question.predicted._replace(scores=scores.get(step, []))
        if not self.asked:
            return
        places = np.flatnonzero(~is_missing(self._own.values))
        indices, values = self._own.indices[places].tolist(), self._own.values[places].tolist()
        starts = np.searchsorted(places, self._own.indptr).tolist()
        for step, question in self.asked.items():
            part = slice(starts[question.row], starts[question.row + 1])
            prior = self.priors.get(step) if math.isnan(predictions[step][0]) else None
            question.predicted = Predicted(indices[part], values[part], predictions[step], scores.get(step, []), prior)
            question.row = question.step = -1

    def prediction_of(
        self, settled: Settled, predictions: list[list[float]], model: AdaptiveLinearModel
    ) -> tuple[list[float], list[float]]:
        """Return the prediction that was made for a question, and its scores, none for one of this mini-batch.

        Before the first label it is what the answers suggested.
        """
        question = settled.question
        if question.predicted is None:
            prediction, prior = predictions[question.step], self.priors.get(question.step)
            scores: list[float] = []
        else:
            prediction, scores, prior = question.predicted[2:]
        if not math.isnan(prediction[0]):
            return prediction, scores
        share, mean = prior if prior is not None and settled.has_share else (NOTHING_KNOWN, 0.0)
        if model.labels.earlier:
            return [share], [0.0]  # The first reading was of two labels.
        return [mean if model.task == "regression" else NOTHING_KNOWN if model.scores > 1 else share], []
