"""The weights of a linear model: ``Gradient`` and ``LinearWeights``.

A gradient is a sum over rows, so gradients of several workers can be added to one step. ``LinearWeights`` holds the
weights and the optimizer's state, makes steps, and can be saved and restored.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Final, final

import numpy as np
import numpy.typing as npt

from streamiter.errors import ConfigurationError, ModelError
from streamiter.learn.rows import FEW
from streamiter.numbers import Floats, Indices, whole_number
from streamiter.optimizers import Optimizer, checked_optimizer, view_of
from streamiter.sparse_rows import sums_by
from streamiter.tables import as_floats


@final
class Gradient:
    """The sum of the weighted gradients of some rows, and the sum of the weights of these rows.

    ``total`` has one number for each of the ``width`` features or, if ``indices`` is not None, for each feature that
    ``indices`` names, in ascending order. ``intercept`` is the sum for the intercept, ``records`` the number of rows
    with a weight above 0. The sum of the gradients of several workers equals the gradient of all their rows:

    >>> first = Gradient(total=np.array([1.0, 2.0]), intercept=0.5, weight=1.0, records=1, width=2)
    >>> second = Gradient(total=np.array([3.0]), intercept=0.5, weight=3.0, records=2, width=2,
    ...                   indices=np.array([1]))
    >>> both = first + second
    >>> both.total.tolist(), both.weight, both.records
    ([1.0, 5.0], 4.0, 3)
    """

    __slots__ = ("indices", "intercept", "records", "total", "weight", "width")

    def __init__(
        self,
        total: Floats,
        intercept: float,
        weight: float,
        records: int,
        width: int,
        indices: Indices | None = None,
    ) -> None:
        self.total = total
        self.intercept = intercept
        self.weight = weight
        self.records = records
        self.width = width
        self.indices = indices

    def __add__(self, other: Gradient) -> Gradient:
        if self.width != other.width:
            raise ModelError(
                f"Gradient: expected one of {self.width} features to add, given one of {other.width}"
            )
        indices, total = _added(self, other)
        return Gradient(
            total=total,
            indices=indices,
            intercept=self.intercept + other.intercept,
            weight=self.weight + other.weight,
            records=self.records + other.records,
            width=self.width,
        )

    def to_dense(self) -> Floats:
        """Return the sums of all features, as a new array."""
        if self.indices is None:
            return self.total.copy()
        dense = np.zeros(self.width)
        dense[self.indices] = self.total
        return dense

    def to_record(self) -> dict[str, Any]:
        """Return the gradient as plain data, to send it to another step."""
        return {name: getattr(self, name) for name in self.__slots__}

    @classmethod
    def from_record(cls, record: Mapping[str, Any]) -> Gradient:
        """Return the gradient that :meth:`to_record` gave."""
        return cls(**record)

    def __repr__(self) -> str:
        named = self.width if self.indices is None else len(self.indices)
        return f"Gradient({self.records} records of weight {self.weight:g}, {named} of {self.width} features)"


def _added(first: Gradient, second: Gradient) -> tuple[Indices | None, Floats]:
    if first.indices is None or second.indices is None:
        return None, first.to_dense() + second.to_dense()
    indices, places = np.unique(np.concatenate([first.indices, second.indices]), return_inverse=True)
    totals = np.concatenate([first.total, second.total])
    return indices, sums_by(places, totals, len(indices))


# Several optimizers keep the square of a gradient; the square of 1e150 is still finite.
GRADIENT_LIMIT: Final = 1e150


class LinearWeights:
    """The weights and the intercept of a linear model, with the optimizer's state (its *slots*).

    The base of ``LinearModel``, which computes the gradients. The *version* counts the steps, also those of models that
    this one took over; the optimizer counts its own steps.
    """

    def __init__(
        self,
        width: int,
        *,
        link: str,
        optimizer: Optimizer,
        intercept: bool,
        initial_weights: npt.ArrayLike | None,
        initial_intercept: float,
    ) -> None:
        self._name = type(self).__name__
        self.width = _checked_width(self._name, width)
        checked_optimizer(self._name, optimizer)
        self._link = link
        self.optimizer = optimizer
        self.intercept = intercept
        self._bias_optimizer = optimizer.without_regularization()
        self._weights = np.zeros(width) if initial_weights is None else self._checked_weights(initial_weights)
        self._bias = self._checked_bias(initial_intercept)
        self._slots = optimizer.new_slots(self._weights)
        self._bias_slots = self._bias_optimizer.new_slots(self._bias)
        self._weights_view, self._bias_view = view_of(self._weights), view_of(self._bias)
        self._slot_views = [view_of(self._slots[name]) for name in optimizer.slot_names]
        self._bias_slot_views = [view_of(self._bias_slots[name]) for name in optimizer.slot_names]
        self._version = self._step = self._records = 0

    # ---- reading the model

    @property
    def version(self) -> int:
        """The number of steps so far."""
        return self._version

    @property
    def records(self) -> int:
        """The number of rows learned from so far; rows of weight 0 are not counted."""
        return self._records

    @property
    def weights(self) -> Floats:
        """The weights: a read-only view, which changes with the model."""
        view = self._weights.view()
        view.flags.writeable = False
        return view

    @property
    def intercept_weight(self) -> float:
        """The intercept; 0 for a model without intercept."""
        return float(self._bias[0])

    def parameters(self) -> dict[str, Any]:
        """Return copies of weights, intercept and link as plain data: all that is needed to predict."""
        return {"weights": self._weights.copy(), "intercept": self.intercept_weight, "link": self._link}

    # ---- taking over the parameters of another model

    def start_from(self, parameters: Mapping[str, Any] | npt.ArrayLike) -> None:
        """Continue from the :meth:`parameters` of another model, or from bare weights; the optimizer's state is reset.

        Unlike ``initial_weights``, these weights are kept by every optimizer (FTRL would reset initial weights).
        """
        weights, intercept = self._checked_parameters(parameters)
        np.copyto(self._weights, weights)
        np.copyto(self._bias, intercept)
        for slots, fresh in (
            (self._slots, self.optimizer.slots_for_warm_start(self._weights)),
            (self._bias_slots, self._bias_optimizer.slots_for_warm_start(self._bias)),
        ):
            for name in self.optimizer.slot_names:
                np.copyto(slots[name], fresh[name])

    def follow(self, parameters: Mapping[str, Any] | npt.ArrayLike) -> None:
        """Take over weights and intercept, to predict and to compute gradients; slots and version do not change."""
        weights, intercept = self._checked_parameters(parameters)
        np.copyto(self._weights, weights)
        np.copyto(self._bias, intercept)

    def take_over(self, parameters: Mapping[str, Any], *, steps: int, records: int) -> None:
        """Take over the parameters of a model that started with these weights; count its steps and records, too."""
        self.start_from(parameters)
        self._version += steps
        self._records += records

    def _checked_parameters(self, parameters: Mapping[str, Any] | npt.ArrayLike) -> tuple[Floats, Floats]:
        if not isinstance(parameters, Mapping):
            return self._checked_weights(parameters), np.zeros(1)
        link = parameters.get("link", self._link)
        if "weights" not in parameters or link != self._link:
            raise ModelError(
                f'{self._name}: expected parameters with "weights" and the link {self._link!r}, given '
                f"{sorted(parameters)} with the link {link!r}"
            )
        return self._checked_weights(parameters["weights"]), self._checked_bias(
            parameters.get("intercept", 0.0)
        )

    # ---- steps

    def apply(self, gradient: Gradient) -> None:
        """Make one step with a gradient, which another model, or an earlier version, may have computed."""
        if gradient.width != self.width:
            raise ModelError(
                f"{self._name}.apply: expected a gradient of {self.width} features, given {gradient.width}"
            )
        with np.errstate(over="ignore", invalid="ignore"):
            tame = is_tame(gradient)
        if not tame:
            raise ModelError(
                f"{self._name}.apply: expected a finite gradient below {GRADIENT_LIMIT:g}, given "
                f"{gradient!r}; look for extreme feature values or too high a learning rate"
            )
        self._take_step(gradient)

    def _take_step(self, gradient: Gradient) -> None:
        if gradient.weight <= 0.0:
            return
        step = self._step + 1
        mean = gradient.total / gradient.weight
        if len(mean) <= FEW:
            named = range(self.width) if gradient.indices is None else gradient.indices.tolist()
            self.optimizer.update_few(named, self._weights_view, mean.tolist(), self._slot_views, step)
        elif gradient.indices is None:
            self.optimizer.update(self._weights, mean, self._slots, step)
        else:
            self.optimizer.update_at(gradient.indices, self._weights, mean, self._slots, step)
        self._finish_step(gradient.intercept / gradient.weight, gradient.records)

    def _finish_step(self, slope: float, records: int) -> None:
        self._step += 1
        self._version += 1
        self._records += records
        if self.intercept:
            self._bias_optimizer.update_few(
                (0,), self._bias_view, (slope,), self._bias_slot_views, self._step
            )

    # ---- snapshots

    def state(self) -> dict[str, Any]:
        """Return a copy of the whole state of learning, as plain data."""
        return {
            "link": self._link,
            "optimizer": self.optimizer.name,
            "weights": self._weights.copy(),
            "slots": {name: slot.copy() for name, slot in self._slots.items()},
            "has_intercept": self.intercept,
            "intercept": self._bias.copy(),
            "intercept_slots": {name: slot.copy() for name, slot in self._bias_slots.items()},
            "version": self._version,
            "step": self._step,
            "records": self._records,
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Take on the :meth:`state` of a model of the same kind; settings such as learning rates may differ."""
        mine, theirs = _description(self.state()), _description(state)
        if mine != theirs:
            raise ModelError(
                f"{self._name}.restore: expected the state of a model like {mine}, given {theirs}"
            )
        np.copyto(self._weights, state["weights"])
        np.copyto(self._bias, state["intercept"])
        for name in self.optimizer.slot_names:
            np.copyto(self._slots[name], state["slots"][name])
            np.copyto(self._bias_slots[name], state["intercept_slots"][name])
        self._version, self._step, self._records = state["version"], state["step"], state["records"]

    # ---- checks

    def _checked_weights(self, initial_weights: npt.ArrayLike) -> Floats:
        start = as_floats(self._name, "initial weights", initial_weights).copy()
        if start.shape != (self.width,) or not np.isfinite(start).all():
            raise ModelError(
                f"{self._name}(initial_weights=): expected {self.width} finite numbers, one for each "
                f"feature, given {start.size} of shape {start.shape}"
            )
        return start

    def _checked_bias(self, initial_intercept: float) -> Floats:
        if not math.isfinite(initial_intercept) or (initial_intercept and not self.intercept):
            raise ModelError(
                f"{self._name}(initial_intercept=): expected a finite number, and 0 without an intercept, "
                f"given {initial_intercept}"
            )
        return np.array([initial_intercept], dtype=np.float64)

    def _runaway(self, what: str) -> ModelError:
        return ModelError(
            f"{self._name}: {what} is too large to compute with, so the weights run away or features are "
            f"extreme; scale the features or lower the learning rate (the model stays at version "
            f"{self._version})"
        )


def _checked_width(name: str, width: npt.ArrayLike) -> int:
    if np.ndim(width):
        raise ConfigurationError(
            f"{name}(width=): expected the number of features, given an array of shape {np.shape(width)}; make the "
            f"model as {name}({np.shape(width)[-1]}) and give the array to fit"
        )
    return whole_number(f"{name}(width=)", width, 1)


def is_tame(gradient: Gradient) -> bool:
    """Whether the square of the gradient is finite, so that optimizers can compute with it."""
    square = float(gradient.total @ gradient.total) + gradient.intercept * gradient.intercept
    return square < GRADIENT_LIMIT * GRADIENT_LIMIT


def _description(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return the properties that two states must share: the kind of model, and the lengths of its arrays."""
    kinds = {name: state.get(name) for name in ("link", "optimizer", "has_intercept")}
    arrays = {"weights": state.get("weights", ())} | dict(state.get("slots", {}))
    return kinds | {name: len(array) for name, array in arrays.items()}
