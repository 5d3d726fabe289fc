"""The loss of support vector machines."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import numpy.typing as npt

from streamiter.networks.losses.loss import Loss, Predictions
from streamiter.networks.losses.signs import SIGNS_OF_LABELS, are_signs, sign_labels
from streamiter.networks.parameters import Array

__all__ = ["HingeLoss"]


@dataclass(frozen=True)
class HingeLoss(Loss):
    """max(0, 1 − y·f), y −1 or 1.

    >>> HingeLoss().losses(np.array([[0.5], [3.0]]), np.ones(2)).tolist()
    [0.5, 0.0]
    """

    type_name: ClassVar[str] = "hingeloss"
    expected_labels: ClassVar[str] = "labels −1 or 1"
    labels_to_take: ClassVar[str] = SIGNS_OF_LABELS

    def losses(self, scores: Array, labels: Array) -> Array:
        losses: Array = 1 - labels * scores[:, 0]
        return np.maximum(losses, 0, out=losses)

    def slopes(self, scores: Array, labels: Array) -> Array:
        slopes: Array = -labels * (labels * scores[:, 0] < 1)
        return slopes[:, None]

    def predictions(self, scores: Array) -> Predictions:
        values = scores[:, 0].copy()
        return Predictions(values, label=sign_labels(values, at=0.0))

    def _good_labels(self, labels: Array, outputs: int) -> npt.NDArray[np.bool_]:
        return are_signs(labels)
