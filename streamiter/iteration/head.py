"""The head: where a variable stream enters the loop, and where its feedback comes back."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from streamiter.iteration.coordinator import Advance, LoopCoordinator, Release, Restored, Terminate
from streamiter.iteration.epoch_counts import EpochCounts
from streamiter.operators.context import Context, JobScope
from streamiter.operators.operator import Boundary, BoundaryOutput
from streamiter.records import Batch, Control, DataBatch, EndOfInput, EpochWatermark
from streamiter.runtime.epochs_aside import EpochsAside
from streamiter.runtime.gate_records import InputEnded

if TYPE_CHECKING:
    from streamiter.runtime.plan import Surroundings

__all__ = ["FEEDBACK", "INITIAL", "Head"]

INITIAL = "initial"
FEEDBACK = "feedback"


class Head(Boundary):
    """Passes on initial variables and feedback, holding feedback that has run too far ahead.

    ``max_epochs_ahead`` None: nothing is held.
    """

    outlives_inputs = True

    def __init__(
        self, coordinator_of: Callable[[JobScope], LoopCoordinator], max_epochs_ahead: int | None
    ) -> None:
        self._coordinator_of = coordinator_of
        self._max_epochs_ahead = max_epochs_ahead
        self._held: EpochsAside | None = None
        self._counts = EpochCounts()
        """Of epochs that are not received to their end."""
        self._unacknowledged: dict[int, int] = {}
        """Counts of epochs that were reported and are not known to be complete."""
        self._reported = -1
        self._released = -1
        self._advanced = -1
        self._initial_ended = False
        self._feedback_ended = False
        self._ended_in: int | None = None
        self._in_checkpoint = False
        self._terminate: Terminate | None = None
        """The end of the iteration, put off until the feedback of a checkpoint is complete."""

    def attach(self, surroundings: Surroundings) -> None:
        self._surroundings = surroundings

    def open(self, context: Context) -> None:
        self._context = context
        self._coordinator = self._coordinator_of(context.scope)
        if self._max_epochs_ahead is not None:
            self._held = EpochsAside(self._surroundings.make_spill_queue)
        self._index = self._coordinator.register_head(
            context.post, self._surroundings.feedback_channels, self._held
        )

    # -- records -----------------------------------------------------------------------------------------

    async def on_batch(self, input_name: str, records: Batch, epoch: int, out: BoundaryOutput) -> None:
        if input_name == INITIAL:
            out.emit_batch(records, 0)
            return
        self._counts.add(epoch, len(records))
        self._coordinator.feedback_handled()
        if self._held is not None and epoch > self._released + (self._max_epochs_ahead or 0):
            self._held.put(0, DataBatch(records, epoch))
        else:
            out.emit_batch(records, epoch)

    def _release(self, epoch: int, out: BoundaryOutput) -> None:
        self._released = epoch
        if self._held is not None:
            for _, batch in self._held.take(epoch + (self._max_epochs_ahead or 0)):
                out.emit_batch(batch.records, batch.epoch)

    # -- control records ---------------------------------------------------------------------------------

    async def on_control(self, control: Control, out: BoundaryOutput) -> None:
        if isinstance(control, InputEnded):
            self._input_ended(control.input_name)
        elif isinstance(control, EpochWatermark):
            self._report_up_to(control.epoch)
        elif isinstance(control, Release):
            self._release(control.epoch, out)
        elif isinstance(control, Advance):
            self._advanced = control.epoch
            self._unacknowledged.pop(control.epoch, None)
            await out.control(EpochWatermark(control.epoch))
        elif isinstance(control, Terminate):
            await self._end(control, out)

    def _input_ended(self, input_name: str) -> None:
        if input_name == INITIAL:
            self._initial_ended = True
            self._report_up_to(0)
        else:
            self._feedback_ended = True
        if self._initial_ended and self._feedback_ended:
            self._report_up_to(self._counts.last_epoch or 0)
            self._coordinator.head_finished(self._index)

    def _report_up_to(self, epoch: int) -> None:
        """All feedback up to ``epoch`` is in. The watermark may have gone up by more than one."""
        for received in range(self._reported + 1, epoch + 1):
            self._unacknowledged[received] = count = self._counts.take(received)
            self._reported = received
            self._coordinator.head_received(self._index, received, count)

    async def _end(self, terminate: Terminate, out: BoundaryOutput) -> None:
        if self._in_checkpoint:
            self._terminate = terminate
            return
        self._ended_in = terminate.epoch
        await out.control(EndOfInput(terminate.epoch))

    def close(self) -> None:
        if self._held is not None:
            self._held.close()

    # -- state -------------------------------------------------------------------------------------------

    def checkpoint_begins(self) -> None:
        self._in_checkpoint = True
        self._coordinator.checkpoint_begins()

    def checkpoint_ends(self) -> None:
        self._in_checkpoint = False
        self._coordinator.checkpoint_ends()
        if self._terminate is not None:
            self._context.post(self._terminate)

    def snapshot(self) -> dict[str, Any]:
        return {
            "counts": self._counts.snapshot(),
            "unacknowledged": list(self._unacknowledged.items()),
            "reported": self._reported,
            "released": self._released,
            "advanced": self._advanced,
            "initial ended": self._initial_ended,
            "feedback ended": self._feedback_ended,
            "ended in": self._ended_in,
            "held": [] if self._held is None else self._held.snapshot(),
        }

    def restore(self, state: dict[str, Any]) -> None:
        self._counts.restore(state["counts"])
        self._unacknowledged = dict(state["unacknowledged"])
        self._reported = state["reported"]
        self._released = state["released"]
        self._advanced = state["advanced"]
        self._initial_ended = state["initial ended"]
        self._feedback_ended = state["feedback ended"]
        self._ended_in = state["ended in"]
        if self._held is not None:
            self._held.restore(state["held"])
        self._coordinator.restore(
            Restored(
                post=self._context.post,
                released=self._released,
                advanced=self._advanced,
                ended_in=self._ended_in,
                report=self._report_again,
            )
        )

    def _report_again(self) -> None:
        complete = self._coordinator.progress.last_complete
        for epoch, count in self._unacknowledged.items():
            if epoch > complete:
                self._coordinator.head_received(self._index, epoch, count)
        if self._initial_ended and self._feedback_ended:
            self._coordinator.head_finished(self._index)
