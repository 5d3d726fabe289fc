"""Epochs on unbounded data: groups of records, each followed by its epoch watermark."""

from __future__ import annotations

from typing import Any

from streamiter.errors import GraphError
from streamiter.flow.graph_checks import user_line
from streamiter.flow.stream import Stream
from streamiter.operators.operator import Boundary, BoundaryOutput
from streamiter.records import Batch, Control, EndOfInput, EpochWatermark, slice_batch
from streamiter.runtime.gate import InputEnded
from streamiter.runtime.graph import Step

__all__ = ["Stamper", "epochs_every"]


def epochs_every(stream: Stream, *, records: int, name: str | None = None) -> Stream:
    """Stamp a stream with epochs: of each subtask's records the first ``records`` get epoch 0, the next 1, …

    Each group is followed in-band by its ``EpochWatermark``, so that in an unbounded iteration the
    listeners' callbacks work on endless input. The last group may be smaller.

    Raises GraphError inside an iteration body.
    """
    if not isinstance(stream, Stream):
        raise GraphError(f"epochs_every: expected a stream, given {stream!r}")
    if isinstance(records, bool) or not isinstance(records, int) or records < 1:
        raise GraphError(f"epochs_every: expected records of at least 1, given {records!r}")
    flow = stream.flow
    if flow.loop is not None or stream.loop is not None:
        raise GraphError(
            f"epochs_every: expected a stream outside an iteration body, given {stream.name!r} inside; "
            "stamp the data stream before it is passed to the iteration"
        )
    label = name or "epochs_every"
    return flow.add_step(
        Step(
            name=flow.unique_name(label, named=name is not None),
            parallelism=stream.parallelism,
            where=user_line(),
            factory=lambda: Stamper(records),
            inputs=stream.edges(),
            named=name is not None,
            bounded=stream.is_bounded,
            stamped=True,
            shape="iteration",
        )
    )


class Stamper(Boundary):
    """Counts records and cuts batches where an epoch ends."""

    def __init__(self, records: int) -> None:
        self._records = records
        self._epoch = 0
        self._count = 0

    async def on_batch(self, input_name: str, records: Batch, epoch: int, out: BoundaryOutput) -> None:
        start, length = 0, len(records)
        while start < length:
            stop = min(length, start + self._records - self._count)
            out.emit_batch(slice_batch(records, start, stop), self._epoch)
            self._count += stop - start
            start = stop
            if self._count == self._records:
                await self._complete(out)

    async def on_control(self, control: Control, out: BoundaryOutput) -> None:
        if isinstance(control, InputEnded) and self._count:
            await self._complete(out)
        elif isinstance(control, EndOfInput):
            await out.control(EndOfInput())

    async def _complete(self, out: BoundaryOutput) -> None:
        await out.control(EpochWatermark(self._epoch))
        self._epoch += 1
        self._count = 0

    def snapshot(self) -> dict[str, Any]:
        return {"epoch": self._epoch, "count": self._count}

    def restore(self, state: dict[str, Any]) -> None:
        self._epoch = state["epoch"]
        self._count = state["count"]
