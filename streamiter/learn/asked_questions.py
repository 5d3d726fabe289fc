"""What a join of questions with labels that come later is given and tells, and how questions were predicted."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from streamiter.values.numbers import Array, Floats, Indices
from streamiter.values.records import Batch
from streamiter.values.times import Times


class JoinEvents(NamedTuple):
    """The events of a mini-batch; an item for each event."""

    keys: Sequence[Hashable] | Array
    """The key that an answer shares with its question."""
    asks: npt.NDArray[np.bool_]
    answers: npt.NDArray[np.bool_]
    """Whether an event is a question, or an answer; one that was refused is neither."""
    labels: npt.NDArray[np.object_]
    """The label of an answer, None for no label; also that of a question that brings its label, for later."""
    records: Batch
    weights: Floats | None
    """The sample weights of the labels; None: all are 1."""
    times: Sequence[int] | Times | None
    before: Sequence[int] | Times | None
    """For each event its time, and the watermark behind the events before it; None by the clock."""

    @staticmethod
    def none() -> JoinEvents:
        """Return no events: only time has passed."""
        nothing = np.zeros(0, np.bool_)
        return JoinEvents([], nothing, nothing, np.empty(0, object), [], None, None, None)


class JoinedSteps(NamedTuple):
    """What happens with questions, in this order; an item for each step. See ``label_join_arrays`` for the columns."""

    kind: Indices
    slot: Indices
    event: Indices
    label_slot: Indices
    label_event: Indices
    scores: Indices
    at_event: Indices
    was_learned: npt.NDArray[np.bool_]
    has_share: npt.NDArray[np.bool_]
    """Whether the share of answers other than ``otherwise`` is the share of True."""


class StillWaiting(NamedTuple):
    """The questions and answers of a mini-batch that wait behind it, and earlier questions with new scores."""

    slots: Indices
    events: Indices
    """The event of each; -1 for an earlier question, which was learned as False."""
    scores: Indices
    """For a question the step that has made its scores; -1 for an answer."""


# ---- predictions

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
