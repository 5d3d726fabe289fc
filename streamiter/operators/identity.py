"""Pass everything on."""

from __future__ import annotations

from streamiter.operators.operator import Operator
from streamiter.operators.output import Output
from streamiter.records import Batch

__all__ = ["Identity"]


class Identity(Operator):
    """Passes batches on as they are: for steps that only re-partition, union or name a stream."""

    is_stateless = True

    def process_batch(self, batch: Batch, out: Output) -> None:
        out.emit_batch(batch)
