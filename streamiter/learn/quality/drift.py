"""Drift: detectors that say when the loss of a learner rises, because the relation that it learned no longer holds.

A detector watches the progressive loss of single rows: each row is predicted before it is learned from. Its memory does
not grow, and it does not depend on how rows are cut into batches. :class:`ADWIN` compares all older parts of a window
with the newer rest; :class:`PageHinkley` adds up how far values are above their mean.
"""

from __future__ import annotations

import abc
import math
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Final, NamedTuple, Self, TypedDict

import numpy as np
import numpy.typing as npt

from streamiter.learn.quality.validation import PredictedRows, ValidationKind
from streamiter.learn.rows import refuse_rows_unless
from streamiter.models.saved_objects import Savable
from streamiter.operators.declared_state import COPIED, DeclaredState, declared
from streamiter.operators.output import Output
from streamiter.values.helpers.compiled import saying_that_it_compiles
from streamiter.values.numbers import Floats, checked_number, whole_number
from streamiter.values.records import OutputTag
from streamiter.values.tables import as_floats


class MeanChange(NamedTuple):
    """A change of the mean of the values."""

    position: int
    """The position of the value at which the change was found, among the values of one call."""
    old_mean: float
    """The mean of the values before the change."""
    new_mean: float
    """The mean of the values since the change."""


class DriftDetector(DeclaredState, Savable, abc.ABC):
    """Watches numbers for a change of their mean. Its state fits a detector with other settings, too."""

    name: ClassVar[str]

    def __init__(self, **settings: float) -> None:
        from streamiter.learn.quality import drift_steps

        self._steps = drift_steps
        self._settings: dict[str, Any] = {
            setting: self._checked_setting(setting, given) for setting, given in settings.items()
        }
        with saying_that_it_compiles(f"the arithmetic of {self.name}"):
            self.watch(np.zeros(0))

    @abc.abstractmethod
    def watch(self, values: npt.ArrayLike) -> list[MeanChange]:
        """Add values, in their order; return the changes that were found.

        Raises ``BadRows`` for values that are not finite; then none was added.
        """

    def new(self) -> Self:
        """Return a detector with the same settings, which has seen no values."""
        return type(self)(**self._settings)

    def _checked(self, values: npt.ArrayLike) -> Floats:
        checked = np.atleast_1d(as_floats(self.name, "values", values))
        refuse_rows_unless(np.isfinite(checked), self.name, "finite values", checked)
        return checked

    def _checked_setting(self, setting: str, given: float) -> float:
        option = f"{self.name}({setting}=)"
        if (bounds := _BOUNDS.get(setting)) is None:
            return whole_number(option, given, 1)
        return checked_number(option, given, *bounds)


_BOUNDS: Final[Mapping[str, tuple[str, Callable[[float], bool]]]] = {
    "confidence": ("a probability above 0 and below 1", lambda given: 0.0 < given < 1.0),
    "threshold": ("a number above 0", lambda given: 0.0 < given < math.inf),
    "allowance": ("a number of 0 or more", lambda given: 0.0 <= given < math.inf),
    "memory": ("a factor above 0, at most 1", lambda given: 0.0 < given <= 1.0),
}
"""For each setting that is not a count, what is expected."""


class ADWIN(DriftDetector):
    """A window that grows while its mean is constant, and drops its oldest values when the mean changes.

    Every ``check_every`` values the detector parts the window at about 5·log2(n/5) places, for n values, and compares
    the means of the older and the newer part. If they differ by more than chance explains at ``confidence``, the mean
    has changed; the older part of the clearest difference is dropped. A smaller ``confidence`` means fewer false alarms
    and longer delays. The values may have any unit. The memory is 9 KB.

    Source: Bifet and Gavaldà, "Learning from Time-Changing Data with Adaptive Windowing" (2007): ADWIN2, with the
    range of the values in the bound of Bernstein. The parts have at least five values and count four fewer, as in MOA
    and river. River's ``ADWIN`` drops the whole window; up to the first change, values of 0 and 1 give the same result.

    >>> [change] = ADWIN().watch([0.0, 0.2] * 500 + [0.4, 0.8] * 500)
    >>> change.position, round(change.old_mean, 2), round(change.new_mean, 2)
    (1023, 0.1, 0.6)
    """

    name = "ADWIN"

    _seen = declared(0)
    _buckets: Floats = declared(form=COPIED)
    _lengths: npt.NDArray[np.intp] = declared(form=COPIED)

    def __init__(self, *, confidence: float = 0.01, check_every: int = 32) -> None:
        from streamiter.learn.quality.drift_steps import BUCKETS, LEVELS

        self._buckets = np.zeros((LEVELS, BUCKETS + 1, 4))
        self._lengths = np.zeros(LEVELS, dtype=np.intp)
        super().__init__(confidence=confidence, check_every=check_every)

    @property
    def width(self) -> int:
        """The number of values in the window."""
        return int(self._steps.whole_window(self._buckets, self._lengths)[0])

    def watch(self, values: npt.ArrayLike) -> list[MeanChange]:
        checked, check_every = self._checked(values), self._settings["check_every"]
        changes = np.empty((len(checked) // check_every + 1, 3))
        found = self._steps.adwin(
            checked, self._settings["confidence"], check_every, self._seen, self._buckets, self._lengths, changes
        )
        self._seen += len(checked)
        return _changes(changes[:found])


class PageHinkley(DriftDetector):
    """Adds up how far values are above their mean; a sum that has risen by ``threshold`` is a rise of the mean.

    The sum grows by the distance of each value to the mean of all values since the last rise, less ``allowance``, and
    is multiplied by ``memory``. From ``rows_min`` values on it is compared with its minimum; a :class:`MeanChange` has
    the means before and since that minimum. The detector finds no rise that is smaller than ``allowance``, and no fall.
    ``threshold`` and ``allowance`` are in the unit of the values, and their defaults are for values from 0 to 1.

    Source: Page, "Continuous Inspection Schemes" (1954); the sum is that of river's ``PageHinkley(mode="up")``.

    >>> [(rise.position, round(rise.old_mean, 2)) for rise in PageHinkley().watch([0.0, 0.2] * 500 + [0.4, 0.8] * 500)]
    [(1025, 0.1)]
    """

    name = "PageHinkley"

    _test: Floats = declared(made=lambda: np.zeros(6), form=COPIED)

    def __init__(
        self, *, threshold: float = 10.0, allowance: float = 0.1, memory: float = 0.9999, rows_min: int = 30
    ) -> None:
        super().__init__(threshold=threshold, allowance=allowance, memory=memory, rows_min=rows_min)

    def watch(self, values: npt.ArrayLike) -> list[MeanChange]:
        checked = self._checked(values)
        changes = np.empty((len(checked), 3))
        settings = (self._settings[name] for name in ("threshold", "allowance", "memory", "rows_min"))
        found = self._steps.page_hinkley(checked, *settings, self._test, changes)
        return _changes(changes[:found])


def _changes(found: Floats) -> list[MeanChange]:
    return [MeanChange(int(position), old, new) for position, old, new in found.tolist()]


# ---- a learner under watch


class DriftEvent(TypedDict):
    """A drift, as ``train_online(…).drifts`` emits it."""

    row: int
    """The number of rows that were predicted and had their label when the drift was found."""
    old_loss: float
    """The mean loss before the drift; :class:`DriftWatch` says in which unit."""
    new_loss: float
    """The mean loss since the drift, larger than ``old_loss``."""
    detector: str
    """The name of the detector: ``"ADWIN"`` or ``"PageHinkley"``."""


DRIFTS: Final = OutputTag("drifts")
"""The side output of a learner: each :class:`DriftEvent`."""


class DriftWatch(DeclaredState, Savable):
    """Watches the loss of each prediction that a learner makes, and counts drifts: changes to a larger mean loss.

    The loss is from 0 to 1, because one row of a large log loss would hide a change of all others: the squared error of
    probabilities (of the true class, for classes), or the squared error of numbers as a share of the variance of all
    targets so far, at most 1. A row counts once, whatever its weight; a row of weight 0, or without a finite
    prediction, does not count.

    >>> watch = DriftWatch(ADWIN())
    >>> sure = np.full(1_000, 0.9)
    >>> right, wrong = ({"task": "classification", "predictions": sure, "targets": np.full(1_000, target),
    ...                  "weights": np.ones(1_000)} for target in (1.0, 0.0))
    >>> watch.add(right), [drift["row"] for drift in watch.add(wrong)], watch.metrics()
    ([], [1024], {'drifts': 1, 'rows_since_drift': 976})
    """

    _rows = declared(0)
    _drifts = declared(0)
    _row_of_drift = declared(0)
    _scale: Floats = declared(made=lambda: np.zeros(3), form=COPIED)
    """The number of targets, their mean and their sum of squared deviations; only for numbers."""
    _are_numbers: bool | None = declared(None)

    def __init__(self, detector: DriftDetector) -> None:
        from streamiter.learn.quality import drift_steps

        self._losses_of_numbers = drift_steps.losses_of_numbers
        self._detector = detector.new()
        with saying_that_it_compiles("the losses of numbers"):
            self._losses("regression", np.zeros(0), np.zeros(0))

    def add(self, rows: PredictedRows) -> list[DriftEvent]:
        """Add the rows of a mini-batch, in their order; return the drifts that were found."""
        are_numbers = rows["task"] == "regression"
        if self._are_numbers not in (None, are_numbers):
            # Labels that seemed to be classes are numbers. Their loss has another unit, which is no drift.
            self._detector = self._detector.new()
        self._are_numbers = are_numbers
        counts = (rows["weights"] > 0.0) & np.isfinite(rows["predictions"])
        losses = self._losses(rows["task"], rows["predictions"][counts], rows["targets"][counts])
        drifts: list[DriftEvent] = [
            {
                "row": self._rows + change.position + 1,
                "old_loss": change.old_mean,
                "new_loss": change.new_mean,
                "detector": self._detector.name,
            }
            for change in self._detector.watch(losses)
            if change.new_mean > change.old_mean
        ]
        self._rows += len(losses)
        if drifts:
            self._drifts += len(drifts)
            self._row_of_drift = drifts[-1]["row"]
        return drifts

    def tell(self, rows: PredictedRows, out: Output) -> bool:
        """Add the rows of a mini-batch, and emit the drifts that were found; return whether there were any."""
        drifts = self.add(rows)
        for drift in drifts:
            out.emit(drift, tag=DRIFTS)
        return bool(drifts)

    def _losses(self, task: ValidationKind, predictions: Floats, targets: Floats) -> Floats:
        if task == "regression":
            losses = np.empty(len(targets))
            self._losses_of_numbers(predictions, targets, self._scale, losses)
            return losses
        errors: Floats = predictions - (1.0 if task == "classes" else targets)
        return errors * errors

    def metrics(self) -> dict[str, float]:
        """Return the number of ``drifts``, and ``rows_since_drift``: rows since the last drift, or the start."""
        return {"drifts": self._drifts, "rows_since_drift": self._rows - self._row_of_drift}

    def state(self) -> dict[str, Any]:
        """Return a copy of the counts and of the detector's state, as plain data."""
        return super().state() | {"detector": self._detector.name, "detector state": self._detector.state()}

    def restore(self, state: Mapping[str, Any] | None) -> None:
        """Restore a :meth:`state`; a detector of another kind keeps the counts, and has seen no values.

        None, of a learner that was not watched, changes nothing.
        """
        if state is None:
            return
        super().restore(state)
        if state["detector"] == self._detector.name:
            self._detector.restore(state["detector state"])
