"""The losses of linear models: what a wrong prediction costs, and how a weighted sum becomes a prediction.

A *margin* is w·x + b, the weighted sum of a row's features plus the intercept. A *loss* turns a margin into a
prediction by its link, and gives the cost of a wrong prediction.
"""

from __future__ import annotations

import abc
from collections.abc import Mapping
from dataclasses import astuple, dataclass
from types import MappingProxyType
from typing import ClassVar, Final, Literal, cast, get_args

import numpy as np

from streamiter.errors import ConfigurationError, did_you_mean
from streamiter.learn.rows import holds, refuse_rows_unless
from streamiter.values.numbers import Floats, checked_number, positive

# The loss of a wrong probability of 0 or 1 would be infinite. scikit-learn clipped at 1e-15 for a long time; 1e-15 is
# the smallest round number p for which 1 − p differs from 1.
PROBABILITY_FLOOR: Final = 1e-15

# exp(709.8) overflows; from 700 on a probability is 1e-304 either way.
_EXPONENT_MAX: Final = 700.0

# A mean of 0, from a margin below −745, has no logarithm.
_COUNT_MIN: Final = 1e-300


class LinearLoss(abc.ABC):
    """Turns margins into predictions, and gives the cost of wrong predictions.

    >>> LogLoss().predict(np.array([0.0, 2.0, 800.0])).round(4).tolist()
    [0.5, 0.8808, 1.0]
    """

    link: ClassVar[str]
    """The name of the function from the prediction to the margin: "identity", "logit" or "log"."""
    task: ClassVar[Literal["classification", "regression"]] = "regression"
    """Whether targets are classes, 0 and 1, or numbers."""
    predicts_mean: ClassVar[bool] = True
    """Whether the best prediction is the mean of the targets; then a much worse prediction than the mean is a fault."""

    @abc.abstractmethod
    def predict(self, margins: Floats) -> Floats:
        """Return the prediction for each margin, in a new array."""

    @abc.abstractmethod
    def predict_one(self, margin: float) -> float:
        """Return the prediction for one margin, the same as :meth:`predict` to the last bit."""

    @abc.abstractmethod
    def values(self, predictions: Floats, targets: Floats) -> Floats:
        """Return the loss of each prediction."""

    def total(self, predictions: Floats, targets: Floats, weights: Floats | None = None) -> float:
        """Return the sum of the losses, each multiplied by its weight."""
        values = self.values(predictions, targets)
        return float(values.sum() if weights is None else values @ weights)

    def slopes(self, predictions: Floats, targets: Floats) -> Floats:
        """Return the derivative of each loss by the margin; ``predictions`` are overwritten.

        It is ``prediction − target`` for a loss with its canonical link.
        """
        return np.subtract(predictions, targets, out=predictions)

    def slope(self, prediction: float, target: float) -> float:
        """Return the derivative of one loss, the same as :meth:`slopes` to the last bit."""
        return prediction - target

    def validated(self, predictions: Floats) -> Floats:
        """Return the predictions as ``ProgressiveValidation`` takes them: probabilities for classes, or numbers."""
        return predictions

    def generated(self, targets: Floats) -> Floats | None:
        """Return φ(target), if the loss is the Bregman divergence of a convex φ; else None.

        Then the mean is the best constant prediction, and its mean loss is mean φ(target) − φ(mean target).
        """
        return None

    def best_constant(self, targets: Floats, weights: Floats) -> float:
        """Return the prediction that is best for all of these rows: here their mean."""
        return float(np.average(targets, weights=weights))

    @abc.abstractmethod
    def check_targets(self, owner: str, targets: Floats) -> None:
        """Raise :class:`~streamiter.learn.rows.BadRows` for targets that the loss is not defined for."""


class _IdentityLoss(LinearLoss):
    """A loss of numbers, whose prediction is the margin."""

    link = "identity"

    def predict(self, margins: Floats) -> Floats:
        return margins.copy()

    def predict_one(self, margin: float) -> float:
        return margin

    def check_targets(self, owner: str, targets: Floats) -> None:
        refuse_rows_unless(np.isfinite(targets), owner, "finite targets", targets)


@dataclass(frozen=True)
class SquaredLoss(_IdentityLoss):
    """½ (prediction − target)²: the prediction is the mean."""

    def values(self, predictions: Floats, targets: Floats) -> Floats:
        return 0.5 * np.square(predictions - targets)

    def generated(self, targets: Floats) -> Floats:
        return 0.5 * np.square(targets)


@dataclass(frozen=True)
class HuberLoss(_IdentityLoss):
    """½ d² for distances ``d = |prediction − target|`` up to ``delta``, then delta · (d − ½ delta): robust to outliers.

    A row pulls at the weights with at most ``delta``, which is in the unit of the targets. Source: Huber (1964).

    >>> HuberLoss(delta=1.0).values(np.array([0.5, 3.0]), np.zeros(2)).tolist()
    [0.125, 2.5]
    """

    delta: float = 1.0

    def __post_init__(self) -> None:
        positive("HuberLoss(delta=)", self.delta)

    def values(self, predictions: Floats, targets: Floats) -> Floats:
        distances = np.abs(predictions - targets)
        near = np.minimum(distances, self.delta)
        return near * (distances - 0.5 * near)

    def slopes(self, predictions: Floats, targets: Floats) -> Floats:
        predictions -= targets
        return np.clip(predictions, -self.delta, self.delta, out=predictions)

    def slope(self, prediction: float, target: float) -> float:
        return min(max(prediction - target, -self.delta), self.delta)

    def best_constant(self, targets: Floats, weights: Floats) -> float:
        low, high = float(targets.min()), float(targets.max())
        for _ in range(60):  # Until an interval of floats cannot be halved.
            middle = (low + high) / 2
            if np.clip(middle - targets, -self.delta, self.delta) @ weights > 0.0:
                high = middle
            else:
                low = middle
        return low


@dataclass(frozen=True)
class QuantileLoss(_IdentityLoss):
    """The pinball loss: the share ``quantile`` of all targets is below the prediction; ½ predicts the median.

    A target above the prediction costs ``quantile`` for each unit of the distance, a target below it 1 − ``quantile``.
    Steps have the same length near the best weights as far away, so the learning rate must fall: take ``AdaGrad``, or
    an ``InverseSquareRoot`` rate. Source: Koenker and Bassett, "Regression Quantiles" (1978).

    >>> QuantileLoss(0.9).values(np.array([1.0, 3.0]), np.array([2.0, 2.0])).round(3).tolist()
    [0.9, 0.1]
    """

    predicts_mean: ClassVar[bool] = False
    quantile: float = 0.5

    def __post_init__(self) -> None:
        expected = "a share above 0 and below 1"
        checked_number("QuantileLoss(quantile=)", self.quantile, expected, lambda share: 0.0 < share < 1.0)

    def values(self, predictions: Floats, targets: Floats) -> Floats:
        missing = targets - predictions
        return np.maximum(self.quantile * missing, (self.quantile - 1.0) * missing)

    def slopes(self, predictions: Floats, targets: Floats) -> Floats:
        return np.where(predictions < targets, -self.quantile, (predictions > targets) * (1.0 - self.quantile))

    def slope(self, prediction: float, target: float) -> float:
        return -self.quantile if prediction < target else (prediction > target) * (1.0 - self.quantile)

    def best_constant(self, targets: Floats, weights: Floats) -> float:
        order = np.argsort(targets)
        shares = np.cumsum(weights[order])
        return float(targets[order[np.searchsorted(shares, self.quantile * shares[-1])]])


@dataclass(frozen=True)
class PoissonLoss(LinearLoss):
    """Half the deviance of Poisson counts; the link is the logarithm, so predictions are means above 0.

    It is prediction − target + target · log(target / prediction). Targets are 0 or more, and need not be whole. Source:
    McCullagh and Nelder, "Generalized Linear Models" (1989).

    >>> PoissonLoss().values(np.array([2.0, 2.0]), np.array([2.0, 0.0])).tolist()
    [0.0, 2.0]
    """

    link = "log"

    def predict(self, margins: Floats) -> Floats:
        exponents = np.minimum(margins, _EXPONENT_MAX)
        return np.exp(exponents, out=exponents)

    def predict_one(self, margin: float) -> float:
        return float(np.exp(min(margin, _EXPONENT_MAX)))

    def values(self, predictions: Floats, targets: Floats) -> Floats:
        counts = targets > 0.0
        ratios = np.divide(targets, np.maximum(predictions, _COUNT_MIN), out=np.ones_like(targets), where=counts)
        return predictions - targets + targets * np.log(ratios)

    def generated(self, targets: Floats) -> Floats:
        return targets * np.log(np.maximum(targets, _COUNT_MIN)) - targets

    def check_targets(self, owner: str, targets: Floats) -> None:
        refuse_rows_unless((targets >= 0.0) & (targets < np.inf), owner, "targets of 0 or more", targets)


@dataclass(frozen=True)
class LogLoss(LinearLoss):
    """−log of the probability that was predicted for the target, 0 or 1; the link is the logit.

    Probabilities are clipped to 1e-15 … 1 − 1e-15.
    """

    link = "logit"
    task = "classification"

    def predict(self, margins: Floats) -> Floats:
        odds_against = np.negative(margins)
        np.minimum(odds_against, _EXPONENT_MAX, out=odds_against)
        np.exp(odds_against, out=odds_against)
        odds_against += 1.0
        return np.divide(1.0, odds_against, out=odds_against)

    def predict_one(self, margin: float) -> float:
        # numpy's exp, not math's: the two differ in the last bit for one number in twenty.
        return 1.0 / (1.0 + float(np.exp(min(-margin, _EXPONENT_MAX))))

    def values(self, predictions: Floats, targets: Floats) -> Floats:
        clipped = np.clip(predictions, PROBABILITY_FLOOR, 1.0 - PROBABILITY_FLOOR)
        return -(targets * np.log(clipped) + (1.0 - targets) * np.log1p(-clipped))

    def total(self, predictions: Floats, targets: Floats, weights: Floats | None = None) -> float:
        # The probability that was predicted for the target, so that one logarithm is enough.
        chances = np.subtract(1.0, targets)
        chances -= predictions
        np.abs(chances, out=chances)
        np.maximum(chances, PROBABILITY_FLOOR, out=chances)
        np.log(chances, out=chances)
        return -float(chances.sum() if weights is None else chances @ weights)

    def generated(self, targets: Floats) -> Floats:
        against = 1.0 - targets
        least = PROBABILITY_FLOOR
        return targets * np.log(np.maximum(targets, least)) + against * np.log(np.maximum(against, least))

    def check_targets(self, owner: str, targets: Floats) -> None:
        _check_classes(owner, targets)


@dataclass(frozen=True)
class HingeLoss(_IdentityLoss):
    """max(0, 1 − s · margin) with s = 1 for target 1 and −1 for target 0: the loss of support vector machines.

    A prediction is the margin, a score: above 0 means target 1. Validation takes 1/(1 + e^−score) as the probability of
    target 1. Source: Cortes and Vapnik, "Support-Vector Networks" (1995).

    >>> HingeLoss().values(np.array([0.5, 3.0, 0.5]), np.array([1.0, 1.0, 0.0])).tolist()
    [0.5, 0.0, 1.5]
    """

    task = "classification"
    predicts_mean = False

    def values(self, predictions: Floats, targets: Floats) -> Floats:
        return np.maximum(0.0, 1.0 - (2.0 * targets - 1.0) * predictions)

    def slopes(self, predictions: Floats, targets: Floats) -> Floats:
        signs = 2.0 * targets - 1.0
        return np.where(signs * predictions < 1.0, -signs, 0.0)

    def slope(self, prediction: float, target: float) -> float:
        sign = 2.0 * target - 1.0
        return -sign if sign * prediction < 1.0 else 0.0

    def validated(self, predictions: Floats) -> Floats:
        return LogLoss().predict(predictions)

    def check_targets(self, owner: str, targets: Floats) -> None:
        _check_classes(owner, targets)


def _check_classes(owner: str, targets: Floats) -> None:
    good = (targets == 0.0) | (targets == 1.0)
    if not holds(good):
        advice = "say which of them are 1, for instance y > 0"
        if holds(targets[~good] == -1.0):
            advice = 'for -1 and 1 take LogisticRegression(…, labels="-1/1"), or give y > 0'
        refuse_rows_unless(good, owner, "targets 0 or 1", targets, advice)


LOSSES_OF_NUMBERS: Final[Mapping[str, type[LinearLoss]]] = MappingProxyType(
    {"squared": SquaredLoss, "huber": HuberLoss, "quantile": QuantileLoss, "poisson": PoissonLoss}
)
"""The losses that predict numbers, by name."""

PlainLoss = tuple[str, tuple[float, ...]]
"""A loss of numbers as plain data: its name and its settings."""


def plain_loss(loss: LinearLoss) -> PlainLoss | None:
    """Return a loss as plain data; None for the loss of another task, and for a loss of the user's own.

    >>> plain_loss(QuantileLoss(0.9)), loss_of_plain(plain_loss(QuantileLoss(0.9)))
    (('quantile', (0.9,)), QuantileLoss(quantile=0.9))
    """
    return next(
        ((name, astuple(loss)) for name, kind in LOSSES_OF_NUMBERS.items() if type(loss) is kind),  # type: ignore[call-overload]
        None,
    )


def loss_of_plain(plain: PlainLoss | None) -> LinearLoss:
    """Return the loss that :func:`plain_loss` described; the squared loss for None."""
    return SquaredLoss() if plain is None else LOSSES_OF_NUMBERS[plain[0]](*plain[1])


LossName = Literal["squared", "absolute", "huber", "quantile", "poisson"]
"""A loss of numbers that the default learner can have."""


def checked_loss(owner: str, loss: object, quantile: object) -> PlainLoss | None:
    """Return the loss of the default learner; None for the squared loss, and where the task decides.

    Raises ConfigurationError for an unknown name, and for a quantile that is missing, or given without need.
    """
    names = get_args(LossName)
    if loss is not None and loss not in names:
        raise ConfigurationError(
            f"{owner}(loss=): expected one of {', '.join(map(repr, names))}, given {loss!r}"
            f"{did_you_mean(str(loss), names)}"
        )
    if (quantile is not None) != (loss == "quantile"):
        raise ConfigurationError(
            f'{owner}(quantile=): expected a share such as 0.9 with loss="quantile", and only there, given '
            f"loss={loss!r}, quantile={quantile!r}; give both, or none of them"
        )
    if loss in ("quantile", "absolute"):
        level = QuantileLoss(0.5 if quantile is None else cast(float, quantile)).quantile
        return ("quantile", (float(level),))
    return None if loss in (None, "squared") else (cast(str, loss), ())


def loss_of_validation(loss: PlainLoss | None) -> PlainLoss | None:
    """Return the loss by which predictions of the default learner are judged; None: the squared loss.

    For Huber's loss, whose bend follows the errors, it is half the absolute error.
    """
    return ("quantile", (0.5,)) if loss == ("huber", ()) else loss
