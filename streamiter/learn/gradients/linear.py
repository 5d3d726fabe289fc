"""``LinearModel``: a linear model that predicts, learns and computes gradients.

A model holds the weights and the optimizer's state (its *slots*), makes steps, and can be saved and restored. Its loss
defines what a prediction is, and which targets are allowed (``streamiter.learn.losses``).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final, TypedDict

import numpy as np
import numpy.typing as npt

from streamiter.errors import ConfigurationError, ModelError, OtherModel
from streamiter.learn.gradients.gradient import GRADIENT_LIMIT, MOMENTS, Gradient, is_tame
from streamiter.learn.losses import LinearLoss
from streamiter.learn.rows import (
    FEW,
    CheckedExamples,
    Examples,
    Features,
    Rows,
    all_are_few,
    as_points,
    checked_examples,
    checked_rows,
    dense_weighted_sum,
    dots,
    holds,
    independent_dots,
    refuse_not_finite,
    refuse_rows_unless,
    row_vector,
    row_weights,
    rows_as_lists,
    weighted_sum,
)
from streamiter.models.documents import refused_state, state_in, with_state
from streamiter.models.saved_objects import Savable
from streamiter.operators.declared_state import DeclaredState, Form, declared
from streamiter.operators.definitions import Definition, changes, settings_in_words
from streamiter.parameter_server.optimizers import Optimizer, Slots, checked_optimizer, view_of
from streamiter.values.helpers.notebooks import html_facts
from streamiter.values.numbers import Floats, Moments, standardized, whole_number
from streamiter.values.sparse_rows import SparseRows
from streamiter.values.tables import as_floats


def targets_from_signs(owner: str, signs: Floats) -> Floats:
    """Return the targets 0 and 1 for −1 and 1; ``BadRows`` names other targets."""
    refuse_rows_unless(np.abs(signs) == 1.0, owner, "targets −1 or 1", signs, 'for 0 and 1 leave labels="-1/1" out')
    return (signs + 1.0) / 2.0


def gradient_and_loss(
    loss: LinearLoss, examples: CheckedExamples, weights: Floats, intercept: float
) -> tuple[Gradient, float]:
    """Return the gradient for all features, and the sum of the losses; both may be infinite or NaN."""
    rows, targets, sample_weights = examples.rows, examples.targets, examples.weights
    margins = dots(rows, weights)
    margins += intercept
    predictions = loss.predict(margins)
    total_loss = loss.total(predictions, targets, sample_weights)
    slopes = loss.slopes(predictions, targets)
    if sample_weights is None:
        weight, records = float(len(rows)), len(rows)
    else:
        weight, records = float(sample_weights.sum()), int(np.count_nonzero(sample_weights))
        slopes *= sample_weights
    total = dense_weighted_sum(rows, slopes)
    return Gradient(total, float(slopes.sum()), weight, records, len(weights)), total_loss


# A larger weight is most likely a mistake, and this many single steps would look like a hang.
_STEPS_LIMIT: Final = 10_000


class LinearOptions(TypedDict, total=False):
    """Options of :class:`LinearModel` that the classes derived from it have, too."""

    intercept: bool
    initial_weights: npt.ArrayLike | None
    initial_intercept: float


LEARNER: Final = "LinearModel"
"""The name of the learner whose state versions carry."""

_IN_PARAMETERS: Final = ("weights", "bias")


def _copy_each(slots: Slots, given: Slots) -> None:
    for name, slot in slots.items():
        np.copyto(slot, given[name])


# The steps on few features use views of the arrays, so these stay where they are.
_IN_PLACE: Final = Form(np.copy, take_on=np.copyto)
_SLOTS: Final = Form(lambda slots: {name: slot.copy() for name, slot in slots.items()}, take_on=_copy_each)


class LinearModel(DeclaredState, Savable):
    """A linear model that learns online, one step at a time: weights, an intercept, a loss and an optimizer.

    ``width`` is the number of features. Learning starts from ``initial_weights`` and ``initial_intercept`` (zeros
    unless given). The intercept is a separate weight that is never regularized; ``intercept=False`` leaves it out.

    Features are a matrix (rows, features) or :class:`~streamiter.values.sparse_rows.SparseRows`. The gradient of a step
    is the mean over its rows, each multiplied by its sample weight: a row of weight 2 counts as two rows, a row of
    weight 0 does not count.

    *Which weights a step changes.* A dense step changes all weights, a sparse step only the weights of features that
    the mini-batch names. The result is the same for optimizers that change nothing for a gradient of 0: FTRL, and SGD
    without regularization.

    Use a model in one task only. A :class:`~streamiter.errors.ModelError` leaves the model unchanged; if single rows
    are at fault, it is a :class:`~streamiter.learn.rows.BadRows` that names the rows.
    """

    _weights: Floats = declared(form=_IN_PLACE)
    _slots: Slots = declared(form=_SLOTS)
    _bias: Floats = declared(form=_IN_PLACE)
    """An array with the intercept."""
    _bias_slots: Slots = declared(form=_SLOTS)
    _version = declared(0)
    _step = declared(0)
    _records = declared(0)
    _moments: Moments | None = declared(None, form=MOMENTS)
    """The statistics that features are scaled with; None: features are taken as they are."""

    def __init__(
        self,
        width: int,
        *,
        loss: LinearLoss,
        optimizer: Optimizer,
        intercept: bool = True,
        initial_weights: npt.ArrayLike | None = None,
        initial_intercept: float = 0.0,
    ) -> None:
        self._name = type(self).__name__
        self.width = _checked_width(self._name, width)
        checked_optimizer(self._name, optimizer)
        self.loss = loss
        self._link = loss.link
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

    def scale(self, start: Moments) -> None:
        """Scale features to mean 0 and deviation 1 from now on, in ``predict`` and ``gradient``.

        The statistics begin with ``start``; gradients have the statistics of their rows, and ``apply`` adds them. They
        are a part of the parameters.
        """
        if start.records and len(start.mean) != self.width:
            raise ModelError(
                f"{self._name}: expected a scaler of {self.width} features, given one of {len(start.mean)}"
            )
        self._moments = start if start.records else Moments(0, np.zeros(self.width), np.zeros(self.width))

    def _scaled(self, rows: Rows, moments: Moments) -> Rows:
        dense = rows.to_dense() if isinstance(rows, SparseRows) else rows
        return standardized(dense, moments.mean, moments.deviation())

    def _unscaled_rows(self, features: Features) -> Rows:
        """Return checked rows, for ways of learning that do not scale."""
        if self._moments is not None:
            raise ModelError(f"{self._name}: expected gradients to learn from, because the model scales features")
        return checked_rows(self._name, features, self.width)

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

    def _repr_html_(self) -> str:
        """Return a table of the model, for notebooks."""
        facts = {
            "features": self.width,
            "records": self.records,
            "version": self.version,
            "optimizer": self.optimizer,
            "weights": self.weights,
        }
        return html_facts(type(self).__name__, facts)

    def parameters(self, *, state: bool = True) -> dict[str, Any]:
        """Return copies of weights, intercept and link as plain data: all parameters of predictions.

        They also have the state that :meth:`start_from` needs to continue exactly: slots, steps and records. Without
        ``state`` they are enough to predict.
        """
        parameters = {"weights": self._weights.copy(), "intercept": self.intercept_weight, "link": self._link}
        if (moments := self._moments) is not None:
            parameters |= moments._asdict() | {"deviation": moments.deviation()}
        return with_state(parameters, LEARNER, {"model": self.learned()}) if state else parameters

    def learned(self) -> dict[str, object]:
        """Return :meth:`state` without the entries that :meth:`parameters` has, too."""
        return {name: value for name, value in self.state().items() if name not in _IN_PARAMETERS}

    # ---- taking over the parameters of another model

    def start_from(self, parameters: Mapping[str, Any] | npt.ArrayLike) -> None:
        """Continue from the :meth:`parameters` of another model, or from bare weights.

        If they carry a state, the model continues exactly; otherwise the optimizer's state is reset. Every optimizer
        keeps these weights, unlike ``initial_weights``, which FTRL resets. Raises ModelError for a state that does not
        fit: leave the parameter ``state`` out to start without it.
        """
        subject = f"{self._name}.start_from"
        if (state := state_in(parameters, LEARNER, subject)) is not None:
            weights = dict(zip(_IN_PARAMETERS, self._checked_parameters(parameters), strict=True))
            try:
                self.restore(state["model"] | weights)
            except (ModelError, LookupError, TypeError, ValueError) as error:
                raise refused_state(subject, error) from error
            return
        self.follow(parameters)
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
        if self._moments is not None and isinstance(parameters, Mapping):
            self._moments = Moments(*(parameters[name] for name in Moments._fields))

    def take_over(self, parameters: Mapping[str, Any], *, steps: int, records: int) -> None:
        """Take over the parameters of a model that started with these weights; count its steps and records, too."""
        self.start_from(parameters)
        self.count(records, steps)

    def count(self, records: int, steps: int = 0) -> None:
        """Count records that another model has learned from, and its steps."""
        self._version += steps
        self._records += records

    def _checked_parameters(self, parameters: Mapping[str, Any] | npt.ArrayLike) -> tuple[Floats, Floats]:
        if isinstance(parameters, Mapping) and "center" in parameters:
            raise OtherModel(
                f"{self._name}: expected weights of columns as they are, given those of an AdaptiveLinearModel, whose "
                "columns have centers and limits; leave out model= to start from them"
            )
        is_scaled = isinstance(parameters, Mapping) and "deviation" in parameters
        if is_scaled != (self._moments is not None):
            raise ModelError(
                f"{self._name}: expected parameters {'without' if is_scaled else 'with'} the mean and deviation of "
                f"features, given {sorted(parameters) if isinstance(parameters, Mapping) else 'bare weights'}; train "
                f"with{'' if is_scaled else 'out'} scaler= to start from them"
            )
        if not isinstance(parameters, Mapping):
            return self._checked_weights(parameters), np.zeros(1)
        link = parameters.get("link", self._link)
        if "weights" not in parameters or link != self._link:
            raise ModelError(
                f'{self._name}: expected parameters with "weights" and the link {self._link!r}, given '
                f"{sorted(parameters)} with the link {link!r}; give the parameters of a model with this link"
            )
        return self._checked_weights(parameters["weights"]), self._checked_bias(parameters.get("intercept", 0.0))

    def twin(self, optimizer: Optimizer) -> LinearModel:
        """Return a model that starts with these weights, and learns from targets in the form that the loss expects."""
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

    # ---- predicting and learning

    def predict(self, features: Features) -> Floats:
        """Return the value, or the probability of target 1, for each row.

        The prediction for a row does not depend on the other rows, to the last bit.
        """
        rows = checked_rows(self._name, features, self.width)
        if self._moments is not None:
            rows = self._scaled(rows, self._moments)
        with np.errstate(over="ignore", invalid="ignore"):
            margins = independent_dots(rows, self._weights) + self._bias_view[0]
        if not holds(np.isfinite(margins)):
            refuse_not_finite(self._name, rows)
            raise self._runaway("a prediction")
        return self.loss.predict(margins)

    def learn(self, features: Features, targets: npt.ArrayLike, sample_weights: npt.ArrayLike | None = None) -> None:
        """Make one step on a mini-batch; no step if there are no rows, or only rows of weight 0."""
        rows = self._unscaled_rows(features)
        if len(rows) == 1:
            refuse_not_finite(self._name, rows)
            checked = self.checked_targets(targets, 1)
            # The mean of one row is that row, for any weight.
            if sample_weights is None or row_weights(self._name, sample_weights, 1)[0]:
                self._learn_rows(rows, checked, None)
        else:
            self._take_step(self._gradient(rows, targets, sample_weights))

    def learn_each(
        self, features: Features, targets: npt.ArrayLike, sample_weights: npt.ArrayLike | None = None
    ) -> Floats:
        """Make one step for each row, in order; return the prediction for each row before its step.

        This is the same as ``predict`` and ``learn`` row by row, but quicker. A row of weight 2 counts as two rows, so
        it makes two steps; a fraction of a row is a step with that fraction of its gradient. All rows are checked
        before the first step. If the arithmetic overflows at a later row, the model keeps the steps before that row.
        """
        rows = self._unscaled_rows(features)
        refuse_not_finite(self._name, rows)
        checked = self.checked_targets(targets, len(rows))
        if sample_weights is None:
            return np.array(self._learn_rows(rows, checked, None), dtype=np.float64)
        weights = row_weights(self._name, sample_weights, len(rows))
        expected = f"sample weights up to {_STEPS_LIMIT:,}, as many steps"
        refuse_rows_unless(weights <= _STEPS_LIMIT, f"{self._name}.learn_each", expected, weights)
        return np.array(self._learn_rows(rows, checked, weights.tolist()), dtype=np.float64)

    def gradient(
        self, features: Features, targets: npt.ArrayLike, sample_weights: npt.ArrayLike | None = None
    ) -> Gradient:
        """Return the gradient of the loss at the current weights, as sums; the model does not change."""
        rows = checked_rows(self._name, features, self.width)
        if self._moments is None:
            return self._gradient(rows, targets, sample_weights)
        dense = as_points(self._name, rows.to_dense() if isinstance(rows, SparseRows) else rows, what="features")
        gradient = self._gradient(self._scaled(dense, self._moments), targets, sample_weights)
        counts = slice(None) if sample_weights is None else np.asarray(sample_weights) > 0.0
        gradient.moments = Moments.of(dense[counts])
        return gradient

    def checked_examples(self, examples: Examples) -> CheckedExamples:
        """Return checked examples, for repeated learning. Raises ``BadRows`` for rows that are not examples."""
        return checked_examples(self._name, examples, self.width, self.checked_targets)

    def gradient_and_loss(self, examples: CheckedExamples) -> tuple[Gradient, float]:
        """Return the gradient for all features, and the sum of the losses; the model does not change."""
        with np.errstate(over="ignore", invalid="ignore"):
            gradient, loss = gradient_and_loss(self.loss, examples, self._weights, self._bias_view[0])
            if is_tame(gradient):
                return gradient, loss
        raise self._runaway("a gradient")

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
            predictions = self.loss.predict(dots(rows, self._weights) + self._bias_view[0])
            slopes = self.loss.slopes(predictions, targets)
            if weights is not None:
                slopes *= weights
            indices, total = weighted_sum(rows, slopes)
            gradient = Gradient(total, float(slopes.sum()), weight, records, self.width, indices)
            if is_tame(gradient):
                return gradient
        refuse_not_finite(self._name, rows)
        raise self._runaway("a gradient")

    # ---- steps on single rows

    def _learn_rows(self, rows: Rows, targets: Floats, weights: Sequence[float] | None) -> list[float]:
        times = [1.0] * len(rows) if weights is None else weights
        if all_are_few(rows):
            return [
                self._learn_few(indices, values, target, weight)
                for (indices, values), target, weight in zip(rows_as_lists(rows), targets.tolist(), times, strict=True)
            ]
        return [
            self._learn_row(rows[row : row + 1], targets[row : row + 1], weight) for row, weight in enumerate(times)
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
            self._step_few(indices, values, self.loss.slope(prediction, target), 1)
        else:
            for part, records in _steps(weight):
                slope = self.loss.slope(self._predict_few(indices, values), target)
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
        if not abs(slope) + sum(map(abs, gradient)) < GRADIENT_LIMIT:
            raise self._runaway("a gradient")
        self.optimizer.update_few(indices, self._weights_view, gradient, self._slot_views, self._step + 1)
        self._finish_step(slope, records)

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
        if self._moments is not None and gradient.moments is not None:
            self._moments = self._moments.plus(gradient.moments)

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
            self._bias_optimizer.update_few((0,), self._bias_view, (slope,), self._bias_slot_views, self._step)

    # ---- snapshots

    def definition(self) -> Definition:
        """Return the settings on which the meaning of the state depends; others, such as learning rates, may differ."""
        return {
            "model": self._name,
            "features": self.width,
            "optimizer": self.optimizer.name,
            "intercept": self.intercept,
            "loss": settings_in_words(self.loss),
            "is_scaled": self._moments is not None,
        }

    def state(self) -> dict[str, object]:
        """Return a copy of the state of learning, as plain data."""
        kind = {"link": self._link, "optimizer": self.optimizer.name, "has intercept": self.intercept}
        return super().state() | kind

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restore the :meth:`state` of a model of the same kind; settings such as learning rates may differ."""
        if changed := changes(_description(state), _description(self.state())):
            raise OtherModel(
                f"{self._name}.restore: expected the state of a model with the same settings, given another one: "
                f"{', '.join(changed)}; make an equal model"
            )
        super().restore(state)

    def _start_with(self, state: Mapping[str, Any]) -> None:
        if state["moments"] is not None:
            self.scale(Moments(*state["moments"]))
        self.restore(state)

    # ---- checks

    def _checked_weights(self, initial_weights: npt.ArrayLike) -> Floats:
        start = as_floats(self._name, "initial weights", initial_weights).copy()
        if start.shape != (self.width,) or not holds(np.isfinite(start)):
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
            f"{self._name}: {what} is too large to compute with, so the weights diverge or features are "
            f"extreme; scale the features or lower the learning rate (the model stays at version "
            f"{self._version})"
        )

    def checked_targets(self, targets: npt.ArrayLike, length: int) -> Floats:
        """Return ``length`` targets in the form that the loss expects. Raises ``BadRows`` for bad targets."""
        checked = row_vector(self._name, "targets", targets, length)
        self.loss.check_targets(self._name, checked)
        return checked


def _steps(weight: float) -> Iterator[tuple[float, int]]:
    """Yield the steps for a row of this weight: the share of each step, and its number of records.

    The last share may be a fraction. The first step counts for one record, the others for none.
    """
    records = 1
    while weight > 0.0:
        yield min(weight, 1.0), records
        weight -= 1.0
        records = 0


def _checked_width(name: str, width: npt.ArrayLike) -> int:
    if np.ndim(width):
        raise ConfigurationError(
            f"{name}(width=): expected the number of features, given an array of shape {np.shape(width)}; make the "
            f"model as {name}({np.shape(width)[-1]}) and give the array to fit"
        )
    return whole_number(f"{name}(width=)", width, 1)


def _description(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return the properties that two states must share: the kind of model, and the lengths of its arrays."""
    kinds = {name: state.get(name) for name in ("link", "optimizer", "has intercept")}
    kinds["is_scaled"] = state.get("moments") is not None
    arrays = {"weights": state.get("weights", ())} | dict(state.get("slots", {}))
    return kinds | {name: len(array) for name, array in arrays.items()}
