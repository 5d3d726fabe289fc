"""The compiled statistics of answers, see ``streamiter.learn.late_labels.answer_delays``.

This module needs Numba to be fast, see ``streamiter.values.helpers.compiled``.
"""

from __future__ import annotations

import math
from typing import Final

from streamiter.values.helpers.compiled import compiled
from streamiter.values.numbers import Floats, Integers

ENDED: Final = 0
"""The number of waits that have ended, of questions with an answer, too."""
DELAYS: Final = 1
"""The number of delays that have been measured."""

UNANSWERED: Final = 0
"""The share of the last questions that have no answer, by the ends of their waits."""
AHEAD: Final = 1
"""The answers that were learned early, minus the questions without one; in the mean the steps are 0."""

# Fewer answers do not tell how long the longest of a hundred takes.
_DELAYS_MIN: Final = 100
DELAYS_KEPT: Final = 1_000
# Then the model has read this many labels that their kind will not change: it is ``labels.FIRST_LABELS``.
_ENDED_MIN: Final = 1_000
_QUESTIONS: Final = 10_000
# Measured with answers that come one by one, and every 250 and 900 s: with 3 the model is older, with 8 it is biased.
AHEAD_MAX: Final = 5.0
# The share of questions without an answer is a wait old, so a small difference must not add up.
_LEAK: Final = 0.05
# Multiples of it are spread evenly between 0 and 2**32, of any numbers in a row (Knuth, 6.4).
_GOLDEN: Final = 2_654_435_769


@compiled
def add_delay(last: Integers, ordered: Integers, counts: Integers, delay: int) -> None:
    """Count an answer that came this many milliseconds after its question."""
    count = min(counts[DELAYS], DELAYS_KEPT)
    ring = counts[DELAYS] % DELAYS_KEPT
    if count == DELAYS_KEPT:
        at = 0
        while ordered[at] != last[ring]:
            at += 1
        for later in range(at + 1, count):
            ordered[later - 1] = ordered[later]
        count -= 1
    last[ring] = delay
    while count > 0 and ordered[count - 1] > delay:
        ordered[count] = ordered[count - 1]
        count -= 1
    ordered[count] = delay
    counts[DELAYS] += 1


@compiled
def count_end(counts: Integers, shares: Floats, is_answered: bool) -> None:
    """Count a question at the end of its wait, whenever its answer came."""
    counts[ENDED] += 1
    unanswered = 0.0 if is_answered else 1.0
    shares[UNANSWERED] += (unanswered - shares[UNANSWERED]) / (min(counts[ENDED], _QUESTIONS) + 1)


@compiled
def are_known(counts: Integers) -> bool:
    """Whether enough answers have come, and enough waits have ended."""
    return bool(counts[DELAYS] >= _DELAYS_MIN and counts[ENDED] >= _ENDED_MIN)


@compiled
def age_of(ordered: Integers, counts: Integers, shares: Floats, number: int) -> int:
    """Return the age at which question ``number`` counts as unanswered; -1: at the end of its wait."""
    low, high = number % 65_536, number // 65_536 % 65_536
    drawn = (low * _GOLDEN + high * _GOLDEN % 65_536 * 65_536) % 4_294_967_296 / 4_294_967_296.0
    share = shares[UNANSWERED]
    left = (math.exp(-drawn * (1.0 - share) / share) - share) / (1.0 - share)
    if left <= 0.0:
        return -1
    count = min(counts[DELAYS], DELAYS_KEPT)
    return int(ordered[min(int((1.0 - left) * count), count - 1)]) + 1


@compiled
def learns_now(shares: Floats, is_answered: bool) -> bool:
    """Whether a new answer, or a question that has reached its age, is learned before its wait is over."""
    step = shares[UNANSWERED] if is_answered else shares[UNANSWERED] - 1.0
    ahead = shares[AHEAD] * (1.0 - _LEAK * abs(step)) + step
    if abs(ahead) > AHEAD_MAX:
        return False
    shares[AHEAD] = ahead
    return True
