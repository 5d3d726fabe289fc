"""Transfer functions of layers and losses of networks; ``configuration.sections`` has tables of them.

A transfer function is applied to each output of a layer; on the way back, ``Applied.backward`` turns the gradient by
its output into the gradient by its input. A loss compares the scores of the last layer with the labels: it gives the
loss of each row, its derivative, and the predictions that the scores stand for.
"""

from __future__ import annotations

import abc
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from streamiter.learn.losses import HuberLoss, LinearLoss, SquaredLoss
from streamiter.learn.quality.validation import ValidationKind
from streamiter.learn.rows import refuse_rows_unless
from streamiter.values.numbers import Array


def logistic(values: Array) -> Array:
    """Compute the logistic function 1/(1 + e^(−x)) in place; if e^(−x) overflows it is 0.

    >>> logistic(np.array([-1000.0, 0.0, 1000.0])).tolist()
    [0.0, 0.5, 1.0]
    """
    with np.errstate(over="ignore"):
        np.negative(values, out=values)
        np.exp(values, out=values)
        values += 1
        np.reciprocal(values, out=values)
    return values


class Applied(NamedTuple):
    """The result of a transfer function."""

    output: Array
    backward: Callable[[Array], Array]
    """Returns the gradient by the input from the gradient by the output, which it does not change."""


class TransferFunction(abc.ABC):
    """A transfer function with its settings. Layers and workers share it; a layer keeps the result.

    >>> applied = Relu().forward(np.array([[-1.0, 2.0]]), None)
    >>> applied.output.tolist(), applied.backward(np.array([[5.0, 5.0]])).tolist()
    ([[0.0, 2.0]], [[0.0, 5.0]])
    """

    draws: ClassVar[bool] = False
    """Whether the function draws from the generator in training."""

    @abc.abstractmethod
    def forward(self, values: Array, generator: np.random.Generator | None) -> Applied:
        """Apply the function to ``values`` (rows, n), which may be overwritten; ``generator`` is None in prediction."""


@dataclass(frozen=True)
class IdentityFunction(TransferFunction):
    """The identity: x."""

    def forward(self, values: Array, generator: np.random.Generator | None) -> Applied:
        return Applied(values, lambda gradient: gradient)


@dataclass(frozen=True)
class Relu(TransferFunction):
    """The rectified linear unit: max(0, x); its slope at 0 is 0."""

    def forward(self, values: Array, generator: np.random.Generator | None) -> Applied:
        np.maximum(values, 0, out=values)
        return Applied(values, lambda gradient: gradient * (values > 0))


@dataclass(frozen=True)
class Sigmoid(TransferFunction):
    """The logistic function: 1/(1 + e^(−x)).

    >>> Sigmoid().forward(np.array([[0.0, 1000.0]]), None).output.tolist()
    [[0.5, 1.0]]
    """

    def forward(self, values: Array, generator: np.random.Generator | None) -> Applied:
        def backward(gradient: Array) -> Array:
            slopes: Array = 1 - values
            slopes *= values
            slopes *= gradient
            return slopes

        return Applied(logistic(values), backward)


@dataclass(frozen=True)
class Tanh(TransferFunction):
    """The hyperbolic tangent: tanh(x).

    >>> Tanh().forward(np.array([[0.0, 1000.0]]), None).output.tolist()
    [[0.0, 1.0]]
    """

    def forward(self, values: Array, generator: np.random.Generator | None) -> Applied:
        def backward(gradient: Array) -> Array:
            slopes: Array = values * values
            np.subtract(1, slopes, out=slopes)
            slopes *= gradient
            return slopes

        return Applied(np.tanh(values, out=values), backward)


@dataclass(frozen=True)
class Softmax(TransferFunction):
    """Shares of a row: e^x / Σ e^x. The largest x of the row is subtracted first, so that nothing overflows.

    >>> Softmax().forward(np.array([[1000.0, 1000.0]]), None).output.tolist()
    [[0.5, 0.5]]
    """

    def forward(self, values: Array, generator: np.random.Generator | None) -> Applied:
        values -= values.max(axis=1, keepdims=True)
        np.exp(values, out=values)
        values /= values.sum(axis=1, keepdims=True)

        def backward(gradient: Array) -> Array:
            slopes: Array = gradient - np.einsum("ij,ij->i", gradient, values)[:, None]
            slopes *= values
            return slopes

        return Applied(values, backward)


@dataclass(frozen=True)
class Dropout(TransferFunction):
    """In training each x becomes 0 with probability ``proba``, else x/(1 − proba); in prediction it stays x.

    So the expectation is x, and prediction scales nothing (Srivastava et al., 2014, in the inverted form).

    >>> values = np.ones((1, 4))
    >>> Dropout(0.5).forward(values.copy(), np.random.default_rng(0)).output.tolist()
    [[2.0, 0.0, 0.0, 0.0]]
    >>> Dropout(0.5).forward(values.copy(), None).output.tolist()
    [[1.0, 1.0, 1.0, 1.0]]
    """

    draws: ClassVar[bool] = True
    proba: float = 0.5

    def forward(self, values: Array, generator: np.random.Generator | None) -> Applied:
        if generator is None:
            return Applied(values, lambda gradient: gradient)
        scales: Array = np.empty_like(values)
        generator.random(out=scales, dtype=scales.dtype.type)
        stays = scales >= self.proba
        np.multiply(stays, scales.dtype.type(1.0 / (1.0 - self.proba)), out=scales)
        values *= scales
        return Applied(values, lambda gradient: gradient * scales)


@dataclass(frozen=True)
class WithDropout(TransferFunction):
    """Another transfer function, ``inner``, and then dropout; in prediction the other function alone."""

    inner: ClassVar[TransferFunction]
    draws: ClassVar[bool] = True
    proba: float = 0.5

    def forward(self, values: Array, generator: np.random.Generator | None) -> Applied:
        inner = self.inner.forward(values, generator)
        if generator is None:
            return inner
        # Dropout overwrites its input; ``inner.backward`` needs the output of the inner function itself.
        outer = Dropout(self.proba).forward(inner.output.copy(), generator)
        return Applied(outer.output, lambda gradient: inner.backward(outer.backward(gradient)))


@dataclass(frozen=True)
class SigmoidWithDropout(WithDropout):
    """dropout(sigmoid(x)); in prediction sigmoid(x)."""

    inner: ClassVar[TransferFunction] = Sigmoid()


@dataclass(frozen=True)
class TanhWithDropout(WithDropout):
    """dropout(tanh(x)); in prediction tanh(x)."""

    inner: ClassVar[TransferFunction] = Tanh()


@dataclass(frozen=True)
class Predictions:
    """Predictions for the rows of a batch; a field is None if the loss does not define it."""

    value: Array
    """The score, the value of a regression, or the score of the predicted class of several."""
    probability: Array | None = None
    """The probability of the positive class, or of the predicted class of several."""
    label: Array | None = None
    """The predicted class: −1 or 1, or the number of the class."""


class NetworkLoss(abc.ABC):
    """A loss function with its settings; it has no state.

    ``scores`` have the shape (rows, outputs), ``labels`` the shape (rows,), both in the dtype of the network.

    >>> scores, labels = np.array([[0.0], [2.0]]), np.array([1.0, -1.0])
    >>> [round(loss, 4) for loss in NetworkLogLoss().losses(scores, labels).tolist()]
    [0.6931, 2.1269]
    """

    type_name: ClassVar[str]
    """The name in configuration files, in lower case."""

    expected_labels: ClassVar[str] = "finite labels"

    labels_to_take: ClassVar[str] = "leave these rows out"
    """Which labels the loss takes, for the error about other labels."""

    needs_labels: ClassVar[bool] = True
    """Whether the loss uses labels."""

    of_mean: ClassVar[ValidationKind | None] = None
    """As which kind of prediction the loss is compared with the loss of the mean of the labels, if it is comparable."""

    @abc.abstractmethod
    def losses(self, scores: Array, labels: Array) -> Array:
        """Return the loss of each row."""

    @abc.abstractmethod
    def slopes(self, scores: Array, labels: Array) -> Array:
        """Return the derivative of the loss of each row by its scores: (rows, outputs)."""

    @abc.abstractmethod
    def predictions(self, scores: Array) -> Predictions:
        """Return the predictions for the scores."""

    def mean(self, scores: Array, labels: Array) -> float:
        """Return the mean loss of the batch."""
        return float(self.losses(scores, labels).mean(dtype=np.float64))

    def gradient(self, scores: Array, labels: Array) -> Array:
        """Return the derivative of the mean loss by the scores: (rows, outputs)."""
        slopes = self.slopes(scores, labels)
        slopes /= len(scores)
        return slopes

    def correct(self, predictions: Predictions, labels: Array) -> npt.NDArray[np.bool_] | None:
        """Return which rows are predicted correctly; None for a regression."""
        if predictions.label is None:
            return None
        same: npt.NDArray[np.bool_] = predictions.label == labels
        return same

    def check_labels(self, owner: str, labels: Array, outputs: int) -> None:
        """Raise ``BadRows`` for labels that the loss does not know."""
        good, expected = self._good_labels(labels, outputs), self._expected(outputs)
        refuse_rows_unless(good, owner, expected, labels, self.labels_to_take)

    def _good_labels(self, labels: Array, outputs: int) -> npt.NDArray[np.bool_]:
        return np.isfinite(labels)

    def _expected(self, outputs: int) -> str:
        return f"{self.expected_labels} for {self.type_name}"


def are_signs(labels: Array) -> npt.NDArray[np.bool_]:
    """Return which labels are −1 or 1."""
    good: npt.NDArray[np.bool_] = np.abs(labels) == 1
    return good


def sign_labels(values: Array, at: float) -> Array:
    """Return 1 for a value above ``at``, otherwise −1."""
    labels: Array = np.where(values > at, values.dtype.type(1), values.dtype.type(-1))
    return labels


class RegressionLoss(NetworkLoss):
    """The base of losses of numbers: ``linear`` is the same loss of a linear model."""

    linear: LinearLoss

    def losses(self, scores: Array, labels: Array) -> Array:
        return self.linear.values(scores[:, 0], labels)

    def slopes(self, scores: Array, labels: Array) -> Array:
        return self.linear.slopes(scores[:, 0].copy(), labels)[:, None]

    def predictions(self, scores: Array) -> Predictions:
        return Predictions(scores[:, 0].copy())


@dataclass(frozen=True)
class L2Loss(RegressionLoss):
    """Least squares: ½(f − y)².

    >>> L2Loss().losses(np.array([[3.0]]), np.array([1.0])).tolist()
    [2.0]
    """

    type_name: ClassVar[str] = "l2loss"
    of_mean = "regression"
    linear = SquaredLoss()


class SignLoss(NetworkLoss):
    """The base of losses whose labels are −1 and 1."""

    expected_labels: ClassVar[str] = "labels −1 or 1"
    labels_to_take: ClassVar[str] = (
        "set translabel to PosNegTrans, which counts for files and topics, or give np.where(labels > 0, 1.0, -1.0)"
    )

    def _good_labels(self, labels: Array, outputs: int) -> npt.NDArray[np.bool_]:
        return are_signs(labels)


@dataclass(frozen=True)
class NetworkLogLoss(SignLoss):
    """The loss of logistic regression: log(1 + e^(−y·f)), y −1 or 1; it does not overflow.

    >>> NetworkLogLoss().losses(np.array([[0.0], [-1000.0]]), np.ones(2)).round(3).tolist()
    [0.693, 1000.0]
    """

    type_name: ClassVar[str] = "logloss"
    of_mean = "classification"

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


@dataclass(frozen=True)
class NetworkHingeLoss(SignLoss):
    """The loss of support vector machines: max(0, 1 − y·f), y −1 or 1.

    >>> NetworkHingeLoss().losses(np.array([[0.5], [3.0]]), np.ones(2)).tolist()
    [0.5, 0.0]
    """

    type_name: ClassVar[str] = "hingeloss"

    def losses(self, scores: Array, labels: Array) -> Array:
        losses: Array = 1 - labels * scores[:, 0]
        return np.maximum(losses, 0, out=losses)

    def slopes(self, scores: Array, labels: Array) -> Array:
        slopes: Array = -labels * (labels * scores[:, 0] < 1)
        return slopes[:, None]

    def predictions(self, scores: Array) -> Predictions:
        values = scores[:, 0].copy()
        return Predictions(values, label=sign_labels(values, at=0.0))


# The value of Angel: a probability that is surely wrong costs 20.7.
_LEAST_PROBABILITY: Final = 1e-9


@dataclass(frozen=True)
class CrossEntropyLoss(NetworkLoss):
    """The log loss of probabilities: −log p of the correct class, with p clipped at 1e-9.

    The input must be a probability, such as the output of a sigmoid. The positive class has label 1, the other 0 or −1.
    Below the clip the slope is the slope at the clip, so that the network learns from a row that is surely wrong.

    >>> CrossEntropyLoss().losses(np.array([[0.5], [0.0]]), np.ones(2)).round(3).tolist()
    [0.693, 20.723]
    """

    type_name: ClassVar[str] = "crossentropyloss"
    of_mean = "classification"
    expected_labels: ClassVar[str] = "labels 0 or 1 (or −1 or 1)"
    labels_to_take: ClassVar[str] = (
        "set translabel to ZeroOneTrans, which counts for files and topics, or give np.where(labels > 0, 1.0, 0.0)"
    )

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
        # 1 − p is computed before it is clipped, because 1 − 1e-9 is 1 in float32.
        of_right: Array = np.where(labels > 0, scores[:, 0], 1 - scores[:, 0])
        return np.maximum(of_right, _LEAST_PROBABILITY, out=of_right)

    def _good_labels(self, labels: Array, outputs: int) -> npt.NDArray[np.bool_]:
        good: npt.NDArray[np.bool_] = are_signs(labels) | (labels == 0)
        return good


@dataclass(frozen=True)
class SoftmaxLoss(NetworkLoss):
    """The loss of several classes: −log p_y, p the softmax of the scores, y from 0 to K − 1.

    >>> SoftmaxLoss().losses(np.array([[1000.0, 1000.0]]), np.zeros(1)).round(3).tolist()
    [0.693]
    """

    type_name: ClassVar[str] = "softmaxloss"
    of_mean = "classes"
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

    def _good_labels(self, labels: Array, outputs: int) -> npt.NDArray[np.bool_]:
        good: npt.NDArray[np.bool_] = (labels >= 0) & (labels < outputs) & (labels == np.floor(labels))
        return good

    def _expected(self, outputs: int) -> str:
        return f"labels from 0 to {outputs - 1} for {self.type_name}"


def _softmax(scores: Array) -> Array:
    return Softmax().forward(scores.copy(), None).output


@dataclass(frozen=True)
class NetworkHuberLoss(RegressionLoss):
    """A loss of regression that is robust to outliers: ½d² if |d| ≤ δ, else δ|d| − ½δ², d = f − y (Huber, 1964).

    >>> NetworkHuberLoss(delta=1.0).losses(np.array([[0.5], [3.0]]), np.zeros(2)).tolist()
    [0.125, 2.5]
    """

    type_name: ClassVar[str] = "huberloss"
    delta: float = 1.0

    @property
    def linear(self) -> LinearLoss:  # type: ignore[override]
        return HuberLoss(self.delta)


@dataclass(frozen=True)
class KMeansLoss(NetworkLoss):
    """The squared distance to the nearest centre: the minimum of the scores, which ``kmeansinputlayer`` computes.

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
        """Return None: clusters are no classes."""
