"""A loss of regression that outliers do not rule."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from streamiter.networks.losses.loss import Loss, Predictions
from streamiter.networks.parameters import Array
from streamiter.numbers import positive

__all__ = ["HuberLoss"]


@dataclass(frozen=True)
class HuberLoss(Loss):
    """½d² where |d| ≤ δ, otherwise δ|d| − ½δ², d = f − y (Huber, 1964).

    >>> HuberLoss(delta=1.0).losses(np.array([[0.5], [3.0]]), np.zeros(2)).tolist()
    [0.125, 2.5]
    """

    type_name: ClassVar[str] = "huberloss"
    delta: float = 1.0

    def __post_init__(self) -> None:
        positive("huberloss(delta=)", self.delta)

    def losses(self, scores: Array, labels: Array) -> Array:
        distances = np.abs(scores[:, 0] - labels)
        # Within δ it is ½d², beyond it grows by δ for each unit.
        within = np.minimum(distances, self.delta)
        losses: Array = within * (distances - 0.5 * within)
        return losses

    def slopes(self, scores: Array, labels: Array) -> Array:
        slopes: Array = np.clip(scores - labels[:, None], -self.delta, self.delta)
        return slopes

    def predictions(self, scores: Array) -> Predictions:
        return Predictions(scores[:, 0].copy())
