"""Learning rates that change with the number of updates.

>>> rate = InverseSquareRoot(0.5, decay=1.0)
>>> rate.at(1), rate.at(3)
(0.35355339059327373, 0.25)

``Correction`` and ``WarmRestarts`` are Angel's, and so are the defaults of their settings.
"""

from __future__ import annotations

import abc
import math
from dataclasses import dataclass

from streamiter.numbers import fraction, not_negative, positive, whole_number

__all__ = [
    "Constant",
    "Correction",
    "Inverse",
    "InverseSquareRoot",
    "LearningRate",
    "WarmRestarts",
    "rate_of",
]


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


@dataclass(frozen=True, slots=True)
class Correction(LearningRate):
    """``initial / √(1 + decay·step) · (1 − beta) / (1 − betaˢᵗᵉᵖ)``: for :class:`~streamiter.optimizers.Momentum`.

    A velocity sums up to ``1/(1 − beta)`` gradients; this rate takes back what the sum has grown to at each
    step. ``beta`` is the momentum of the rule.

    >>> rate = Correction(0.5, decay=0.0, beta=0.5)
    >>> rate.at(1), rate.at(2)
    (0.5, 0.3333333333333333)
    """

    decay: float = 0.001
    beta: float = 0.9

    def __post_init__(self) -> None:
        object.__setattr__(self, "initial", positive("learning_rate", self.initial))
        object.__setattr__(self, "decay", not_negative("decay", self.decay))
        object.__setattr__(self, "beta", fraction("beta", self.beta))

    def at(self, step: int) -> float:
        decayed = self.initial / math.sqrt(1.0 + self.decay * step)
        return decayed * (1.0 - self.beta) / (1.0 - self.beta**step)


@dataclass(frozen=True, slots=True)
class WarmRestarts(LearningRate):
    """Half a cosine from ``initial`` down to a tenth of it, again and again, each time over twice as many steps.

    ``low + ½·(high − low)·(1 + cos(π·current/interval))``: ``current`` counts the steps of the interval from 1 to
    ``interval``, and ``low`` is ``initial/10``. After restart k, ``high`` is divided by ``√(1 + k·decay)`` once more
    (Loshchilov and Hutter 2017, "SGDR"). Where ``decay`` is large, ``high`` comes below ``low`` some day, and the rate
    rises to ``low`` from there.

    >>> rate = WarmRestarts(1.0, decay=3.0, interval=2)
    >>> [round(rate.at(step), 3) for step in range(1, 7)]
    [0.55, 0.1, 0.441, 0.3, 0.159, 0.1]
    """

    decay: float = 0.001
    interval: int = 100

    def __post_init__(self) -> None:
        object.__setattr__(self, "initial", positive("learning_rate", self.initial))
        object.__setattr__(self, "decay", not_negative("decay", self.decay))
        object.__setattr__(self, "interval", whole_number("interval", self.interval, 1))

    def at(self, step: int) -> float:
        current, interval, high, restarts = step, self.interval, self.initial, 0
        while current > interval:  # doubles, so that even a billion steps are some twenty rounds
            current -= interval
            interval *= 2
            restarts += 1
            high /= math.sqrt(1.0 + restarts * self.decay)
        low = self.initial / 10.0
        return low + 0.5 * (high - low) * (1.0 + math.cos(math.pi * current / interval))


def rate_of(given: float | LearningRate) -> LearningRate:
    """A number stands for a constant rate."""
    return given if isinstance(given, LearningRate) else Constant(given)
