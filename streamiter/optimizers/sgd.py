"""Stochastic gradient descent."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from itertools import repeat
from typing import ClassVar, cast

import numpy as np
import numpy.typing as npt

from streamiter.errors import ConfigurationError
from streamiter.numbers import is_number, not_negative
from streamiter.optimizers.learning_rates import LearningRate, rate_of
from streamiter.optimizers.optimizer import Floats, FloatView, Indices, Numbers, Optimizer, Slots, Views
from streamiter.optimizers.regularization import soften, with_l2

__all__ = ["SGD"]


@dataclass(frozen=True)
class SGD(Optimizer):
    """Stochastic gradient descent: ``w −= lr·(g + l2·w)``, then ``w = soft(w, lr·l1)``.

    ``soft(x, k) = sign(x)·max(|x| − k, 0)``. ``learning_rate`` is a number or a
    :class:`~streamiter.optimizers.learning_rates.LearningRate`. With sparse gradients l1 and l2 shrink the
    weights of the features that are there, when they are there: rare features are shrunk less often.

    ``l2`` may be an array, one number for each weight: some may forget quickly what was learned from them,
    such as those that follow the hour's conditions, while others keep it.

    >>> weights = np.array([1.0, 1.0])
    >>> SGD(0.5, l2=[0.0, 1.0]).update(weights, np.zeros(2), {}, step=1)
    >>> weights.tolist()
    [1.0, 0.5]
    """

    learning_rate: float | LearningRate = 0.5
    l1: float = 0.0
    l2: float | npt.ArrayLike = field(default=0.0, hash=False)  # an array has no hash

    name: ClassVar[str] = "sgd"

    def __post_init__(self) -> None:
        self._check_settings(not_negative, "l1")
        object.__setattr__(self, "learning_rate", rate_of(self.learning_rate))
        object.__setattr__(self, "l2", _checked_l2(self.l2))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, SGD):
            return NotImplemented
        same_numbers = (self.learning_rate, self.l1) == (other.learning_rate, other.l1)
        return same_numbers and np.array_equal(self.l2, other.l2)

    def new_slots(self, weights: Floats) -> dict[str, Floats]:
        self.check_width(weights.size)
        return super().new_slots(weights)

    def check_width(self, width: int) -> None:
        l2 = self._l2()
        if isinstance(l2, np.ndarray) and l2.size != width:
            raise ConfigurationError(
                f"SGD(l2=): expected one number for each of the {width} weights, given {l2.size}"
            )

    def _rate(self, step: int) -> float:
        assert isinstance(self.learning_rate, LearningRate)
        return self.learning_rate.at(step)

    def _l2(self) -> float | Floats:
        return cast("float | Floats", self.l2)

    def update(self, weights: Floats, gradient: Floats, slots: Slots, step: int) -> None:
        self._move(weights, gradient, self._l2(), self._rate(step))

    def update_at(
        self, indices: npt.NDArray[np.intp], weights: Floats, gradient: Floats, slots: Slots, step: int
    ) -> None:
        l2, gathered = self._l2(), weights[indices]
        self._move(gathered, gradient, l2[indices] if isinstance(l2, np.ndarray) else l2, self._rate(step))
        weights[indices] = gathered

    def _move(self, weights: Floats, gradient: Floats, l2: float | Floats, rate: float) -> None:
        shrinks = isinstance(l2, np.ndarray) or l2 > 0.0
        if shrinks:
            move = with_l2(gradient, weights, l2)
            move *= rate
            weights -= move
        else:
            weights -= rate * gradient
        if self.l1:
            soften(weights, rate * self.l1)

    def update_few(
        self, indices: Indices, weights: FloatView, gradient: Numbers, slots: Views, step: int
    ) -> None:
        rate, l2, threshold = self._rate(step), self._l2(), self._rate(step) * self.l1
        shrinking = (
            map(cast(FloatView, l2.data).__getitem__, indices) if isinstance(l2, np.ndarray) else repeat(l2)
        )
        for index, slope, shrink in zip(indices, gradient, shrinking, strict=False):
            weight = weights[index]
            weight -= rate * (slope + shrink * weight)
            if threshold:
                weight = math.copysign(max(abs(weight) - threshold, 0.0), weight) + 0.0
            weights[index] = weight

    def part(self, weights: slice | npt.NDArray[np.intp]) -> SGD:
        l2 = self._l2()
        return replace(self, l2=l2[weights]) if isinstance(l2, np.ndarray) else self

    def without_regularization(self) -> SGD:
        return replace(self, l1=0.0, l2=0.0)


def _checked_l2(l2: float | npt.ArrayLike) -> float | Floats:
    """A number, or an array that nobody changes."""
    if is_number(l2):
        return not_negative("SGD(l2=)", l2)
    try:
        each = np.array(l2, dtype=np.float64)
    except (TypeError, ValueError, OverflowError):  # no numbers, or rows of different lengths
        raise _refused_l2(repr(l2)) from None
    if each.ndim != 1 or not each.size:
        raise _refused_l2(f"an array of shape {each.shape}")
    if not ((each >= 0.0) & (each < math.inf)).all():
        raise _refused_l2(f"an array with values from {each.min()} to {each.max()}")
    each.flags.writeable = False
    return each


def _refused_l2(given: str) -> ConfigurationError:
    return ConfigurationError(
        f"SGD(l2=): expected a number of 0 or more, or one for each weight, given {given}"
    )
