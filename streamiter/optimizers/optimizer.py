"""What all update rules have in common.

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

from __future__ import annotations

import abc
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import repeat
from typing import Any, ClassVar, Protocol, Self, cast

import numpy as np
import numpy.typing as npt

from streamiter.errors import ConfigurationError
from streamiter.numbers import fraction, is_number, not_negative
from streamiter.optimizers.learning_rates import LearningRate, rate_of

__all__ = [
    "SGD",
    "FloatView",
    "Floats",
    "GradientDescent",
    "Indices",
    "Momentum",
    "Numbers",
    "Optimizer",
    "RegularizedRule",
    "Slots",
    "Views",
    "checked_optimizer",
    "view_of",
]


Floats = npt.NDArray[np.floating[Any]]
"""float64 or float32; weights, gradient and slots are of the same."""

Slots = Mapping[str, Floats]


class FloatView(Protocol):
    """One-dimensional numbers that are read and written as plain floats, such as ``view_of`` gives."""

    def __getitem__(self, index: int, /) -> float: ...
    def __setitem__(self, index: int, value: float, /) -> None: ...


Indices = Sequence[int]
"""Of some weights, none twice."""

Numbers = Sequence[float]
"""One for each index."""

Views = Sequence[FloatView]
"""Of the slots, in the order of their names."""


def view_of(array: Floats) -> FloatView:
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
    """

    name: ClassVar[str]
    """Stored with the slots, so that a snapshot is not restored into another rule."""

    slot_names: ClassVar[tuple[str, ...]] = ()

    def _check_settings(self, check: Callable[[str, Any], float], *options: str) -> None:
        """Have settings checked, each by its name, as the optimizer is made; they become plain floats."""
        for option in options:
            number = check(f"{type(self).__name__}({option}=)", getattr(self, option))
            object.__setattr__(self, option, number)

    def new_slots(self, weights: Floats) -> dict[str, Floats]:
        """Slots for weights that start as given, before the first update."""
        return {name: np.zeros_like(weights) for name in self.slot_names}

    def slots_to_go_on(self, weights: Floats) -> dict[str, Floats]:
        """Slots with which learning goes on from weights that another model has learned."""
        return self.new_slots(weights)

    @abc.abstractmethod
    def update(self, weights: Floats, gradient: Floats, slots: Slots, step: int) -> None:
        """Apply a gradient of the weights' own shape. ``step`` counts the updates from 1."""

    def update_at(
        self, indices: npt.NDArray[np.intp], weights: Floats, gradient: Floats, slots: Slots, step: int
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
        self, indices: Indices, weights: FloatView, gradient: Numbers, slots: Views, step: int
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


def _array_of(view: FloatView) -> Floats:
    return np.asarray(cast(memoryview, view))


def soft(weight: float, threshold: float) -> float:
    """``sign(w)·max(|w| − threshold, 0)``, the proximal step of l1; never −0.0.

    What l1 and l2 do to weights, and the rules that have them in common.
    """
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


@dataclass(frozen=True)
class GradientDescent(Optimizer):
    """Gradient descent that shrinks after its step: ``w −= lr·g``, then ``w ·= 1 − lr·l2``, ``w −= lr·l1·sign(w)``.

    What offline training uses unless told otherwise. ``learning_rate`` as for :class:`SGD`; times l2 it is at most 1.

    >>> weights = np.array([1.0, -1.0])
    >>> GradientDescent(0.5, l2=1.0).update(weights, np.array([-1.0, 0.0]), {}, step=1)
    >>> weights.tolist()
    [0.75, -0.5]

    Gradient descent as offline training does it.
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

    Stochastic gradient descent.
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

    Gradient descent with momentum.
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
