"""What is counted of rows, and how good that makes a split."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Final

import numpy as np
import numpy.typing as npt

from streamiter.learn.rows.checks import Floats
from streamiter.learn.trees.tree import Nodes

__all__ = ["Criterion", "Gini", "Variance", "exact_grid"]


class Criterion(ABC):
    """Statistics are lines of numbers that can be added: the number of rows, then what the criterion needs."""

    columns: int
    """How many numbers."""

    @abstractmethod
    def histogram(self, at: Nodes, length: int, targets: Floats, weights: Floats) -> Floats:
        """Statistics of the rows at each of ``length`` places: an array (length, columns)."""

    @abstractmethod
    def weight(self, statistics: Floats) -> Floats:
        """The sum of the weights of the rows."""

    @abstractmethod
    def score(self, statistics: Floats) -> Floats:
        """How alike the rows are, between 0 and their weight; a split is as good as it raises the sum."""

    @abstractmethod
    def values(self, statistics: Floats) -> Floats:
        """What is predicted: the share of each class, or the mean of the targets."""

    def rows(self, statistics: Floats) -> Floats:
        """How many rows."""
        rows: Floats = statistics[..., 0]
        return rows


class Gini(Criterion):
    """For classes: the weight of each. Targets are the numbers of the classes, from 0."""

    def __init__(self, classes: int) -> None:
        self._classes = classes
        self.columns = 1 + classes

    def histogram(self, at: Nodes, length: int, targets: Floats, weights: Floats) -> Floats:
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
        shares: Floats = statistics[..., 1:] / self.weight(statistics)[..., np.newaxis]
        return shares


class Variance(Criterion):
    """For numbers: the weight, and the weighted sum of the targets, which are between -1 and 1."""

    columns = 3

    def histogram(self, at: Nodes, length: int, targets: Floats, weights: Floats) -> Floats:
        return np.column_stack(
            [
                np.bincount(at, minlength=length),
                np.bincount(at, weights, minlength=length),
                np.bincount(at, targets, minlength=length),
            ]
        )

    def weight(self, statistics: Floats) -> Floats:
        weight: Floats = statistics[..., 1]
        return weight

    def score(self, statistics: Floats) -> Floats:
        return _ratio(np.square(statistics[..., 2]), self.weight(statistics))

    def values(self, statistics: Floats) -> Floats:
        means: Floats = statistics[..., 2:] / statistics[..., 1:2]
        return means


_MANTISSA_BITS: Final = 52


def exact_grid(numbers: int, largest: float) -> float:
    """A power of two: so many of its multiples up to ``largest`` add up without rounding, in any order.

    So sums do not depend on how the rows were divided among workers.

    >>> grid = exact_grid(1_000, 7.0)
    >>> thirds = np.rint(np.full(999, 1 / 3) / grid) * grid
    >>> float(thirds.sum()) == float(thirds[:500].sum() + thirds[500:].sum()), round(float(thirds.sum()), 6)
    (True, 333.0)
    """
    _, exponent = np.frexp(numbers * largest)
    return max(float(np.ldexp(1.0, int(exponent) - _MANTISSA_BITS)), np.finfo(np.float64).smallest_subnormal)


def _ratio(above: Floats, below: Floats) -> Floats:
    """0 where there is nothing."""
    ratio: npt.NDArray[np.float64] = np.divide(above, below, out=np.zeros_like(above), where=below > 0)
    return ratio
