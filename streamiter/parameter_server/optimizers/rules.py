"""The update rules: gradient descent, SGD, momentum, and rules with a rate for each weight (AdaGrad to FTRL).

Each rule states its formula: w are the weights, g the gradient, lr the learning rate; ``soft(x, k) = sign(x)·max(|x| −
k, 0)``. ``_move`` computes with arrays, ``_move_few`` one number at a time; both give the same numbers to the last bit.
"""

from __future__ import annotations

import abc
import math
from dataclasses import dataclass, field, replace
from typing import ClassVar, Self

import numpy as np

from streamiter.errors import ConfigurationError
from streamiter.parameter_server.optimizers.optimizer import (
    FloatArray,
    FloatView,
    IndexList,
    LearningRate,
    NumberList,
    Optimizer,
    Slots,
    Views,
    rate_of,
)
from streamiter.values.numbers import fraction, not_negative, positive


class _RateRule(Optimizer):
    """A rule with a learning rate."""

    learning_rate: float | LearningRate
    """The rate, or how it changes; a number becomes a ``Constant``."""

    def _rate(self, step: int) -> float:
        assert isinstance(self.learning_rate, LearningRate)
        return self.learning_rate.at(step)


@dataclass(frozen=True)
class GradientDescent(_RateRule):
    """Gradient descent that shrinks after its step: ``w −= lr·g``, then ``w ·= 1 − lr·l2``, ``w −= lr·l1·sign(w)``.

    The default of offline training. ``learning_rate`` is as for :class:`SGD`; the product with l2 must be at most 1.

    >>> weights = np.array([1.0, -1.0])
    >>> GradientDescent(0.5, l2=1.0).update(weights, np.array([-1.0, 0.0]), {}, step=1)
    >>> weights.tolist()
    [0.75, -0.5]
    """

    learning_rate: float | LearningRate = 0.1
    l1: float = 0.0
    l2: float = 0.0

    name: ClassVar[str] = "gradient descent"

    def __post_init__(self) -> None:
        self._check_settings(not_negative, "l1", "l2")
        rate = rate_of(self.learning_rate)
        object.__setattr__(self, "learning_rate", rate)
        if (shrinking := rate.at(1) * self.l2) > 1.0:
            raise ConfigurationError(
                f"GradientDescent(l2=): expected learning_rate·l2 of at most 1, given {rate.at(1):g}·{self.l2:g} = "
                f"{shrinking:g}, which changes the signs of weights instead of shrinking them; lower one of them"
            )

    def update(self, weights: FloatArray, gradient: FloatArray, slots: Slots, step: int) -> None:
        rate = self._rate(step)
        weights -= rate * gradient
        if self.l2:
            weights *= 1.0 - rate * self.l2
        if self.l1:
            weights -= rate * self.l1 * np.sign(weights)

    def without_regularization(self) -> GradientDescent:
        return replace(self, l1=0.0, l2=0.0)


@dataclass(frozen=True)
class RegularizedRule(_RateRule):
    """A rule with a learning rate, with l2 in the gradient and l1 after the step.

    ``g += l2·w``, then the step of the rule (``_move``), then ``w = soft(w, lr·l1)``.
    """

    learning_rate: float | LearningRate = 0.01
    l1: float = field(default=0.0, kw_only=True)
    l2: float = field(default=0.0, kw_only=True)

    def __post_init__(self) -> None:
        self._check_settings(not_negative, "l1", "l2")
        object.__setattr__(self, "learning_rate", rate_of(self.learning_rate))

    def update(self, weights: FloatArray, gradient: FloatArray, slots: Slots, step: int) -> None:
        rate = self._rate(step)
        self._move(weights, with_l2(gradient, weights, self.l2) if self.l2 else gradient, slots, rate, step)
        if self.l1:
            soften(weights, rate * self.l1)

    def update_few(self, indices: IndexList, weights: FloatView, gradient: NumberList, slots: Views, step: int) -> None:
        rate, l2 = self._rate(step), self.l2
        if l2:
            gradient = [l2 * weights[index] + g for index, g in zip(indices, gradient, strict=True)]
        self._move_few(indices, weights, gradient, slots, rate, step)
        if self.l1:
            threshold = rate * self.l1
            for index in indices:
                weights[index] = soft(weights[index], threshold)

    @abc.abstractmethod
    def _move(self, weights: FloatArray, gradient: FloatArray, slots: Slots, rate: float, step: int) -> None:
        """Make the step of the rule, without l1 and l2, in place; the gradient must not be changed."""

    @abc.abstractmethod
    def _move_few(
        self, indices: IndexList, weights: FloatView, gradient: NumberList, slots: Views, rate: float, step: int
    ) -> None:
        """Make the same step one number at a time, with the operations of ``_move`` in the same order."""

    def without_regularization(self) -> Self:
        return replace(self, l1=0.0, l2=0.0)


@dataclass(frozen=True)
class SGD(RegularizedRule):
    """Stochastic gradient descent: ``w −= lr·(g + l2·w)``, then ``w = soft(w, lr·l1)``.

    ``learning_rate`` is a number or a :class:`~streamiter.parameter_server.optimizers.LearningRate`. With sparse
    gradients l1 and l2 shrink only the weights of the features that occur in the mini-batch: rare features are shrunk
    less often.
    """

    learning_rate: float | LearningRate = 0.5
    l1: float = 0.0
    l2: float = 0.0

    name: ClassVar[str] = "sgd"

    def _move(self, weights: FloatArray, gradient: FloatArray, slots: Slots, rate: float, step: int) -> None:
        weights -= rate * gradient

    def _move_few(
        self, indices: IndexList, weights: FloatView, gradient: NumberList, slots: Views, rate: float, step: int
    ) -> None:
        for index, g in zip(indices, gradient, strict=True):
            weights[index] -= rate * g


@dataclass(frozen=True)
class Momentum(RegularizedRule):
    """Gradient descent with momentum (Polyak 1964): ``g += l2·w``; ``v = momentum·v + g``; ``w −= lr·v``.

    Then ``w = soft(w, lr·l1)``. The velocity v adds up to ``1/(1 − momentum)`` gradients. So the learning rate must be
    smaller than that of SGD by this factor, or a :class:`~streamiter.parameter_server.optimizers.Correction`. A sparse
    gradient moves the weights that it names; the velocity of other weights does not change.

    >>> import numpy as np
    >>> momentum, weights = Momentum(0.5, momentum=0.5), np.array([1.0])
    >>> slots = momentum.new_slots(weights)
    >>> momentum.update(weights, np.array([1.0]), slots, step=1)
    >>> momentum.update(weights, np.array([0.0]), slots, step=2)
    >>> weights.tolist(), slots["v"].tolist()
    ([0.25], [0.5])
    """

    learning_rate: float | LearningRate = 0.01
    momentum: float = 0.9

    name: ClassVar[str] = "momentum"
    slot_names: ClassVar[tuple[str, ...]] = ("v",)

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_settings(fraction, "momentum")

    def _move(self, weights: FloatArray, gradient: FloatArray, slots: Slots, rate: float, step: int) -> None:
        v = slots["v"]
        v *= self.momentum
        v += gradient
        weights -= v * rate

    def _move_few(
        self, indices: IndexList, weights: FloatView, gradient: NumberList, slots: Views, rate: float, step: int
    ) -> None:
        momentum = self.momentum
        (all_v,) = slots
        for index, g in zip(indices, gradient, strict=True):
            v = all_v[index] = all_v[index] * momentum + g
            weights[index] -= v * rate


@dataclass(frozen=True)
class _ScaledBySquares(RegularizedRule):
    """``n = kept·n + taken·g²``; ``w −= lr·g / (√n + epsilon)``."""

    epsilon: float = 1e-8

    slot_names: ClassVar[tuple[str, ...]] = ("n",)

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_settings(positive, "epsilon")

    @abc.abstractmethod
    def _shares(self) -> tuple[float, float]:
        """Return the factors of n and of g²."""

    def _move(self, weights: FloatArray, gradient: FloatArray, slots: Slots, rate: float, step: int) -> None:
        n, (kept, taken) = slots["n"], self._shares()
        work = gradient * gradient
        if kept != 1.0:
            n *= kept
            work *= taken
        n += work
        np.sqrt(n, out=work)
        work += self.epsilon
        move = gradient * rate
        move /= work
        weights -= move

    def _move_few(
        self, indices: IndexList, weights: FloatView, gradient: NumberList, slots: Views, rate: float, step: int
    ) -> None:
        epsilon, (kept, taken) = self.epsilon, self._shares()
        (all_n,) = slots
        for index, g in zip(indices, gradient, strict=True):
            n = all_n[index] = all_n[index] * kept + g * g * taken
            weights[index] -= g * rate / (math.sqrt(n) + epsilon)


@dataclass(frozen=True)
class AdaGrad(_ScaledBySquares):
    """AdaGrad (Duchi et al. 2011): ``n += g²``; ``w −= lr·g / (√n + epsilon)``; rare features learn in larger steps.

    ``g`` includes ``l2·w``, and ``w = soft(w, lr·l1)`` after the step.

    >>> adagrad, weights = AdaGrad(0.5), np.array([1.0, 1.0])
    >>> adagrad.update(weights, np.array([1.0, 100.0]), adagrad.new_slots(weights), step=1)
    >>> weights.round(6).tolist()
    [0.5, 0.5]
    """

    learning_rate: float | LearningRate = 0.01
    epsilon: float = 1e-8

    name: ClassVar[str] = "adagrad"

    def _shares(self) -> tuple[float, float]:
        return 1.0, 1.0


@dataclass(frozen=True)
class RMSProp(_ScaledBySquares):
    """RMSProp (Hinton 2012): ``n = beta·n + (1 − beta)·g²``; ``w −= lr·g / (√n + epsilon)``.

    Angel calls this rule "adagrad". Unlike with :class:`AdaGrad`, old gradients are forgotten, and steps do not shrink
    to 0. ``g`` includes ``l2·w``, and ``w = soft(w, lr·l1)`` after the step.

    >>> rule, weights = RMSProp(0.5, beta=0.75), np.array([1.0])
    >>> rule.update(weights, np.array([3.0]), rule.new_slots(weights), step=1)
    >>> weights.round(6).tolist()
    [0.0]
    """

    learning_rate: float | LearningRate = 0.01
    beta: float = 0.9
    epsilon: float = 1e-8

    name: ClassVar[str] = "rmsprop"

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_settings(fraction, "beta")

    def _shares(self) -> tuple[float, float]:
        return self.beta, 1.0 - self.beta


@dataclass(frozen=True)
class AdaDelta(RegularizedRule):
    """AdaDelta (Zeiler 2012): the size of earlier steps, times the ratio of this gradient to earlier gradients.

    ``n = alpha·n + (1 − alpha)·g²``; ``Δ = g·√((v + epsilon)/(n + epsilon))``; ``w −= lr·Δ``;
    ``v = beta·v + (1 − beta)·Δ²``. The default learning rate is 1, as in the paper. ``g`` includes ``l2·w``, and
    ``w = soft(w, lr·l1)`` after the step.

    >>> rule, weights = AdaDelta(alpha=0.75, epsilon=1.0), np.array([1.0])
    >>> rule.update(weights, np.array([2.0]), rule.new_slots(weights), step=1)
    >>> weights.round(6).tolist()
    [-0.414214]
    """

    learning_rate: float | LearningRate = 1.0
    alpha: float = 0.9
    beta: float = 0.9
    epsilon: float = 1e-7

    name: ClassVar[str] = "adadelta"
    slot_names: ClassVar[tuple[str, ...]] = ("n", "v")

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_settings(fraction, "alpha", "beta")
        self._check_settings(positive, "epsilon")

    def _move(self, weights: FloatArray, gradient: FloatArray, slots: Slots, rate: float, step: int) -> None:
        n, v = slots["n"], slots["v"]
        work = gradient * gradient
        work *= 1.0 - self.alpha
        n *= self.alpha
        n += work
        np.add(n, self.epsilon, out=work)
        delta = v + self.epsilon
        delta /= work
        np.sqrt(delta, out=delta)
        delta *= gradient
        np.multiply(delta, rate, out=work)
        weights -= work
        delta *= delta
        delta *= 1.0 - self.beta
        v *= self.beta
        v += delta

    def _move_few(
        self, indices: IndexList, weights: FloatView, gradient: NumberList, slots: Views, rate: float, step: int
    ) -> None:
        alpha, beta, epsilon = self.alpha, self.beta, self.epsilon
        new_n, new_v = 1.0 - alpha, 1.0 - beta
        all_n, all_v = slots
        for index, g in zip(indices, gradient, strict=True):
            n = all_n[index] = all_n[index] * alpha + g * g * new_n
            v = all_v[index]
            delta = math.sqrt((v + epsilon) / (n + epsilon)) * g
            weights[index] -= delta * rate
            all_v[index] = v * beta + delta * delta * new_v


@dataclass(frozen=True)
class Adam(RegularizedRule):
    """Adam (Kingma and Ba 2015): ``m = beta·m + (1 − beta)·g``; ``v = gamma·v + (1 − gamma)·g²``;
    ``w −= lr·(m/(1 − betaᵗ)) / (√(v/(1 − gammaᵗ)) + epsilon)``, t counting all steps from 1.

    gamma is .99 as in Angel; the paper has .999. A sparse gradient changes only m and v of the weights that it names.
    ``g`` includes ``l2·w``, and ``w = soft(w, lr·l1)`` after the step.

    >>> adam, weights = Adam(0.5), np.array([1.0, 1.0])
    >>> adam.update(weights, np.array([-1.0, 100.0]), adam.new_slots(weights), step=1)
    >>> weights.round(6).tolist()
    [1.5, 0.5]
    """

    learning_rate: float | LearningRate = 0.001
    beta: float = 0.9
    gamma: float = 0.99
    epsilon: float = 1e-8

    name: ClassVar[str] = "adam"
    slot_names: ClassVar[tuple[str, ...]] = ("m", "v")

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_settings(fraction, "beta", "gamma")
        self._check_settings(positive, "epsilon")

    def _move(self, weights: FloatArray, gradient: FloatArray, slots: Slots, rate: float, step: int) -> None:
        m, v = slots["m"], slots["v"]
        work = gradient * (1.0 - self.beta)
        m *= self.beta
        m += work
        np.multiply(gradient, gradient, out=work)
        work *= 1.0 - self.gamma
        v *= self.gamma
        v += work
        np.divide(v, 1.0 - self.gamma**step, out=work)
        np.sqrt(work, out=work)
        work += self.epsilon
        move = m / (1.0 - self.beta**step)
        move *= rate
        move /= work
        weights -= move

    def _move_few(
        self, indices: IndexList, weights: FloatView, gradient: NumberList, slots: Views, rate: float, step: int
    ) -> None:
        beta, gamma, epsilon = self.beta, self.gamma, self.epsilon
        new_m, new_v = 1.0 - beta, 1.0 - gamma
        m_share, v_share = 1.0 - beta**step, 1.0 - gamma**step
        all_m, all_v = slots
        for index, g in zip(indices, gradient, strict=True):
            m = all_m[index] = all_m[index] * beta + g * new_m
            v = all_v[index] = all_v[index] * gamma + g * g * new_v
            weights[index] -= m / m_share * rate / (math.sqrt(v / v_share) + epsilon)


@dataclass(frozen=True)
class FTRL(Optimizer):
    """Follow the regularized leader, per coordinate (McMahan et al. 2013, "Ad click prediction").

    ``δ = (√(n + g²) − √n)/α``; ``n += g²``; ``z += g − δ·w``; ``w = 0`` where ``|z| ≤ l1``, else
    ``w = −(z − sign(z)·l1) / (l2 + (β + √n)/α)``.

    A gradient of 0 changes nothing, so dense and sparse updates are the same. z and n start at 0, also for initial
    weights that are not 0. Such a weight counts in the gradient and in ``δ·w`` until its first gradient; then the
    formula replaces it. ``keep_start=True`` chooses z so that the formula gives the initial weights, and learning
    continues from them, as it always does after a warm start from a published model.
    """

    alpha: float = 0.1
    beta: float = 1.0
    l1: float = 0.0
    l2: float = 0.0
    keep_start: bool = False

    name: ClassVar[str] = "ftrl"
    slot_names: ClassVar[tuple[str, ...]] = ("z", "n")

    def __post_init__(self) -> None:
        self._check_settings(positive, "alpha")
        self._check_settings(not_negative, "beta", "l1", "l2")

    def new_slots(self, weights: FloatArray) -> dict[str, FloatArray]:
        return self.slots_for_warm_start(weights) if self.keep_start else super().new_slots(weights)

    def slots_for_warm_start(self, weights: FloatArray) -> dict[str, FloatArray]:
        slots = super().new_slots(weights)
        slots["z"] -= weights * (self.l2 + self.beta / self.alpha) + np.sign(weights) * self.l1
        return slots

    def update(self, weights: FloatArray, gradient: FloatArray, slots: Slots, step: int) -> None:
        z, n = slots["z"], slots["n"]
        work, root = np.sqrt(n), gradient * gradient
        n += root
        np.sqrt(n, out=root)
        np.subtract(root, work, out=work)  # δ·α
        work /= self.alpha
        work *= weights
        np.subtract(gradient, work, out=work)
        z += work
        np.abs(z, out=work)
        work -= self.l1
        np.maximum(work, 0.0, out=work)
        np.copysign(work, z, out=work)
        # 0 − x and not −x: a weight of −0.0 would look odd in a published model. If n is 0, there was no gradient yet:
        # the initial weight stays, and a beta of 0 would divide by 0.
        np.subtract(0.0, work, out=work)
        root += self.beta
        root /= self.alpha
        root += self.l2
        np.divide(work, root, out=weights, where=n > 0.0)

    def update_few(self, indices: IndexList, weights: FloatView, gradient: NumberList, slots: Views, step: int) -> None:
        alpha, beta, l1, l2 = self.alpha, self.beta, self.l1, self.l2
        all_z, all_n = slots
        for index, slope in zip(indices, gradient, strict=True):
            n_before = all_n[index]
            n = n_before + slope * slope
            root = math.sqrt(n)
            z = all_z[index] + (slope - (root - math.sqrt(n_before)) / alpha * weights[index])
            all_z[index], all_n[index] = z, n
            if n > 0.0:
                shrunk = z - l1 if z > l1 else z + l1 if z < -l1 else 0.0
                weights[index] = (0.0 - shrunk) / (l2 + (beta + root) / alpha)

    def without_regularization(self) -> FTRL:
        return replace(self, l1=0.0, l2=0.0)


def soft(weight: float, threshold: float) -> float:
    """Return ``sign(w)·max(|w| − threshold, 0)``, the proximal step of l1; never −0.0."""
    return math.copysign(max(abs(weight) - threshold, 0.0), weight) + 0.0


def soften(weights: FloatArray, threshold: float) -> None:
    """Apply :func:`soft` to all weights, in place."""
    shrunk = np.abs(weights)
    shrunk -= threshold
    np.maximum(shrunk, 0.0, out=shrunk)
    np.copysign(shrunk, weights, out=weights)
    weights += 0.0  # Adding 0 turns −0.0 into 0.0.


def with_l2(gradient: FloatArray, weights: FloatArray, l2: float) -> FloatArray:
    """Return ``g + l2·w``, a new array."""
    total = weights * l2
    total += gradient
    return total
