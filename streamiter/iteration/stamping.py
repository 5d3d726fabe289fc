"""Epochs on unbounded data: groups of records, each followed by its epoch watermark."""

from __future__ import annotations

from typing import Any

from streamiter.errors import GraphError
from streamiter.flow.stream import Stream
from streamiter.iteration.stamping_pace import GoAlong, StampingPace
from streamiter.operators.context import Context
from streamiter.operators.operator import Boundary, BoundaryOutput
from streamiter.records import Batch, Control, EndOfInput, EpochWatermark, Idle, slice_batch
from streamiter.runtime.gate_records import InputEnded
from streamiter.runtime.graph import Step
from streamiter.user_code import user_line

__all__ = ["Stamper", "epochs_every"]


def epochs_every(stream: Stream, *, records: int, name: str | None = None) -> Stream:
    """Stamp a stream with epochs: of each subtask's records the first ``records`` get epoch 0, the next 1, …

    Each group is followed in-band by its ``EpochWatermark``, so that in an unbounded iteration the
    listeners' callbacks work on endless input. The last group may be smaller. A subtask that no partition
    belongs to goes along with the others; if it is given one later, its records begin in the epoch after
    those that all the others have completed.

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
    """Counts records and cuts batches where an epoch ends; without input it goes along with the others."""

    def __init__(self, records: int) -> None:
        self._records = records
        self._epoch = 0
        self._count = 0
        self._idle = False
        self._ended = False

    def open(self, context: Context) -> None:
        self._context = context
        self._index = context.subtask_index
        self._pace: StampingPace = context.scope.get(
            ("stamping", context.name), lambda: StampingPace(context.parallelism)
        )

    async def on_batch(self, input_name: str, records: Batch, epoch: int, out: BoundaryOutput) -> None:
        if self._idle:
            self._idle = False
            self._pace.goes_on(self._index, self._epoch - 1)
        start, length = 0, len(records)
        while start < length:
            stop = min(length, start + self._records - self._count)
            out.emit_batch(slice_batch(records, start, stop), self._epoch)
            self._count += stop - start
            start = stop
            if self._count == self._records:
                await self._complete(out)

    async def on_control(self, control: Control, out: BoundaryOutput) -> None:
        if isinstance(control, (InputEnded, Idle)) and self._count:
            await self._complete(out)
        if isinstance(control, InputEnded):
            self._ended = True
            self._pace.has_ended(self._index, self._epoch - 1)
        elif isinstance(control, Idle):
            self._idle = True
            self._pace.is_idle(self._index, self._context.post)
        elif isinstance(control, GoAlong):
            await self._go_along(out)
        elif isinstance(control, EndOfInput):
            await out.control(EndOfInput())

    async def _complete(self, out: BoundaryOutput) -> None:
        await out.control(EpochWatermark(self._epoch))
        self._pace.has_completed(self._index, self._epoch)
        self._epoch += 1
        self._count = 0

    async def _go_along(self, out: BoundaryOutput) -> None:
        reached = self._pace.told(self._index)
        if self._idle and not self._ended and reached >= self._epoch:
            await out.control(EpochWatermark(reached))
            self._epoch = reached + 1

    def snapshot(self) -> dict[str, Any]:
        return {"epoch": self._epoch, "count": self._count, "ended": self._ended}

    def restore(self, state: dict[str, Any]) -> None:
        self._epoch = state["epoch"]
        self._count = state["count"]
        self._ended = state["ended"]
        (self._pace.has_ended if self._ended else self._pace.has_completed)(self._index, self._epoch - 1)
