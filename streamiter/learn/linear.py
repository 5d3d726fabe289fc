"""Linear models."""

from __future__ import annotations

import abc
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Final

import numpy as np
import numpy.typing as npt

from streamiter.errors import GraphError
from streamiter.flow.graph_checks import check_function
from streamiter.learn.linear_weights import GRADIENT_LIMIT, Gradient, LinearWeights, is_tame
from streamiter.learn.rows import (
    CheckedExamples,
    Examples,
    Features,
    Rows,
    all_are_few,
    checked_rows,
    dense_weighted_sum,
    dots,
    holds,
    independent_dots,
    refuse_not_finite,
    refuse_rows,
    row_vector,
    row_weights,
    rows_as_lists,
    weighted_sum,
)
from streamiter.models.update import ModelSnapshot
from streamiter.numbers import Floats
from streamiter.operators.operator import Context, Operator
from streamiter.operators.output import Output
from streamiter.operators.rejection import shortened
from streamiter.optimizers import Optimizer
from streamiter.records import OutputTag

__all__ = [
    "MODELS",
    "PROBABILITY_FLOOR",
    "EpochGradients",
    "LinearLoss",
    "LinearModel",
    "LogLoss",
    "ParameterOwner",
    "SquaredLoss",
    "check_makes_model",
]


# A wrong prediction of certainty would cost infinity; 1e-15 is what scikit-learn long clipped at, and
# the smallest round number that 1 − p still tells from 1.
PROBABILITY_FLOOR: Final = 1e-15

# exp(709.8) overflows; from 700 on the probability is 1e-304 either way.
_LOG_ODDS_LIMIT: Final = 700.0


class LinearLoss(abc.ABC):
    """How a margin becomes a prediction, and what a wrong one costs.

    Losses of linear models, each with its canonical link.

    With the canonical link the derivative of the loss by the margin (the linear part, w·x + b) is simply
    ``prediction − target``; both losses here have it.

    >>> LogLoss().predict(np.array([0.0, 2.0, 800.0])).round(4).tolist()
    [0.5, 0.8808, 1.0]
    """

    link: ClassVar[str]
    """What leads from the prediction back to the margin: "identity" or "logit"."""

    @abc.abstractmethod
    def predict(self, margins: Floats) -> Floats:
        """The prediction for each margin, in a new array."""

    @abc.abstractmethod
    def predict_one(self, margin: float) -> float:
        """The same for one margin, to the same last bit."""

    @abc.abstractmethod
    def values(self, predictions: Floats, targets: Floats) -> Floats:
        """The loss of each prediction."""

    def total(self, predictions: Floats, targets: Floats, weights: Floats | None = None) -> float:
        """The sum of the losses, each counted with its weight."""
        values = self.values(predictions, targets)
        return float(values.sum() if weights is None else values @ weights)

    @abc.abstractmethod
    def check_targets(self, owner: str, targets: Floats) -> None:
        """Raises :class:`~streamiter.learn.rows.BadRows` for targets that cannot be."""


class SquaredLoss(LinearLoss):
    """½ (prediction − target)² of a value; the link is the identity."""

    link = "identity"

    def predict(self, margins: Floats) -> Floats:
        return margins.copy()

    def predict_one(self, margin: float) -> float:
        return margin

    def values(self, predictions: Floats, targets: Floats) -> Floats:
        return 0.5 * np.square(predictions - targets)

    def check_targets(self, owner: str, targets: Floats) -> None:
        good = np.isfinite(targets)
        if not holds(good):
            raise refuse_rows(good, f"{owner}: expected finite targets", targets)


class LogLoss(LinearLoss):
    """−log of the probability given to what happened, target 0 or 1; the link is the logit.

    Probabilities are clipped to 1e-15 … 1 − 1e-15.
    """

    link = "logit"

    def predict(self, margins: Floats) -> Floats:
        odds_against = np.negative(margins)
        np.minimum(odds_against, _LOG_ODDS_LIMIT, out=odds_against)
        np.exp(odds_against, out=odds_against)
        odds_against += 1.0
        return np.divide(1.0, odds_against, out=odds_against)

    def predict_one(self, margin: float) -> float:
        # numpy's exp, not math's: the two differ in the last bit for one number in twenty.
        return 1.0 / (1.0 + float(np.exp(min(-margin, _LOG_ODDS_LIMIT))))

    def values(self, predictions: Floats, targets: Floats) -> Floats:
        clipped = np.clip(predictions, PROBABILITY_FLOOR, 1.0 - PROBABILITY_FLOOR)
        return -(targets * np.log(clipped) + (1.0 - targets) * np.log1p(-clipped))

    def total(self, predictions: Floats, targets: Floats, weights: Floats | None = None) -> float:
        # The probability given to what happened, so that one logarithm does instead of two.
        chances = np.subtract(1.0, targets)
        chances -= predictions
        np.abs(chances, out=chances)
        np.maximum(chances, PROBABILITY_FLOOR, out=chances)
        np.log(chances, out=chances)
        return -float(chances.sum() if weights is None else chances @ weights)

    def check_targets(self, owner: str, targets: Floats) -> None:
        good = (targets == 0.0) | (targets == 1.0)
        if not holds(good):
            advice = "say which of them are 1, for instance y > 0"
            if holds(targets[~good] == -1.0):
                advice = 'for -1 and 1 take LogisticRegression(…, labels="-1/1"), or give y > 0'
            raise refuse_rows(good, f"{owner}: expected targets 0 or 1", targets, advice)


# A weight that large in steps of its own is a mistake, and would seem to hang.
_STEPS_LIMIT: Final = 10_000


class LinearModel(LinearWeights):
    """A linear model that learns online, one step at a time.

    ``width`` is the number of features. ``initial_weights`` and ``initial_intercept`` are where it
    starts (zeros unless given). The intercept is a weight of its own that is never regularized;
    ``intercept=False`` does without.

    Belongs to one task. A :class:`~streamiter.errors.ModelError` leaves the model as it was; where
    single rows are at fault it is a :class:`~streamiter.learn.rows.BadRows` that names them.

    The online linear model: weights, an intercept, a loss and an optimizer.

    Features are a matrix (rows, features) or :class:`~streamiter.sparse_rows.SparseRows`. The gradient of a
    step is the mean over its rows, each counted with its sample weight: a row of weight 2 is two rows, a row
    of weight 0 is not there.

    *Which weights a step touches.* A dense step touches all of them, a sparse one only those whose features
    the mini-batch names. That is the same wherever a gradient of 0 changes nothing: always with FTRL, with
    SGD unless it regularizes.
    """

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
        super().__init__(
            width,
            link=loss.link,
            optimizer=optimizer,
            intercept=intercept,
            initial_weights=initial_weights,
            initial_intercept=initial_intercept,
        )
        self.loss = loss

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
            slopes = self.loss.predict(dots(rows, self._weights) + self._bias_view[0])
            slopes -= targets
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
        if not abs(slope) + sum(map(abs, gradient)) < GRADIENT_LIMIT:
            raise self._runaway("a gradient")
        self.optimizer.update_few(indices, self._weights_view, gradient, self._slot_views, self._step + 1)
        self._finish_step(slope, records)

    # ---- checks

    def checked_targets(self, targets: npt.ArrayLike, length: int) -> Floats:
        """Targets as the loss counts them, one for each of ``length`` rows; ``BadRows`` names the others."""
        checked = row_vector(self._name, "targets", targets, length)
        self.loss.check_targets(self._name, checked)
        return checked


def _steps(weight: float) -> Iterator[tuple[float, int]]:
    """The steps that a row of this weight stands for: the share of each (the last may be a fraction), and
    the records it counts for, which are 1 altogether.
    """
    records = 1
    while weight > 0.0:
        yield min(weight, 1.0), records
        weight -= 1.0
        records = 0


MODELS: Final = OutputTag("models")
"""The side output of an owner: a ``ModelSnapshot`` for each version (or each n-th)."""


class ParameterOwner(Operator):
    """Keeps the model with its optimizer's slots, and publishes it; parallelism 1.

    It emits the parameters that the workers go on with.

    The owner of a model's parameters: gradients come in, parameters and published models go out.
    """

    def __init__(self, make_model: Callable[[], LinearModel], publish_every: int) -> None:
        self._model = make_model()
        self._publish_every = publish_every
        self._published = 0
        self._loss: float | None = None

    def open(self, context: Context) -> None:
        self._context = context

    def step(self, gradient: Gradient, loss: float, out: Output) -> None:
        """One step; publishes the model when it is due."""
        self._model.apply(gradient)
        self._loss = loss / gradient.weight if gradient.weight else self._loss
        if self._model.version - self._published >= self._publish_every:
            self._publish(out)

    def finish(self, out: Output) -> None:
        """The last version is published in any case."""
        if self._model.version > self._published:
            self._publish(out)

    def _publish(self, out: Output) -> None:
        self._published = self._model.version
        metrics = {} if self._loss is None else {"loss": self._loss}
        parameters, records = self._model.parameters(), self._model.records
        out.emit(ModelSnapshot(parameters, records, metrics, self._context.epoch), tag=MODELS)

    def snapshot(self) -> dict[str, Any]:
        return {"model": self._model.state(), "published": self._published, "loss": self._loss}

    def restore(self, state: dict[str, Any]) -> None:
        self._model.restore(state["model"])
        self._published = state["published"]
        self._loss = state["loss"]


@dataclass
class EpochGradients:
    """What the workers have reported for one epoch."""

    gradients: dict[int, Gradient] = field(default_factory=dict)
    losses: dict[int, float] = field(default_factory=dict)

    def add(self, worker: int, gradient: Gradient, loss: float) -> None:
        before = self.gradients.get(worker)
        self.gradients[worker] = gradient if before is None else before + gradient
        self.losses[worker] = self.losses.get(worker, 0.0) + loss

    def total(self) -> tuple[Gradient, float]:
        workers = sorted(self.gradients)
        gradient = self.gradients[workers[0]]
        for worker in workers[1:]:
            gradient = gradient + self.gradients[worker]
        return gradient, sum(self.losses[worker] for worker in workers)

    def to_record(self) -> list[tuple[int, dict[str, Any], float]]:
        return [
            (worker, gradient.to_record(), self.losses[worker]) for worker, gradient in self.gradients.items()
        ]

    @classmethod
    def from_record(cls, record: list[tuple[int, dict[str, Any], float]]) -> EpochGradients:
        gradients = {worker: Gradient.from_record(gradient) for worker, gradient, _ in record}
        return cls(gradients, {worker: loss for worker, _, loss in record})


def check_makes_model(owner: str, make_model: Any) -> None:
    """Raise GraphError for what is no function, such as a model itself."""
    if isinstance(make_model, LinearModel) or not callable(make_model):
        raise GraphError(
            f"{owner}: expected a function that makes the model, given {shortened(make_model)}; each worker needs one "
            "of its own: write lambda: LogisticRegression(…)"
        )
    check_function(make_model, f"{owner}(model)", [])
