"""Only the records that a mask selects."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import compress
from typing import Any

import numpy as np
import numpy.typing as npt

from streamiter.operators.functions import FunctionResultError, plain_function
from streamiter.operators.operator import Operator
from streamiter.operators.output import Output
from streamiter.operators.rejection import shortened
from streamiter.records import Batch, Columns, take

__all__ = ["FilterBatch"]

Mask = npt.NDArray[np.bool_]


class FilterBatch(Operator):
    """Emits the records where the mask ``f(batch)`` is true, in order, as the kind of batch they came in.

    ``f`` gives one boolean for each record, as an array or a list. It may raise ``RejectRecords`` to
    refuse single records.

    Raises ``FunctionResultError`` (a ``TypeError``) where the mask is anything else.

    >>> import numpy as np
    >>> from streamiter.operators import FilterBatch, Output
    >>> from streamiter.records import Columns
    >>> out, results = Output(), []
    >>> out.connect(results.extend, None)
    >>> clicks = Columns({"user": ["ann", "bob"], "price": [3, 0]})
    >>> FilterBatch(lambda batch: batch["price"] > 0).process_batch(clicks, out)
    >>> results
    [{'user': np.str_('ann'), 'price': np.int64(3)}]
    """

    is_stateless = True

    def __init__(self, f: Callable[[Batch], Mask | Sequence[bool]]) -> None:
        self._f = plain_function("FilterBatch(f)", f)

    def process_batch(self, batch: Batch, out: Output) -> None:
        if not len(batch):
            return
        mask = _checked_mask(self._f(batch), len(batch))
        if mask.all():
            out.emit_batch(batch)
        elif isinstance(batch, (np.ndarray, Columns)):
            out.emit_batch(take(batch, np.flatnonzero(mask)))
        else:
            out.emit_batch(list(compress(batch, mask)))


def _checked_mask(result: Any, length: int) -> Mask:
    mask = np.asarray(result) if isinstance(result, (list, np.ndarray)) else None
    if mask is None or mask.dtype != np.bool_ or mask.shape != (length,):
        given = type(result).__name__ if mask is None else f"{mask.dtype} of shape {mask.shape}"
        raise FunctionResultError(
            f"FilterBatch(f): expected one boolean for each of the {length} records, given {given}: "
            f"{shortened(result)}; compare, as in batch['price'] > 0"
        )
    return mask
