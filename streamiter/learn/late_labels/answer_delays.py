"""Statistics of answers: how long answers take, how many questions have no answer, and the share of True.

:class:`AnswerDelays` says which questions are learned before the end of their wait, and :class:`Answers` what to
predict before the first label.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import chain, zip_longest
from typing import Any, Final

import numpy as np

from streamiter.learn.labels import Label
from streamiter.operators.declared_state import COPIED, DeclaredState, declared


class AnswerDelays:
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

    def __init__(self) -> None:
        # Imported here: it imports Numba, which takes most of a second.
        from streamiter.learn.late_labels import answer_delay_steps

        self._steps = steps = answer_delay_steps
        self.last = np.zeros(steps.DELAYS_KEPT, np.int64)
        """The last delays, as a ring."""
        self.ordered = np.zeros(steps.DELAYS_KEPT, np.int64)
        """The last delays, in ascending order."""
        self.counts = np.zeros(2, np.int64)
        self.shares = np.array([0.5, 0.0])

    def are_known(self) -> bool:
        """Whether enough answers have come, and the model has read this many labels that their kind will not change."""
        return bool(self._steps.are_known(self.counts))

    def state(self) -> dict[str, Any]:
        """Return a copy of the state as plain data."""
        steps, count = self._steps, int(self.counts[self._steps.DELAYS])
        first = max(0, count - steps.DELAYS_KEPT)
        unanswered, ahead = self.shares.tolist()
        return {
            "delays": self.last[np.arange(first, count) % steps.DELAYS_KEPT].tolist(),
            "ended": int(self.counts[steps.ENDED]),
            "unanswered": unanswered,
            "ahead": ahead,
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restore a :meth:`state`."""
        delays = state["delays"]
        self.last[: len(delays)] = delays
        self.ordered[: len(delays)] = sorted(delays)
        self.counts[:] = state["ended"], len(delays)
        self.shares[:] = state["unanswered"], state["ahead"]

    @staticmethod
    def merged(states: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Return the joined counts of several; the last delays of each of them are the last delays."""
        from streamiter.learn.late_labels.answer_delay_steps import AHEAD_MAX, DELAYS_KEPT

        ended = sum(state["ended"] for state in states)
        last = list(chain(*zip_longest(*(reversed(state["delays"]) for state in states))))
        unanswered = sum(state["unanswered"] * state["ended"] for state in states) / ended if ended else 0.5
        return {
            "delays": [delay for delay in last if delay is not None][:DELAYS_KEPT][::-1],
            "ended": ended,
            "unanswered": unanswered,
            "ahead": max(-AHEAD_MAX, min(AHEAD_MAX, sum(state["ahead"] for state in states))),
        }


# ---- before the first label

Prior = tuple[float, float]
"""The share of True that the answers so far suggest, as a lower bound, and the mean of their numbers, or NaN."""

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
        return max(share, NOTHING_KNOWN / math.sqrt(of + 1)), total / answered if answered else math.nan

    def add(self, label: Label, otherwise: Label) -> None:
        """Count the label of an answer; one of two texts counts like True or False."""
        label = label != otherwise if isinstance(label, str) else label
        if isinstance(label, (bool, int, float, np.number, np.bool_)) and math.isfinite(label):
            self.counts[1] += 1
            self.counts[2] += float(label)
