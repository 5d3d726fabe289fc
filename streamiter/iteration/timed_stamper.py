"""The timed stamper: gives the records of its subtask epochs by the clock."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from streamiter.iteration.stamping_clock import StampingClock
from streamiter.iteration.stamping_pace import GoAlong
from streamiter.operators.context import Context
from streamiter.operators.operator import Boundary, BoundaryOutput
from streamiter.records import Batch, Control, EndOfInput, EpochWatermark
from streamiter.runtime.gate_records import InputEnded

__all__ = ["TimedStamper"]


class TimedStamper(Boundary):
    """Passes records on in the epoch under way, until the clock of its step ends that."""

    gives_epochs = True

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._epoch = 0
        self._has_records = False
        """Whether some are of that epoch."""
        self._ended = False

    def open(self, context: Context) -> None:
        self._index = context.subtask_index
        self._clock: StampingClock = context.scope.get(
            ("stamping", context.name), lambda: StampingClock(context.clock, self._seconds)
        )
        self._clock.join(self._index, context.post)

    def close(self) -> None:
        self._clock.leave(self._index)

    async def on_batch(self, input_name: str, records: Batch, epoch: int, out: BoundaryOutput) -> None:
        out.emit_batch(records, self._epoch)
        self._has_records = True
        self._clock.has_records(self._epoch)

    async def on_control(self, control: Control, out: BoundaryOutput) -> None:
        if isinstance(control, GoAlong):
            self._clock.told(self._index)
            await self._complete(self._clock.last_ended, out)
        elif isinstance(control, InputEnded):
            if self._has_records:
                await self._complete(self._epoch, out)
            self._ended = True
            self._clock.leave(self._index)
        elif isinstance(control, EndOfInput):
            await out.control(EndOfInput())

    async def _complete(self, epoch: int, out: BoundaryOutput) -> None:
        if epoch >= self._epoch:
            await out.control(EpochWatermark(epoch))
            self._epoch = epoch + 1
            self._has_records = False

    def snapshot(self) -> dict[str, Any]:
        return {
            "epoch": self._epoch,
            "has records": self._has_records,
            "ended": self._ended,
            "remaining_s": self._clock.remaining_s,
        }

    def restore(self, state: dict[str, Any]) -> None:
        self._epoch = state["epoch"]
        self._has_records = state["has records"]
        self._ended = state["ended"]
        self._clock.go_on_after(self._epoch - 1, state["remaining_s"])
        if self._has_records:
            self._clock.has_records(self._epoch)
        if self._ended:
            self._clock.leave(self._index)

    @staticmethod
    def redistribute(states: Sequence[dict[str, Any]], parallelism: int) -> list[dict[str, Any]]:
        """All go on in the epoch of whoever has come furthest, until the time comes that was to come."""
        epoch = max(state["epoch"] for state in states)
        shared = {
            "epoch": epoch,
            "has records": any(state["has records"] and state["epoch"] == epoch for state in states),
            "ended": all(state["ended"] for state in states),
            "remaining_s": min(state["remaining_s"] for state in states),
        }
        return [dict(shared) for _ in range(parallelism)]
