"""Linear and logistic regression, online and offline.

>>> model = LogisticRegression(2, optimizer=SGD(0.5))
>>> features = np.array([[0.0, 1.0], [1.0, 0.0], [0.0, 2.0]])
>>> for _ in range(100):
...     model.learn(features, [0, 1, 0])
>>> model.version, model.records, model.predict(features).round().tolist()
(100, 300, [0.0, 1.0, 0.0])
>>> model = LogisticRegression(2)
>>> model.fit(features, [0, 1, 0], rounds=100, learning_rate=2.0).steps, model.predict(features).round().tolist()
(100, [0.0, 1.0, 0.0])
"""

from __future__ import annotations

from typing import Literal

import numpy as np
import numpy.typing as npt

from streamiter.errors import ConfigurationError
from streamiter.learn.linear.losses import LogLoss, SquaredLoss
from streamiter.learn.regression.fitting import OfflineModel
from streamiter.learn.rows.checks import Floats, holds, refuse_rows, row_vector
from streamiter.learn.rows.feature_rows import Features
from streamiter.optimizers import FTRL, SGD, Optimizer

__all__ = ["LinearRegression", "LogisticRegression"]


class LinearRegression(OfflineModel):
    """Online linear regression: squared loss ½(prediction − target)²; SGD of rate 0.01 by default.

    All other arguments as in :class:`~streamiter.learn.linear.model.LinearModel`.
    """

    def __init__(
        self,
        width: int,
        *,
        optimizer: Optimizer | None = None,
        intercept: bool = True,
        initial_weights: npt.ArrayLike | None = None,
        initial_intercept: float = 0.0,
    ) -> None:
        super().__init__(
            width,
            loss=SquaredLoss(),
            optimizer=optimizer or SGD(0.01),
            intercept=intercept,
            initial_weights=initial_weights,
            initial_intercept=initial_intercept,
        )


class LogisticRegression(OfflineModel):
    """Online logistic regression: log loss; predicts the probability of target 1.

    The default optimizer is ``FTRL(alpha=0.3, beta=0.1)``: it finds the scale of each feature by itself
    and does about as well row by row as in mini-batches of 100. Its steps become shorter with time;
    where what was true last week is not any more, take ``SGD`` with a constant rate (0.05 for rows with
    some ten features of 0 or 1, more for mini-batches) or a larger alpha.

    ``labels`` says which targets come: ``"0/1"`` or ``"-1/1"``. All other arguments as in
    :class:`~streamiter.learn.linear.model.LinearModel`.
    """

    def __init__(
        self,
        width: int,
        *,
        optimizer: Optimizer | None = None,
        intercept: bool = True,
        labels: Literal["0/1", "-1/1"] = "0/1",
        initial_weights: npt.ArrayLike | None = None,
        initial_intercept: float = 0.0,
    ) -> None:
        if labels not in ("0/1", "-1/1"):
            raise ConfigurationError(
                f'LogisticRegression(labels=): expected "0/1" or "-1/1", given {labels!r}'
            )
        self.labels = labels
        super().__init__(
            width,
            loss=LogLoss(),
            optimizer=optimizer or FTRL(alpha=0.3, beta=0.1),
            intercept=intercept,
            initial_weights=initial_weights,
            initial_intercept=initial_intercept,
        )

    def predict_probability(self, features: Features) -> Floats:
        """The probability of target 1 for each row: what ``predict`` gives, by its name."""
        return self.predict(features)

    def checked_targets(self, targets: npt.ArrayLike, length: int) -> Floats:
        if self.labels == "0/1":
            return super().checked_targets(targets, length)
        signs = row_vector(self._name, "targets", targets, length)
        good = np.abs(signs) == 1.0
        if not holds(good):
            raise refuse_rows(
                good, f"{self._name}: expected targets −1 or 1", signs, 'for 0 and 1 leave labels="-1/1" out'
            )
        return (signs + 1.0) / 2.0
