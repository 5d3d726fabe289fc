"""The online linear model: weights, an intercept, a loss and an optimizer.

Features are a matrix (rows, features) or :class:`~streamiter.learn.sparse.SparseRows`. The gradient of a
step is the mean over its rows, each counted with its sample weight: a row of weight 2 is two rows, a row
of weight 0 is not there.

*Which weights a step touches.* A dense step touches all of them, a sparse one only those whose features
the mini-batch names. That is the same wherever a gradient of 0 changes nothing: always with FTRL, with
SGD unless it regularizes.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from streamiter.errors import ConfigurationError, ModelError
from streamiter.learn.checks import Floats, as_floats, holds, refuse_rows, row_vector, row_weights
from streamiter.learn.examples import CheckedExamples, Examples
from streamiter.learn.feature_rows import (
    FEW,
    Features,
    Rows,
    all_are_few,
    checked_rows,
    dense_weighted_sum,
    dots,
    independent_dots,
    refuse_not_finite,
    rows_as_lists,
    weighted_sum,
)
from streamiter.learn.gradients import Gradient
from streamiter.learn.losses import Loss
from streamiter.learn.optimizers import Optimizer, view_of

__all__ = ["LinearModel"]

# Several optimizers keep the square of a gradient: that of 1e150 is still finite.
_GRADIENT_LIMIT: Final = 1e150
# A weight that large in steps of its own is a mistake, and would seem to hang.
_STEPS_LIMIT: Final = 10_000


class LinearModel:
    """A linear model that learns online, one step at a time.

    ``width`` is the number of features. ``initial_weights`` and ``initial_intercept`` are where it
    starts (zeros unless given). The intercept is a weight of its own that is never regularized;
    ``intercept=False`` does without.

    Belongs to one task. A :class:`~streamiter.errors.ModelError` leaves the model as it was; where
    single rows are at fault it is a :class:`~streamiter.learn.checks.BadRows` that names them.
    """

    def __init__(
        self,
        width: int,
        *,
        loss: Loss,
        optimizer: Optimizer,
        intercept: bool = True,
        initial_weights: npt.ArrayLike | None = None,
        initial_intercept: float = 0.0,
    ) -> None:
        self._name = type(self).__name__
        if width < 1:
            raise ConfigurationError(f"{self._name}(width=): expected 1 feature or more, given {width}")
        self.width = width
        self.loss = loss
        self.optimizer = optimizer
        self.intercept = intercept
        self._bias_optimizer = optimizer.without_regularization()
        self._weights = np.zeros(width) if initial_weights is None else self._start(initial_weights)
        self._bias = self._start_bias(initial_intercept)
        self._slots = optimizer.new_slots(self._weights)
        self._bias_slots = self._bias_optimizer.new_slots(self._bias)
        self._weights_view, self._bias_view = view_of(self._weights), view_of(self._bias)
        self._slot_views = [view_of(self._slots[name]) for name in optimizer.slot_names]
        self._bias_slot_views = [view_of(self._bias_slots[name]) for name in optimizer.slot_names]
        self._version = self._step = self._records = 0

    # ---- what there is to know

    @property
    def version(self) -> int:
        """Grows by 1 with each step; 0 before the first."""
        return self._version

    @property
    def records(self) -> int:
        """Rows learned from so far; rows of weight 0 are not counted."""
        return self._records

    @property
    def weights(self) -> Floats:
        """The weights: a read-only view that follows the model."""
        view = self._weights.view()
        view.flags.writeable = False
        return view

    @property
    def intercept_weight(self) -> float:
        """The intercept; 0 where there is none."""
        return float(self._bias[0])

    def parameters(self) -> dict[str, Any]:
        """What a consumer needs to predict, as plain data of its own."""
        return {"weights": self._weights.copy(), "intercept": self.intercept_weight, "link": self.loss.link}

    # ---- taking over what another model has learned

    def start_from(self, parameters: Mapping[str, Any] | npt.ArrayLike) -> None:
        """Go on from :meth:`parameters` of another model, or from bare weights.

        Unlike ``initial_weights`` they are never given up for what an optimizer would have begun with.
        """
        weights, intercept = self._checked_parameters(parameters)
        np.copyto(self._weights, weights)
        np.copyto(self._bias, intercept)
        for slots, fresh in (
            (self._slots, self.optimizer.slots_to_go_on(self._weights)),
            (self._bias_slots, self._bias_optimizer.slots_to_go_on(self._bias)),
        ):
            for name in self.optimizer.slot_names:
                np.copyto(slots[name], fresh[name])

    def follow(self, parameters: Mapping[str, Any] | npt.ArrayLike) -> None:
        """Take over weights and intercept to predict and make gradients with; slots and version stay."""
        weights, intercept = self._checked_parameters(parameters)
        np.copyto(self._weights, weights)
        np.copyto(self._bias, intercept)

    def twin(self, optimizer: Optimizer) -> LinearModel:
        """A model that begins with these weights, and learns from targets as the loss counts them."""
        twin = LinearModel(
            self.width,
            loss=self.loss,
            optimizer=optimizer,
            intercept=self.intercept,
            initial_weights=self._weights,
            initial_intercept=self.intercept_weight,
        )
        twin._name = self._name
        return twin

    def take_over(self, parameters: Mapping[str, Any], *, steps: int, records: int) -> None:
        """Go on from what a :meth:`twin` has learned, as if this model had."""
        self.start_from(parameters)
        self._version += steps
        self._records += records

    def _checked_parameters(self, parameters: Mapping[str, Any] | npt.ArrayLike) -> tuple[Floats, Floats]:
        if not isinstance(parameters, Mapping):
            return self._start(parameters), np.zeros(1)
        link = parameters.get("link", self.loss.link)
        if "weights" not in parameters or link != self.loss.link:
            raise ModelError(
                f'{self._name}: expected parameters with "weights" and the link {self.loss.link!r}, given '
                f"{sorted(parameters)} with the link {link!r}"
            )
        return self._start(parameters["weights"]), self._start_bias(parameters.get("intercept", 0.0))

    # ---- predicting and learning

    def predict(self, features: Features) -> Floats:
        """The value, or the probability of target 1, for each row.

        The prediction for a row does not depend on the rows beside it, to the last bit.
        """
        rows = checked_rows(self._name, features, self.width)
        with np.errstate(over="ignore", invalid="ignore"):
            margins = independent_dots(rows, self._weights) + self._bias_view[0]
        if not holds(np.isfinite(margins)):
            refuse_not_finite(self._name, rows)
            raise self._runaway("a prediction")
        return self.loss.predict(margins)

    def learn(
        self, features: Features, targets: npt.ArrayLike, sample_weights: npt.ArrayLike | None = None
    ) -> None:
        """One step on a mini-batch. Without rows, or all of weight 0, there is no step."""
        rows = checked_rows(self._name, features, self.width)
        if len(rows) == 1:
            refuse_not_finite(self._name, rows)
            checked = self.checked_targets(targets, 1)
            # The mean of one row, however often it is counted, is that row.
            if sample_weights is None or row_weights(self._name, sample_weights, 1)[0]:
                self._learn_rows(rows, checked, None)
        else:
            self._take_step(self._gradient(rows, targets, sample_weights))

    def learn_each(
        self, features: Features, targets: npt.ArrayLike, sample_weights: npt.ArrayLike | None = None
    ) -> Floats:
        """One step for each row, in order; the prediction that was made for each before its step.

        The same as ``predict`` and ``learn`` row by row, only quicker. A row of weight 2 is two rows and so
        two steps; a fraction of a row is a step with that fraction of its gradient. All rows are checked
        before the first one is learned from; should the arithmetic break down at a later one, those before
        it stay learned.
        """
        rows = checked_rows(self._name, features, self.width)
        refuse_not_finite(self._name, rows)
        checked = self.checked_targets(targets, len(rows))
        if sample_weights is None:
            return np.array(self._learn_rows(rows, checked, None), dtype=np.float64)
        weights = row_weights(self._name, sample_weights, len(rows))
        few = weights <= _STEPS_LIMIT
        if not holds(few):
            raise refuse_rows(
                few,
                f"{self._name}.learn_each: expected sample weights up to {_STEPS_LIMIT:,}, as many steps",
                weights,
            )
        return np.array(self._learn_rows(rows, checked, weights.tolist()), dtype=np.float64)

    def gradient(
        self, features: Features, targets: npt.ArrayLike, sample_weights: npt.ArrayLike | None = None
    ) -> Gradient:
        """The gradient of the loss at the present weights, as sums; the model does not change."""
        return self._gradient(checked_rows(self._name, features, self.width), targets, sample_weights)

    def checked_examples(self, examples: Examples) -> CheckedExamples:
        """Examples as they were given, checked once to be gone through many times; ``BadRows`` names the others."""
        rows = checked_rows(self._name, examples.features, self.width)
        refuse_not_finite(self._name, rows)
        targets = self.checked_targets(examples.targets, len(rows))
        weights = None if examples.weights is None else row_weights(self._name, examples.weights, len(rows))
        return CheckedExamples(rows, targets, weights)

    def gradient_and_loss(self, examples: CheckedExamples) -> tuple[Gradient, float]:
        """The gradient, for all features, and the sum of the losses; the model does not change."""
        rows, targets, weights = examples.rows, examples.targets, examples.weights
        with np.errstate(over="ignore", invalid="ignore"):
            margins = dots(rows, self._weights)
            margins += self._bias_view[0]
            slopes = self.loss.predict(margins)
            loss = self.loss.total(slopes, targets, weights)
            slopes -= targets
            if weights is None:
                weight, records = float(len(rows)), len(rows)
            else:
                weight, records = float(weights.sum()), int(np.count_nonzero(weights))
                slopes *= weights
            total = dense_weighted_sum(rows, slopes)
            gradient = Gradient(total, float(slopes.sum()), weight, records, self.width)
            if _is_tame(gradient):
                return gradient, loss
        raise self._runaway("a gradient")

    def apply(self, gradient: Gradient) -> None:
        """One step with a gradient made here or elsewhere, perhaps for an earlier version."""
        if gradient.width != self.width:
            raise ModelError(
                f"{self._name}.apply: expected a gradient of {self.width} features, given {gradient.width}"
            )
        with np.errstate(over="ignore", invalid="ignore"):
            tame = _is_tame(gradient)
        if not tame:
            raise ModelError(
                f"{self._name}.apply: expected a finite gradient below {_GRADIENT_LIMIT:g}, given "
                f"{gradient!r}; look for extreme feature values or too high a learning rate"
            )
        self._take_step(gradient)

    # ---- snapshots

    def state(self) -> dict[str, Any]:
        """Everything that learning goes on from, as plain data of its own."""
        return {
            "link": self.loss.link,
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
        """Go on from a :meth:`state` of a model of the same kind; settings such as rates may differ."""
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

    # ---- a step on a mini-batch

    def _gradient(self, rows: Rows, targets: npt.ArrayLike, sample_weights: npt.ArrayLike | None) -> Gradient:
        checked = self.checked_targets(targets, len(rows))
        if sample_weights is None:
            weights, total, records = None, float(len(rows)), len(rows)
        else:
            weights = row_weights(self._name, sample_weights, len(rows))
            total, records = float(weights.sum()), int(np.count_nonzero(weights))
        return self._gradient_of(rows, checked, weights, weight=total, records=records)

    def _gradient_of(
        self, rows: Rows, targets: Floats, weights: Floats | None, *, weight: float, records: int
    ) -> Gradient:
        with np.errstate(over="ignore", invalid="ignore"):
            slopes = self.loss.predict(dots(rows, self._weights) + self._bias_view[0])
            slopes -= targets
            if weights is not None:
                slopes *= weights
            indices, total = weighted_sum(rows, slopes)
            gradient = Gradient(total, float(slopes.sum()), weight, records, self.width, indices)
            if _is_tame(gradient):
                return gradient
        refuse_not_finite(self._name, rows)
        raise self._runaway("a gradient")

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

    # ---- steps on single rows

    def _learn_rows(self, rows: Rows, targets: Floats, weights: Sequence[float] | None) -> list[float]:
        times = [1.0] * len(rows) if weights is None else weights
        if all_are_few(rows):
            return [
                self._learn_few(indices, values, target, weight)
                for (indices, values), target, weight in zip(
                    rows_as_lists(rows), targets.tolist(), times, strict=True
                )
            ]
        return [
            self._learn_row(rows[row : row + 1], targets[row : row + 1], weight)
            for row, weight in enumerate(times)
        ]

    def _learn_row(self, row: Rows, target: Floats, weight: float) -> float:
        if all_are_few(row):
            [(indices, values)] = rows_as_lists(row)
            return self._learn_few(indices, values, float(target[0]), weight)
        prediction = float(self.predict(row)[0])
        for part, records in _steps(weight):
            share = None if part == 1.0 else np.array([part])
            self._take_step(self._gradient_of(row, target, share, weight=1.0, records=records))
        return prediction

    def _learn_few(self, indices: Sequence[int], values: list[float], target: float, weight: float) -> float:
        prediction = self._predict_few(indices, values)
        if weight == 1.0:
            self._step_few(indices, values, prediction - target, 1)
        else:
            for part, records in _steps(weight):
                slope = self._predict_few(indices, values) - target
                self._step_few(indices, values, slope * part, records)
        return prediction

    def _predict_few(self, indices: Sequence[int], values: list[float]) -> float:
        weights = self._weights_view
        margin = 0.0
        for index, value in zip(indices, values, strict=True):
            margin += value * weights[index]
        margin += self._bias_view[0]
        return self.loss.predict_one(margin)

    def _step_few(self, indices: Sequence[int], values: list[float], slope: float, records: int) -> None:
        gradient = [slope * value for value in values]
        if not abs(slope) + sum(map(abs, gradient)) < _GRADIENT_LIMIT:
            raise self._runaway("a gradient")
        self.optimizer.update_few(indices, self._weights_view, gradient, self._slot_views, self._step + 1)
        self._finish_step(slope, records)

    # ---- checks

    def checked_targets(self, targets: npt.ArrayLike, length: int) -> Floats:
        """Targets as the loss counts them, one for each of ``length`` rows; ``BadRows`` names the others."""
        checked = row_vector(self._name, "targets", targets, length)
        self.loss.check_targets(self._name, checked)
        return checked

    def _start(self, initial_weights: npt.ArrayLike) -> Floats:
        start = as_floats(self._name, "initial weights", initial_weights).copy()
        if start.shape != (self.width,) or not np.isfinite(start).all():
            raise ModelError(
                f"{self._name}(initial_weights=): expected {self.width} finite numbers, one for each "
                f"feature, given {start.size} of shape {start.shape}"
            )
        return start

    def _start_bias(self, initial_intercept: float) -> Floats:
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


def _steps(weight: float) -> Iterator[tuple[float, int]]:
    """The steps that a row of this weight stands for: the share of each (the last may be a fraction), and
    the records it counts for, which are 1 altogether.
    """
    records = 1
    while weight > 0.0:
        yield min(weight, 1.0), records
        weight -= 1.0
        records = 0


def _is_tame(gradient: Gradient) -> bool:
    square = float(gradient.total @ gradient.total) + gradient.intercept * gradient.intercept
    return square < _GRADIENT_LIMIT * _GRADIENT_LIMIT


def _description(state: Mapping[str, Any]) -> dict[str, Any]:
    """What two states must have in common: the same kind of model with arrays of the same lengths."""
    kinds = {name: state.get(name) for name in ("link", "optimizer", "has_intercept")}
    arrays = {"weights": state.get("weights", ())} | dict(state.get("slots", {}))
    return kinds | {name: len(array) for name, array in arrays.items()}
