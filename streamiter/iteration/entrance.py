"""The entrance: where a data stream enters the body of an iteration."""

from __future__ import annotations

from collections import deque
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
        self._passed = -1
        self._data_ended = False
        self._ended_in: int | None = None
        self._throttled = False
        self._waiting: deque[DataBatch | Control] = deque()
        """Stamped data too far ahead, and what came behind it: at most one batch and its watermark."""

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
        return () if self._throttled or self._waiting else None

    def held_for(self) -> str | None:
        if not self._waiting:
            return None
        return f"its data is ahead of epoch {self.last_complete + 1}, which waits for {self.coordinator.awaited()}"

    async def on_batch(self, input_name: str, records: Batch, epoch: int, out: BoundaryOutput) -> None:
        if not self._stamped:
            epoch = 0
        if self._waiting or self._is_too_far_ahead(epoch):
            self._waiting.append(DataBatch(records, epoch))
            return
        out.emit_batch(records, epoch)
        if self.coordinator.is_overloaded:
            self._throttled = True
            self.coordinator.throttle(self.context.post)
            self.context.clock.call_later(_ADMIT_AFTER_S, lambda: self.context.post(Admit()))

    async def on_control(self, control: Control, out: BoundaryOutput) -> None:
        if isinstance(control, Admit):
            self._throttled = False
        elif isinstance(control, Advance):
            self.last_complete = control.epoch
            await self._let_in(out)
        elif isinstance(control, Terminate):
            self._ended_in = control.epoch
            await out.control(EndOfInput(control.epoch))
        elif isinstance(control, (EpochWatermark, InputEnded)):
            if self._waiting:
                self._waiting.append(control)
            else:
                await self._pass(control, out)

    async def _let_in(self, out: BoundaryOutput) -> None:
        while self._waiting:
            item = self._waiting[0]
            if isinstance(item, DataBatch):
                if self._is_too_far_ahead(item.epoch):
                    return
                self._waiting.popleft()
                out.emit_batch(item.records, item.epoch)
            else:
                self._waiting.popleft()
                await self._pass(item, out)

    async def _pass(self, control: Control, out: BoundaryOutput) -> None:
        if isinstance(control, EpochWatermark):
            if self._stamped:
                self._passed = control.epoch
                await out.control(control)
                self.coordinator.entrance_passed(self._index, control.epoch)
        else:
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
            "passed": self._passed,
            "data ended": self._data_ended,
            "ended in": self._ended_in,
            "waiting": [_plain(item) for item in self._waiting],
        }

    def restore(self, state: dict[str, Any]) -> None:
        self.last_complete = state["last complete"]
        self._passed = state["passed"]
        self._data_ended = state["data ended"]
        self._ended_in = state["ended in"]
        self._waiting.extend(_item(*entry) for entry in state["waiting"])
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
        going_on = [state for state in states if not _has_brought_end(state)]
        brought = min(_brought(state) for state in going_on or states)
        passed = min(state["passed"] for state in going_on or states)
        data = sorted(
            (item for state in states for item in state["waiting"] if item[0] == "data"),
            key=lambda item: item[2],
        )
        last: list[tuple[str, Any, int]] = [("watermark", None, brought)] if brought > passed else []
        data_ended = all(state["data ended"] for state in states)
        if not going_on and not data_ended:
            last += [item for state in states for item in state["waiting"] if item[0] == "ended"][:1]
        ended_in = end_of_all(states)
        return [
            {
                "last complete": min(state["last complete"] for state in states),
                "passed": passed,
                "data ended": data_ended,
                "ended in": ended_in,
                "waiting": [*data[subtask::parallelism], *last],
            }
            for subtask in range(parallelism)
        ]


def _has_brought_end(state: dict[str, Any]) -> bool:
    return state["data ended"] or any(kind == "ended" for kind, _, _ in state["waiting"])


def _brought(state: dict[str, Any]) -> int:
    """The last watermark that came to it, whether it could be passed on or not."""
    came: list[int] = [epoch for kind, _, epoch in state["waiting"] if kind == "watermark"]
    came.append(state["passed"])
    return max(came)


def _plain(item: DataBatch | Control) -> tuple[str, Any, int]:
    if isinstance(item, DataBatch):
        return "data", item.records, item.epoch
    if isinstance(item, EpochWatermark):
        return "watermark", None, item.epoch
    assert isinstance(item, InputEnded)
    return "ended", item.input_name, 0


def _item(kind: str, payload: Any, epoch: int) -> DataBatch | Control:
    if kind == "data":
        return DataBatch(payload, epoch)
    return EpochWatermark(epoch) if kind == "watermark" else InputEnded(payload)
