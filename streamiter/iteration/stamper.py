"""The stamper: gives the records of its subtask epochs as they come, by their number or at marks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from streamiter.iteration.epoch_groups import Groups
from streamiter.iteration.silence import Silence, SilenceDue
from streamiter.iteration.stamping_pace import GoAlong, StampingPace
from streamiter.operators.context import Context
from streamiter.operators.operator import Boundary, BoundaryOutput
from streamiter.records import Batch, Control, EndOfInput, EpochWatermark, Idle
from streamiter.runtime.gate_records import InputEnded

__all__ = ["Stamper"]


class Stamper(Boundary):
    """Cuts batches where an epoch ends; without input it goes along with the others.

    Without input is who no partition belongs to, and who nothing has come to for ``idle_timeout_s``. What is
    posted to it is handled before what is in its channels: when data comes, it has gone along as far as the
    others have come, and when its input ends, nothing that was posted is still to come.
    """

    gives_epochs = True

    def __init__(self, groups: Groups, idle_timeout_s: float | None) -> None:
        self._groups = groups
        self._idle_timeout_s = idle_timeout_s
        self._epoch = 0
        self._count = 0
        """Records of that epoch."""
        self._idle = False
        self._ended = False

    def open(self, context: Context) -> None:
        self._step = context.name
        self._index = context.subtask_index
        self._post = context.post
        self._pace: StampingPace = context.scope.get(
            ("stamping", context.name), lambda: StampingPace(context.parallelism)
        )
        self._silence = Silence(context, self._idle_timeout_s)
        self._silence.begin()

    def close(self) -> None:
        self._silence.stop()

    async def on_batch(self, input_name: str, records: Batch, epoch: int, out: BoundaryOutput) -> None:
        if self._idle:
            self._wake_up()
        self._silence.broken()
        for piece, ends_epoch in self._groups.cut(records, self._count, self._step):
            if len(piece):
                out.emit_batch(piece, self._epoch)
                self._count += len(piece)
            if ends_epoch:
                await self._complete(out)

    async def on_control(self, control: Control, out: BoundaryOutput) -> None:
        if isinstance(control, InputEnded):
            await self._end(out)
        elif isinstance(control, Idle):
            await self._fall_idle(out)
        elif isinstance(control, SilenceDue):
            if self._silence.has_lasted():
                await self._fall_idle(out)
        elif isinstance(control, GoAlong):
            self._pace.told(self._index)
            await self._go_along(self._pace.reached, out)
        elif isinstance(control, EndOfInput):
            await out.control(EndOfInput())

    async def _complete(self, out: BoundaryOutput) -> None:
        await out.control(EpochWatermark(self._epoch))
        self._pace.has_completed(self._index, self._epoch)
        self._epoch += 1
        self._count = 0

    async def _end(self, out: BoundaryOutput) -> None:
        self._silence.stop()
        if self._count:
            await self._complete(out)
        self._ended = True
        self._pace.has_ended(self._index, self._epoch - 1)

    async def _fall_idle(self, out: BoundaryOutput) -> None:
        self._silence.stop()
        if self._count:
            await self._complete(out)
        self._idle = True
        self._pace.is_idle(self._index, self._post)

    def _wake_up(self) -> None:
        self._idle = False
        self._pace.goes_on(self._index, self._epoch - 1)
        self._silence.begin()

    async def _go_along(self, reached: int, out: BoundaryOutput) -> None:
        if reached >= self._epoch:
            await out.control(EpochWatermark(reached))
            self._epoch = reached + 1

    def snapshot(self) -> dict[str, Any]:
        return {"epoch": self._epoch, "count": self._count, "idle": self._idle, "ended": self._ended}

    def restore(self, state: dict[str, Any]) -> None:
        self._epoch = state["epoch"]
        self._count = state["count"]
        self._idle = state["idle"]
        self._ended = state["ended"]
        self._pace.has_completed(self._index, self._epoch - 1)
        if self._ended:
            self._pace.has_ended(self._index, self._epoch - 1)
        elif self._idle:
            self._pace.is_idle(self._index, self._post)
        if self._ended or self._idle:
            self._silence.stop()

    @staticmethod
    def redistribute(states: Sequence[dict[str, Any]], parallelism: int) -> list[dict[str, Any]]:
        """All go on in the epoch of whoever has come furthest: nothing comes late, and groups begin anew."""
        epoch = max(state["epoch"] for state in states)
        ended = all(state["ended"] for state in states)
        return [{"epoch": epoch, "count": 0, "idle": False, "ended": ended} for _ in range(parallelism)]
