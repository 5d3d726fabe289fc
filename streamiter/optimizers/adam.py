"""Momentum and scaled steps at once."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from streamiter.numbers import fraction, positive
from streamiter.optimizers.learning_rates import LearningRate
from streamiter.optimizers.optimizer import Floats, FloatView, Indices, Numbers, Slots, Views
from streamiter.optimizers.regularization import RegularizedRule

__all__ = ["Adam"]


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
