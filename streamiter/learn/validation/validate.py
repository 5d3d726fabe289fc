"""Progressive validation as a step: predictions in, metrics out."""

from __future__ import annotations

from typing import Any, Literal

from streamiter.learn.validation.progressive import ProgressiveValidation
from streamiter.operators.operator import Operator
from streamiter.operators.output import Output

__all__ = ["Validate"]


class Validate(Operator):
    """Counts what workers predicted before they learned; emits the metrics every ``report_every`` rows.

    The last metrics come at the end of the input.
    """

    def __init__(
        self, kind: Literal["classification", "regression"], *, window: int, report_every: int
    ) -> None:
        self._validation = ProgressiveValidation(window=window, kind=kind)
        self._report_every = report_every
        self._since_report = 0

    def process(self, rows: dict[str, Any], out: Output) -> None:
        """Count some predictions."""
        self._validation.update(rows["predictions"], rows["targets"], rows["weights"])
        self._since_report += len(rows["predictions"])
        if self._since_report >= self._report_every:
            self._since_report = 0
            out.emit(self._validation.metrics())

    def finish(self, out: Output) -> None:
        if self._since_report:
            out.emit(self._validation.metrics())

    def snapshot(self) -> dict[str, Any]:
        return {"validation": self._validation.state(), "since report": self._since_report}

    def restore(self, state: dict[str, Any]) -> None:
        self._validation.restore(state["validation"])
        self._since_report = state["since report"]
