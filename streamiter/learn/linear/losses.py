"""Losses of linear models, each with its canonical link.

With the canonical link the derivative of the loss by the margin (the linear part, w·x + b) is simply
``prediction − target``; both losses here have it.

>>> LogLoss().predict(np.array([0.0, 2.0, 800.0])).round(4).tolist()
[0.5, 0.8808, 1.0]
"""

from __future__ import annotations

import abc
from typing import ClassVar, Final

import numpy as np

from streamiter.learn.rows.checks import Floats, holds, refuse_rows

__all__ = ["PROBABILITY_FLOOR", "LogLoss", "Loss", "SquaredLoss"]

# A wrong prediction of certainty would cost infinity; 1e-15 is what scikit-learn long clipped at, and
# the smallest round number that 1 − p still tells from 1.
PROBABILITY_FLOOR: Final = 1e-15

# exp(709.8) overflows; from 700 on the probability is 1e-304 either way.
_LOG_ODDS_LIMIT: Final = 700.0


class Loss(abc.ABC):
    """How a margin becomes a prediction, and what a wrong one costs."""

    link: ClassVar[str]
    """What leads from the prediction back to the margin: "identity" or "logit"."""

    @abc.abstractmethod
    def predict(self, margins: Floats) -> Floats:
        """The prediction for each margin, in a new array."""

    @abc.abstractmethod
    def predict_one(self, margin: float) -> float:
        """The same for one margin, to the same last bit."""

    @abc.abstractmethod
    def values(self, predictions: Floats, targets: Floats) -> Floats:
        """The loss of each prediction."""

    def total(self, predictions: Floats, targets: Floats, weights: Floats | None = None) -> float:
        """The sum of the losses, each counted with its weight."""
        values = self.values(predictions, targets)
        return float(values.sum() if weights is None else values @ weights)

    @abc.abstractmethod
    def check_targets(self, owner: str, targets: Floats) -> None:
        """Raises :class:`~streamiter.learn.rows.checks.BadRows` for targets that cannot be."""


class SquaredLoss(Loss):
    """½ (prediction − target)² of a value; the link is the identity."""

    link = "identity"

    def predict(self, margins: Floats) -> Floats:
        return margins.copy()

    def predict_one(self, margin: float) -> float:
        return margin

    def values(self, predictions: Floats, targets: Floats) -> Floats:
        return 0.5 * np.square(predictions - targets)

    def check_targets(self, owner: str, targets: Floats) -> None:
        good = np.isfinite(targets)
        if not holds(good):
            raise refuse_rows(good, f"{owner}: expected finite targets", targets)


class LogLoss(Loss):
    """−log of the probability given to what happened, target 0 or 1; the link is the logit.

    Probabilities are clipped to 1e-15 … 1 − 1e-15.
    """

    link = "logit"

    def predict(self, margins: Floats) -> Floats:
        odds_against = np.negative(margins)
        np.minimum(odds_against, _LOG_ODDS_LIMIT, out=odds_against)
        np.exp(odds_against, out=odds_against)
        odds_against += 1.0
        return np.divide(1.0, odds_against, out=odds_against)

    def predict_one(self, margin: float) -> float:
        # numpy's exp, not math's: the two differ in the last bit for one number in twenty.
        return 1.0 / (1.0 + float(np.exp(min(-margin, _LOG_ODDS_LIMIT))))

    def values(self, predictions: Floats, targets: Floats) -> Floats:
        clipped = np.clip(predictions, PROBABILITY_FLOOR, 1.0 - PROBABILITY_FLOOR)
        return -(targets * np.log(clipped) + (1.0 - targets) * np.log1p(-clipped))

    def total(self, predictions: Floats, targets: Floats, weights: Floats | None = None) -> float:
        # The probability given to what happened, so that one logarithm does instead of two.
        chances = np.subtract(1.0, targets)
        chances -= predictions
        np.abs(chances, out=chances)
        np.maximum(chances, PROBABILITY_FLOOR, out=chances)
        np.log(chances, out=chances)
        return -float(chances.sum() if weights is None else chances @ weights)

    def check_targets(self, owner: str, targets: Floats) -> None:
        good = (targets == 0.0) | (targets == 1.0)
        if not holds(good):
            advice = "say which of them are 1, for instance y > 0"
            if holds(targets[~good] == -1.0):
                advice = 'for -1 and 1 take LogisticRegression(…, labels="-1/1"), or give y > 0'
            raise refuse_rows(good, f"{owner}: expected targets 0 or 1", targets, advice)
