"""Gradient descent in steps that are scaled by the size of each weight's gradients."""

from __future__ import annotations

import abc
import math
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from streamiter.numbers import fraction, positive
from streamiter.optimizers.learning_rates import LearningRate
from streamiter.optimizers.optimizer import Floats, FloatView, Indices, Numbers, Slots, Views
from streamiter.optimizers.regularization import RegularizedRule

__all__ = ["AdaGrad", "RMSProp"]


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
