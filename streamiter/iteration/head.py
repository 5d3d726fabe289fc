"""The head: where a variable stream enters the loop, and where its feedback comes back."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from streamiter.iteration.coordinator import Advance, LoopCoordinator, Release, Terminate
from streamiter.iteration.epoch_counts import EpochCounts
from streamiter.operators.context import Context
from streamiter.operators.operator import Boundary, BoundaryOutput
from streamiter.records import Batch, Control, DataBatch, EndOfData, EndOfInput, EpochWatermark
from streamiter.runtime.epochs_aside import EpochsAside
from streamiter.runtime.gate import InputEnded
from streamiter.runtime.plan import Surroundings

__all__ = ["FEEDBACK", "INITIAL", "Head"]

INITIAL = "initial"
FEEDBACK = "feedback"


class Head(Boundary):
    """Passes on initial variables and feedback, holding feedback that has run too far ahead.

    ``max_epochs_ahead`` None: nothing is held.
    """

    def __init__(
        self, coordinator_of: Callable[[Context], LoopCoordinator], max_epochs_ahead: int | None
    ) -> None:
        self._coordinator_of = coordinator_of
        self._max_epochs_ahead = max_epochs_ahead
        self._released = -1
        self._counts = EpochCounts()
        self._held: EpochsAside | None = None

    def attach(self, surroundings: Surroundings) -> None:
        self._surroundings = surroundings

    def open(self, context: Context) -> None:
        self._coordinator = self._coordinator_of(context)
        feedback = self._surroundings.feedback_channels
        self._index = self._coordinator.register_head(context.post, feedback)
        if self._max_epochs_ahead is not None:
            self._held = EpochsAside(self._surroundings.make_spill_queue)

    async def on_batch(self, input_name: str, records: Batch, epoch: int, out: BoundaryOutput) -> None:
        if input_name == FEEDBACK:
            self._counts.add(epoch, len(records))
            self._coordinator.feedback_handled()
            if self._held is not None and epoch > self._released + (self._max_epochs_ahead or 0):
                self._held.put(0, DataBatch(records, epoch))
                return
        out.emit_batch(records, epoch)

    async def on_control(self, control: Control, out: BoundaryOutput) -> None:
        if isinstance(control, InputEnded):
            if control.input_name == INITIAL:
                self._coordinator.head_received(self._index, 0, 0)
        elif isinstance(control, EpochWatermark):
            self._coordinator.head_received(self._index, control.epoch, self._counts.take(control.epoch))
        elif isinstance(control, EndOfData):
            self._coordinator.head_finished(self._index)
        elif isinstance(control, Release):
            self._release(control.epoch, out)
        elif isinstance(control, Advance):
            await out.control(EpochWatermark(control.epoch))
        elif isinstance(control, Terminate):
            await out.control(EndOfInput(control.epoch))

    def _release(self, epoch: int, out: BoundaryOutput) -> None:
        self._released = epoch
        if self._held is not None:
            for _, batch in self._held.take(epoch + (self._max_epochs_ahead or 0)):
                out.emit_batch(batch.records, batch.epoch)

    def close(self) -> None:
        if self._held is not None:
            self._held.close()

    def snapshot(self) -> dict[str, Any]:
        return {
            "released": self._released,
            "counts": self._counts.snapshot(),
            "held": [] if self._held is None else self._held.snapshot(),
        }

    def restore(self, state: dict[str, Any]) -> None:
        self._released = state["released"]
        self._counts.restore(state["counts"])
        if self._held is not None:
            self._held.restore(state["held"])
