"""Only the records that satisfy a predicate."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

from streamiter.operators.functions import plain_function
from streamiter.operators.operator import Operator
from streamiter.operators.output import Output
from streamiter.operators.record_loop import apply_to_each, fail_at, records_of
from streamiter.records import Batch, take

__all__ = ["Filter"]


class Filter(Operator):
    """Emits the records for which ``predicate(record)`` is true, in order, as the kind of batch they came in.

    A record for which the predicate raises follows the step's policy.

    >>> import numpy as np
    >>> from streamiter.operators import Filter, Output
    >>> out, results = Output(), []
    >>> out.connect(results.append, None)
    >>> Filter(lambda x: x > 1).process_batch(np.array([1, 2, 3]), out)
    >>> results
    [array([2, 3])]
    """

    is_stateless = True

    def __init__(self, predicate: Callable[[Any], Any]) -> None:
        self._predicate = plain_function("Filter(predicate)", predicate)

    def process_batch(self, batch: Batch, out: Output) -> None:
        if out.tolerates_rejections:
            out.emit_batch(self._kept_tolerantly(batch, out))
        else:
            out.emit_batch(self._kept(batch, out))

    def _kept(self, batch: Batch, out: Output) -> Batch:
        predicate = self._predicate
        records, progress = records_of(batch)
        try:
            if isinstance(batch, list):
                return [record for record in records if predicate(record)]
            indices = [index for index, record in enumerate(records) if predicate(record)]
        except Exception as error:
            fail_at(batch, progress, error, out)
        return batch if len(indices) == len(batch) else take(batch, indices)

    def _kept_tolerantly(self, batch: Batch, out: Output) -> Batch:
        predicate = self._predicate
        accepted, verdicts = apply_to_each(lambda record: operator.truth(predicate(record)), batch, out)
        return take(accepted, [index for index, verdict in enumerate(verdicts) if verdict])
