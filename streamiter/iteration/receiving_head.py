"""What all heads have in common: they report what comes back, and end with the loop."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from streamiter.errors import CheckpointError
from streamiter.iteration.coordinator import LoopCoordinator, Terminate
from streamiter.iteration.received_epochs import ReceivedEpochs
from streamiter.operators.context import Context, JobScope
from streamiter.operators.operator import Boundary, BoundaryOutput
from streamiter.records import EndOfInput

if TYPE_CHECKING:
    from streamiter.runtime.plan import Surroundings

__all__ = ["ReceivingHead", "end_of_all"]


def end_of_all(states: Sequence[dict[str, Any]]) -> int | None:
    """The epoch in which all of them have been told that the iteration ends; None if it goes on."""
    ended_in = {state["ended in"] for state in states}
    if len(ended_in) > 1:
        raise CheckpointError("the iteration was about to end, and only some of them knew")
    return next(iter(ended_in), None)


class ReceivingHead(Boundary):
    """Base of the heads. ``open`` of a derived class makes ``received``."""

    outlives_inputs = True
    received: ReceivedEpochs
    surroundings: Surroundings

    def __init__(self, coordinator_of: Callable[[JobScope], LoopCoordinator]) -> None:
        self._coordinator_of = coordinator_of
        self.ended_in: int | None = None
        self._in_checkpoint = False
        self._put_off: Terminate | None = None
        """The end of the iteration, put off until the feedback of a checkpoint is complete."""

    def attach(self, surroundings: Surroundings) -> None:
        self.surroundings = surroundings

    def open(self, context: Context) -> None:
        self.context = context
        self.coordinator = self._coordinator_of(context.scope)

    async def end(self, terminate: Terminate, out: BoundaryOutput) -> None:
        """The iteration ends: pass on what is still held, then the end."""
        if self._in_checkpoint:
            self._put_off = terminate
            return
        await self.emit_last(terminate.epoch, out)
        self.ended_in = terminate.epoch
        await out.control(EndOfInput(terminate.epoch))

    async def emit_last(self, epoch: int, out: BoundaryOutput) -> None:
        """Emit what is held of the epoch in which the iteration ends."""

    def checkpoint_begins(self, checkpoint: int) -> None:
        self._in_checkpoint = True
        self.coordinator.checkpoint_begins(checkpoint)

    def checkpoint_ends(self, checkpoint: int) -> None:
        self._in_checkpoint = False
        self.coordinator.checkpoint_ends(checkpoint)
        if self._put_off is not None:
            self.context.post(self._put_off)
