"""Learning rates that change with the number of updates.

>>> rate = InverseSquareRoot(0.5, decay=1.0)
>>> rate.at(1), rate.at(3)
(0.35355339059327373, 0.25)
"""

from __future__ import annotations

import abc
import math
from dataclasses import dataclass

from streamiter.numbers import not_negative, positive

__all__ = ["Constant", "Inverse", "InverseSquareRoot", "LearningRate", "rate_of"]


@dataclass(frozen=True, slots=True)
class LearningRate(abc.ABC):
    """A learning rate by the number of the update; pure, so that it needs no state of its own."""

    initial: float

    def __post_init__(self) -> None:
        object.__setattr__(self, "initial", positive("learning_rate", self.initial))

    @abc.abstractmethod
    def at(self, step: int) -> float:
        """The rate of update ``step``, counted from 1."""


@dataclass(frozen=True, slots=True)
class Constant(LearningRate):
    """The same rate for ever: what a stream that drifts needs."""

    def at(self, step: int) -> float:
        return self.initial


@dataclass(frozen=True, slots=True)
class InverseSquareRoot(LearningRate):
    """``initial / √(1 + decay·step)``, often called the standard decay."""

    decay: float = 1.0

    def __post_init__(self) -> None:
        object.__setattr__(self, "initial", positive("learning_rate", self.initial))
        object.__setattr__(self, "decay", not_negative("decay", self.decay))

    def at(self, step: int) -> float:
        return self.initial / math.sqrt(1.0 + self.decay * step)


@dataclass(frozen=True, slots=True)
class Inverse(LearningRate):
    """``initial / (1 + decay·step)``: the sum of the steps still diverges, that of their squares does not."""

    decay: float = 1.0

    def __post_init__(self) -> None:
        object.__setattr__(self, "initial", positive("learning_rate", self.initial))
        object.__setattr__(self, "decay", not_negative("decay", self.decay))

    def at(self, step: int) -> float:
        return self.initial / (1.0 + self.decay * step)


def rate_of(given: float | LearningRate) -> LearningRate:
    """A number stands for a constant rate."""
    return given if isinstance(given, LearningRate) else Constant(given)
