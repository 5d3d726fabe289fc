"""Steps in the unit of the weights, without a learning rate to choose."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from streamiter.numbers import fraction, positive
from streamiter.optimizers.learning_rates import LearningRate
from streamiter.optimizers.optimizer import Floats, FloatView, Indices, Numbers, Slots, Views
from streamiter.optimizers.regularization import RegularizedRule

__all__ = ["AdaDelta"]


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
