"""How a node of a decision tree is split: by a :class:`Criterion`, from the histograms of its rows.

Histograms are sums of numbers on a grid (:func:`exact_grid`), so the best split does not depend on the workers.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Final, NamedTuple

import numpy as np

from streamiter.values.numbers import Floats, Indices


class Criterion(ABC):
    """Judges splits by statistics of rows.

    Statistics are rows of numbers that can be added: the number of rows, then the numbers that the criterion needs.
    """

    columns: int
    """The length of statistics."""

    @abstractmethod
    def histogram(self, at: Indices, length: int, targets: Floats, weights: Floats) -> Floats:
        """Return the statistics of the rows at each of ``length`` places: an array (length, columns)."""

    @abstractmethod
    def weight(self, statistics: Floats) -> Floats:
        """Return the sum of the weights of the rows."""

    @abstractmethod
    def score(self, statistics: Floats) -> Floats:
        """Return the similarity of the rows, from 0 to their weight; the gain of a split is the increase of the sum."""

    @abstractmethod
    def values(self, statistics: Floats) -> Floats:
        """Return the prediction: the share of each class, or the mean of the targets."""

    def rows(self, statistics: Floats) -> Floats:
        """Return the number of rows."""
        return statistics[..., 0]


class Gini(Criterion):
    """Gini impurity, for classes: statistics have the weight of each class. Targets are class numbers from 0."""

    def __init__(self, classes: int) -> None:
        self._classes = classes
        self.columns = 1 + classes

    def histogram(self, at: Indices, length: int, targets: Floats, weights: Floats) -> Floats:
        by_class = np.bincount(
            at * self._classes + targets.astype(np.intp), weights, minlength=length * self._classes
        ).reshape(length, self._classes)
        rows = by_class.sum(axis=1) if (weights == 1.0).all() else np.bincount(at, minlength=length)
        return np.column_stack([rows, by_class])

    def weight(self, statistics: Floats) -> Floats:
        weight: Floats = statistics[..., 1:].sum(axis=-1)
        return weight

    def score(self, statistics: Floats) -> Floats:
        squares = np.einsum("...c,...c->...", statistics[..., 1:], statistics[..., 1:])
        return _ratio(squares, self.weight(statistics))

    def values(self, statistics: Floats) -> Floats:
        return statistics[..., 1:] / self.weight(statistics)[..., np.newaxis]


class Variance(Criterion):
    """Variance, for numbers: statistics have the weight, and the weighted sum of the targets, from -1 to 1."""

    columns = 3

    def histogram(self, at: Indices, length: int, targets: Floats, weights: Floats) -> Floats:
        return np.column_stack(
            [
                np.bincount(at, minlength=length),
                np.bincount(at, weights, minlength=length),
                np.bincount(at, targets, minlength=length),
            ]
        )

    def weight(self, statistics: Floats) -> Floats:
        return statistics[..., 1]

    def score(self, statistics: Floats) -> Floats:
        return _ratio(np.square(statistics[..., 2]), self.weight(statistics))

    def values(self, statistics: Floats) -> Floats:
        return statistics[..., 2:] / statistics[..., 1:2]


def _ratio(above: Floats, below: Floats) -> Floats:
    """Return the quotients, 0 for a divisor of 0."""
    return np.divide(above, below, out=np.zeros_like(above), where=below > 0)


_MANTISSA_BITS: Final = 52


def exact_grid(numbers: int, largest: float) -> float:
    """Return a power of two of which ``numbers`` multiples up to ``largest`` add up without rounding, in any order.

    So sums do not depend on the division of the rows among workers.

    >>> grid = exact_grid(1_000, 7.0)
    >>> thirds = np.rint(np.full(999, 1 / 3) / grid) * grid
    >>> float(thirds.sum()) == float(thirds[:500].sum() + thirds[500:].sum()), round(float(thirds.sum()), 6)
    (True, 333.0)
    """
    _, exponent = np.frexp(numbers * largest)
    return max(float(np.ldexp(1.0, int(exponent) - _MANTISSA_BITS)), np.finfo(np.float64).smallest_subnormal)


class Splits(NamedTuple):
    """The best split of each node, an entry for each node; a node that cannot be split has a gain of -infinity."""

    feature: Indices
    """The feature that the node is split by."""
    cut: Indices
    """Rows in bins up to this one go left."""
    gain: Floats
    """The increase of the score."""
    left: Floats
    """The statistics of the rows that go left."""


def best_splits(histograms: Floats, bins: Sequence[int], criterion: Criterion, minimum_rows: int) -> Splits:
    """Return the split with the largest gain for each node; both sides keep ``minimum_rows`` rows.

    ``histograms`` is an array (nodes, bins of all features, columns). Of equal gains the first feature and the lowest
    cut is taken. Cuts with only empty bins between them divide the rows in the same way; the middle cut is taken.

    >>> red, blue = [3.0, 3.0, 0.0], [2.0, 0.0, 2.0]
    >>> splits = best_splits(np.array([[red, [0.0, 0.0, 0.0], [0.0, 0.0, 0.0], blue]]), [4], Gini(2), 1)
    >>> splits.cut.tolist(), splits.gain.round(9).tolist(), splits.left.tolist()
    ([1], [2.4], [[3.0, 3.0, 0.0]])
    """
    nodes = np.arange(len(histograms))
    total = histograms[:, : bins[0]].sum(axis=1)
    best = Splits(
        feature=np.zeros(len(nodes), dtype=np.intp),
        cut=np.zeros(len(nodes), dtype=np.intp),
        gain=np.full(len(nodes), -np.inf),
        left=np.zeros_like(total),
    )
    start = 0
    for feature, count in enumerate(bins):
        part = histograms[:, start : start + count]
        start += count
        if count == 1:
            continue
        left = np.cumsum(part[:, :-1], axis=1)
        scores = _scores(left, total, criterion, minimum_rows)
        cuts = scores.argmax(axis=1)
        gains = scores[nodes, cuts] - criterion.score(total)
        for node in np.flatnonzero(gains > best.gain):
            best.feature[node], best.gain[node] = feature, gains[node]
            best.left[node] = left[node, cuts[node]]
            best.cut[node] = _middle(criterion.rows(part[node]), int(cuts[node]))
    return best


def _scores(left: Floats, total: Floats, criterion: Criterion, minimum_rows: int) -> Floats:
    right = total[:, np.newaxis] - left
    enough = (criterion.rows(left) >= minimum_rows) & (criterion.rows(right) >= minimum_rows)
    return np.where(enough, criterion.score(left) + criterion.score(right), -np.inf)


def _middle(rows: Floats, cut: int) -> int:
    """Return the middle of the cuts that divide these bins in the same way as ``cut``, which is the lowest such cut."""
    empty = int(np.argmax(rows[cut + 1 :] > 0))
    return cut + empty // 2
