"""What all losses have in common."""

from __future__ import annotations

import abc
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import numpy.typing as npt

from streamiter.errors import ConfigurationError
from streamiter.learn.rows.checks import holds, refuse_rows
from streamiter.networks.parameters import Array

__all__ = ["Loss", "Predictions"]


@dataclass(frozen=True)
class Predictions:
    """What a loss makes of scores, an array of the length of the batch each; None: it knows no such thing."""

    value: Array
    """The score; of a regression the value itself; of several classes the score of the one that is predicted."""
    probability: Array | None = None
    """Of two classes: of the positive one; of several: of the one that is predicted."""
    label: Array | None = None
    """−1 or 1; of several classes the class."""


class Loss(abc.ABC):
    """Settings only. ``scores`` are (rows, outputs), ``labels`` (rows,), both in the dtype of the network.

    >>> from streamiter.networks.losses.log_loss import LogLoss
    >>> scores, labels = np.array([[0.0], [2.0]]), np.array([1.0, -1.0])
    >>> [round(loss, 4) for loss in LogLoss().losses(scores, labels).tolist()]
    [0.6931, 2.1269]
    """

    type_name: ClassVar[str]
    """As files have it, in lower case."""

    expected_labels: ClassVar[str] = "finite labels"

    labels_to_take: ClassVar[str] = "leave these rows out"
    """What to do with others."""

    needs_labels: ClassVar[bool] = True
    """Otherwise ``labels`` are not looked at."""

    @abc.abstractmethod
    def losses(self, scores: Array, labels: Array) -> Array:
        """That of each row."""

    @abc.abstractmethod
    def slopes(self, scores: Array, labels: Array) -> Array:
        """The derivative of each row's loss by its scores: (rows, outputs)."""

    @abc.abstractmethod
    def predictions(self, scores: Array) -> Predictions:
        """What the scores say."""

    def mean(self, scores: Array, labels: Array) -> float:
        """The mean over the batch."""
        return float(self.losses(scores, labels).mean(dtype=np.float64))

    def gradient(self, scores: Array, labels: Array) -> Array:
        """The derivative of the mean by the scores: (rows, outputs)."""
        slopes = self.slopes(scores, labels)
        slopes /= len(scores)
        return slopes

    def correct(self, predictions: Predictions, labels: Array) -> npt.NDArray[np.bool_] | None:
        """Which rows are predicted right; None for a regression."""
        if predictions.label is None:
            return None
        same: npt.NDArray[np.bool_] = predictions.label == labels
        return same

    def check_outputs(self, owner: str, outputs: int) -> None:
        """ConfigurationError where a layer of so many outputs cannot have this loss."""
        if outputs != 1:
            raise ConfigurationError(
                f"{owner}: expected an input of 1 output for {self.type_name}, given {outputs}; "
                "end with a layer of outputdim 1, or take softmaxloss"
            )

    def check_labels(self, owner: str, labels: Array, outputs: int) -> None:
        """``BadRows`` for labels that it does not know."""
        good = self._good_labels(labels, outputs)
        if not holds(good):
            raise refuse_rows(
                good, f"{owner}: expected {self._expected(outputs)}", labels, self.labels_to_take
            )

    def _good_labels(self, labels: Array, outputs: int) -> npt.NDArray[np.bool_]:
        finite: npt.NDArray[np.bool_] = np.isfinite(labels)
        return finite

    def _expected(self, outputs: int) -> str:
        return f"{self.expected_labels} for {self.type_name}"
