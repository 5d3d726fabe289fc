"""Gradient descent as offline training does it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np

from streamiter.errors import ConfigurationError
from streamiter.numbers import not_negative
from streamiter.optimizers.learning_rates import LearningRate, rate_of
from streamiter.optimizers.optimizer import Floats, Optimizer, Slots

__all__ = ["GradientDescent"]


@dataclass(frozen=True)
class GradientDescent(Optimizer):
    """Gradient descent that shrinks after its step: ``w −= lr·g``, then ``w ·= 1 − lr·l2``, ``w −= lr·l1·sign(w)``.

    What offline training uses unless told otherwise. ``learning_rate`` as for :class:`SGD`; times l2 it is at most 1.

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
                f"{shrinking:g}, which turns weights round instead of shrinking them; lower one of them"
            )

    def update(self, weights: Floats, gradient: Floats, slots: Slots, step: int) -> None:
        assert isinstance(self.learning_rate, LearningRate)
        rate = self.learning_rate.at(step)
        weights -= rate * gradient
        if self.l2:
            weights *= 1.0 - rate * self.l2
        if self.l1:
            weights -= rate * self.l1 * np.sign(weights)

    def without_regularization(self) -> GradientDescent:
        return replace(self, l1=0.0, l2=0.0)
