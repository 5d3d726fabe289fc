"""The log loss of probabilities."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Final

import numpy as np
import numpy.typing as npt

from streamiter.networks.losses.loss import Loss, Predictions
from streamiter.networks.losses.signs import are_signs, sign_labels
from streamiter.networks.parameters import Array

__all__ = ["CrossEntropyLoss"]

# Angel's; a probability that is surely wrong costs 20.7.
_LEAST_PROBABILITY: Final = 1e-9


@dataclass(frozen=True)
class CrossEntropyLoss(Loss):
    """−log p of the right class, p clipped at 1e-9; the input must end with a sigmoid, or another probability.

    The positive class has label 1, the other 0 or −1. Below the clip the slope is that at the clip, so that a row that
    is surely wrong is learned from.

    >>> CrossEntropyLoss().losses(np.array([[0.5], [0.0]]), np.ones(2)).round(3).tolist()
    [0.693, 20.723]
    """

    type_name: ClassVar[str] = "crossentropyloss"
    expected_labels: ClassVar[str] = "labels 0 or 1 (or −1 or 1)"
    labels_to_take: ClassVar[str] = "set translabel to ZeroOneTrans (above 0: 1, otherwise 0)"

    def losses(self, scores: Array, labels: Array) -> Array:
        losses: Array = np.log(self._of_right_class(scores, labels))
        return np.negative(losses, out=losses)

    def slopes(self, scores: Array, labels: Array) -> Array:
        slopes: Array = np.where(labels > 0, scores.dtype.type(-1), scores.dtype.type(1))
        slopes /= self._of_right_class(scores, labels)
        return slopes[:, None]

    def predictions(self, scores: Array) -> Predictions:
        probability = scores[:, 0].copy()
        return Predictions(probability, probability, sign_labels(probability, at=0.5))

    def correct(self, predictions: Predictions, labels: Array) -> npt.NDArray[np.bool_]:
        same: npt.NDArray[np.bool_] = (predictions.value > 0.5) == (labels > 0)
        return same

    def _of_right_class(self, scores: Array, labels: Array) -> Array:
        # 1 − p is made before it is clipped: 1 − 1e-9 is 1 in float32.
        of_right: Array = np.where(labels > 0, scores[:, 0], 1 - scores[:, 0])
        return np.maximum(of_right, _LEAST_PROBABILITY, out=of_right)

    def _good_labels(self, labels: Array, outputs: int) -> npt.NDArray[np.bool_]:
        good: npt.NDArray[np.bool_] = are_signs(labels) | (labels == 0)
        return good
