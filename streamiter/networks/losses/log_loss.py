"""The loss of logistic regression."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import numpy.typing as npt

from streamiter.networks.logistic import logistic
from streamiter.networks.losses.loss import Loss, Predictions
from streamiter.networks.losses.signs import SIGNS_OF_LABELS, are_signs, sign_labels
from streamiter.networks.parameters import Array

__all__ = ["LogLoss"]


@dataclass(frozen=True)
class LogLoss(Loss):
    """log(1 + e^(−y·f)), y −1 or 1; it does not overflow.

    >>> LogLoss().losses(np.array([[0.0], [-1000.0]]), np.ones(2)).round(3).tolist()
    [0.693, 1000.0]
    """

    type_name: ClassVar[str] = "logloss"
    expected_labels: ClassVar[str] = "labels −1 or 1"
    labels_to_take: ClassVar[str] = SIGNS_OF_LABELS

    def losses(self, scores: Array, labels: Array) -> Array:
        margins: Array = labels * scores[:, 0]
        np.negative(margins, out=margins)
        return np.logaddexp(0, margins, out=margins)

    def slopes(self, scores: Array, labels: Array) -> Array:
        shares = logistic(-labels * scores[:, 0])
        shares *= -labels
        return shares[:, None]

    def predictions(self, scores: Array) -> Predictions:
        values = scores[:, 0].copy()
        return Predictions(values, logistic(values.copy()), sign_labels(values, at=0.0))

    def _good_labels(self, labels: Array, outputs: int) -> npt.NDArray[np.bool_]:
        return are_signs(labels)
