"""The area under the ROC curve: exactly for scores at hand, closely for a stream without end.

>>> area_under_curve(np.array([0.1, 0.4, 0.35, 0.8]), np.array([0.0, 0.0, 1.0, 1.0]), np.ones(4))
0.75
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np

from streamiter.learn.rows.checks import Floats
from streamiter.sparse_rows import sums_by

__all__ = ["ScoreHistogram", "area_under_curve"]

# 32,768 bins over log odds of ±20 (probabilities from 2e-9 on) are 0.0012 wide, 0.5 MB in all. Pairs in
# one bin count half, so the error is at most half the share of such pairs: about 0.28 · 0.0012 / 2 < 2e-4
# for scores whose log odds spread with a deviation of 1, and 2e-3 with one of 0.1. Within a bin the true
# order is as often one way as the other, so that what is seen is ten times less.
_BINS: Final = 1 << 15
_LOG_ODDS_MAX: Final = 20.0


def area_under_curve(scores: Floats, targets: Floats, weights: Floats) -> float | None:
    """The probability that a row of target 1 has a higher score than one of target 0; ties count half.

    None while either kind is missing.
    """
    order = np.argsort(scores)
    ordered = scores[order]
    place = np.cumsum(np.diff(ordered, prepend=ordered[:1]) > 0.0, dtype=np.intp)
    count = int(place[-1]) + 1 if len(place) else 0
    positive = sums_by(place, (weights * targets)[order], count)
    negative = sums_by(place, (weights * (1.0 - targets))[order], count)
    return _area(positive, negative)


def _area(positive: Floats, negative: Floats) -> float | None:
    """The same for weights by ascending score."""
    all_pairs = float(positive.sum()) * float(negative.sum())
    if all_pairs <= 0.0:
        return None
    negative_below = np.cumsum(negative) - negative
    return float(positive @ (negative_below + 0.5 * negative)) / all_pairs


class ScoreHistogram:
    """Weights by score and target in bins of equal width in log odds; memory does not grow.

    >>> scores = ScoreHistogram()
    >>> scores.add(log_odds=np.array([-2.2, 1.4]), targets=np.array([0.0, 1.0]), weights=np.ones(2))
    >>> scores.area_under_curve()
    1.0
    """

    def __init__(self) -> None:
        self._positive = np.zeros(_BINS)
        self._negative = np.zeros(_BINS)

    def add(self, *, log_odds: Floats, targets: Floats, weights: Floats) -> None:
        """Count these rows."""
        scaled = (log_odds + _LOG_ODDS_MAX) * (_BINS / (2.0 * _LOG_ODDS_MAX))
        bins = np.clip(scaled, 0.0, _BINS - 1.0).astype(np.intp)
        np.add.at(self._positive, bins, weights * targets)
        np.add.at(self._negative, bins, weights * (1.0 - targets))

    def area_under_curve(self) -> float | None:
        """As :func:`area_under_curve`, rows of one bin being ties; ``error_bound`` says how far off."""
        return _area(self._positive, self._negative)

    def error_bound(self) -> float:
        """How far ``area_under_curve`` can at most be from the exact one."""
        all_pairs = float(self._positive.sum()) * float(self._negative.sum())
        return float(self._positive @ self._negative) / all_pairs / 2.0 if all_pairs > 0.0 else 0.0

    def state(self) -> dict[str, Any]:
        """The bins as plain data; only those in use."""
        used = np.flatnonzero((self._positive > 0.0) | (self._negative > 0.0))
        return {"bins": used, "positive": self._positive[used], "negative": self._negative[used]}

    def restore(self, state: dict[str, Any]) -> None:
        """Go on from a :meth:`state`."""
        for mine, name in ((self._positive, "positive"), (self._negative, "negative")):
            mine[:] = 0.0
            mine[state["bins"]] = state[name]
