"""Progressive validation: each prediction is made before the model learns from its row, then compared with the target.

:class:`ProgressiveValidation` counts predictions and returns metrics. ``streamiter.learn.quality.validation_step`` does
so as a step of a flow.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Final, Literal, NotRequired, TypedDict

import numpy as np
import numpy.typing as npt

from streamiter.errors import ConfigurationError, ModelError, OtherModel
from streamiter.learn.losses import (
    PROBABILITY_FLOOR,
    LinearLoss,
    LogLoss,
    PlainLoss,
    SquaredLoss,
    loss_of_plain,
    plain_loss,
)
from streamiter.learn.quality.score_metrics import (
    Calibration,
    CalibrationBin,
    LastRows,
    ScoreHistogram,
    area_under_curve,
    calibration_of,
    weights_of_classes,
)
from streamiter.learn.rows import holds, refuse_rows_unless, row_vector, row_weights
from streamiter.models.saved_objects import Savable
from streamiter.operators.declared_state import COPIED, NESTED, DeclaredState, Form, declared
from streamiter.values.numbers import Array, Floats, Indices, one_of
from streamiter.values.records import OutputTag

ValidationKind = Literal["classification", "classes", "regression"]
"""The kind of predictions: probabilities of target 1, probabilities of the true class, or numbers."""

_NAME: Final = "ProgressiveValidation"

# The sums of weight, loss, squared error, rows that are right, absolute error, right rows of target 1, rows that are
# predicted as 1 or have target 1, targets, and φ of the targets (`LinearLoss.generated`). A sum that the kind does not
# need is 0.
_SUMS: Final = 9
_WEIGHT, _LOSS, _SQUARES, _CORRECT, _DISTANCE, _BOTH, _ONES, _TARGETS, _GENERATED = range(_SUMS)


class ProgressiveValidation(DeclaredState, Savable):
    """Metrics of predictions, over all rows so far and over the last ``window`` rows.

    ``kind="classification"``: predictions are probabilities of target 1, targets are 0 or 1. ``kind="regression"``:
    both are any finite numbers. ``kind="classes"``: predictions are the probability of the true class of each row,
    targets are 1 where that class was the most probable one. ``metrics()`` contains these metrics, with rows multiplied
    by their sample weights:

    - ``count``: the number of rows, and ``weight``: the sum of their weights,
    - ``loss``: the mean log loss (probabilities clipped at 1e-15), or the mean of half the squared error,
    - ``squared_error``: the mean squared error, and ``rmse``: its root,
    - ``mae``: the mean absolute error, for regression only,
    - ``accuracy``: the share of rows whose prediction and target are on the same side of ½ (½ itself counts as 1),
      not for regression,
    - ``f1``: the harmonic mean of precision and recall of target 1, where predictions of ½ and more count as 1, for
      classification only,
    - ``ece``: the expected calibration error, for classification only: the mean distance between predictions and
      targets within the bins of :meth:`calibration` (Naeini et al. 2015, "Obtaining Well Calibrated Probabilities
      Using Bayesian Binning"),
    - ``auc``: the probability that a row of target 1 has a higher prediction than a row of target 0, for
      classification only,
    - ``baseline_loss``: the loss of the best constant prediction for all rows: the mean target, or the share of each
      class. For quantiles and Huber's loss there is only ``window_baseline_loss``.

    and the same metrics of the window as ``window_…``. A metric that is not defined (yet) is left out, such as ``auc``
    before both targets have arrived. ``loss`` is another loss for ``kind="regression"``, such as ``QuantileLoss(0.9)``.

    All metrics are exact except ``auc``, which comes from a fixed histogram of scores; its error is mostly below 2e-4.
    Memory does not grow: 32 bytes for each row of the window, and half a MB. A row of weight 0 does not count.

    >>> validation = ProgressiveValidation(window=100)
    >>> validation.update([0.9, 0.2, 0.6, 0.4], [1, 0, 0, 1])
    >>> metrics = validation.metrics()
    >>> metrics["count"], metrics["auc"], round(metrics["loss"], 3), metrics["window_accuracy"]
    (4, 0.75, 0.54, 0.5)
    """

    _first: float | None = declared(None)
    """The first target; sums of squares lose the digits of numbers such as 1,700,000,000 that hardly differ."""
    _of_class: Floats | None = declared(made=lambda: np.zeros(0), form=COPIED)
    """The weight of the rows of each class; None if their numbers are not given."""
    _count = declared(0)
    _sums: Floats = declared(made=lambda: np.zeros(_SUMS), form=COPIED)
    _scores: ScoreHistogram | None = declared(form=NESTED)
    _calibration: Calibration | None = declared(form=NESTED)
    _window: LastRows = declared(form=Form(LastRows.rows))

    def __init__(
        self, *, window: int = 10_000, kind: ValidationKind = "classification", loss: LinearLoss | None = None
    ) -> None:
        if window < 1:
            raise ConfigurationError(f"{_NAME}(window=): expected 1 row or more, given {window}")
        one_of(f"{_NAME}(kind=)", kind, "classification", "classes", "regression")
        if loss is not None and (kind != "regression" or loss.task != "regression"):
            raise ConfigurationError(
                f'{_NAME}(loss=): expected a loss of numbers with kind="regression", given {loss!r} with {kind!r}'
            )
        self.kind: ValidationKind = kind
        self.loss: LinearLoss = loss or (SquaredLoss() if kind == "regression" else LogLoss())
        self._scores = ScoreHistogram() if kind == "classification" else None
        self._calibration = Calibration() if kind == "classification" else None
        self._window = LastRows(window)

    def update(
        self,
        predictions: npt.ArrayLike,
        targets: npt.ArrayLike,
        sample_weights: npt.ArrayLike | None = None,
        *,
        classes: npt.ArrayLike | None = None,
    ) -> None:
        """Count these rows. If it raises a :class:`~streamiter.errors.ModelError`, no row was counted.

        ``classes`` are the numbers of the true classes, from 0 on; for ``kind="classes"`` only, for the baseline.
        """
        self.count_rows(predictions, targets, sample_weights, classes)

    def count_rows(
        self,
        predictions: npt.ArrayLike,
        targets: npt.ArrayLike,
        sample_weights: npt.ArrayLike | None,
        classes: npt.ArrayLike | None = None,
    ) -> float:
        """:meth:`update`, and return the sum of the losses of these rows, each multiplied by its weight."""
        rows = self._checked(predictions, targets, sample_weights, classes)
        return float(self._counted(rows, has_classes=classes is not None) @ rows[2])

    def count_batches(self, batches: Sequence[PredictedRows]) -> list[float]:
        """Count the rows of mini-batches together, which takes a tenth of the time; return the losses of each one.

        If there are several, no row has the weight 0.
        """
        fields = [name for name in ("predictions", "targets", "weights", "classes") if name in batches[0]]
        rows = self._checked(*(np.concatenate([each[name] for each in batches]) for name in fields))
        losses, first, sums = self._counted(rows, has_classes="classes" in fields), 0, []
        for each in batches:
            own = slice(first, first + len(each["predictions"]))
            sums.append(float(losses[own] @ rows[2, own]))
            first = own.stop
        return sums

    def _counted(self, rows: Floats, *, has_classes: bool) -> Floats:
        """Count rows that were checked, and return their losses."""
        if not rows.shape[1]:
            return np.zeros(0)
        self._count += rows.shape[1]
        if self._first is None:
            # φ of a shifted target belongs to the squared loss only.
            self._first = float(rows[1, 0]) if isinstance(self.loss, SquaredLoss) else 0.0
        if self.kind == "classes" and self._of_class is not None:
            self._of_class = weights_of_classes(self._of_class, rows) if has_classes else None
        losses, log_odds = self._losses(rows)
        self._sums = self._added(rows, losses, self._sums)
        if self._scores and self._calibration:
            self._calibration.add(rows[:3])
            self._scores.add(log_odds=log_odds, targets=rows[1], weights=rows[2])
        self._window.add(rows)
        return losses

    def metrics(self) -> dict[str, float]:
        """Return the metrics by name; the class describes them."""
        metrics = self._means(self._count, self._sums, self._area(), self._calibration)
        rows = self._window.rows()
        sums = self._added(rows, self._losses(rows)[0]) if rows.shape[1] else np.zeros(_SUMS)
        area = area_under_curve(*rows[:3]) if self._scores else None
        calibration = calibration_of(rows[:3]) if self._scores else None
        window = self._means(rows.shape[1], sums, area, calibration)
        if rows.shape[1]:
            _, targets, weights, _ = rows
            metrics |= self._baseline(self._sums, self._of_class)
            if self.kind == "classes":
                window |= self._baseline(
                    sums, None if self._of_class is None else weights_of_classes(np.zeros(0), rows)
                )
            else:
                constant = np.full(rows.shape[1], self.loss.best_constant(targets, weights))
                window["baseline_loss"] = self.loss.total(constant, targets, weights) / window["weight"]
        return metrics | {f"window_{name}": value for name, value in window.items()}

    def _baseline(self, sums: Floats, of_class: Floats | None) -> dict[str, float]:
        """Return the loss of the best constant prediction by its name; empty if sums do not tell it."""
        weight = sums[_WEIGHT]
        if self.kind == "classes":
            if of_class is None:
                return {}
            shares = of_class[of_class > 0.0] / weight
            return {"baseline_loss": -float(shares @ np.log(shares))}
        mean = self.loss.generated(np.array([sums[_TARGETS] / weight]))
        return {} if mean is None else {"baseline_loss": float(max(sums[_GENERATED] / weight - mean[0], 0.0))}

    def continued_as(
        self, kind: ValidationKind, earlier_targets: tuple[float, float] = (0.0, 1.0)
    ) -> ProgressiveValidation:
        """Return the validation of the same rows, if their kind is not the kind that it seemed: no row is lost.

        The targets 0 and 1 were the two ``earlier_targets``: numbers, or numbers of classes. A probability of the
        second one is also a prediction of a number, and the probability of a class.

        >>> seemed = ProgressiveValidation()
        >>> seemed.update([0.9, 0.2], [1, 0])
        >>> numbers = seemed.continued_as("regression")
        >>> numbers.update([2.5], [3.0])
        >>> numbers.metrics()["count"], round(numbers.metrics()["mae"], 3)
        (3, 0.267)
        """
        if self.kind != "classification":
            raise ModelError(f"{_NAME}.continued_as: expected kind classification, given {self.kind}")
        other = ProgressiveValidation(window=self._window.size, kind=kind)
        other._count, other._sums = self._count, self._sums.copy()
        other._window.add(rows_as(kind, self._window.rows(), earlier_targets))
        negative, positive = earlier_targets
        weight, ones = self._sums[[_WEIGHT, _TARGETS]].tolist()
        if kind == "regression":
            width = positive - negative
            other._first = negative
            other._sums[[_SQUARES, _DISTANCE, _TARGETS]] *= [width * width, width, width]
            other._sums[_LOSS] = other._sums[_SQUARES] / 2.0
            other._sums[_GENERATED] = width * width * ones / 2.0
        else:
            other._of_class = np.zeros(int(max(earlier_targets)) + 1)
            other._of_class[[int(negative), int(positive)]] = [weight - ones, ones]
        return other

    def calibration(self, *, window: bool = False) -> list[CalibrationBin]:
        """Return the reliability table of all rows, or of the window: ten bins by ascending prediction.

        Raises ``ModelError`` for another kind than classification.

        >>> validation = ProgressiveValidation()
        >>> validation.update([0.11, 0.19, 0.97], [0, 1, 1])
        >>> [tuple(each) for each in validation.calibration() if each.weight]
        [(0.1, 2.0, 0.15, 0.5), (0.9, 1.0, 0.97, 1.0)]
        """
        if self._calibration is None:
            raise ModelError(f"{_NAME}.calibration: expected kind classification, given {self.kind}")
        if window:
            return calibration_of(self._window.rows()[:3]).table()
        return self._calibration.table()

    def state(self) -> dict[str, Any]:
        """Return a copy of all sums and of the window as plain data."""
        return super().state() | {"kind": self.kind, "loss": plain_loss(self.loss)}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restore a :meth:`state` of the same kind; a smaller window takes the last rows of the old one."""
        if state.get("kind") != self.kind:
            raise OtherModel(f"{_NAME}.restore: expected a state of {self.kind}, given {state.get('kind')!r}")
        super().restore(state)

    def _checked(
        self,
        predictions: npt.ArrayLike,
        targets: npt.ArrayLike,
        sample_weights: npt.ArrayLike | None,
        classes: npt.ArrayLike | None = None,
    ) -> Floats:
        """Return predictions, targets, weights and classes as rows of one array; rows of weight 0 are left out."""
        checked_targets = row_vector(_NAME, "targets", targets, np.size(targets))
        count = len(checked_targets)
        checked = row_vector(_NAME, "predictions", predictions, count)
        self.loss.check_targets(_NAME, checked_targets)
        is_probability = self.kind != "regression"
        good = (checked >= 0.0) & (checked <= 1.0) if is_probability else np.isfinite(checked)
        expected = "probabilities from 0 to 1" if is_probability else "finite predictions"
        refuse_rows_unless(good, _NAME, expected, checked)
        numbers = np.zeros(count)
        if classes is not None:
            numbers = row_vector(_NAME, "classes", classes, count)
            refuse_rows_unless((numbers >= 0.0) & (numbers == np.floor(numbers)), _NAME, "numbers of classes", numbers)
        weights = np.ones(count) if sample_weights is None else row_weights(_NAME, sample_weights, count)
        rows, counts = np.stack([checked, checked_targets, weights, numbers]), weights > 0.0
        return rows if counts.all() else rows[:, counts]

    def _losses(self, rows: Floats) -> tuple[Floats, Floats]:
        """Return the losses of the rows, and for classification the log odds of the predictions."""
        predictions, targets, _, _ = rows
        if self.kind != "classification":
            return self.loss.values(predictions, np.ones_like(targets) if self.kind == "classes" else targets), targets
        clipped = np.clip(predictions, PROBABILITY_FLOOR, 1.0 - PROBABILITY_FLOOR)
        logs, logs_against = np.log(clipped), np.log1p(-clipped)
        return -(targets * logs + (1.0 - targets) * logs_against), logs - logs_against

    def _added(self, rows: Floats, losses: Floats, sums: Floats | None = None) -> Floats:
        """Return the sums with these rows added to them; of the window alone, which has only those for its metrics."""
        predictions, targets, weights, _ = rows
        of_all, is_regression = sums is not None, self.kind == "regression"
        distances = (1.0 if self.kind == "classes" else targets) - predictions
        terms: dict[int, Array] = {_LOSS: losses, _SQUARES: np.square(distances)}
        if of_all or is_regression:
            terms[_DISTANCE] = np.abs(distances)
        counts: dict[int, Array] = {_WEIGHT: np.broadcast_to(1.0, len(weights))}
        if self.kind == "classes":
            counts[_CORRECT] = targets
        elif self.kind == "classification":
            chosen = predictions >= 0.5
            counts |= {_CORRECT: chosen == (targets == 1.0), _BOTH: chosen * targets, _ONES: chosen + targets}
            counts[_TARGETS] = targets  # φ of 0 and of 1 is 0.
        elif of_all:
            shifted = targets - (self._first or 0.0)
            if (generated := self.loss.generated(shifted)) is not None:
                terms |= {_TARGETS: shifted, _GENERATED: generated}
        is_squared = is_regression and isinstance(self.loss, SquaredLoss)
        if is_squared:
            del terms[_LOSS]
        added = _sums_with(terms, counts, weights, np.zeros(_SUMS) if sums is None else sums)
        if is_squared:
            added[_LOSS] = added[_SQUARES] / 2.0
        return added

    def _means(self, count: int, sums: Floats, area: float | None, calibration: Calibration | None) -> dict[str, float]:
        weight, loss, squares, correct, distance, both, ones, _, _ = sums.tolist()
        if not count:
            return {"count": 0, "weight": 0.0}
        squared_error = squares / weight
        means: dict[str, float] = {
            "count": count,
            "weight": weight,
            "loss": loss / weight,
            "squared_error": squared_error,
            "rmse": math.sqrt(squared_error),
        }
        if self.kind == "regression":
            means["mae"] = distance / weight
        else:
            means["accuracy"] = correct / weight
        if calibration:
            means["f1"] = 2.0 * both / ones if ones else math.nan
            means["ece"] = calibration.error()
        if area is not None:
            means["auc"] = area
        return {name: value for name, value in means.items() if not math.isnan(value)}

    def _area(self) -> float | None:
        return self._scores.area_under_curve() if self._scores else None


def _sums_with(terms: Mapping[int, Array], counts: Mapping[int, Array], weights: Floats, sums: Floats) -> Floats:
    """Return sums, by place, with these terms of each row added to them, and counts of whole numbers.

    They are added row after row: numpy's sum adds in pairs, so its result would depend on the cuts of batches. Only
    whole numbers have the same sum in any order.
    """
    added = np.zeros(len(sums))
    if holds(weights == 1.0) and holds(sums[[*counts]] % 1.0 == 0.0):
        for place, term in counts.items():
            added[place] = sums[place] + np.sum(term)
    else:
        terms = {**terms, **counts}
    places = list(terms)
    # Each addition waits for the one before. The two parts of complex numbers do not wait for each other.
    weighted = np.zeros((len(weights), 2))
    for first in range(0, len(places), 2):
        both = places[first : first + 2]
        for part, place in enumerate(both):
            np.multiply(terms[place], weights, out=weighted[:, part])
            weighted[0, part] += sums[place]
        in_pairs = weighted.view(np.complex128)[:, 0]
        np.cumsum(in_pairs, out=in_pairs)
        added[both] = weighted[-1, : len(both)]
    return added


PREDICTIONS: Final = OutputTag("predictions")
"""The side output of a learner: predictions that were made before learning, as :class:`PredictedRows`."""


class PredictedRows(TypedDict):
    """The rows of a mini-batch with the predictions that were made before learning from them, in their order.

    :meth:`ProgressiveValidation.update` takes the three arrays, which have a number for each row. Rows that were
    refused are not in them, nor numbers that ``AdaptiveLinearModel`` was asked for before it knew any.
    """

    task: ValidationKind
    """The ``kind`` of a ``ProgressiveValidation`` for these rows."""
    predictions: Floats
    """The probability of target 1 ("classification"), the number ("regression"), or the probability that was predicted
    for the true class ("classes")."""
    targets: Floats
    """0 or 1, the number, or for "classes" 1 where the true class was the most probable one, else 0."""
    weights: Floats
    """The sample weights; 1 where none are given."""
    classes: NotRequired[Indices]
    """For "classes" the number of the true class of each row."""
    labels: NotRequired[list[Any]]
    """For "classes" the labels of the classes that have come so far, by number. For "classification", if labels are no
    truth values, the labels of the targets 0 and 1: predictions are the probability of the second label."""
    probabilities: NotRequired[Floats]
    """For "classes" the probability of each class for each row, a matrix (rows, classes) in the order of ``labels``. If
    it has one column more, the last is the probability of a class that had not come yet. A class that came after the
    prediction has the probability 0."""
    numbers: NotRequired[Indices]
    """The number of each row's record, or answer, in the stream (in its subtask), from 0 on, ascending. If records of a
    mini-batch are refused before, the numbers of its other rows may be smaller by their count. For late labels it is
    the number of the event with which, or just before which, the label was known."""
    questions: NotRequired[Indices]
    """For late labels the number of each row's question in the stream."""
    loss: NotRequired[PlainLoss]
    """The loss of numbers, if it is not the squared one."""
    earlier_targets: NotRequired[tuple[float, float]]
    """If earlier rows may be of a "classification", since their labels were only two: the numbers, or the numbers of
    the classes, that the targets 0 and 1 stood for."""
    is_mean: NotRequired[bool]
    """False for predictions that are no means of targets, such as quantiles."""


def rows_as(kind: ValidationKind, rows: Floats, earlier_targets: tuple[float, float]) -> Floats:
    """Return rows of a classification as rows of another kind: predictions, targets, weights, classes, and more."""
    changed = rows.copy()
    predictions, targets = rows[:2]
    negative, positive = earlier_targets
    if kind == "regression":
        changed[:2] = negative + (positive - negative) * rows[:2]
    else:
        changed[0] = np.where(targets == 1.0, predictions, 1.0 - predictions)
        changed[1] = (predictions >= 0.5) == (targets == 1.0)
        changed[3] = np.where(targets == 1.0, positive, negative)
    return changed


def validation_of(kind: ValidationKind, loss: PlainLoss | None, window: int) -> ProgressiveValidation:
    """Return the validation of predictions of this kind, with their loss."""
    return ProgressiveValidation(window=window, kind=kind, loss=None if loss is None else loss_of_plain(loss))


def loss_of(rows: PredictedRows) -> float:
    """Return the sum of the losses, as :class:`ProgressiveValidation` counts them, multiplied by the weights."""
    loss = loss_of_plain(rows.get("loss")) if rows["task"] == "regression" else LogLoss()
    targets = np.ones_like(rows["targets"]) if rows["task"] == "classes" else rows["targets"]
    return loss.total(rows["predictions"], targets, rows["weights"])
