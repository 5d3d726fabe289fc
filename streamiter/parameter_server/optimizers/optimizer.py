"""Optimizers: the base class of update rules, and learning rates.

An optimizer holds settings only. Its state for each weight is in *slots*, arrays of the shape of the weights, which
belong to the owner of the weights: a model, or a shard of a parameter server. All work is elementwise, in place on the
given arrays, and never changes the gradient. All arrays are float64, or all are float32; then everything is computed in
float32, without copies in float64.

A learning rate is a number, or a :class:`LearningRate`, which changes with the number of updates. ``Correction`` and
``WarmRestarts`` come from Angel, with the same defaults.
"""

from __future__ import annotations

import abc
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, ClassVar, Final, Protocol, cast

import numpy as np
import numpy.typing as npt

from streamiter.errors import ConfigurationError
from streamiter.values.numbers import fraction, not_negative, positive, whole_number

FloatArray = npt.NDArray[np.floating[Any]]
"""An array of float64 or float32; weights, gradient and slots have the same dtype."""

Slots = Mapping[str, FloatArray]
"""The optimizer's state for each weight, by the names of its slots."""


class FloatView(Protocol):
    """An array whose numbers are read and written as plain floats; ``view_of`` returns one."""

    def __getitem__(self, index: int, /) -> float: ...
    def __setitem__(self, index: int, value: float, /) -> None: ...


IndexList = Sequence[int]
"""Positions of some weights, none twice."""


NumberList = Sequence[float]
"""A number for each position."""


Views = Sequence[FloatView]
"""Views of the slots, in the order of ``slot_names``."""


class Optimizer(abc.ABC):
    """The settings of an update rule; weights and slots belong to the caller.

    A rule implements ``update``; ``update_at`` follows from it. A rule may override ``update_few`` if plain Python is
    quicker than numpy; the results must be the same to the last bit.

    >>> weights = np.array([1.0, -2.0])
    >>> from streamiter.parameter_server.optimizers import SGD
    >>> sgd = SGD(0.5)
    >>> sgd.update(weights, np.array([2.0, 2.0]), sgd.new_slots(weights), step=1)
    >>> weights.tolist()
    [0.0, -3.0]
    """

    name: ClassVar[str]
    """The name that is stored with the slots, so that a snapshot is not restored into another rule."""

    slot_names: ClassVar[tuple[str, ...]] = ()
    """The names of the slots."""

    def _check_settings(self, check: Callable[[str, object], float], *options: str) -> None:
        """Check settings, given by their names, when the optimizer is made, and turn them into plain floats."""
        for option in options:
            number = check(f"{type(self).__name__}({option}=)", getattr(self, option))
            object.__setattr__(self, option, number)

    def new_slots(self, weights: FloatArray) -> dict[str, FloatArray]:
        """Return the slots before the first update, for these initial weights."""
        return {name: np.zeros_like(weights) for name in self.slot_names}

    def slots_for_warm_start(self, weights: FloatArray) -> dict[str, FloatArray]:
        """Return the slots for weights that another model has learned, to continue learning from these weights."""
        return self.new_slots(weights)

    @abc.abstractmethod
    def update(self, weights: FloatArray, gradient: FloatArray, slots: Slots, step: int) -> None:
        """Apply a gradient of the shape of the weights. ``step`` counts the updates from 1."""

    def update_at(
        self, indices: npt.NDArray[np.intp], weights: FloatArray, gradient: FloatArray, slots: Slots, step: int
    ) -> None:
        """Apply a sparse gradient: ``gradient[i]`` is the gradient of ``weights[indices[i]]``; no index occurs twice.

        The cost grows with the number of indices only. All other weights and slots do not change, so a regularization
        that shrinks weights (l1 and l2 of SGD) acts on a weight only if its index is named.
        """
        gathered = weights[indices]
        gathered_slots = {name: slots[name][indices] for name in self.slot_names}
        self.update(gathered, gradient, gathered_slots, step)
        weights[indices] = gathered
        for name, slot in gathered_slots.items():
            slots[name][indices] = slot

    def update_few(self, indices: IndexList, weights: FloatView, gradient: NumberList, slots: Views, step: int) -> None:
        """Do the same as ``update_at`` for a few dozen numbers, on views of the arrays (slots by position)."""
        arrays = {name: _array_of(slot) for name, slot in zip(self.slot_names, slots, strict=True)}
        at = np.asarray(indices, dtype=np.intp)
        self.update_at(at, _array_of(weights), np.asarray(gradient, dtype=np.float64), arrays, step)

    def without_regularization(self) -> Optimizer:
        """Return the rule for weights that must not be shrunk, such as an intercept."""
        return self


def checked_optimizer(owner: str, given: object) -> Optimizer:
    """Return the argument ``optimizer=``. Raises ConfigurationError for an object that is not an optimizer."""
    if isinstance(given, Optimizer):
        return given
    if isinstance(given, type) and issubclass(given, Optimizer):
        what, advice = f"the class {given.__name__}", f"make one of it: {given.__name__}()"
    else:
        what, advice = repr(given), "take one of streamiter.learn: SGD(…), Adam(…), FTRL(…), …"
    raise ConfigurationError(f"{owner}(optimizer=): expected an Optimizer, given {what}; {advice}")


def view_of(array: FloatArray) -> FloatView:
    """Return a view that reads and writes the array's numbers as plain floats, several times quicker than numpy.

    The array must be float64: with float32, plain floats would compute in another precision than the arrays.
    """
    if array.dtype != np.float64:
        raise ConfigurationError(f"view_of: expected an array of float64, given {array.dtype}; use update_at")
    return cast("FloatView", array.data)


def _array_of(view: FloatView) -> FloatArray:
    return np.asarray(cast("memoryview", view))


_CHECKS: Final[Mapping[str, Callable[[object], float]]] = {
    "initial": lambda given: positive("learning_rate", given),
    "decay": lambda given: not_negative("decay", given),
    "beta": lambda given: fraction("beta", given),
    "interval": lambda given: whole_number("interval", given, 1),
}
"""The checks of the settings of learning rates; each returns a plain number."""


@dataclass(frozen=True, slots=True)
class LearningRate(abc.ABC):
    """A learning rate that depends on the number of the update only, so it has no state.

    >>> rate = InverseSquareRoot(0.5, decay=1.0)
    >>> rate.at(1), rate.at(3)
    (0.35355339059327373, 0.25)
    """

    initial: float
    """The rate that the formula starts from."""

    def __post_init__(self) -> None:
        for checked in fields(self):
            if check := _CHECKS.get(checked.name):
                object.__setattr__(self, checked.name, check(getattr(self, checked.name)))

    @abc.abstractmethod
    def at(self, step: int) -> float:
        """Return the rate of update ``step``, counted from 1."""


@dataclass(frozen=True, slots=True)
class Constant(LearningRate):
    """The same rate for all updates: for streams that drift."""

    def at(self, step: int) -> float:
        return self.initial


@dataclass(frozen=True, slots=True)
class InverseSquareRoot(LearningRate):
    """``initial / √(1 + decay·step)``, often called the standard decay."""

    decay: float = 1.0

    def at(self, step: int) -> float:
        return self.initial / math.sqrt(1.0 + self.decay * step)


@dataclass(frozen=True, slots=True)
class Inverse(LearningRate):
    """``initial / (1 + decay·step)``: the sum of the rates diverges, the sum of their squares does not."""

    decay: float = 1.0

    def at(self, step: int) -> float:
        return self.initial / (1.0 + self.decay * step)


@dataclass(frozen=True, slots=True)
class Correction(LearningRate):
    """``initial / √(1 + decay·step) · (1 − beta) / (1 − betaˢᵗᵉᵖ)``: for ``Momentum``.

    The velocity of momentum sums up to ``1/(1 − beta)`` gradients; this rate divides by the sum reached at each step.
    ``beta`` is the momentum of the rule.

    >>> rate = Correction(0.5, decay=0.0, beta=0.5)
    >>> rate.at(1), rate.at(2)
    (0.5, 0.3333333333333333)
    """

    decay: float = 0.001
    beta: float = 0.9

    def at(self, step: int) -> float:
        decayed = self.initial / math.sqrt(1.0 + self.decay * step)
        return decayed * (1.0 - self.beta) / (1.0 - self.beta**step)


@dataclass(frozen=True, slots=True)
class WarmRestarts(LearningRate):
    """Half a cosine from ``initial`` down to a tenth of it, repeated, each time over twice as many steps.

    ``low + ½·(high − low)·(1 + cos(π·current/interval))``: ``current`` counts the steps of the interval from 1 to
    ``interval``, and ``low`` is ``initial/10``. At restart k, ``high`` is divided by ``√(1 + k·decay)`` (Loshchilov and
    Hutter 2017, "SGDR"). With a large ``decay``, ``high`` falls below ``low`` after some restarts; then the rate rises
    to ``low`` in each interval.

    >>> rate = WarmRestarts(1.0, decay=3.0, interval=2)
    >>> [round(rate.at(step), 3) for step in range(1, 7)]
    [0.55, 0.1, 0.441, 0.3, 0.159, 0.1]
    """

    decay: float = 0.001
    interval: int = 100

    def at(self, step: int) -> float:
        current, interval, high, restarts = step, self.interval, self.initial, 0
        while current > interval:  # Intervals double, so a billion steps are about twenty rounds.
            current -= interval
            interval *= 2
            restarts += 1
            high /= math.sqrt(1.0 + restarts * self.decay)
        low = self.initial / 10.0
        return low + 0.5 * (high - low) * (1.0 + math.cos(math.pi * current / interval))


def rate_of(given: float | LearningRate) -> LearningRate:
    """Return the learning rate that was given; a number is a constant rate."""
    return given if isinstance(given, LearningRate) else Constant(given)
