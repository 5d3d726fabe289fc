"""The loss of least squares."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from streamiter.networks.losses.loss import Loss, Predictions
from streamiter.networks.parameters import Array

__all__ = ["L2Loss"]


@dataclass(frozen=True)
class L2Loss(Loss):
    """½(f − y)².

    >>> import numpy as np
    >>> L2Loss().losses(np.array([[3.0]]), np.array([1.0])).tolist()
    [2.0]
    """

    type_name: ClassVar[str] = "l2loss"

    def losses(self, scores: Array, labels: Array) -> Array:
        losses: Array = scores[:, 0] - labels
        losses *= losses
        losses *= 0.5
        return losses

    def slopes(self, scores: Array, labels: Array) -> Array:
        slopes: Array = scores - labels[:, None]
        return slopes

    def predictions(self, scores: Array) -> Predictions:
        return Predictions(scores[:, 0].copy())
