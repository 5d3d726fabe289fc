"""Optimizers with a rate for each parameter: AdaGrad, AdaDelta, Adam, FTRL."""

from __future__ import annotations

import abc
import math
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np

from streamiter.numbers import fraction, not_negative, positive
from streamiter.optimizers.learning_rates import LearningRate
from streamiter.optimizers.optimizer import (
    Floats,
    FloatView,
    Indices,
    Numbers,
    Optimizer,
    RegularizedRule,
    Slots,
    Views,
)

__all__ = [
    "FTRL",
    "AdaDelta",
    "AdaGrad",
    "Adam",
    "RMSProp",
]


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
        """How much of n is kept, and how much of g² is taken."""

    def _move(self, weights: Floats, gradient: Floats, slots: Slots, rate: float, step: int) -> None:
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
        self, indices: Indices, weights: FloatView, gradient: Numbers, slots: Views, rate: float, step: int
    ) -> None:
        epsilon, (kept, taken) = self.epsilon, self._shares()
        (all_n,) = slots
        for index, g in zip(indices, gradient, strict=True):
            n = all_n[index] = all_n[index] * kept + g * g * taken
            weights[index] -= g * rate / (math.sqrt(n) + epsilon)


@dataclass(frozen=True)
class AdaGrad(_ScaledBySquares):
    """AdaGrad (Duchi et al. 2011): ``n += g²``; ``w −= lr·g / (√n + epsilon)``; rare features learn in larger steps.

    ``g`` is with ``l2·w``, and ``w = soft(w, lr·l1)`` after the step.

    >>> adagrad, weights = AdaGrad(0.5), np.array([1.0, 1.0])
    >>> adagrad.update(weights, np.array([1.0, 100.0]), adagrad.new_slots(weights), step=1)
    >>> weights.round(6).tolist()
    [0.5, 0.5]

    Gradient descent in steps that are scaled by the size of each weight's gradients.
    """

    learning_rate: float | LearningRate = 0.01
    epsilon: float = 1e-8

    name: ClassVar[str] = "adagrad"

    def _shares(self) -> tuple[float, float]:
        return 1.0, 1.0


@dataclass(frozen=True)
class RMSProp(_ScaledBySquares):
    """RMSProp (Hinton 2012): ``n = beta·n + (1 − beta)·g²``; ``w −= lr·g / (√n + epsilon)``.

    What Angel calls "adagrad". Unlike with :class:`AdaGrad` old gradients are forgotten, and steps do not
    end. ``g`` is with ``l2·w``, and ``w = soft(w, lr·l1)`` after the step.

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
    """AdaDelta (Zeiler 2012): the step is as large as earlier steps, in the ratio of this gradient to earlier ones.

    ``n = alpha·n + (1 − alpha)·g²``; ``Δ = g·√((v + epsilon)/(n + epsilon))``; ``w −= lr·Δ``;
    ``v = beta·v + (1 − beta)·Δ²``. The learning rate is 1 in the paper, and unless given. ``g`` is with ``l2·w``, and
    ``w = soft(w, lr·l1)`` after the step.

    >>> rule, weights = AdaDelta(alpha=0.75, epsilon=1.0), np.array([1.0])
    >>> rule.update(weights, np.array([2.0]), rule.new_slots(weights), step=1)
    >>> weights.round(6).tolist()
    [-0.414214]

    Steps in the unit of the weights, without a learning rate to choose.
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

    def _move(self, weights: Floats, gradient: Floats, slots: Slots, rate: float, step: int) -> None:
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
        self, indices: Indices, weights: FloatView, gradient: Numbers, slots: Views, rate: float, step: int
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

    gamma is .99 as in Angel, .999 in the paper. A sparse gradient touches what it names; m and v of other weights wait.
    ``g`` is with ``l2·w``, and ``w = soft(w, lr·l1)`` after the step.

    >>> adam, weights = Adam(0.5), np.array([1.0, 1.0])
    >>> adam.update(weights, np.array([-1.0, 100.0]), adam.new_slots(weights), step=1)
    >>> weights.round(6).tolist()
    [1.5, 0.5]

    Momentum and scaled steps at once.
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

    def _move(self, weights: Floats, gradient: Floats, slots: Slots, rate: float, step: int) -> None:
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
        self, indices: Indices, weights: FloatView, gradient: Numbers, slots: Views, rate: float, step: int
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

    A gradient of 0 changes nothing, so dense and sparse updates are the same. z and n start at 0 also
    for weights that start elsewhere: those count in the gradient and in ``δ·w`` until their coordinate
    gets its first gradient, and are given up for what the formula says then. ``keep_start=True``
    chooses z so that the formula gives the start weights back, and learning goes on from there, as it
    does in any case after a warm start from a published model.

    Follow the regularized leader.
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

    def new_slots(self, weights: Floats) -> dict[str, Floats]:
        return self.slots_to_go_on(weights) if self.keep_start else super().new_slots(weights)

    def slots_to_go_on(self, weights: Floats) -> dict[str, Floats]:
        slots = super().new_slots(weights)
        slots["z"] -= weights * (self.l2 + self.beta / self.alpha) + np.sign(weights) * self.l1
        return slots

    def update(self, weights: Floats, gradient: Floats, slots: Slots, step: int) -> None:
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
        # 0 − x and not −x: a weight of −0.0 would look odd in a published model. Where n is 0 there
        # never was a gradient: the start weight stays, and a beta of 0 would divide by 0.
        np.subtract(0.0, work, out=work)
        root += self.beta
        root /= self.alpha
        root += self.l2
        np.divide(work, root, out=weights, where=n > 0.0)

    def update_few(
        self, indices: Indices, weights: FloatView, gradient: Numbers, slots: Views, step: int
    ) -> None:
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
