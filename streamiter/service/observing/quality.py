"""How good a model is: :class:`ModelQuality` has the reports of validation, drifts, and fields that have shifted."""

from __future__ import annotations

import logging
import math
from collections import Counter, deque
from dataclasses import dataclass
from typing import Any, Final, Literal

from streamiter.learn.quality.field_watch import FieldReport
from streamiter.values.field_profiles import ComparedField
from streamiter.values.helpers.clock import Clock

_log = logging.getLogger("streamiter.service")

FIELDS_SHOWN_MAX: Final = 50
_FIELDS_NAMED: Final = 10
# Each is a mark in the chart of the page.
DRIFTS_MAX: Final = 100
# Fewer rows say little about a model; and a model of labels that nothing predicts is as good as their mean, not better.
_JUDGED_ROWS: Final = 1_000
_WORSE: Final = 1.02


@dataclass(frozen=True, slots=True)
class ValidationReport:
    """Metrics of progressive validation."""

    at_ms: int
    metrics: dict[str, float]
    """See :class:`~streamiter.learn.ProgressiveValidation`."""


@dataclass(frozen=True, slots=True)
class QualityNow:
    """The quality of predictions that were made before learning, over the newest rows."""

    measure: Literal["log loss", "RMSE", "loss"]
    loss: float | None
    baseline: float | None
    """The loss of always predicting the mean of the same labels."""
    auc: float | None
    rows: float | None
    """The number of rows in this window."""
    at_ms: int

    @property
    def is_worse(self) -> bool:
        """Whether always predicting the mean of the labels would clearly have been better."""
        if self.loss is None or self.baseline is None or (self.rows or 0.0) < _JUDGED_ROWS:
            return False
        return self.loss > _WORSE * self.baseline


@dataclass(frozen=True, slots=True)
class DriftFound:
    """A drift that a detector has found."""

    at_ms: int
    row: int
    """The number of labelled rows until then."""
    old_loss: float
    new_loss: float
    detector: str


@dataclass(frozen=True, slots=True)
class WatchedWindow:
    """The fields of the last window of rows, compared with the reference."""

    at_ms: int
    shifted: int
    """The number of fields that have shifted."""
    count: int
    """The number of fields that are watched."""
    report: FieldReport
    """The fields that have moved most come first; at most 50."""


def _moved(field: ComparedField) -> tuple[int, float, float]:
    """Return how much a field has moved, to sort by."""
    of_limit = (field["psi"] or 0.0) / (field["psi_limit"] or 1.0)
    return len(field["shifted"]), of_limit, abs(field["missing"] - field["missing_before"])


class ModelQuality:
    """The quality of the predictions of a process that learns, and what has changed in its data.

    ``reports`` is how many reports of validation are kept.
    """

    def __init__(self, clock: Clock, reports: int) -> None:
        self._clock = clock
        self.reports: deque[ValidationReport] = deque(maxlen=reports)
        """One each second, oldest first."""
        self._worse_since_ms: int | None = None
        """Since when all reports have told that predictions are worse than the mean of the labels."""
        self.drifts: deque[DriftFound] = deque(maxlen=DRIFTS_MAX)
        self.drift_counts: Counter[str] = Counter()
        """The number of drifts by detector, since the start of the process."""
        self.window: WatchedWindow | None = None
        """The last window of rows whose fields were compared; None before the first one."""
        self.window_counts: Counter[bool] = Counter()
        """The number of windows since the start of the process, by whether a field had shifted."""

    @property
    def now(self) -> QualityNow | None:
        """The quality of the newest predictions; None before the first report."""
        return quality_of(self.reports[-1]) if self.reports else None

    @property
    def worse_s(self) -> float:
        """For how many seconds reports have told that predictions are worse than the mean of the labels."""
        since_ms = self._worse_since_ms
        return 0.0 if since_ms is None or not self.reports else (self.reports[-1].at_ms - since_ms) / 1000

    def forget(self) -> None:
        """Forget what is true only while the process learns."""
        self.reports.clear()
        self._worse_since_ms = self.window = None

    def reported(self, metrics: dict[str, float]) -> None:
        """Note a report of progressive validation; of several in a second the last one is kept."""
        report = ValidationReport(self._clock.now_ms(), metrics)
        if self.reports and report.at_ms // 1000 == self.reports[-1].at_ms // 1000:
            self.reports.pop()
        self.reports.append(report)
        if not quality_of(report).is_worse:
            self._worse_since_ms = None
        elif self._worse_since_ms is None:
            self._worse_since_ms = report.at_ms

    def shifted(self, event: Any) -> None:
        """Note a ``DriftEvent`` or a ``FieldReport``."""
        (self.drifted if "detector" in event else self.watched)(event)

    def drifted(self, event: Any) -> None:
        """Note a ``DriftEvent``."""
        self.drifts.append(DriftFound(self._clock.now_ms(), **event))
        self.drift_counts[event["detector"]] += 1

    def watched(self, report: FieldReport) -> None:
        """Note a report; the log names the fields that have shifted, where these are others than before."""
        fields = sorted(report["fields"], key=_moved, reverse=True)
        shifted = {each["field"]: each["shifted"] for each in fields if each["shifted"]}
        before = (
            [] if self.window is None else [each["field"] for each in self.window.report["fields"] if each["shifted"]]
        )
        shown: FieldReport = {**report, "fields": fields[:FIELDS_SHOWN_MAX]}
        self.window = WatchedWindow(self._clock.now_ms(), len(shifted), len(fields), shown)
        self.window_counts[bool(shifted)] += 1
        if new := [f"{field!r} ({', '.join(shifted[field])})" for field in shifted if field not in before]:
            _log.warning("fields have other values than in the reference: %s", ", ".join(new[:_FIELDS_NAMED]))


def quality_of(report: ValidationReport) -> QualityNow:
    """Return the quality over the window of a report.

    >>> quality_of(ValidationReport(0, {"window_loss": 2.0, "window_mae": 1.0})).loss
    2.0
    """
    metrics = report.metrics
    loss, baseline = metrics.get("window_loss"), metrics.get("window_baseline_loss")
    measure: Literal["log loss", "RMSE", "loss"] = "loss" if "window_mae" in metrics else "log loss"
    squared = metrics.get("window_squared_error")
    # The loss of numbers is half of the squared error, unless the settings name another one.
    if measure == "loss" and (squared is None or loss is None or math.isclose(2.0 * loss, squared, rel_tol=1e-9)):
        loss, baseline = (None if each is None else (2.0 * each) ** 0.5 for each in (loss, baseline))
        measure = "RMSE"
    return QualityNow(measure, loss, baseline, metrics.get("window_auc"), metrics.get("window_count"), report.at_ms)
