"""Mean and deviation of each feature of a stream, over everything so far: a version for each window."""

from __future__ import annotations

from typing import Any

from streamiter.flow.algorithms import all_or_nothing, check_stream, step_names
from streamiter.flow.stream import Stream
from streamiter.learn.rows.good_rows import blaming_rows, of_good_rows
from streamiter.learn.scaling.scaler import StandardScaler
from streamiter.models.update import ModelSnapshot
from streamiter.operators.operator import Operator
from streamiter.operators.output import Output
from streamiter.operators.rejection import RejectionPolicy
from streamiter.records import Batch
from streamiter.topics.topic import Topic

__all__ = ["online_standard_scaler"]


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
    """
    check_stream("online_standard_scaler", rows, "rows")
    label = step_names(rows.flow, name)

    windows = rows.batch(window, timeout_s, parallelism=1, name=label("windows"))
    return windows.process(_Scale, name=label("scale"), on_error=on_error, dead_letter=dead_letter)


class _Scale(Operator):
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
