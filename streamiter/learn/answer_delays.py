"""Statistics of answers: how long answers take, how many questions have no answer, and the share of True.

:class:`AnswerDelays` says which questions are learned before the end of their wait, and :class:`Answers` what to
predict before the first label.
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Mapping, Sequence
from itertools import chain, zip_longest
from typing import Any, Final

import numpy as np

from streamiter.learn.labels import FIRST_LABELS, Label
from streamiter.operators.declared_state import COPIED, DeclaredState, Form, declared

# Fewer answers do not tell how long the longest of a hundred takes.
_ANSWERS_MIN: Final = 100
_ANSWERS: Final = 1_000
_QUESTIONS: Final = 10_000
# Measured with answers that come one by one, and every 250 and 900 s: with 3 the model is older, with 8 it is biased.
_AHEAD_MAX: Final = 5.0
# The share of questions without an answer is a wait old, so a small difference must not add up.
_LEAK: Final = 0.05
# Multiples of it are spread evenly between 0 and 2**32, of any numbers in a row (Knuth, 6.4).
_GOLDEN: Final = 2_654_435_769


class AnswerDelays(DeclaredState):
    """How long answers take, and how many questions have none: when does a question count as one without an answer?

    Let F(a) be the share of answers that take at most ``a``, and u the share of questions without one. If most of such
    questions are learned at the ages of answers, no label is fresher than another, and the model has no bias while
    traffic changes. But the probability that a question of age a, without an answer so far, never gets one is only u /
    (u + (1 − u)(1 − F(a))). So questions are drawn: the chance that a question is taken at an age is the chance of an
    answer at this age, times this probability. Of the questions without an answer the share u · ln(1/u) / (1 − u) is
    drawn, .95 where u is .9, and .26 where u is .1; the others wait to the end.

    That is right only while answers come one by one. If they come in bursts, or fail to come, only as many questions
    are learned early as keep True and False in balance. The rest is learned at the end of its wait, when each question
    has its label.
    """

    _delays: deque[int] = declared(made=deque, form=Form(list, deque))
    _ended = declared(0)
    """The number of waits that have ended, of questions with an answer, too."""
    _unanswered = declared(0.5)
    """The share of the last questions that have no answer, by the ends of their waits."""
    _ahead = declared(0.0)
    """The answers that were learned early, minus the questions without one; in the mean the steps are 0."""

    def __init__(self) -> None:
        self._sorted: list[int] = []

    def answered(self, delay: int) -> None:
        self._delays.append(delay)
        insort(self._sorted, delay)
        if len(self._delays) > _ANSWERS:
            del self._sorted[bisect_left(self._sorted, self._delays.popleft())]

    def ended(self, *, is_answered: bool) -> None:
        """Count a question at the end of its wait, whenever its answer came."""
        self._ended += 1
        self._unanswered += ((not is_answered) - self._unanswered) / (min(self._ended, _QUESTIONS) + 1)

    def are_known(self) -> bool:
        """Whether enough answers have come, and the model has read so many labels that their kind will not change."""
        return len(self._sorted) >= _ANSWERS_MIN and self._ended >= FIRST_LABELS

    def age_of(self, number: int) -> int | None:
        """Return the age at which question ``number`` counts as unanswered; None: at the end of its wait."""
        share, drawn = self._unanswered, (number * _GOLDEN % 2**32) / 2**32
        left = (math.exp(-drawn * (1.0 - share) / share) - share) / (1.0 - share)
        if left <= 0.0:
            return None
        return self._sorted[min(int((1.0 - left) * len(self._sorted)), len(self._sorted) - 1)] + 1

    def learns_now(self, *, is_answered: bool) -> bool:
        """Whether a new answer, or a question that has reached its age, is learned before its wait is over."""
        step = self._unanswered if is_answered else self._unanswered - 1.0
        ahead = self._ahead * (1.0 - _LEAK * abs(step)) + step
        if abs(ahead) > _AHEAD_MAX:
            return False
        self._ahead = ahead
        return True

    def restore(self, state: Mapping[str, Any]) -> None:
        super().restore(state)
        self._sorted = sorted(self._delays)

    @staticmethod
    def merged(states: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Return the joined counts of several; the last delays of each of them are the last delays."""
        ended = sum(state["ended"] for state in states)
        last = list(chain(*zip_longest(*(reversed(state["delays"]) for state in states))))
        unanswered = sum(state["unanswered"] * state["ended"] for state in states) / ended if ended else 0.5
        return {
            "delays": [delay for delay in last if delay is not None][:_ANSWERS][::-1],
            "ended": ended,
            "unanswered": unanswered,
            "ahead": max(-_AHEAD_MAX, min(_AHEAD_MAX, sum(state["ahead"] for state in states))),
        }


# ---- before the first label

Prior = tuple[float, float]
"""The share of True that the answers so far suggest, as a lower bound, and the mean of their numbers."""

NOTHING_KNOWN: Final = 0.5


class Answers(DeclaredState):
    """Counts questions and answers until the first label is learned. State of the owner."""

    counts = declared(made=lambda: [0.0, 0.0, 0.0], form=COPIED)
    """The number of questions, and of answers with a number, and the sum of these."""

    def ask(self, *, is_answered: bool) -> Prior:
        """Count a question; return the prior for it. ``is_answered``: questions without an answer have no label."""
        asked, answered, total = self.counts
        self.counts[0] += 1
        of = answered if is_answered else asked
        share = (min(max(total, 0.0), of) + NOTHING_KNOWN) / (of + 1)
        # While no answer can have come, few answers say little: a share of 1/n would cost log n for each True.
        return max(share, NOTHING_KNOWN / math.sqrt(of + 1)), total / answered if answered else 0.0

    def add(self, label: Label, otherwise: Label) -> None:
        """Count the label of an answer; one of two texts counts like True or False."""
        label = label != otherwise if isinstance(label, str) else label
        if isinstance(label, (bool, int, float, np.number, np.bool_)) and math.isfinite(label):
            self.counts[1] += 1
            self.counts[2] += float(label)
