"""How questions were predicted whose labels come later: their predictions, and the scores of the experts."""

from __future__ import annotations

from typing import Final, NamedTuple

import numpy as np

from streamiter.values.numbers import Floats, Indices

NOTHING_LEARNED: Final = -1
"""The reading of a question that was asked before the first label: it has no scores."""


class QuestionPredictions(NamedTuple):
    """How questions were predicted: an item, or a row, for each question."""

    made: Floats
    """The probability of True or the number, or the probability of each class; NaN before the first label. The rows of
    questions that were asked when there were fewer classes are filled up with NaN."""
    widths: Indices
    """The number of probabilities in each row."""
    readings: Indices
    """The number of readings of labels that had been given up, or ``NOTHING_LEARNED``."""
    priors: Floats
    """Before the first label, the share of True and the mean of the answers so far; NaN where they are not known."""


class AskedScores:
    """The experts' scores with which questions were asked, for the steps of a mini-batch.

    ``questions`` are the numbers of the questions of earlier mini-batches, ascending. Row i of ``scores`` has the
    scores of question i, of which ``counts[i]`` are filled in, made under ``readings[i]``.
    """

    def __init__(self, questions: Indices, readings: Indices, counts: Indices, scores: Floats) -> None:
        self.questions = questions
        self.readings = readings
        self.counts = counts
        self.scores = scores
        self.made: Floats = np.zeros((0, 0))
        """After the steps, the scores of all questions, a row for each number; none before the first label."""
        self.reading = NOTHING_LEARNED
        """After the steps, the reading under which these were made."""

    @staticmethod
    def none() -> AskedScores:
        """Return the scores where no question is of an earlier mini-batch."""
        nothing = np.zeros(0, np.intp)
        return AskedScores(nothing, nothing, nothing, np.zeros((0, 0)))
