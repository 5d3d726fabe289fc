"""Optimizers: how a gradient changes weights.

An optimizer holds settings only. What it remembers about each weight is in *slots*, arrays of the shape
of the weights that its owner keeps, snapshots and restores: a model, or a shard of a parameter server.
All work is elementwise, in place on the arrays given, and never changes the gradient.

>>> weights = np.array([1.0, -2.0])
>>> sgd = SGD(0.5)
>>> sgd.update(weights, np.array([2.0, 2.0]), sgd.new_slots(weights), step=1)
>>> weights.tolist()
[0.0, -3.0]
"""

from __future__ import annotations

import abc
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import repeat
from typing import ClassVar, Protocol, cast

import numpy as np
import numpy.typing as npt

from streamiter.errors import ConfigurationError
from streamiter.learn.learning_rates import LearningRate, rate_of
from streamiter.learn.numbers import is_number, not_negative, positive

__all__ = ["FTRL", "SGD", "FloatView", "GradientDescent", "Optimizer", "Slots", "view_of"]

Floats = npt.NDArray[np.float64]
Slots = Mapping[str, Floats]


class FloatView(Protocol):
    """One-dimensional numbers that are read and written as plain floats, such as ``view_of`` gives."""

    def __getitem__(self, index: int, /) -> float: ...
    def __setitem__(self, index: int, value: float, /) -> None: ...


def view_of(array: Floats) -> FloatView:
    """The array's own numbers as plain floats: several times quicker, one by one, than through numpy."""
    return cast(FloatView, array.data)


class Optimizer(abc.ABC):
    """Settings of an update rule; the numbers it works on belong to the caller.

    A rule implements ``update``; ``update_at`` follows from it. ``update_few`` may be overridden where
    plain Python is quicker than numpy, and must give the same numbers to the last bit.
    """

    name: ClassVar[str]
    """Stored with the slots, so that a snapshot is not restored into another rule."""

    slot_names: ClassVar[tuple[str, ...]] = ()

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
        self,
        indices: Sequence[int],
        weights: FloatView,
        gradient: Sequence[float],
        slots: Sequence[FloatView],
        step: int,
    ) -> None:
        """The same as ``update_at`` for some dozen numbers, on views of the arrays (slots by position)."""
        arrays = {name: _array_of(slot) for name, slot in zip(self.slot_names, slots, strict=True)}
        at = np.asarray(indices, dtype=np.intp)
        self.update_at(at, _array_of(weights), np.asarray(gradient, dtype=np.float64), arrays, step)

    def without_regularization(self) -> Optimizer:
        """The same rule for weights that must not be shrunk, such as an intercept."""
        return self


def _array_of(view: FloatView) -> Floats:
    return np.asarray(cast(memoryview, view))


@dataclass(frozen=True)
class SGD(Optimizer):
    """Stochastic gradient descent: ``w −= lr·(g + l2·w)``, then ``w = soft(w, lr·l1)``.

    ``soft(x, k) = sign(x)·max(|x| − k, 0)``. ``learning_rate`` is a number or a
    :class:`~streamiter.learn.learning_rates.LearningRate`. With sparse gradients l1 and l2 shrink the
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
        object.__setattr__(self, "l1", not_negative("SGD(l1=)", self.l1))
        object.__setattr__(self, "learning_rate", rate_of(self.learning_rate))
        object.__setattr__(self, "l2", _checked_l2(self.l2))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, SGD):
            return NotImplemented
        same_numbers = (self.learning_rate, self.l1) == (other.learning_rate, other.l1)
        return same_numbers and np.array_equal(self.l2, other.l2)

    def new_slots(self, weights: Floats) -> dict[str, Floats]:
        l2 = self._l2()
        if isinstance(l2, np.ndarray) and l2.shape != weights.shape:
            raise ConfigurationError(
                f"SGD(l2=): expected one number for each of the {weights.size} weights, given {l2.size}"
            )
        return super().new_slots(weights)

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
        weights -= rate * (gradient + l2 * weights if shrinks else gradient)
        if self.l1:
            np.copysign(np.maximum(np.abs(weights) - rate * self.l1, 0.0), weights, out=weights)
            weights += 0.0  # turns −0.0 into 0.0

    def update_few(
        self,
        indices: Sequence[int],
        weights: FloatView,
        gradient: Sequence[float],
        slots: Sequence[FloatView],
        step: int,
    ) -> None:
        rate, l2, threshold = self._rate(step), self._l2(), self._rate(step) * self.l1
        shrinking = map(view_of(l2).__getitem__, indices) if isinstance(l2, np.ndarray) else repeat(l2)
        for index, slope, shrink in zip(indices, gradient, shrinking, strict=False):
            weight = weights[index]
            weight -= rate * (slope + shrink * weight)
            if threshold:
                weight = math.copysign(max(abs(weight) - threshold, 0.0), weight) + 0.0
            weights[index] = weight

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
class GradientDescent(Optimizer):
    """Gradient descent that shrinks after its step: ``w −= lr·g``, then ``w ·= 1 − lr·l2``, ``w −= lr·l1·sign(w)``.

    What offline training uses unless told otherwise. ``learning_rate`` as for :class:`SGD`.

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
        object.__setattr__(self, "l1", not_negative("GradientDescent(l1=)", self.l1))
        object.__setattr__(self, "l2", not_negative("GradientDescent(l2=)", self.l2))
        object.__setattr__(self, "learning_rate", rate_of(self.learning_rate))

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
class FTRL(Optimizer):
    """Follow the regularized leader, per coordinate (McMahan et al. 2013, "Ad click prediction").

    ``δ = (√(n + g²) − √n)/α``; ``n += g²``; ``z += g − δ·w``; ``w = 0`` where ``|z| ≤ l1``, else
    ``w = −(z − sign(z)·l1) / (l2 + (β + √n)/α)``.

    A gradient of 0 changes nothing, so dense and sparse updates are the same. z and n start at 0 also
    for weights that start elsewhere: those count in the gradient and in ``δ·w`` until their coordinate
    gets its first gradient, and are given up for what the formula says then. ``keep_start=True``
    chooses z so that the formula gives the start weights back, and learning goes on from there, as it
    does in any case after a warm start from a published model.
    """

    alpha: float = 0.1
    beta: float = 1.0
    l1: float = 0.0
    l2: float = 0.0
    keep_start: bool = False

    name: ClassVar[str] = "ftrl"
    slot_names: ClassVar[tuple[str, ...]] = ("z", "n")

    def __post_init__(self) -> None:
        object.__setattr__(self, "alpha", positive("FTRL(alpha=)", self.alpha))
        object.__setattr__(self, "beta", not_negative("FTRL(beta=)", self.beta))
        object.__setattr__(self, "l1", not_negative("FTRL(l1=)", self.l1))
        object.__setattr__(self, "l2", not_negative("FTRL(l2=)", self.l2))

    def new_slots(self, weights: Floats) -> dict[str, Floats]:
        return self.slots_to_go_on(weights) if self.keep_start else super().new_slots(weights)

    def slots_to_go_on(self, weights: Floats) -> dict[str, Floats]:
        slots = super().new_slots(weights)
        slots["z"] -= weights * (self.l2 + self.beta / self.alpha) + np.sign(weights) * self.l1
        return slots

    def update(self, weights: Floats, gradient: Floats, slots: Slots, step: int) -> None:
        z, n = slots["z"], slots["n"]
        root_before = np.sqrt(n)
        n += gradient * gradient
        root = np.sqrt(n)
        z += gradient - (root - root_before) / self.alpha * weights
        shrunk = np.copysign(np.maximum(np.abs(z) - self.l1, 0.0), z)
        # 0 − x and not −x: a weight of −0.0 would look odd in a published model. Where n is 0 there
        # never was a gradient: the start weight stays, and a beta of 0 would divide by 0.
        np.divide(0.0 - shrunk, self.l2 + (self.beta + root) / self.alpha, out=weights, where=n > 0.0)

    def update_few(
        self,
        indices: Sequence[int],
        weights: FloatView,
        gradient: Sequence[float],
        slots: Sequence[FloatView],
        step: int,
    ) -> None:
        alpha, beta, l1, l2 = self.alpha, self.beta, self.l1, self.l2
        all_z, all_n = slots
        for index, slope in zip(indices, gradient, strict=True):
            n_before = all_n[index]
            n = n_before + slope * slope
            root = math.sqrt(n)
            z = all_z[index] + (slope - (root - math.sqrt(n_before)) / alpha * weights[index])
            all_z[index], all_n[index] = z, n
            if n > 0.0:
                shrunk = z - l1 if z > l1 else z + l1 if z < -l1 else 0.0
                weights[index] = (0.0 - shrunk) / (l2 + (beta + root) / alpha)

    def without_regularization(self) -> FTRL:
        return replace(self, l1=0.0, l2=0.0)
