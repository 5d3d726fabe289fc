"""How far points are from the nearest centre."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from streamiter.networks.losses.loss import Loss, Predictions
from streamiter.networks.parameters import Array

__all__ = ["KMeansLoss"]


@dataclass(frozen=True)
class KMeansLoss(Loss):
    """min over k of the scores, which are squared distances to the centres, as ``kmeansinputlayer`` gives them.

    It needs no labels. Of two nearest centres the first one counts.

    >>> KMeansLoss().losses(np.array([[4.0, 1.0]]), np.zeros(1)).tolist()
    [1.0]
    """

    type_name: ClassVar[str] = "kmeansloss"
    needs_labels: ClassVar[bool] = False

    def losses(self, scores: Array, labels: Array) -> Array:
        nearest: Array = scores.min(axis=1)
        return nearest

    def slopes(self, scores: Array, labels: Array) -> Array:
        slopes = np.zeros_like(scores)
        slopes[np.arange(len(scores)), scores.argmin(axis=1)] = 1
        return slopes

    def predictions(self, scores: Array) -> Predictions:
        nearest = scores.argmin(axis=1)
        return Predictions(scores.min(axis=1), label=nearest.astype(scores.dtype))

    def correct(self, predictions: Predictions, labels: Array) -> None:
        """None: clusters are no classes."""

    def check_outputs(self, owner: str, outputs: int) -> None:
        """Any number of centres."""
