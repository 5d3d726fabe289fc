"""The quality of probabilities: the area under the ROC curve, calibration, hits; and the rows that they are made of.

The area (``auc``) is computed exactly for given rows, and approximately, from a histogram of scores, for an endless
stream.
"""

from __future__ import annotations

from typing import Final, NamedTuple

import numpy as np

from streamiter.operators.declared_state import COPIED, DeclaredState, Form, declared
from streamiter.values.numbers import Floats, Indices
from streamiter.values.sparse_rows import sums_by

# 32,768 bins over log odds of ±20 (probabilities from 2e-9 on) are 0.0012 wide, 0.5 MB in all. Pairs in one bin count
# half, so the error is at most half the share of such pairs: about 0.28 · 0.0012 / 2 < 2e-4 for scores whose log odds
# have a deviation of 1, and 2e-3 for a deviation of 0.1. Within a bin both orders are equally frequent, so the measured
# error is ten times smaller.
_BINS: Final = 1 << 15
_LOG_ODDS_MAX: Final = 20.0


def area_under_curve(scores: Floats, targets: Floats, weights: Floats) -> float | None:
    """Return the probability that a row of target 1 has a higher score than a row of target 0; ties count half.

    This is the area under the ROC curve. None if one of the two targets is missing.

    >>> area_under_curve(np.array([0.1, 0.4, 0.35, 0.8]), np.array([0.0, 0.0, 1.0, 1.0]), np.ones(4))
    0.75
    """
    order = np.argsort(scores)
    ordered = scores[order]
    place = np.cumsum(np.diff(ordered, prepend=ordered[:1]) > 0.0, dtype=np.intp)
    count = int(place[-1]) + 1 if len(place) else 0
    positive = sums_by(place, (weights * targets)[order], count)
    negative = sums_by(place, (weights * (1.0 - targets))[order], count)
    return _area(positive, negative)


def _area(positive: Floats, negative: Floats) -> float | None:
    """Return the area for the weights of both targets, each by ascending score."""
    all_pairs = float(positive.sum()) * float(negative.sum())
    if all_pairs <= 0.0:
        return None
    negative_below = np.cumsum(negative) - negative
    # Not as a product of matrices, whose threads would spin for a while after it.
    return float((positive * (negative_below + 0.5 * negative)).sum()) / all_pairs


def _filled(pair: tuple[Indices, Floats]) -> Floats:
    bins = np.zeros(_BINS)
    bins[pair[0]] = pair[1]
    return bins


_USED_BINS: Final = Form(lambda bins: (used := np.flatnonzero(bins), bins[used]), _filled)
"""The form of bins most of which are empty: those that are in use, and what they have."""


class ScoreHistogram(DeclaredState):
    """Sums of weights by score and target, in bins of equal width in log odds; its memory does not grow.

    >>> scores = ScoreHistogram()
    >>> scores.add(log_odds=np.array([-2.2, 1.4]), targets=np.array([0.0, 1.0]), weights=np.ones(2))
    >>> scores.area_under_curve()
    1.0
    """

    _positive = declared(made=lambda: np.zeros(_BINS), form=_USED_BINS)
    _negative = declared(made=lambda: np.zeros(_BINS), form=_USED_BINS)

    def add(self, *, log_odds: Floats, targets: Floats, weights: Floats) -> None:
        """Count these rows."""
        scaled = (log_odds + _LOG_ODDS_MAX) * (_BINS / (2.0 * _LOG_ODDS_MAX))
        bins = np.clip(scaled, 0.0, _BINS - 1.0).astype(np.intp)
        np.add.at(self._positive, bins, weights * targets)
        np.add.at(self._negative, bins, weights * (1.0 - targets))

    def area_under_curve(self) -> float | None:
        """Return :func:`area_under_curve` with the rows of a bin as ties."""
        return _area(self._positive, self._negative)


CALIBRATION_BINS: Final = 10


class CalibrationBin(NamedTuple):
    """The rows whose prediction is in one of ten equal parts of 0 to 1; probabilities are good if both means agree."""

    lowest: float
    """The smallest prediction of the bin; a prediction of 1 is in the last bin."""
    weight: float
    """The sum of the sample weights: the number of rows, if all weights are 1."""
    mean_prediction: float | None
    """The mean prediction; None without rows."""
    share: float | None
    """The share of rows with target 1; None without rows."""


class Calibration(DeclaredState):
    """For each bin the sums of weights, predictions and targets."""

    sums: Floats = declared(made=lambda: np.zeros((3, CALIBRATION_BINS)), form=COPIED)

    def add(self, rows: Floats) -> None:
        """Count rows of predictions, targets and weights, one after the other."""
        predictions, targets, weights = rows
        bins = np.minimum((predictions * CALIBRATION_BINS).astype(np.intp), CALIBRATION_BINS - 1)
        for mine, terms in zip(self.sums, (weights, weights * predictions, weights * targets), strict=True):
            np.add.at(mine, bins, terms)

    def table(self) -> list[CalibrationBin]:
        """Return all bins, by ascending prediction."""
        return [
            CalibrationBin(
                number / CALIBRATION_BINS,
                weight,
                predicted / weight if weight else None,
                found / weight if weight else None,
            )
            for number, (weight, predicted, found) in enumerate(self.sums.T.tolist())
        ]

    def error(self) -> float:
        """Return the mean distance between both means of a bin, over all rows."""
        weights, predicted, found = self.sums
        return float(np.abs(predicted - found).sum() / weights.sum())


def calibration_of(rows: Floats) -> Calibration:
    """Return the sums of these rows."""
    calibration = Calibration()
    calibration.add(rows)
    return calibration


# ---- rows


def weights_of_classes(of_class: Floats, rows: Floats) -> Floats:
    """Return the weight of each class, with these rows of predictions, targets, weights and classes."""
    classes = rows[3].astype(np.intp)
    found = np.zeros(max(len(of_class), int(classes.max()) + 1))
    found[: len(of_class)] = of_class
    np.add.at(found, classes, rows[2])  # Row after row, as sums are added.
    return found


class LastRows:
    """The last rows, in a ring: predictions, targets, weights and classes as rows of one array."""

    def __init__(self, size: int) -> None:
        self._ring = np.zeros((4, size))
        self._seen = 0

    @property
    def size(self) -> int:
        """The largest number of rows."""
        return self._ring.shape[1]

    def add(self, rows: Floats) -> None:
        size = self._ring.shape[1]
        kept = rows[:, -size:]
        start = (self._seen + rows.shape[1] - kept.shape[1]) % size
        until_end = size - start
        self._ring[:, start : start + kept.shape[1]] = kept[:, :until_end]
        self._ring[:, : max(kept.shape[1] - until_end, 0)] = kept[:, until_end:]
        self._seen += rows.shape[1]

    def rows(self) -> Floats:
        """Return a copy of the rows, the oldest first."""
        size = self._ring.shape[1]
        if self._seen <= size:
            return self._ring[:, : self._seen].copy()
        return np.roll(self._ring, -(self._seen % size), axis=1)

    def restore(self, rows: Floats) -> None:
        self._seen = 0
        self.add(np.asarray(rows, dtype=np.float64))


# ---- classes


def widened(predictions: Floats, width: int) -> Floats:
    """Return the probabilities of all classes, 0 for classes that came later; the last class stays the last."""
    known = predictions.shape[1]
    if known == width:
        return predictions
    return np.insert(predictions, [known - 1] * (width - known), 0.0, axis=1)


def hits(predictions: Floats, classes: Indices) -> tuple[Floats, Floats]:
    """Return the probability of the true class of each row, and 1 where no other class is more probable.

    A class that had not come yet had the probability of the last column.
    """
    rows = np.arange(len(classes))
    found = predictions[rows, classes]
    probabilities = np.where(found > 0.0, found, predictions[:, -1])
    return probabilities, (found > 0.0) * (found >= predictions.max(axis=1)).astype(np.float64)


def as_lists(predictions: Floats) -> list[list[float]]:
    """Return the numbers of each prediction."""
    found: list[list[float]] = (predictions[:, np.newaxis] if predictions.ndim == 1 else predictions).tolist()
    return found
