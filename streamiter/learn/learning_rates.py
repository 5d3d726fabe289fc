"""Learning rates that change with the number of updates.

>>> rate = InverseSquareRoot(0.5, decay=1.0)
>>> rate.at(1), rate.at(3)
(0.35355339059327373, 0.25)
"""

from __future__ import annotations

import abc
import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from streamiter.errors import ConfigurationError

__all__ = [
    "Constant",
    "Inverse",
    "InverseSquareRoot",
    "LearningRate",
    "is_number",
    "not_negative",
    "plain_float",
    "positive",
    "rate_of",
]


def positive(option: str, value: Any) -> float:
    """The value as a plain float; refuses one that is not a finite number above 0."""
    number = plain_float(value)
    if not 0.0 < number < math.inf:
        raise ConfigurationError(f"{option}: expected a number above 0, given {value!r}")
    return number


def not_negative(option: str, value: Any) -> float:
    """The value as a plain float; refuses one that is not a finite number of 0 or more."""
    number = plain_float(value)
    if not 0.0 <= number < math.inf:
        raise ConfigurationError(f"{option}: expected a number of 0 or more, given {value!r}")
    return number


def is_number(value: Any) -> bool:
    """Whether it is one number, of Python or of numpy."""
    return isinstance(value, (int, float, np.integer, np.floating))


def plain_float(value: Any) -> float:
    """The number as a float, infinity for an int too large for one; NaN for what is no number."""
    try:
        return float(value) if is_number(value) else math.nan
    except OverflowError:
        return math.inf


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
