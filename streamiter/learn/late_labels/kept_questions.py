"""What is kept of questions that wait for their labels: their rows, and how they were predicted.

A question has a *slot*, a row in each of the arrays; the slot of a question that has left is given to another one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from streamiter.learn.asked_questions import NOTHING_LEARNED, AskedScores, QuestionPredictions
from streamiter.learn.ready_made.model_rows import ModelRows
from streamiter.values.numbers import Floats, Indices


class KeptQuestions:
    """The arrays of all questions that wait."""

    def __init__(self) -> None:
        self.numbers: Indices = np.zeros(0, np.intp)
        """The number of the event of each question in the stream."""
        self._starts: Indices = np.zeros(0, np.intp)
        self._lengths: Indices = np.zeros(0, np.intp)
        self._indices: Indices = np.zeros(0, np.intp)
        self._values: Floats = np.zeros(0)
        self._used = 0
        """The number of values in use. The row of a question that has left is there until its slot is taken."""
        self._made: Floats = np.full((0, 1), np.nan)
        self._widths: Indices = np.zeros(0, np.intp)
        self._readings: Indices = np.zeros(0, np.intp)
        self._priors: Floats = np.zeros((0, 2))
        self._scores: Floats = np.zeros((0, 0))
        self._score_counts: Indices = np.zeros(0, np.intp)

    def make_room(self, slots: int) -> None:
        """Have arrays for this many slots."""
        more = slots - len(self.numbers)
        for name in ("numbers", "_starts", "_lengths", "_widths", "_readings", "_score_counts"):
            setattr(self, name, np.pad(getattr(self, name), (0, more)))
        for name in ("_made", "_priors", "_scores"):
            setattr(self, name, np.pad(getattr(self, name), ((0, more), (0, 0)), constant_values=np.nan))

    # ---- keeping and taking

    def keep(self, slots: Indices, numbers: Indices, rows: ModelRows, predictions: QuestionPredictions) -> None:
        """Keep questions, which have no scores yet; the rows have no missing values."""
        self.numbers[slots] = numbers
        lengths = np.diff(rows.indptr)
        self._make_room_for_values(slots, int(rows.indptr[-1]))
        self._starts[slots], self._lengths[slots] = self._used + rows.indptr[:-1], lengths
        stop = self._used + int(rows.indptr[-1])
        self._indices[self._used : stop], self._values[self._used : stop] = rows.indices, rows.values
        self._used = stop
        if (width := predictions.made.shape[1]) > self._made.shape[1]:
            self._made = _widened(self._made, width)
        self._made[slots, :width] = predictions.made
        self._widths[slots], self._readings[slots] = predictions.widths, predictions.readings
        self._priors[slots] = predictions.priors
        self._score_counts[slots] = 0

    def _make_room_for_values(self, slots: Indices, count: int) -> None:
        """Have room for more values, and forget the earlier rows of slots that were taken again."""
        if self._used + count <= len(self._values):
            return
        self._lengths[slots] = 0
        living = np.flatnonzero(self._lengths)
        rows = self.rows(living)
        room = np.zeros(2 * (len(rows.values) + count))
        indices = np.zeros(len(room), np.intp)
        self._used = len(rows.values)
        room[: self._used], indices[: self._used] = rows.values, rows.indices
        self._values, self._indices = room, indices
        self._starts[living] = rows.indptr[:-1]

    def keep_scores(self, slots: Indices, scores: Floats, reading: int | Indices) -> None:
        """Keep the experts' scores of questions, a row for each."""
        if (width := scores.shape[1]) > self._scores.shape[1]:
            self._scores = _widened(self._scores, width)
        self._scores[slots, :width] = scores
        self._score_counts[slots], self._readings[slots] = width, reading

    def rows(self, slots: Indices) -> ModelRows:
        """Return the rows of these questions."""
        lengths = self._lengths[slots]
        indptr = np.concatenate([[0], np.cumsum(lengths)])
        at = np.arange(indptr[-1]) + np.repeat(self._starts[slots] - indptr[:-1], lengths)
        return ModelRows(indptr, self._indices[at], self._values[at])

    def predictions(self, slots: Indices) -> QuestionPredictions:
        """Return how these questions were predicted."""
        return QuestionPredictions(self._made[slots], self._widths[slots], self._readings[slots], self._priors[slots])

    def scores(self, questions: Indices, slots: Indices) -> AskedScores:
        """Return the scores of the questions in these slots, which have these numbers, ascending."""
        counts = self._score_counts[slots]
        readings = np.where(counts > 0, self._readings[slots], NOTHING_LEARNED)
        return AskedScores(questions, readings, counts, self._scores[slots])

    def follow_model(
        self, slots: Indices, column_of: Callable[[int], int | None], *, keeps_predictions: bool = True
    ) -> None:
        """Have the rows by the columns of another model, which has not made the scores of these questions.

        Without ``keeps_predictions`` it has other classes than the model that has predicted them.
        """
        rows = self.rows(slots)
        known = {index: column_of(index) for index in np.unique(rows.indices).tolist()}
        columns = np.array([-1 if (new := known[index]) is None else new for index in rows.indices.tolist()], np.intp)
        row_of = np.repeat(np.arange(len(slots)), np.diff(rows.indptr))
        kept = np.flatnonzero(columns >= 0)
        kept = kept[np.lexsort((rows.values[kept], columns[kept], row_of[kept]))]
        indptr = np.concatenate([[0], np.cumsum(np.bincount(row_of[kept], minlength=len(slots)))])
        predictions = self.predictions(slots)
        if not keeps_predictions:
            nothing = np.full((len(slots), 1), np.nan)
            predictions = predictions._replace(made=nothing, widths=np.ones(len(slots), np.intp))
        unknown = predictions._replace(readings=np.full(len(slots), NOTHING_LEARNED))
        self.keep(slots, self.numbers[slots], ModelRows(indptr, columns[kept], rows.values[kept]), unknown)

    # ---- state

    def state(self, slots: Indices) -> dict[str, Any]:
        """Return what is kept of these questions as plain data."""
        rows, predictions, counts = self.rows(slots), self.predictions(slots), self._score_counts[slots]
        scores = self._scores[slots, : counts.max(initial=0)]
        scores[np.arange(scores.shape[1]) >= counts[:, None]] = np.nan  # Those of a question that had the slot before.
        return {
            "numbers": self.numbers[slots],
            **rows._asdict(),
            **predictions._replace(made=predictions.made[:, : predictions.widths.max(initial=1)])._asdict(),
            "scores": scores,
            "score counts": counts,
        }

    def restore(self, state: Mapping[str, Any], slots: Indices) -> None:
        """Keep the questions of a :meth:`state` in these slots."""
        rows = ModelRows(state["indptr"], state["indices"], state["values"])
        predictions = QuestionPredictions(*(state[name] for name in QuestionPredictions._fields))
        self.keep(slots, state["numbers"], rows, predictions)
        self.keep_scores(slots, state["scores"], state["readings"])
        self._score_counts[slots] = state["score counts"]

    @staticmethod
    def joined(states: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Return the questions of several states, one state after the other."""
        joined: dict[str, Any] = {}
        for name in states[0]:
            parts = [np.asarray(state[name]) for state in states]
            if parts[0].ndim == 2:
                width = max(part.shape[1] for part in parts)
                parts = [_widened(part, width) for part in parts]
            joined[name] = np.concatenate(parts)
        lengths = np.concatenate([np.diff(state["indptr"]) for state in states])
        return joined | {"indptr": np.concatenate([[0], np.cumsum(lengths)])}


def _widened(rows: Floats, width: int) -> Floats:
    return np.pad(rows, ((0, 0), (0, width - rows.shape[1])), constant_values=np.nan)
