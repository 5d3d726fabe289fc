"""Mini-batches of examples with the columns they need, prepared once and learned from in every pass.

A mini-batch is plain data. Of sparse rows it names the columns that are there, ascending, and its rows count these
columns only: that is what is pulled and pushed.

>>> rows = SparseRows.from_rows([([7, 2], [1.0, 3.0]), ([7], [2.0])], width=1_000_000)
>>> mini_batch = prepared(CheckedExamples(rows, np.array([0.0, 1.0])), intercept=True)
>>> mini_batch["columns"].tolist(), rows_of(mini_batch).to_dense().tolist()
([2, 7, 1000000], [[3.0, 1.0], [0.0, 2.0]])
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from streamiter.learn.rows.examples import CheckedExamples
from streamiter.learn.rows.feature_rows import Rows
from streamiter.learn.rows.good_rows import blaming_rows, of_good_rows
from streamiter.operators.operator import Operator
from streamiter.operators.output import Output
from streamiter.records import Batch
from streamiter.sparse_rows import SparseRows

__all__ = ["MiniBatch", "Prepare", "prepared", "rows_of"]

MiniBatch = dict[str, Any]
"""``rows``, ``targets``, ``weights`` (or None), and ``columns`` of the matrix (None: all of them)."""


def prepared(examples: CheckedExamples, *, intercept: bool) -> MiniBatch:
    """Examples as a mini-batch; the column of the intercept is the one behind the features."""
    rows: Any = examples.rows
    columns = None
    if isinstance(rows, SparseRows):
        columns, places = np.unique(rows.indices, return_inverse=True)
        rows = {"indptr": rows.indptr, "indices": places, "values": rows.values, "width": len(columns)}
        columns = columns.astype(np.int64)
        if intercept:
            columns = np.append(columns, np.int64(examples.rows.width))  # type: ignore[union-attr]
    return {"rows": rows, "columns": columns, "targets": examples.targets, "weights": examples.weights}


def rows_of(mini_batch: MiniBatch) -> Rows:
    """The rows: dense, or sparse rows of the columns that are there."""
    rows = mini_batch["rows"]
    return SparseRows(**rows) if isinstance(rows, dict) else rows


class Prepare(Operator):
    """Makes mini-batches of lists of records; rows that are no examples follow the policy of the step."""

    def __init__(self, checked: Callable[[Any], CheckedExamples], *, intercept: bool) -> None:
        self._checked = checked
        self._intercept = intercept

    def process(self, records: Batch, out: Output) -> None:
        examples = of_good_rows(lambda rows: blaming_rows(self._checked, rows, self._checked), records, out)
        if examples is not None and len(examples):
            out.emit(prepared(examples, intercept=self._intercept))
