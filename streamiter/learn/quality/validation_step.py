"""The step that validates a training: :class:`Validate` emits metrics, and warns of losses above that of the mean."""

from __future__ import annotations

import logging
import math
from typing import Any, Final, NamedTuple

import numpy as np

from streamiter.learn.losses import SquaredLoss
from streamiter.learn.quality.validation import PredictedRows, ProgressiveValidation, ValidationKind, validation_of
from streamiter.learn.rows import holds
from streamiter.operators.declared_state import NESTED, DeclaredOperator, DeclaredState, declared
from streamiter.operators.operator import Context
from streamiter.operators.output import Output
from streamiter.values.numbers import Floats

_log = logging.getLogger("streamiter.learn")

# The first rows are not compared: a model that knows nothing yet may be far off.
_ROWS_COMPARED: Final = 1_000
# A loss is far above another if it is half as large again, and for probabilities by this much more, since the loss of
# the mean is near 0 where all labels are equal.
_FAR_ABOVE: Final = 1.5
_LOG_LOSS_MORE: Final = 0.05
# Numbers that differ by at most this part of them are equal, and no loss is compared with 0.
_ROUNDING: Final = 1e-12


class TrainingAdvice(NamedTuple):
    """What the warnings of a training say to check, by the names with which the user has configured it.

    >>> TrainingAdvice(labels="learn.label").labels
    'learn.label'
    """

    rows: str = "check label=, extract= and key_of="
    """If labels or features may belong to other rows."""
    rate: str = (
        "leave out model= in train_online: its own model needs no scaling and no learning rate; or give model= a "
        "smaller rate and scaler=StandardScaler()"
    )
    """If columns may have very different scales, or the learning rate may be too high."""
    labels: str = "label=, or target_of= and is_answer="
    """If all labels are equal."""


def warn_of_loss(step: str, found: tuple[int, float, float], advice: TrainingAdvice) -> None:
    """Tell what :meth:`MeanComparison.far_above` has found."""
    _log.warning(
        "step %r: the loss of the last %d predictions is %.3g, and would be %.3g if each of them were the mean of all "
        "labels so far. Usual reasons: labels or features belong to other rows (%s); columns have very different "
        "scales, or the learning rate is too high (%s); or labels depend on features in a way that changes faster than "
        "the model learns",
        step,
        *found,
        advice.rows,
        advice.rate,
    )


class MeanComparison(DeclaredState):
    """Compares predictions with the predictions of a model that always predicts the mean of all targets so far.

    It looks at 1,000 rows at a time, from the second thousand on. The mean of classes is the share of each class.
    """

    _count = declared(0)
    """The number of rows of this thousand."""
    _loss = declared(0.0)
    """The sum of their losses."""
    _recent: Floats = declared(np.zeros(1))
    """Their sums: the weight of each class; or weight, targets and squared targets, measured from the first."""
    _all: Floats = declared(np.zeros(1))
    """The same sums of all rows."""
    _first: float | None = declared(None)
    """The first target; sums of squares lose the digits of numbers such as 1,700,000,000 that hardly differ."""
    _is_told = declared(False)

    def far_above(
        self, rows: PredictedRows, loss: float, *, together: int = _ROWS_COMPARED
    ) -> tuple[int, float, float] | None:
        """Count rows and the sum of their losses; as soon as they are as many as ``together``, compare them.

        When the loss is far above the loss of the mean for the first time, return the number of rows and both losses.
        """
        kind, weights = rows["task"], rows["weights"]
        if self._is_told or not np.count_nonzero(weights):
            return None
        self._count += len(weights)
        self._loss += loss
        self._recent = _added(self._recent, self._sums(rows))
        if self._count < together:
            return None
        is_first = not np.count_nonzero(self._all)
        self._all = _added(self._all, self._recent)
        of_mean, more = self._loss_of_mean(kind)
        weight = float(self._recent[0] if kind == "regression" else self._recent.sum())
        found = (self._count, self._loss / weight, of_mean / weight)
        self._is_told = not is_first and self._loss > _FAR_ABOVE * of_mean + more * weight
        self._count, self._loss, self._recent = 0, 0.0, np.zeros(1)
        return found if self._is_told else None

    def _sums(self, rows: PredictedRows) -> Floats:
        targets, weights = rows["targets"], rows["weights"]
        if rows["task"] != "regression":
            classes = rows["classes"] if rows["task"] == "classes" else targets.astype(np.intp)
            return np.bincount(classes, weights).astype(np.float64)
        if self._first is None:
            self._first = float(targets[0])
        distances = targets - self._first
        return np.array([np.add.reduce(weights), weights @ distances, weights @ np.square(distances)])

    def _loss_of_mean(self, kind: ValidationKind) -> tuple[float, float]:
        """Return the sum of the losses of the mean, and the difference that does not count, for each row."""
        if kind == "regression":
            weight, total, squares = self._recent.tolist()
            mean = float(self._all[1] / self._all[0])
            of_mean = 0.5 * (squares - 2.0 * mean * total + mean * mean * weight)
            are_equal = of_mean <= weight * (_ROUNDING * (self._first or 0.0)) ** 2
            return of_mean, math.inf if are_equal else 0.0
        there = np.flatnonzero(self._recent)
        shares = self._all[there] / self._all.sum()
        return -float(self._recent[there] @ np.log(shares)), _LOG_LOSS_MORE


def _added(first: Floats, second: Floats) -> Floats:
    """Return the sum of two vectors, where a number that one of them does not have is 0."""
    if len(first) == len(second):
        return first + second
    total = np.zeros(max(len(first), len(second)))
    total[: len(first)] = first
    total[: len(second)] += second
    return total


# The calls of numpy take most of the time that it takes to count a mini-batch alone.
_COUNTED_TOGETHER: Final = 10
# In 10,000 rows even rare labels occur. A stream that ends is often a trial of a program, and short.
_ROWS_WITH_SEVERAL_LABELS: Final = 10_000
_ROWS_OF_A_TRIAL: Final = 100


class Validate(DeclaredOperator):
    """Progressive validation as a step: reads predictions with targets, emits metrics every ``report_every`` rows.

    With ``report_every_s`` it emits them this many seconds after the first new row instead. The last metrics are
    emitted at the end of the input. A model that is much worse than the mean of its targets is reported once, as a
    warning of the logger ``streamiter.learn``.
    """

    _has_timer = declared(False)
    _since_report = declared(0)
    _validation: ProgressiveValidation | None = declared(None, form=NESTED)
    """None before the first predictions, which tell their kind."""
    _comparison = declared(made=MeanComparison, form=NESTED)

    def __init__(
        self,
        *,
        window: int,
        report_every: int,
        report_every_s: float | None = None,
        advice: TrainingAdvice | None = None,
    ) -> None:
        self._advice = advice or TrainingAdvice()
        self._window = window
        self._report_every = report_every
        self._report_every_s = report_every_s
        self._held: list[PredictedRows] = []
        """The mini-batches that are not counted yet; the sums do not depend on which of them are counted together."""
        self._may_be_equal = True

    def open(self, context: Context) -> None:
        self._context, self._name = context, context.name

    def process(self, rows: PredictedRows, out: Output) -> None:
        """Count the predictions of one mini-batch, together with others."""
        if self._validation is None:
            self._validation = validation_of(rows["task"], rows.get("loss"), self._window)
        elif self._validation.kind != rows["task"]:
            self._count_held()
            self._follow_kind(self._validation, rows)
            self._comparison = MeanComparison()
        # A prediction that is refused ends the job with its own mini-batch.
        is_alone = not (math.isfinite(np.add.reduce(rows["predictions"])) and holds(rows["weights"] > 0.0))
        if is_alone or (self._held and ("classes" in self._held[0]) != ("classes" in rows)):
            self._count_held()
        self._held.append(rows)
        if is_alone or len(self._held) == _COUNTED_TOGETHER:
            self._count_held()
        self._since_report += len(rows["predictions"])
        if self._report_every_s is None:
            if self._since_report >= self._report_every:
                self._report(out)
        elif not self._has_timer:
            self._has_timer = True
            self._context.set_timer(self._report_every_s)

    def _follow_kind(self, validation: ProgressiveValidation, rows: PredictedRows) -> None:
        """Follow another kind of predictions: labels were not what they seemed, or an earlier model is back."""
        if validation.kind == "classification":
            self._validation = validation.continued_as(rows["task"], rows.get("earlier_targets", (0.0, 1.0)))
            return
        self._validation = validation_of(rows["task"], rows.get("loss"), self._window)
        message = (
            "step %r: predictions were of the kind %s, and are of the kind %s now, as after a rollback to an earlier "
            "version; metrics count the rows from here on"
        )
        _log.warning(message, self._name, validation.kind, rows["task"])

    def _count_held(self) -> None:
        if self._held:
            assert self._validation is not None
            held, self._held = self._held, []
            for rows, loss in zip(held, self._validation.count_batches(held), strict=True):
                self._compare(rows, loss)

    def _compare(self, rows: PredictedRows, loss: float) -> None:
        """Warn of a loss that is far above the loss of the mean."""
        if "loss" in rows:
            loss = SquaredLoss().total(rows["predictions"], rows["targets"], rows["weights"])
        if rows.get("is_mean", True) and (found := self._comparison.far_above(rows, loss)) is not None:
            warn_of_loss(self._name, found, self._advice)

    def on_timer(self, payload: object, out: Output) -> None:
        """Emit the metrics that are due."""
        self._has_timer = False
        self._report(out)

    def _report(self, out: Output, *, expected_rows: int = _ROWS_WITH_SEVERAL_LABELS) -> None:
        if self._validation is not None and self._since_report:
            self._count_held()
            self._since_report = 0
            metrics = self._validation.metrics()
            out.emit(metrics)
            if self._may_be_equal and metrics["count"] >= expected_rows:
                self._may_be_equal = False
                if metrics.get("baseline_loss") == 0.0:
                    _log.warning(
                        "step %r: expected several labels, given %d equal ones, from which nothing is learned; check "
                        "%s",
                        self._name,
                        metrics["count"],
                        self._advice.labels,
                    )

    def finish(self, out: Output) -> None:
        self._report(out, expected_rows=_ROWS_OF_A_TRIAL)

    def snapshot(self) -> dict[str, Any]:
        self._count_held()
        return super().snapshot()

    def restore(self, state: dict[str, Any]) -> None:
        if (validation := state["validation"]) is not None:
            self._validation = validation_of(validation["kind"], validation["loss"], self._window)
        super().restore(state)
