"""Mean and deviation of each feature, and what to do with them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from streamiter.errors import ModelError
from streamiter.learn.rows.checks import Floats
from streamiter.learn.rows.points import as_points
from streamiter.tables import as_floats

__all__ = ["StandardScaler", "scaled"]


class StandardScaler:
    """Learns the mean and the sample deviation of each feature, row by row or in mini-batches of any size.

    Belongs to one task. Refused rows are named in a ``BadRows``, and leave it as it was.

    >>> scaler = StandardScaler()
    >>> scaler.learn([[1.0, 5.0], [3.0, 5.0]])
    >>> scaler.parameters()["mean"].tolist(), scaler.parameters()["deviation"].round(3).tolist()
    ([2.0, 5.0], [1.414, 0.0])
    """

    def __init__(self) -> None:
        self._records = 0
        self._mean: Floats = np.zeros(0)
        self._squares: Floats = np.zeros(0)
        """Sum of the squared distances to the mean."""

    @property
    def records(self) -> int:
        """Rows learned from so far."""
        return self._records

    def check(self, rows: npt.ArrayLike) -> Floats:
        """The rows as a matrix; raises ModelError for what could not be learned from."""
        return as_points("StandardScaler", rows, len(self._mean) if self._records else None, what="rows")

    def learn(self, rows: npt.ArrayLike) -> None:
        """Take in more rows. Source: Chan, Golub and LeVeque, "Updating formulae … sample variances" (1979)."""
        given = self.check(rows)
        if not len(given):
            return
        mean = given.mean(axis=0)
        squares = np.square(given - mean).sum(axis=0)
        if not self._records:
            self._mean, self._squares, self._records = mean, squares, len(given)
            return
        records = self._records + len(given)
        difference = mean - self._mean
        self._mean = self._mean + difference * (len(given) / records)
        self._squares = (
            self._squares + squares + np.square(difference) * (self._records * len(given) / records)
        )
        self._records = records

    def parameters(self) -> dict[str, Any]:
        """``mean`` and ``deviation``, arrays of the features; of a single row the deviation is 0."""
        if not self._records:
            raise ModelError(
                "StandardScaler: expected rows to have learned from, given none so far; learn first"
            )
        deviation = np.sqrt(self._squares / max(self._records - 1, 1))
        return {"mean": self._mean.copy(), "deviation": deviation}

    def state(self) -> dict[str, Any]:
        """All that it has learned, as plain data of its own."""
        return {"records": self._records, "mean": self._mean.copy(), "squares": self._squares.copy()}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from a :meth:`state`."""
        self._records = state["records"]
        self._mean, self._squares = state["mean"].copy(), state["squares"].copy()


def scaled(parameters: Mapping[str, Any], rows: npt.ArrayLike) -> Floats:
    """Rows (or one row) less the mean, in units of the deviation; a feature that never varied becomes 0.

    What a ``ServedModel(predict=scaled)`` answers with, and what to do before a linear model.

    >>> scaled({"mean": np.array([2.0, 5.0]), "deviation": np.array([0.5, 0.0])}, [[3.0, 5.0]]).tolist()
    [[2.0, 0.0]]
    """
    deviation = parameters["deviation"]
    differences: Floats = as_floats("scaled", "rows", rows) - parameters["mean"]
    varies = deviation > 0
    result: Floats = np.where(varies, differences / np.where(varies, deviation, 1.0), 0.0)
    return result
