"""The head: where a variable stream enters the loop, and where its feedback comes back."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from streamiter.iteration.coordinator import Advance, LoopCoordinator, Release, Restored, Terminate
from streamiter.iteration.received_epochs import ReceivedEpochs
from streamiter.iteration.receiving_head import ReceivingHead, end_of_all
from streamiter.operators.context import Context, JobScope
from streamiter.operators.operator import BoundaryOutput
from streamiter.operators.sharing import Sharing
from streamiter.records import Batch, Control, DataBatch, EpochWatermark
from streamiter.runtime.epochs_aside import EpochsAside
from streamiter.runtime.gate_records import InputEnded

__all__ = ["FEEDBACK", "INITIAL", "Head"]

INITIAL = "initial"
FEEDBACK = "feedback"


class Head(ReceivingHead):
    """Passes on initial variables and feedback, holding feedback that has run too far ahead.

    ``max_epochs_ahead`` None: nothing is held.
    """

    def __init__(
        self, coordinator_of: Callable[[JobScope], LoopCoordinator], max_epochs_ahead: int | None
    ) -> None:
        super().__init__(coordinator_of)
        self._max_epochs_ahead = max_epochs_ahead
        self._held: EpochsAside | None = None
        self._released = -1
        self._advanced = -1
        self._initial_ended = False
        self._feedback_ended = False

    def open(self, context: Context) -> None:
        super().open(context)
        if self._max_epochs_ahead is not None:
            self._held = EpochsAside(self.surroundings.make_spill_queue)
        index = self.coordinator.register_head(
            context.post,
            self.surroundings.feedback_channels,
            self._held,
            name=f"{context.name}[{context.subtask_index}]",
        )
        self.received = ReceivedEpochs(self.coordinator, index)

    # -- records -----------------------------------------------------------------------------------------

    async def on_batch(self, input_name: str, records: Batch, epoch: int, out: BoundaryOutput) -> None:
        if input_name == INITIAL:
            out.emit_batch(records, 0)
            return
        self.received.add(epoch, len(records))
        if self._held is not None and epoch > self._released + (self._max_epochs_ahead or 0):
            self._held.put(0, DataBatch(records, epoch))
        else:
            out.emit_batch(records, epoch)

    async def _release(self, epoch: int, out: BoundaryOutput) -> None:
        if epoch > self._released:
            self._released = epoch
            await self._emit_held(epoch + (self._max_epochs_ahead or 0), out)

    async def _emit_held(self, up_to_epoch: int, out: BoundaryOutput) -> None:
        """Batch by batch as there is room for them: what is held may be far more than memory is given to."""
        held = self._held
        if held is None:
            return
        while (epoch := held.lowest_epoch(0)) is not None and epoch <= up_to_epoch:
            for batch in held.take_next(0, epoch):
                out.emit_batch(batch.records, batch.epoch)
                await out.room()

    # -- control records ---------------------------------------------------------------------------------

    async def on_control(self, control: Control, out: BoundaryOutput) -> None:
        if isinstance(control, InputEnded):
            self._input_ended(control.input_name)
        elif isinstance(control, EpochWatermark):
            self.received.report_up_to(control.epoch)
        elif isinstance(control, Release):
            await self._release(control.epoch, out)
        elif isinstance(control, Advance):
            await self._advance(control.epoch, out)
        elif isinstance(control, Terminate):
            await self.end(control, out)

    def _input_ended(self, input_name: str) -> None:
        if input_name == INITIAL:
            self._initial_ended = True
            self.received.report_up_to(0)
        else:
            self._feedback_ended = True
        if self._initial_ended and self._feedback_ended:
            self.received.end()

    async def _advance(self, epoch: int, out: BoundaryOutput) -> None:
        await self._release(epoch, out)
        self._advanced = epoch
        self.received.acknowledge(epoch)
        await out.control(EpochWatermark(epoch))

    async def emit_last(self, epoch: int, out: BoundaryOutput) -> None:
        await self._emit_held(epoch, out)

    def close(self) -> None:
        if self._held is not None:
            self._held.close()

    # -- state -------------------------------------------------------------------------------------------

    def snapshot(self) -> dict[str, Any]:
        return {
            "received": self.received.snapshot(),
            "released": self._released,
            "advanced": self._advanced,
            "initial ended": self._initial_ended,
            "feedback ended": self._feedback_ended,
            "ended in": self.ended_in,
            "held": [] if self._held is None else self._held.snapshot(),
        }

    def restore(self, state: dict[str, Any]) -> None:
        self.received.restore(state["received"])
        self._released = state["released"]
        self._advanced = state["advanced"]
        self._initial_ended = state["initial ended"]
        self._feedback_ended = state["feedback ended"]
        self.ended_in = state["ended in"]
        if self._held is not None:
            self._held.restore(state["held"])
        self.coordinator.restore(
            Restored(
                post=self.context.post,
                released=self._released,
                advanced=self._advanced,
                ended_in=self.ended_in,
                report=self.received.report_again,
            )
        )

    def share_out(self, states: Sequence[dict[str, Any]], sharing: Sharing) -> list[dict[str, Any]]:
        """What is held goes where it would be fed back to now; of epochs, all heads know what each of them knew."""
        received = ReceivedEpochs.redistribute([state["received"] for state in states], sharing.parallelism)
        held = sharing.queues(FEEDBACK, [state["held"] for state in states])
        ended_in = end_of_all(states)
        return [
            {
                "received": received[head],
                "released": min(state["released"] for state in states),
                "advanced": min(state["advanced"] for state in states),
                "initial ended": all(state["initial ended"] for state in states),
                "feedback ended": all(state["feedback ended"] for state in states),
                "ended in": ended_in,
                "held": held[head],
            }
            for head in range(sharing.parallelism)
        ]
