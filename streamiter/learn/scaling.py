"""Mean and deviation of each feature: ``StandardScaler``, and ``online_standard_scaler``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from streamiter.errors import ModelError
from streamiter.flow.flow import all_or_nothing, check_stream, step_names
from streamiter.flow.stream import Stream
from streamiter.learn.rows.examples import Floats, as_points, blaming_rows, of_good_rows
from streamiter.models.update import ModelSnapshot
from streamiter.operators.operator import Operator
from streamiter.operators.output import Output
from streamiter.operators.rejection import RejectionPolicy
from streamiter.records import Batch
from streamiter.tables import as_floats
from streamiter.topics.topic import Topic

__all__ = [
    "StandardScaler",
    "online_standard_scaler",
    "scaled",
]


class StandardScaler:
    """Learns the mean and the sample deviation of each feature, row by row or in mini-batches of any size.

    Belongs to one task. Refused rows are named in a ``BadRows``, and leave it as it was.

    >>> scaler = StandardScaler()
    >>> scaler.learn([[1.0, 5.0], [3.0, 5.0]])
    >>> scaler.parameters()["mean"].tolist(), scaler.parameters()["deviation"].round(3).tolist()
    ([2.0, 5.0], [1.414, 0.0])

    Mean and deviation of each feature, and what to do with them.
    """

    def __init__(self) -> None:
        self._records = 0
        self._mean: Floats = np.zeros(0)
        self._squares: Floats = np.zeros(0)
        """Sum of the squared distances to the mean."""

    @property
    def records(self) -> int:
        """Rows learned from so far."""
        return self._records

    def check(self, rows: npt.ArrayLike) -> Floats:
        """The rows as a matrix; raises ModelError for what could not be learned from."""
        return as_points("StandardScaler", rows, len(self._mean) if self._records else None, what="rows")

    def learn(self, rows: npt.ArrayLike) -> None:
        """Take in more rows. Source: Chan, Golub and LeVeque, "Updating formulae … sample variances" (1979)."""
        given = self.check(rows)
        if not len(given):
            return
        mean = given.mean(axis=0)
        squares = np.square(given - mean).sum(axis=0)
        if not self._records:
            self._mean, self._squares, self._records = mean, squares, len(given)
            return
        records = self._records + len(given)
        difference = mean - self._mean
        self._mean = self._mean + difference * (len(given) / records)
        self._squares = (
            self._squares + squares + np.square(difference) * (self._records * len(given) / records)
        )
        self._records = records

    def parameters(self) -> dict[str, Any]:
        """``mean`` and ``deviation``, arrays of the features; of a single row the deviation is 0."""
        if not self._records:
            raise ModelError(
                "StandardScaler: expected rows to have learned from, given none so far; learn first"
            )
        deviation = np.sqrt(self._squares / max(self._records - 1, 1))
        return {"mean": self._mean.copy(), "deviation": deviation}

    def state(self) -> dict[str, Any]:
        """All that it has learned, as plain data of its own."""
        return {"records": self._records, "mean": self._mean.copy(), "squares": self._squares.copy()}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from a :meth:`state`."""
        self._records = state["records"]
        self._mean, self._squares = state["mean"].copy(), state["squares"].copy()


def scaled(parameters: Mapping[str, Any], rows: npt.ArrayLike) -> Floats:
    """Rows (or one row) less the mean, in units of the deviation; a feature that never varied becomes 0.

    What a ``ServedModel(predict=scaled)`` answers with, and what to do before a linear model.

    >>> scaled({"mean": np.array([2.0, 5.0]), "deviation": np.array([0.5, 0.0])}, [[3.0, 5.0]]).tolist()
    [[2.0, 0.0]]
    """
    deviation = parameters["deviation"]
    differences: Floats = as_floats("scaled", "rows", rows) - parameters["mean"]
    varies = deviation > 0
    result: Floats = np.where(varies, differences / np.where(varies, deviation, 1.0), 0.0)
    return result


@all_or_nothing
def online_standard_scaler(
    rows: Stream,
    *,
    window: int = 1000,
    timeout_s: float | None = None,
    on_error: RejectionPolicy = "fail",
    dead_letter: Topic | None = None,
    name: str | None = None,
) -> Stream:
    """Mean and sample deviation of each feature, of all rows so far: a ``ModelSnapshot`` for each window.

    A row is an array or list of numbers. A window is ``window`` rows; fewer at the end of the input, and with a
    timeout ``timeout_s`` seconds after its first row came. All of it happens in one subtask. What is emitted has the
    parameters ``mean`` and ``deviation`` (see :func:`scaled`) and goes to ``publish_model``. Records that are no rows
    follow ``on_error`` or go to ``dead_letter``.

    >>> from streamiter import Flow
    >>> flow = Flow("scale")
    >>> models = online_standard_scaler(flow.from_items([[1.0], [3.0], [5.0]]), window=2).collect()
    >>> flow.run().state, [(m.records, float(m.parameters["mean"][0])) for m in models.items]
    ('finished', [(2, 2.0), (3, 3.0)])

    Mean and deviation of each feature of a stream, over everything so far: a version for each window.
    """
    check_stream("online_standard_scaler", rows, "rows")
    label = step_names(rows.flow, name)

    windows = rows.batch(window, timeout_s, parallelism=1, name=label("windows"))
    return windows.process(_ScaleWindows, name=label("scale"), on_error=on_error, dead_letter=dead_letter)


class _ScaleWindows(Operator):
    """Learns from each window and emits what came of it."""

    def __init__(self) -> None:
        self._scaler = StandardScaler()

    def process(self, window: Batch, out: Output) -> None:
        update = of_good_rows(lambda rows: blaming_rows(self._learned, rows, self._scaler.check), window, out)
        if update is not None:
            out.emit(update)

    def _learned(self, window: Any) -> ModelSnapshot:
        self._scaler.learn(window)
        return ModelSnapshot(self._scaler.parameters(), records=self._scaler.records)

    def snapshot(self) -> dict[str, Any]:
        return self._scaler.state()

    def restore(self, state: dict[str, Any]) -> None:
        self._scaler.restore(state)
