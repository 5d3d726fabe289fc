"""``Moments``: the means and squared deviations of columns, which can be added up."""

from __future__ import annotations

from typing import Final, NamedTuple

import numpy as np

from streamiter.numbers import Floats

# Rounding leaves a constant column a deviation of this part of its mean, or less.
_ROUNDING: Final = 1e-14


class Moments(NamedTuple):
    """The number of some rows, and for each column the mean and the sum of the squared distances to the mean.

    >>> first, second = Moments.of(np.array([[1.0], [3.0]])), Moments.of(np.array([[8.0]]))
    >>> first.plus(second).mean.tolist(), first.deviation().round(3).tolist()
    ([4.0], [1.414])
    """

    records: int
    mean: Floats
    squares: Floats

    @staticmethod
    def of(rows: Floats) -> Moments:
        """Return the moments of the rows of a matrix."""
        mean = rows.mean(axis=0) if len(rows) else np.zeros(rows.shape[1])
        return Moments(len(rows), mean, np.square(rows - mean).sum(axis=0))

    def plus(self, other: Moments) -> Moments:
        """Return the moments of all rows.

        Source: Chan, Golub and LeVeque, "Updating formulae and a pairwise algorithm for computing sample variances"
        (1979).
        """
        if not (self.records and other.records):
            return self if self.records else other
        records = self.records + other.records
        difference = other.mean - self.mean
        return Moments(
            records,
            self.mean + difference * (other.records / records),
            self.squares + other.squares + np.square(difference) * (self.records * other.records / records),
        )

    def deviation(self) -> Floats:
        """Return the sample deviation of each column; 0 for a constant column and after a single row."""
        deviation: Floats = np.sqrt(self.squares / max(self.records - 1, 1))
        deviation[deviation <= _ROUNDING * np.abs(self.mean)] = 0.0
        return deviation
