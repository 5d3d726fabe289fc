"""The exit: where an output stream leaves the body of an iteration."""

from __future__ import annotations

from streamiter.operators.operator import Boundary, BoundaryOutput
from streamiter.records import Batch, Control, EndOfInput

__all__ = ["Exit"]


class Exit(Boundary):
    """Passes records on without their epochs; of the control records only the end goes on."""

    hears_of_epochs = False

    async def on_batch(self, input_name: str, records: Batch, epoch: int, out: BoundaryOutput) -> None:
        out.emit_batch(records, 0)

    async def on_control(self, control: Control, out: BoundaryOutput) -> None:
        if isinstance(control, EndOfInput):
            await out.control(EndOfInput())
