"""All records to one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import reduce
from typing import Any

from streamiter.operators.copies import independent_copy
from streamiter.operators.functions import plain_function
from streamiter.operators.keyed import NO_STATE
from streamiter.operators.operator import Operator
from streamiter.operators.output import Output
from streamiter.operators.record_loop import fail_at, records_of, refuse
from streamiter.records import Batch

__all__ = ["ReduceAll"]


class ReduceAll(Operator):
    """Emits, at the end of the input, ``f(…f(f(first, second), third)…, last)``; of no records, nothing.

    ``f`` must change neither argument. A record for which it raises follows the step's policy.

    State: the value so far.

    >>> from streamiter.operators import Output, ReduceAll
    >>> out, results = Output(), []
    >>> out.connect(results.extend, None)
    >>> largest = ReduceAll(max)
    >>> largest.process_batch([3, 9, 4], out)
    >>> largest.finish(out)
    >>> out.flush()
    >>> results
    [9]
    """

    def __init__(self, f: Callable[[Any, Any], Any]) -> None:
        self._f = plain_function("ReduceAll(f)", f)
        self._value: Any = NO_STATE

    def process_batch(self, batch: Batch, out: Output) -> None:
        records, progress = records_of(batch)
        if self._value is NO_STATE:
            self._value = next(records, NO_STATE)
        if out.tolerates_rejections:
            for record in records:
                self._take_in(record, out)
            return
        try:
            self._value = reduce(self._f, records, self._value)
        except Exception as error:
            fail_at(batch, progress, error, out)

    def _take_in(self, record: Any, out: Output) -> None:
        try:
            self._value = self._f(self._value, record)
        except Exception as error:
            refuse(out, record, error)

    def finish(self, out: Output) -> None:
        if self._value is not NO_STATE:
            out.emit(self._value)
        self._value = NO_STATE

    def snapshot(self) -> list[Any]:
        return [] if self._value is NO_STATE else [independent_copy(self._value)]

    def restore(self, state: list[Any]) -> None:
        for value in state:
            self._value = independent_copy(value)

    def redistribute(self, states: Sequence[list[Any]], parallelism: int) -> list[list[Any]]:
        """The value of old subtask i becomes that of i modulo ``parallelism``, or part of it."""
        values = [
            [value for state in states[subtask::parallelism] for value in state]
            for subtask in range(parallelism)
        ]
        return [[reduce(self._f, of_subtask)] if of_subtask else [] for of_subtask in values]
