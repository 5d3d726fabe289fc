"""One result of all subtasks for each epoch."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

from streamiter.flow.algorithms import all_or_nothing
from streamiter.flow.graph_checks import check_function
from streamiter.flow.stream import Stream
from streamiter.iteration.checks import check_body_stream
from streamiter.operators.context import Context
from streamiter.operators.operator import IterationListener, Operator
from streamiter.operators.output import Output

__all__ = ["ReduceEpoch", "all_reduce"]


@all_or_nothing
def all_reduce(
    stream: Stream, f: Callable[[Any, Any], Any] = operator.add, *, name: str | None = None
) -> Stream:
    """At the end of each epoch that brought records, ``f`` over all of them: one record, to all subtasks.

    ``f(result, record)`` gives a new result (numbers and arrays are added unless said otherwise). First the records of
    each subtask are reduced in their order, then the subtasks' results in theirs, so that sums of floating-point
    numbers do not depend on who is faster. In the body of an iteration whose data has epochs.

    Raises GraphError for what is no stream of a body or no function.

    >>> import numpy as np
    >>> from streamiter import Flow, IterationBodyResult, iterate_bounded_streams_until_termination
    >>> flow = Flow("sum")
    >>> def body(variables, data):
    ...     sums = all_reduce(data[0])
    ...     return IterationBodyResult([variables[0]], [sums.filter(lambda _: True)])
    >>> numbers = flow.from_items(np.arange(10), parallelism=2)
    >>> [sums] = iterate_bounded_streams_until_termination([flow.from_items([])], [numbers], body)
    >>> collected = sums.collect()
    >>> flow.run().state, collected.items
    ('finished', [np.int64(45)])
    """
    check_body_stream(stream, "all_reduce(stream)")
    check_function(f, "all_reduce", ["result", "record"], step=name)

    def make_parts() -> ReduceEpoch:
        return ReduceEpoch(f)

    def make_whole() -> ReduceEpoch:
        return ReduceEpoch(f, of_subtasks=True)

    make_parts.__name__ = "all_reduce parts"
    make_whole.__name__ = "all_reduce"
    parts = stream.process(make_parts, name=f"{name} parts" if name else None)
    return parts.process(make_whole, name=name, parallelism=1).broadcast()


class ReduceEpoch(Operator, IterationListener):
    """Reduces the records of each epoch; emits in its callback (subtask, result), or of such pairs the result."""

    def __init__(self, f: Callable[[Any, Any], Any], *, of_subtasks: bool = False) -> None:
        self._f = f
        self._of_subtasks = of_subtasks
        self._results: dict[int, dict[int, Any]] = {}
        """By epoch and subtask."""

    def open(self, context: Context) -> None:
        self._context = context

    def process(self, record: Any, out: Output) -> None:
        results = self._results.setdefault(self._context.epoch or 0, {})
        subtask, value = record if self._of_subtasks else (self._context.subtask_index, record)
        results[subtask] = self._f(results[subtask], value) if subtask in results else value

    def on_epoch_watermark_incremented(self, epoch_watermark: int, context: Context, out: Output) -> None:
        self._emit(self._results.pop(epoch_watermark, {}), out)

    def on_iteration_terminated(self, context: Context, out: Output) -> None:
        for epoch in sorted(self._results):
            self._emit(self._results[epoch], out)
        self._results = {}

    def _emit(self, results: dict[int, Any], out: Output) -> None:
        if not results:
            return
        if not self._of_subtasks:
            [(subtask, result)] = results.items()
            out.emit((subtask, result))
            return
        subtasks = sorted(results)
        total = results[subtasks[0]]
        for subtask in subtasks[1:]:
            total = self._f(total, results[subtask])
        out.emit(total)

    def snapshot(self) -> list[tuple[int, list[tuple[int, Any]]]]:
        return [(epoch, list(results.items())) for epoch, results in self._results.items()]

    def restore(self, state: list[tuple[int, list[tuple[int, Any]]]]) -> None:
        self._results = {epoch: dict(results) for epoch, results in state}
