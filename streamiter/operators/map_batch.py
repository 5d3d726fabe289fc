"""A function of whole transport batches."""

from __future__ import annotations

from collections.abc import Callable

from streamiter.operators.functions import checked_batch, plain_function
from streamiter.operators.operator import Operator
from streamiter.operators.output import Output
from streamiter.records import Batch

__all__ = ["MapBatch"]


class MapBatch(Operator):
    """Emits the batch ``f(batch)``, of any length, for each transport batch.

    Where transport batches are cut carries no meaning, so ``f`` must give the same records however its
    input is cut: work on each record, or drop and add records, but do not sum over a batch. ``f`` must
    not change its batch; it may raise ``RejectRecords`` to refuse single records. It is never given an empty batch.

    Of a table of pandas, polars or Arrow that ``f`` returns the records are its rows. Raises ``FunctionResultError``
    (a ``TypeError``) where it returns something else than a table, a list, a numpy array or ``Columns``.

    >>> import numpy as np
    >>> from streamiter.operators import MapBatch, Output
    >>> out, results = Output(), []
    >>> out.connect(results.append, None)
    >>> MapBatch(np.square).process_batch(np.array([1, 2, 3]), out)
    >>> results
    [array([1, 4, 9])]
    """

    is_stateless = True

    def __init__(self, f: Callable[[Batch], Batch]) -> None:
        self._f = plain_function("MapBatch(f)", f)

    def process_batch(self, batch: Batch, out: Output) -> None:
        if len(batch):
            out.emit_batch(checked_batch("MapBatch(f)", self._f(batch)))
