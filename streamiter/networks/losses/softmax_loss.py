"""The loss of several classes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import numpy.typing as npt

from streamiter.errors import ConfigurationError
from streamiter.networks.losses.loss import Loss, Predictions
from streamiter.networks.parameters import Array

__all__ = ["SoftmaxLoss"]


@dataclass(frozen=True)
class SoftmaxLoss(Loss):
    """−log p_y, p the softmax of the scores, y from 0 to K − 1.

    >>> SoftmaxLoss().losses(np.array([[1000.0, 1000.0]]), np.zeros(1)).round(3).tolist()
    [0.693]
    """

    type_name: ClassVar[str] = "softmaxloss"
    labels_to_take: ClassVar[str] = (
        "set translabel to SubOneTrans where they count from 1, to AddOneTrans where they count from −1, or give the "
        "scores an output for each class"
    )

    def losses(self, scores: Array, labels: Array) -> Array:
        shifted = scores - scores.max(axis=1, keepdims=True)
        of_label = shifted[np.arange(len(labels)), labels.astype(np.intp)]
        losses: Array = np.log(np.exp(shifted, out=shifted).sum(axis=1))
        losses -= of_label
        return losses

    def slopes(self, scores: Array, labels: Array) -> Array:
        slopes = _softmax(scores)
        slopes[np.arange(len(labels)), labels.astype(np.intp)] -= 1
        return slopes

    def predictions(self, scores: Array) -> Predictions:
        rows, best = np.arange(len(scores)), scores.argmax(axis=1)
        return Predictions(scores[rows, best], _softmax(scores)[rows, best], best.astype(scores.dtype))

    def check_outputs(self, owner: str, outputs: int) -> None:
        if outputs < 2:
            raise ConfigurationError(
                f"{owner}: expected an input of one output for each class, 2 or more, for {self.type_name}, "
                f"given {outputs}; change its outputdim, or take logloss"
            )

    def _good_labels(self, labels: Array, outputs: int) -> npt.NDArray[np.bool_]:
        good: npt.NDArray[np.bool_] = (labels >= 0) & (labels < outputs) & (labels == np.floor(labels))
        return good

    def _expected(self, outputs: int) -> str:
        return f"labels from 0 to {outputs - 1} for {self.type_name}"


def _softmax(scores: Array) -> Array:
    shares: Array = scores - scores.max(axis=1, keepdims=True)
    np.exp(shares, out=shares)
    shares /= shares.sum(axis=1, keepdims=True)
    return shares
