"""Gradient descent with momentum."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from streamiter.numbers import fraction
from streamiter.optimizers.learning_rates import LearningRate
from streamiter.optimizers.optimizer import Floats, FloatView, Indices, Numbers, Slots, Views
from streamiter.optimizers.regularization import RegularizedRule

__all__ = ["Momentum"]


@dataclass(frozen=True)
class Momentum(RegularizedRule):
    """Gradient descent with momentum (Polyak 1964): ``g += l2·w``; ``v = momentum·v + g``; ``w −= lr·v``.

    Then ``w = soft(w, lr·l1)``. The velocity adds up to ``1/(1 − momentum)`` gradients: the learning rate is
    to be so much smaller than that of SGD, or a :class:`~streamiter.optimizers.learning_rates.Correction`. A
    sparse gradient moves what it names; the velocity of other weights waits.

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

    def _move(self, weights: Floats, gradient: Floats, slots: Slots, rate: float, step: int) -> None:
        v = slots["v"]
        v *= self.momentum
        v += gradient
        weights -= v * rate

    def _move_few(
        self, indices: Indices, weights: FloatView, gradient: Numbers, slots: Views, rate: float, step: int
    ) -> None:
        momentum = self.momentum
        (all_v,) = slots
        for index, g in zip(indices, gradient, strict=True):
            v = all_v[index] = all_v[index] * momentum + g
            weights[index] -= v * rate
