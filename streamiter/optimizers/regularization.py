"""What l1 and l2 do to weights, and the rules that have them in common."""

from __future__ import annotations

import abc
import math
from dataclasses import dataclass, field, replace
from typing import Self

import numpy as np

from streamiter.numbers import not_negative
from streamiter.optimizers.learning_rates import LearningRate, rate_of
from streamiter.optimizers.optimizer import Floats, FloatView, Indices, Numbers, Optimizer, Slots, Views

__all__ = ["RegularizedRule", "soft", "soften", "with_l2"]


def soft(weight: float, threshold: float) -> float:
    """``sign(w)·max(|w| − threshold, 0)``, the proximal step of l1; never −0.0."""
    return math.copysign(max(abs(weight) - threshold, 0.0), weight) + 0.0


def soften(weights: Floats, threshold: float) -> None:
    """The same for all weights, in place."""
    shrunk = np.abs(weights)
    shrunk -= threshold
    np.maximum(shrunk, 0.0, out=shrunk)
    np.copysign(shrunk, weights, out=weights)
    weights += 0.0  # turns −0.0 into 0.0


def with_l2(gradient: Floats, weights: Floats, l2: float | Floats) -> Floats:
    """``g + l2·w``: a new array, of the weights' type also where l2 is an array of another."""
    total = np.multiply(weights, l2, dtype=weights.dtype, casting="same_kind")
    total += gradient
    return total


@dataclass(frozen=True)
class RegularizedRule(Optimizer):
    """A rule with a learning rate, l2 within the gradient and l1 after the step.

    ``g += l2·w``, then what the rule says (``_move``), then ``w = soft(w, lr·l1)``.
    """

    learning_rate: float | LearningRate = 0.01
    l1: float = field(default=0.0, kw_only=True)
    l2: float = field(default=0.0, kw_only=True)

    def __post_init__(self) -> None:
        self._check_settings(not_negative, "l1", "l2")
        object.__setattr__(self, "learning_rate", rate_of(self.learning_rate))

    def update(self, weights: Floats, gradient: Floats, slots: Slots, step: int) -> None:
        rate = self._rate(step)
        self._move(weights, with_l2(gradient, weights, self.l2) if self.l2 else gradient, slots, rate, step)
        if self.l1:
            soften(weights, rate * self.l1)

    def update_few(
        self, indices: Indices, weights: FloatView, gradient: Numbers, slots: Views, step: int
    ) -> None:
        rate, l2 = self._rate(step), self.l2
        if l2:
            gradient = [l2 * weights[index] + g for index, g in zip(indices, gradient, strict=True)]
        self._move_few(indices, weights, gradient, slots, rate, step)
        if self.l1:
            threshold = rate * self.l1
            for index in indices:
                weights[index] = soft(weights[index], threshold)

    @abc.abstractmethod
    def _move(self, weights: Floats, gradient: Floats, slots: Slots, rate: float, step: int) -> None:
        """The rule itself, without l1 and l2, in place; the gradient is not to be changed."""

    @abc.abstractmethod
    def _move_few(
        self, indices: Indices, weights: FloatView, gradient: Numbers, slots: Views, rate: float, step: int
    ) -> None:
        """The same, to the last bit, one number at a time: the order of operations must be that of ``_move``."""

    def _rate(self, step: int) -> float:
        assert isinstance(self.learning_rate, LearningRate)
        return self.learning_rate.at(step)

    def without_regularization(self) -> Self:
        return replace(self, l1=0.0, l2=0.0)
