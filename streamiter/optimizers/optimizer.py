"""Optimizers."""

from __future__ import annotations

import abc
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol, cast

import numpy as np
import numpy.typing as npt

from streamiter.errors import ConfigurationError
from streamiter.numbers import fraction, not_negative, positive, whole_number

__all__ = [
    "Constant",
    "Correction",
    "FloatArray",
    "FloatView",
    "IndexList",
    "Inverse",
    "InverseSquareRoot",
    "LearningRate",
    "Numbers",
    "Optimizer",
    "Slots",
    "Views",
    "WarmRestarts",
    "checked_optimizer",
    "view_of",
]


@dataclass(frozen=True, slots=True)
class LearningRate(abc.ABC):
    """A learning rate by the number of the update; pure, so that it needs no state of its own.

    Learning rates that change with the number of updates.

    >>> rate = InverseSquareRoot(0.5, decay=1.0)
    >>> rate.at(1), rate.at(3)
    (0.35355339059327373, 0.25)

    ``Correction`` and ``WarmRestarts`` are Angel's, and so are the defaults of their settings.
    """

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


FloatArray = npt.NDArray[np.floating[Any]]
"""float64 or float32; weights, gradient and slots are of the same."""

Slots = Mapping[str, FloatArray]


class FloatView(Protocol):
    """One-dimensional numbers that are read and written as plain floats, such as ``view_of`` gives."""

    def __getitem__(self, index: int, /) -> float: ...
    def __setitem__(self, index: int, value: float, /) -> None: ...


IndexList = Sequence[int]
"""Of some weights, none twice."""

Numbers = Sequence[float]
"""One for each index."""

Views = Sequence[FloatView]
"""Of the slots, in the order of their names."""


def view_of(array: FloatArray) -> FloatView:
    """The array's own numbers as plain floats: several times quicker, one by one, than through numpy.

    Only of float64: plain floats would compute in another precision than arrays of float32 do.
    """
    if array.dtype != np.float64:
        raise ConfigurationError(f"view_of: expected an array of float64, given {array.dtype}; use update_at")
    return cast(FloatView, array.data)


class Optimizer(abc.ABC):
    """Settings of an update rule; the numbers it works on belong to the caller.

    A rule implements ``update``; ``update_at`` follows from it. ``update_few`` may be overridden where
    plain Python is quicker than numpy, and must give the same numbers to the last bit.

    What all update rules have in common.

    An optimizer holds settings only. What it remembers about each weight is in *slots*, arrays of the shape
    of the weights that its owner keeps, snapshots and restores: a model, or a shard of a parameter server.
    All work is elementwise, in place on the arrays given, and never changes the gradient. The arrays are
    float64, or all of them float32: then all is computed in float32, without copies in float64.

    >>> weights = np.array([1.0, -2.0])
    >>> from streamiter.optimizers import SGD
    >>> sgd = SGD(0.5)
    >>> sgd.update(weights, np.array([2.0, 2.0]), sgd.new_slots(weights), step=1)
    >>> weights.tolist()
    [0.0, -3.0]
    """

    name: ClassVar[str]
    """Stored with the slots, so that a snapshot is not restored into another rule."""

    slot_names: ClassVar[tuple[str, ...]] = ()

    def _check_settings(self, check: Callable[[str, Any], float], *options: str) -> None:
        """Have settings checked, each by its name, as the optimizer is made; they become plain floats."""
        for option in options:
            number = check(f"{type(self).__name__}({option}=)", getattr(self, option))
            object.__setattr__(self, option, number)

    def new_slots(self, weights: FloatArray) -> dict[str, FloatArray]:
        """Slots for weights that start as given, before the first update."""
        return {name: np.zeros_like(weights) for name in self.slot_names}

    def slots_to_go_on(self, weights: FloatArray) -> dict[str, FloatArray]:
        """Slots with which learning goes on from weights that another model has learned."""
        return self.new_slots(weights)

    @abc.abstractmethod
    def update(self, weights: FloatArray, gradient: FloatArray, slots: Slots, step: int) -> None:
        """Apply a gradient of the weights' own shape. ``step`` counts the updates from 1."""

    def update_at(
        self,
        indices: npt.NDArray[np.intp],
        weights: FloatArray,
        gradient: FloatArray,
        slots: Slots,
        step: int,
    ) -> None:
        """Apply a sparse gradient: ``gradient[i]`` is that of ``weights[indices[i]]``; no index twice.

        Costs only what is named: all other weights and slots stay as they are, so a regularization that
        shrinks weights (the l1 and l2 of SGD) acts on a weight only when its index is named.
        """
        gathered = weights[indices]
        gathered_slots = {name: slots[name][indices] for name in self.slot_names}
        self.update(gathered, gradient, gathered_slots, step)
        weights[indices] = gathered
        for name, slot in gathered_slots.items():
            slots[name][indices] = slot

    def update_few(
        self, indices: IndexList, weights: FloatView, gradient: Numbers, slots: Views, step: int
    ) -> None:
        """The same as ``update_at`` for some dozen numbers, on views of the arrays (slots by position)."""
        arrays = {name: _array_of(slot) for name, slot in zip(self.slot_names, slots, strict=True)}
        at = np.asarray(indices, dtype=np.intp)
        self.update_at(at, _array_of(weights), np.asarray(gradient, dtype=np.float64), arrays, step)

    def check_width(self, width: int) -> None:
        """Raise ConfigurationError where a setting has numbers for another number of weights than these."""
        del width

    def part(self, weights: slice | npt.NDArray[np.intp]) -> Optimizer:
        """The same rule for some of the weights; another where a setting has a number for each weight."""
        del weights
        return self

    def without_regularization(self) -> Optimizer:
        """The same rule for weights that must not be shrunk, such as an intercept."""
        return self


def checked_optimizer(owner: str, given: Any) -> Optimizer:
    """What was given as ``optimizer=``; ConfigurationError for what is none."""
    if isinstance(given, Optimizer):
        return given
    if isinstance(given, type) and issubclass(given, Optimizer):
        what, advice = f"the class {given.__name__}", f"make one of it: {given.__name__}()"
    else:
        what, advice = repr(given), "take one of streamiter.learn: SGD(…), Adam(…), FTRL(…), …"
    raise ConfigurationError(f"{owner}(optimizer=): expected an Optimizer, given {what}; {advice}")


def _array_of(view: FloatView) -> FloatArray:
    return np.asarray(cast(memoryview, view))
