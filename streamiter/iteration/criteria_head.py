"""The criteria head: where the termination criteria of a bounded iteration come back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from streamiter.iteration.coordinator import Restored, Terminate
from streamiter.iteration.received_epochs import ReceivedEpochs
from streamiter.iteration.receiving_head import ReceivingHead, end_of_all
from streamiter.operators.context import Context
from streamiter.operators.operator import BoundaryOutput
from streamiter.records import Batch, Control, EpochWatermark
from streamiter.runtime.gate_records import InputEnded

__all__ = ["CriteriaHead"]


class CriteriaHead(ReceivingHead):
    """Counts what comes back of each epoch and drops it: whether there is anything is all that matters."""

    def open(self, context: Context) -> None:
        super().open(context)
        index = self.coordinator.register_criteria_head(context.post, self.surroundings.feedback_channels)
        self.received = ReceivedEpochs(self.coordinator, index)
        self.received.report_up_to(0)

    async def on_batch(self, input_name: str, records: Batch, epoch: int, out: BoundaryOutput) -> None:
        self.received.add(epoch, len(records))

    async def on_control(self, control: Control, out: BoundaryOutput) -> None:
        if isinstance(control, EpochWatermark):
            self.received.acknowledge(self.coordinator.told_complete)
            self.received.report_up_to(control.epoch)
        elif isinstance(control, InputEnded):
            self.received.end()
        elif isinstance(control, Terminate):
            await self.end(control, out)

    def snapshot(self) -> dict[str, Any]:
        return {
            "received": self.received.snapshot(),
            "told complete": self.coordinator.told_complete,
            "ended in": self.ended_in,
        }

    def restore(self, state: dict[str, Any]) -> None:
        self.received.restore(state["received"])
        self.ended_in = state["ended in"]
        self.coordinator.restore(
            Restored(
                post=self.context.post,
                advanced=state["told complete"],
                ended_in=self.ended_in,
                report=self.received.report_again,
            )
        )

    @staticmethod
    def redistribute(states: Sequence[dict[str, Any]], parallelism: int) -> list[dict[str, Any]]:
        """All know of epochs what each of them knew."""
        received = ReceivedEpochs.redistribute([state["received"] for state in states], parallelism)
        told = min(state["told complete"] for state in states)
        ended_in = end_of_all(states)
        return [{"received": each, "told complete": told, "ended in": ended_in} for each in received]
