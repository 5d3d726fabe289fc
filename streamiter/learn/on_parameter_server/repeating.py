"""Bounded data that each subtask goes through again and again, at its own pace."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, final

from streamiter.flow.next_step import add_next_step
from streamiter.flow.step_options import StepOptions
from streamiter.flow.stream import Stream
from streamiter.operators.context import Context
from streamiter.operators.operator import Boundary, BoundaryOutput
from streamiter.records import Batch, Control, EndOfInput, slice_batch
from streamiter.runtime.gate_records import InputEnded
from streamiter.runtime.graph import SINGLE_INPUT
from streamiter.runtime.task import DrainInput

if TYPE_CHECKING:
    from streamiter.checkpoints.replay_cache import ReplayCache
    from streamiter.runtime.plan import Surroundings

__all__ = ["Repeater", "repeated"]


def repeated(stream: Stream, passes: int, *, memory_bytes: int, name: str) -> Stream:
    """The records of each subtask ``passes`` times, in the same order; ``memory_bytes`` of them are kept in memory.

    Other than with :func:`~streamiter.replayed` no pass waits for another subtask's: they share no epoch.
    """
    step = add_next_step(
        {SINGLE_INPUT: stream},
        name,
        lambda: Repeater(passes, memory_bytes),
        StepOptions(name=name, parallelism=stream.parallelism),
        shape="iteration",
    )
    step.steps[0].epochs_seen = f"{passes} passes"
    return step


@final
class _GoOn(Control):
    """Posted to itself: the next record, after others have had their turn and what was emitted has found room."""

    __slots__ = ()


@final
class Repeater(Boundary):
    """Keeps what passes it, and sends it again when its input has ended.

    It stands at the border of a task, so that checkpoint barriers pass between any two records.
    """

    outlives_inputs = True
    brings_input = True

    def __init__(self, passes: int, memory_bytes: int) -> None:
        self._memory_bytes = memory_bytes
        self._is_repeating = False
        self._passes_left = passes - 1
        self._batch = self._record = 0
        """What is sent next: a record of a batch that is kept."""

    def attach(self, surroundings: Surroundings) -> None:
        self._surroundings = surroundings

    def open(self, context: Context) -> None:
        self._context = context
        self._cache: ReplayCache = self._surroundings.make_replay_cache(self._memory_bytes)

    async def on_batch(self, input_name: str, records: Batch, epoch: int, out: BoundaryOutput) -> None:
        self._cache.append(records)
        for record in range(len(records)):
            out.emit_batch(slice_batch(records, record, record + 1), epoch)
            await out.room()

    async def on_control(self, control: Control, out: BoundaryOutput) -> None:
        if isinstance(control, InputEnded):
            self._is_repeating = True
            self._context.post(_GoOn())
        elif isinstance(control, DrainInput):
            self._passes_left = 0
        elif isinstance(control, _GoOn):
            await self._go_on(out)

    async def _go_on(self, out: BoundaryOutput) -> None:
        if not self._passes_left or not len(self._cache):
            await out.control(EndOfInput())
            return
        records = self._cache.batch(self._batch)
        out.emit_batch(slice_batch(records, self._record, self._record + 1), 0)
        self._record += 1
        if self._record == len(records):
            self._batch, self._record = self._batch + 1, 0
        if self._batch == len(self._cache):
            self._batch = 0
            self._passes_left -= 1
        self._context.post(_GoOn())

    def close(self) -> None:
        self._cache.close()

    def snapshot(self) -> dict[str, Any]:
        return {
            "cache": self._cache.snapshot(),
            "is repeating": self._is_repeating,
            "passes left": self._passes_left,
            "batch": self._batch,
            "record": self._record,
        }

    def restore(self, state: dict[str, Any]) -> None:
        self._cache.restore(state["cache"])
        self._is_repeating = state["is repeating"]
        self._passes_left = state["passes left"]
        self._batch, self._record = state["batch"], state["record"]
        if self._is_repeating:
            self._context.post(_GoOn())
