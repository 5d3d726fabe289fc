"""The entrance: where a data stream enters the body of an iteration."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final

from streamiter.iteration.coordinator import Admit, Advance, LoopCoordinator, Restored, Terminate
from streamiter.iteration.receiving_head import end_of_all
from streamiter.operators.context import Context, JobScope
from streamiter.operators.operator import Boundary, BoundaryOutput
from streamiter.records import Batch, Control, DataBatch, EndOfData, EndOfInput, EpochWatermark
from streamiter.runtime.gate_records import InputEnded

__all__ = ["Entrance"]

# A head that is blocked, because the body wants data before feedback, handles no feedback that could
# admit data; after this long a batch is let in all the same, or the two would wait for each other.
_ADMIT_AFTER_S: Final = 0.05


class Entrance(Boundary):
    """Passes data on and reports its progress.

    While too much feedback waits it lets in one batch now and then; stamped data of epochs too far ahead
    waits for the loop. When its data has ended it stays until the iteration ends.
    """

    outlives_inputs = True

    def __init__(
        self,
        coordinator_of: Callable[[JobScope], LoopCoordinator],
        *,
        stamped: bool,
        max_epochs_ahead: int | None,
    ) -> None:
        self._coordinator_of = coordinator_of
        self._stamped = stamped
        self._max_epochs_ahead = max_epochs_ahead
        self.last_complete = -1
        self._brought = -1
        """The last watermark that has come; it is passed on as far as no data of its epochs waits."""
        self._passed = -1
        self._end_brought = False
        self._data_ended = False
        self._ended_in: int | None = None
        self._throttled = False
        self._waiting: list[DataBatch] = []
        """Stamped data too far ahead: at most one batch, unless it was that of several entrances."""
        self._is_ahead = False
        """Whether what came last is among it, so that what comes next will be too far ahead as well."""

    def open(self, context: Context) -> None:
        self.context = context
        self.coordinator = self._coordinator_of(context.scope)
        self._index = self.coordinator.register_entrance(
            self.tell, name=f"{context.name}[{context.subtask_index}]"
        )

    def tell(self, control: Control) -> None:
        """Have a control record of the loop handled next."""
        self.context.post(control)

    def wanted_inputs(self) -> Iterable[str] | None:
        return () if self._throttled or self._is_ahead else None

    def held_for(self) -> str | None:
        if not self._is_ahead:
            return None
        return f"its data is ahead of epoch {self.last_complete + 1}, which waits for {self.coordinator.awaited()}"

    async def on_batch(self, input_name: str, records: Batch, epoch: int, out: BoundaryOutput) -> None:
        if not self._stamped:
            epoch = 0
        if self._is_too_far_ahead(epoch):
            self._waiting.append(DataBatch(records, epoch))
            self._is_ahead = True
            return
        out.emit_batch(records, epoch)
        if self.coordinator.is_overloaded:
            self._throttled = True
            self.coordinator.throttle(self.context.post)
            self.context.clock.call_later(_ADMIT_AFTER_S, lambda: self.context.post(Admit()))

    async def on_control(self, control: Control, out: BoundaryOutput) -> None:
        if isinstance(control, Admit):
            self._throttled = False
            await self._pass(out)
        elif isinstance(control, Advance):
            self.last_complete = control.epoch
            await self._let_in(out)
        elif isinstance(control, Terminate):
            self._ended_in = control.epoch
            await out.control(EndOfInput(control.epoch))
        elif isinstance(control, (EpochWatermark, InputEnded)):
            if isinstance(control, EpochWatermark):
                self._brought = control.epoch
            else:
                self._end_brought = True
            await self._pass(out)

    async def _let_in(self, out: BoundaryOutput) -> None:
        waiting, self._waiting = self._waiting, []
        for batch in waiting:
            if self._is_too_far_ahead(batch.epoch):
                self._waiting.append(batch)
            else:
                out.emit_batch(batch.records, batch.epoch)
        last_still_waits = bool(self._waiting) and self._waiting[-1] is waiting[-1]
        self._is_ahead = self._is_ahead and last_still_waits
        await self._pass(out)

    async def _pass(self, out: BoundaryOutput) -> None:
        """Pass on what has come of watermarks, and the end, as far as no data waits before it."""
        covered = min([self._brought, *(batch.epoch - 1 for batch in self._waiting)])
        if self._stamped and covered > self._passed:
            self._passed = covered
            await out.control(EpochWatermark(covered))
            self.coordinator.entrance_passed(self._index, covered)
        if self._end_brought and not self._waiting and not self._data_ended:
            self._data_ended = True
            await self.data_has_ended(out)
            self.coordinator.entrance_ended(self._index)

    async def data_has_ended(self, out: BoundaryOutput) -> None:
        """Tell the body."""
        await out.control(EndOfData(max(0, self._passed)))

    def _is_too_far_ahead(self, epoch: int) -> bool:
        ahead = self._max_epochs_ahead
        return ahead is not None and self._stamped and epoch > self.last_complete + 1 + ahead

    def checkpoint_begins(self, checkpoint: int) -> None:
        self.coordinator.checkpoint_begins(checkpoint)

    def checkpoint_ends(self, checkpoint: int) -> None:
        self.coordinator.checkpoint_ends(checkpoint)

    def snapshot(self) -> dict[str, Any]:
        return {
            "last complete": self.last_complete,
            "brought": self._brought,
            "passed": self._passed,
            "end brought": self._end_brought,
            "data ended": self._data_ended,
            "ended in": self._ended_in,
            "waiting": [(batch.records, batch.epoch) for batch in self._waiting],
            "is ahead": self._is_ahead,
        }

    def restore(self, state: dict[str, Any]) -> None:
        self.last_complete = state["last complete"]
        self._brought = state["brought"]
        self._passed = state["passed"]
        self._end_brought = state["end brought"]
        self._data_ended = state["data ended"]
        self._ended_in = state["ended in"]
        self._waiting = [DataBatch(records, epoch) for records, epoch in state["waiting"]]
        self._is_ahead = state["is ahead"]
        # It may have nothing more to wait for, where another subtask has what it waited for.
        self.context.post(Admit())
        self.coordinator.restore(
            Restored(
                post=self.context.post,
                advanced=self.last_complete,
                ended_in=self._ended_in,
                report=self._report_again,
            )
        )

    def _report_again(self) -> None:
        if self._passed >= 0:
            self.coordinator.entrance_passed(self._index, self._passed)
        if self._data_ended:
            self.coordinator.entrance_ended(self._index)

    def redistribute(self, states: Sequence[dict[str, Any]], parallelism: int) -> list[dict[str, Any]]:
        """Data that waits for the loop is dealt out; all have passed the epochs that each of them had."""
        reading = [state for state in states if not state["end brought"]]
        going_on = [state for state in states if not state["data ended"]]
        furthest = max(state["brought"] for state in states)
        waiting = [item for state in states for item in state["waiting"]]
        shared = {
            "last complete": min(state["last complete"] for state in states),
            "brought": min((state["brought"] for state in reading), default=furthest),
            "passed": min((state["passed"] for state in going_on), default=furthest),
            "end brought": not reading,
            "data ended": all(state["data ended"] for state in states),
            "ended in": end_of_all(states),
            "is ahead": False,
        }
        return [{**shared, "waiting": waiting[subtask::parallelism]} for subtask in range(parallelism)]
