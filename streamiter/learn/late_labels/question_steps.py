"""The steps of the model for a mini-batch of questions and answers: which rows are predicted, learned or taken back.

:class:`QuestionSteps` turns what a ``LabelJoin`` says of questions into ``RowSteps`` of the model that learns row by
row.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from streamiter.learn.asked_questions import NOTHING_LEARNED, JoinedSteps, QuestionPredictions
from streamiter.learn.labels import is_label
from streamiter.learn.late_labels.answer_delays import NOTHING_KNOWN
from streamiter.learn.late_labels.label_join import LabelJoin
from streamiter.learn.late_labels.label_join_arrays import TO_ASK, TO_ASSUME, TO_LEARN, TO_WITHDRAW
from streamiter.learn.ready_made.adaptive import AdaptiveLinearModel
from streamiter.learn.ready_made.model_rows import ASSUMED, CONFIRMED, CORRECTED, WITHDRAWN, ModelRows, RowSteps
from streamiter.values.numbers import Floats, Indices


class QuestionSteps:
    """The steps of a mini-batch, and the rows that they need."""

    def __init__(self, join: LabelJoin, steps: JoinedSteps, rows: ModelRows, row_of: Indices) -> None:
        """``row_of`` has the row of each event that is a question."""
        self._join, self._joined, self._own, self._row_of = join, steps, rows, row_of
        kind = steps.kind.copy()
        self._kind = kind
        self._asks = (kind == TO_ASK) | (kind == TO_ASSUME)
        self._assumes = (kind == TO_ASSUME) | ((kind == TO_ASK) & (join.schedule == "weighted"))
        self._learns = self._assumes | (kind == TO_LEARN) | (kind == TO_WITHDRAW)
        self._weights = np.where(kind == TO_LEARN, join.weights_of(steps), 1.0)
        self.labels = join.labels_of(steps)
        """The label of each step, None for a prediction."""
        self.labels[kind != TO_LEARN] = None
        self.labels[self._assumes | (kind == TO_WITHDRAW)] = join.false_label
        self._is_earlier = steps.event < 0
        self._without_scores = np.flatnonzero((steps.scores < 0) & self._is_earlier)
        numbers = np.arange(len(kind))
        self._questions = np.where(steps.scores < 0, numbers, steps.scores)
        earlier = np.cumsum(self._is_earlier) - 1
        self._rows = np.where(self._is_earlier, rows.length + earlier, 0)
        is_own = ~self._is_earlier
        self._rows[is_own] = row_of[steps.event[is_own]]
        kept = join.questions
        self._slots = steps.slot[self._is_earlier]
        self.asked = kept.scores(self._without_scores, steps.slot[self._without_scores])

    def rows(self) -> ModelRows:
        """Return the rows of the mini-batch, then the rows of earlier questions."""
        return self._own.followed_by(self._join.questions.rows(self._slots)) if len(self._slots) else self._own

    def steps(self) -> RowSteps:
        """Return the steps: questions are predicted, answers are learned from."""
        assumed = np.where(self._assumes, ASSUMED, 0).astype(np.uint8)
        false, labels = self._join.false_label, self.labels
        learned = np.flatnonzero((self._kind == TO_LEARN) & self._joined.was_learned)
        if len(learned):
            # Mostly a label is False itself, and one that is refused is compared with nothing.
            given = labels[learned].tolist()
            are_false = [label is false or (is_label(label) and label == false) for label in given]
            assumed[learned] = np.where(are_false, CONFIRMED, CORRECTED)
        assumed[self._kind == TO_WITHDRAW] = WITHDRAWN
        return RowSteps(
            self._rows, self._asks, self._learns, self._weights, self._questions, assumed if assumed.any() else None
        )

    def targets(self) -> Floats:
        """Return the label of each step as a number, 0 for steps without one."""
        return np.array([0.0 if label is None else float(label) for label in self.labels.tolist()])

    def asked_with(self, predictions: Floats) -> Floats:
        """Return the probability, or the number, with which the question of each step was asked.

        ``predictions`` are those of the rows of the mini-batch.
        """
        steps, is_own = self._joined, ~self._is_earlier
        asked = np.empty(len(steps.kind))
        asked[is_own] = predictions[self._row_of[steps.event[is_own]]]
        asked[self._is_earlier] = self._join.questions.predictions(steps.slot[self._is_earlier]).made[:, 0]
        return asked

    def earlier_scores(self) -> Floats:
        """Return for each step the only score of its question, if that is an earlier one and has been scored."""
        scores = np.zeros(len(self._kind))
        if (has_score := self.asked.counts > 0).any():
            scores[self.asked.questions[has_score]] = self.asked.scores[has_score, 0]
        return scores

    def record_of(self, step: int) -> Any:
        """Return the record of the label of a step."""
        return self._join.record_of(self._joined, step)

    def skip(self, step: int) -> Any:
        """Learn no label in this step; return the record of the label."""
        if self._joined.was_learned[step]:
            self._kind[step], self.labels[step], self._weights[step] = TO_WITHDRAW, self._join.false_label, 1.0
        else:
            self._kind[step], self.labels[step], self._learns[step] = -1, None, False
        return self.record_of(step)

    def settled(self) -> Indices:
        """Return the steps of the questions whose labels are known now."""
        return np.flatnonzero(self._kind == TO_LEARN)

    def weights_of(self, settled: Indices) -> Floats:
        """Return the weights with which these steps were learned."""
        return self._weights[settled]

    def predictions_of(
        self, settled: Indices, made: Floats, priors: Floats, model: AdaptiveLinearModel
    ) -> QuestionPredictions:
        """Return the predictions that were made for questions, of this mini-batch and of earlier ones.

        ``made`` has the predictions of all steps. Before the first label they are what the answers suggested, and NaN
        for numbers of which none had come.
        """
        width = made.shape[1]
        steps, is_earlier = self._joined, self._is_earlier[settled]
        asked = np.where(is_earlier, 0, self._questions[settled])
        given = made[asked]
        widths, readings = np.full(len(settled), width), np.full(len(settled), NOTHING_LEARNED)
        of_priors = np.full((len(settled), 2), np.nan)
        of_priors[~is_earlier] = priors[self._row_of[steps.event[settled[~is_earlier]]]]
        if is_earlier.any():
            earlier = self._join.questions.predictions(steps.slot[settled[is_earlier]])
            if earlier.made.shape[1] > width:
                given = np.pad(given, ((0, 0), (0, earlier.made.shape[1] - width)), constant_values=np.nan)
            given[is_earlier, : earlier.made.shape[1]] = earlier.made
            widths[is_earlier], readings[is_earlier] = earlier.widths, earlier.readings
            of_priors[is_earlier] = earlier.priors
        unknown = np.flatnonzero(np.isnan(given[:, 0]))
        if len(unknown):
            share, mean = of_priors[unknown].T
            share = np.where(steps.has_share[settled[unknown]] & ~np.isnan(share), share, NOTHING_KNOWN)
            widths[unknown] = 1
            # The first reading was of two labels.
            readings[unknown] = 0 if model.labels.earlier else NOTHING_LEARNED
            if not model.labels.earlier and model.task == "regression":
                share = mean
            elif not model.labels.earlier and model.scores > 1:
                share[:] = NOTHING_KNOWN
            given[unknown, 0] = share
        return QuestionPredictions(given, widths, readings, of_priors)

    def numbers_of(self, settled: Indices, numbers: Indices, before: int) -> Indices:
        """Return for each of these steps the numbers of the event that settled it, and of the question."""
        steps = self._joined
        at, events = steps.at_event[settled], steps.event[settled]
        padded = np.append(numbers, before)
        own = np.where(events >= 0, padded[events], self._join.questions.numbers[steps.slot[settled]])
        return np.stack([padded[at], own], axis=1)

    def keep_waiting(self, numbers: Indices, made: Floats, priors: Floats, *, has_missing: bool = True) -> None:
        """End the mini-batch: keep rows, predictions and scores of the questions that wait for a label.

        ``has_missing``: huge values of rows are missing ones.
        """
        join, kept = self._join, self._join.questions
        waiting = join.close()
        is_question = waiting.scores >= 0
        slots, events, scores = (column[is_question] for column in waiting)
        is_new = events >= 0
        new = slots[is_new]
        if len(new):
            steps, events = scores[is_new], events[is_new]
            own = priors[self._row_of[events]]
            own[~np.isnan(made[steps, 0])] = np.nan
            nothing = np.full(len(new), NOTHING_LEARNED)
            predictions = QuestionPredictions(made[steps], np.full(len(new), made.shape[1]), nothing, own)
            kept.keep(new, numbers[events], self._own.take(self._row_of[events], has_missing=has_missing), predictions)
        if len(slots) and self.asked.made.size:
            kept.keep_scores(slots, self.asked.made[scores], self.asked.reading)
