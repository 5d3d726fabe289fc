"""One record out for each record in."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from streamiter.operators.functions import plain_function
from streamiter.operators.operator import Operator
from streamiter.operators.output import Output
from streamiter.operators.record_loop import apply_to_each
from streamiter.records import Batch

__all__ = ["Map"]


class Map(Operator):
    """Emits ``f(record)`` for each record, in order, as lists.

    A record for which ``f`` raises follows the step's policy.

    >>> from streamiter.operators import Map, Output
    >>> out, results = Output(), []
    >>> out.connect(results.extend, None)
    >>> Map(lambda x: 10 * x).process_batch([1, 2, 3], out)
    >>> results
    [10, 20, 30]
    """

    is_stateless = True

    def __init__(self, f: Callable[[Any], Any]) -> None:
        self._f = plain_function("Map(f)", f)

    def process_batch(self, batch: Batch, out: Output) -> None:
        _, results = apply_to_each(self._f, batch, out)
        out.emit_batch(results)
