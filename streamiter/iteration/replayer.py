"""The replayer: the entrance of a data stream that is sent again in every epoch."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, final

from streamiter.iteration.coordinator import Advance, LoopCoordinator, Terminate
from streamiter.iteration.entrance import Entrance
from streamiter.operators.context import Context, JobScope
from streamiter.operators.operator import BoundaryOutput
from streamiter.records import Batch, Control, EpochWatermark

if TYPE_CHECKING:
    from streamiter.checkpoints.replay_cache import ReplayCache
    from streamiter.runtime.plan import Surroundings

__all__ = ["Replayer"]


@final
class _GoOn(Control):
    """Posted to itself: the next batch, after others have had their turn and what was emitted has found room."""

    __slots__ = ()


class Replayer(Entrance):
    """Keeps what passes it in epoch 0, and sends it again when an epoch from 1 on is complete.

    What was asked for while a replay is under way is a range of epochs, and the end comes behind them.
    """

    def __init__(
        self, coordinator_of: Callable[[JobScope], LoopCoordinator], memory_limit_bytes: int
    ) -> None:
        super().__init__(coordinator_of, stamped=False, max_epochs_ahead=None)
        self._memory_limit_bytes = memory_limit_bytes
        self._replayed = 0
        """The last epoch that was sent to its end; at first epoch 0, once the data has ended."""
        self._asked_for = 0
        self._position = 0
        """Batches of epoch ``_replayed`` + 1 that have been sent."""
        self._terminate: Terminate | None = None
        self._untaken: Advance | None = None
        """What it was told last and has not handled, while it waits for room."""

    def attach(self, surroundings: Surroundings) -> None:
        self._surroundings = surroundings

    def open(self, context: Context) -> None:
        super().open(context)
        self._cache: ReplayCache = self._surroundings.make_replay_cache(self._memory_limit_bytes)
        self.coordinator.register_replay(self._cache)

    def tell(self, control: Control) -> None:
        if isinstance(control, Advance):
            if self._untaken is not None:
                self._untaken.epoch = control.epoch
                return
            control = self._untaken = Advance(control.epoch)  # Others have been given the same object.
        super().tell(control)

    async def on_batch(self, input_name: str, records: Batch, epoch: int, out: BoundaryOutput) -> None:
        self._cache.append(records)
        await super().on_batch(input_name, records, epoch, out)

    async def on_control(self, control: Control, out: BoundaryOutput) -> None:
        if isinstance(control, Advance):
            self._untaken = None
            self.last_complete = control.epoch
            is_idle = self._asked_for == self._replayed
            self._asked_for = max(self._asked_for, control.epoch)
            if is_idle:
                await self._go_on(out)
        elif isinstance(control, _GoOn):
            await self._go_on(out)
        elif isinstance(control, Terminate) and self._asked_for > self._replayed:
            self._terminate = control
        else:
            await super().on_control(control, out)

    async def data_has_ended(self, out: BoundaryOutput) -> None:
        """Epoch 0 is over, and others will come."""
        await out.control(EpochWatermark(0))

    async def _go_on(self, out: BoundaryOutput) -> None:
        if self._asked_for > self._replayed:
            epoch = self._replayed + 1
            if self._position < len(self._cache):
                out.emit_batch(self._cache.batch(self._position), epoch)
                self._position += 1
            if self._position == len(self._cache):
                await out.control(EpochWatermark(epoch))
                self._replayed = epoch
                self._position = 0
        if self._asked_for > self._replayed:
            self.context.post(_GoOn())
        elif self._terminate is not None:
            await super().on_control(self._terminate, out)

    def close(self) -> None:
        self._cache.close()

    def snapshot(self) -> dict[str, Any]:
        return {
            **super().snapshot(),
            "cache": self._cache.snapshot(),
            "replayed": self._replayed,
            "asked for": self._asked_for,
            "position": self._position,
            "terminate": None if self._terminate is None else self._terminate.epoch,
        }

    def restore(self, state: dict[str, Any]) -> None:
        self._cache.restore(state["cache"])
        self._replayed = state["replayed"]
        self._asked_for = state["asked for"]
        self._position = state["position"]
        if state["terminate"] is not None:
            self._terminate = Terminate(state["terminate"])
        if self._asked_for > self._replayed:
            self.context.post(_GoOn())
        super().restore(state)
