"""What a task does at a checkpoint barrier, and the parts of a snapshot that hold its state.

A snapshot consists of parts: one for each operator of a task, and one for the task itself. Parts are named after
steps, so that a chain may have other operators in the next run:

===================  ===================================================================================
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Mapping
from typing import NamedTuple, Protocol, TypeAlias, final

from streamiter.checkpoints.plain_data import PlainData
from streamiter.checkpoints.snapshot import SnapshotPart
from streamiter.deferred import Deferred, PlainValue, release_all
from streamiter.errors import PlainDataError
from streamiter.operators.operator import Boundary, ServiceWorker
from streamiter.operators.output import RecordFailure
from streamiter.operators.source import Positions
from streamiter.records import CheckpointBarrier, Control
from streamiter.runtime.checkpointing.clock_alignment import ClockAlignment
from streamiter.runtime.controls import BarrierReturned
from streamiter.runtime.gate import Gate

TaskState: TypeAlias = dict[str, PlainValue]
"""The state of a task: the entries of ``Task.snapshot``, as plain data."""

TaskStates: TypeAlias = dict[str, TaskState]
"""The states of tasks, and of parameter servers, by name."""

STEP, TASK, FEEDBACK, SERVICE = "step", "task", "feedback", "service"


class StopsReading(Protocol):
    """The reader of a source, as far as barriers use it."""

    def stop(self, then: Control) -> None: ...


@final
class TaskBarriers:
    """Takes the state of one task at each checkpoint barrier, and passes the barrier on.

    If no loop leads back to the task, it gives its state to the job at once. Otherwise the gate logs the feedback that
    arrives after the state was taken, until the barrier has returned on every feedback channel; the log is a part of
    the state. A barrier of an abandoned checkpoint is passed on, but no state is taken.
    """

    def __init__(
        self,
        *,
        task: str,
        first_step: str,
        subtask: int,
        gate: Gate,
        boundary: Boundary | None,
        reader: StopsReading | None,
        take_state: Callable[[], Awaitable[dict[str, PlainValue]]],
        pass_on: Callable[[Control], None],
        acknowledge: Callable[[int, list[SnapshotPart]], None],
        plain_data: PlainData,
    ) -> None:
        """``boundary``: the first operator, if it belongs to the border of a loop. ``reader`` reads the source, if any.

        ``pass_on`` puts the barrier into the channels that the task writes, ``acknowledge`` takes the number of the
        checkpoint and the complete state.
        """
        self.positions: Positions = {}
        """Of a source: the positions that belong to the last state."""
        self.is_suspending = False
        """Whether the job stops at a barrier whose return the task waits for; it handles nothing else any more."""
        self.has_suspended = False
        """Whether the job has stopped this task at a barrier."""
        self.worker: ServiceWorker | None = None
        """Access to the parameter server that the first step works with, if it has one."""
        self.clocks: ClockAlignment | None = None
        """Lets all workers of that parameter server stop at the same clock before a barrier."""
        self._task = task
        self._first_step = first_step
        self._subtask = subtask
        self._gate = gate
        self._boundary = boundary
        self._reader = reader
        self._take_state = take_state
        self._pass_on = pass_on
        self._acknowledge = acknowledge
        self._plain_data = plain_data
        self._keeps_last_state = True
        self._abandoned = 0
        """The last abandoned checkpoint."""
        self._pending: int | None = None
        """The checkpoint whose barrier has not returned yet."""
        self._pending_parts: list[SnapshotPart] = []
        """The state for that checkpoint, without the log."""

    def serve_with(self, worker: ServiceWorker, clocks: ClockAlignment, *, keeps_last_state: bool) -> None:
        """Have barriers pass this worker, too. ``keeps_last_state``: whether a suspended job leaves a checkpoint."""
        self.worker, self.clocks, self._keeps_last_state = worker, clocks, keeps_last_state

    def arrange_stop(self) -> None:
        """Stop reading, or read again, so that all workers of a parameter server come to the same clock."""
        if self.clocks is not None:
            self._gate.stand_still(self.clocks.stands_still(self._task))

    def announce(self, barrier: CheckpointBarrier) -> list[Control]:
        """Prepare for a barrier that the job has posted; return the barrier if it is passed now."""
        if self._reader is not None:
            if not barrier.suspend:
                return [barrier]
            self._reader.stop(barrier)
            return []
        if self._gate.stands_still or (self._boundary is not None and self._boundary.outlives_inputs):
            return self._gate.accept_trigger(barrier)
        self._gate.announce(barrier)
        return []

    async def pass_barrier(self, barrier: CheckpointBarrier) -> None:
        """Take the state of the task, then pass the barrier on."""
        number, is_abandoned = barrier.checkpoint, barrier.checkpoint <= self._abandoned
        if self._boundary is not None:
            self._boundary.checkpoint_begins(number)
        parts = [] if is_abandoned else await self.parts()
        is_kept = not barrier.suspend or self._keeps_last_state
        if self.worker is not None and is_kept and not is_abandoned:
            self.worker.pass_barrier(number)
        if self.clocks is not None:
            self.clocks.passed(self._task)
        self._pass_on(barrier)
        if self._gate.has_feedback:
            self._await_return(barrier, parts)
        else:
            self._complete(number, parts)
            self.has_suspended = barrier.suspend

    def _await_return(self, barrier: CheckpointBarrier, parts: list[SnapshotPart]) -> None:
        self._pending, self._pending_parts = barrier.checkpoint, parts
        self.is_suspending = barrier.suspend
        if barrier.suspend:
            self._gate.only_feedback()
        returned = self._gate.start_feedback_log(barrier)
        if barrier.checkpoint <= self._abandoned:
            self._gate.drop_feedback_log()
        for event in returned:
            assert isinstance(event, BarrierReturned)
            self.barrier_returned(event)

    def barrier_returned(self, returned: BarrierReturned) -> None:
        """Complete the state with the feedback that was logged until the barrier returned."""
        parts, self._pending_parts, self._pending = self._pending_parts, [], None
        if returned.checkpoint > self._abandoned:
            parts.append(encode_log(self._first_step, self._subtask, returned.logged, self._plain_data))
        self._complete(returned.checkpoint, parts)
        self.has_suspended = self.is_suspending

    def _complete(self, checkpoint: int, parts: list[SnapshotPart]) -> None:
        self._acknowledge(checkpoint, parts)
        if self._boundary is not None:
            self._boundary.checkpoint_ends(checkpoint)

    def abandon(self, checkpoint: int) -> None:
        """Drop the state for this checkpoint. The task still passes its barrier on."""
        self._abandoned = max(self._abandoned, checkpoint)
        if self._pending is not None and self._pending <= checkpoint:
            self._gate.drop_feedback_log()
            self.release()

    def release(self) -> None:
        """Drop the state that waits for the return of a barrier."""
        release_parts(self._pending_parts)
        self._pending_parts = []

    async def parts(self) -> list[SnapshotPart]:
        """Take the state of the task now; return it as parts of a snapshot."""
        state = await self._take_state()
        self.positions = state["positions"]
        return encode_task(self._first_step, self._subtask, state, self._plain_data)


class PartName(NamedTuple):
    """The name of a part.

    >>> PartName.of("step per user[3]")
    PartName(kind='step', step='per user', subtask=3)
    """

    kind: str
    """``step``, ``task``, ``feedback`` or ``service``."""
    step: str
    """The name of the step."""
    subtask: int
    """The number of the subtask."""

    def __str__(self) -> str:
        return f"{self.kind} {self.step}[{self.subtask}]"

    @classmethod
    def of(cls, name: str) -> PartName:
        """Return the name from its text."""
        kind, _, rest = name.partition(" ")
        step, _, subtask = rest.removesuffix("]").rpartition("[")
        return cls(kind, step, int(subtask))


def encode_task(
    first_step: str, subtask: int, state: Mapping[str, PlainValue], plain_data: PlainData
) -> list[SnapshotPart]:
    """Encode the result of ``Task.snapshot``; later changes of the state do not affect the parts."""
    parts: list[SnapshotPart] = []
    of_task = {key: value for key, value in state.items() if key != "operators"}
    pieces = [(PartName(STEP, step, subtask), of_step) for step, of_step in state["operators"].items()]
    try:
        for name, piece in (*pieces, (PartName(TASK, first_step, subtask), of_task)):
            parts.append(_encoded(name, piece, plain_data))
    except BaseException:
        release_all(state)
        raise
    return parts


def release_parts(parts: Iterable[SnapshotPart]) -> None:
    """Release all deferred pieces of these parts."""
    for part in parts:
        for deferred in part.deferred:
            deferred.release()


def encode_log(first_step: str, subtask: int, logged: PlainValue, plain_data: PlainData) -> SnapshotPart:
    """Encode the feedback that belongs to the snapshot of a head."""
    return _encoded(PartName(FEEDBACK, first_step, subtask), logged, plain_data)


def encode_service(name: PartName, state: PlainValue, plain_data: PlainData) -> SnapshotPart:
    """Encode the state of a parameter server."""
    return _encoded(name, state, plain_data)


def _encoded(name: PartName, state: PlainValue, plain_data: PlainData) -> SnapshotPart:
    try:
        content, deferred = plain_data.encode_state(state, name=f"state of step {name.step!r}")
    except PlainDataError as error:
        raise RecordFailure(name.step) from error
    return SnapshotPart(str(name), content, deferred)


def held_in_memory(deferred: Deferred) -> list[bytes]:
    """Return all frames of a deferred piece, and release it."""
    try:
        return list(deferred.frames())
    finally:
        deferred.release()


def task_state(
    first_step: str, subtask: int, steps: Iterable[str], states: Mapping[str, PlainValue]
) -> TaskState | None:
    """Return the state for ``Task.open`` from states by the names of their parts; None if the task has no state."""
    of_task = states.get(str(PartName(TASK, first_step, subtask)))
    if of_task is None:
        return None
    names = {step: str(PartName(STEP, step, subtask)) for step in steps}
    operators = {step: states[name] for step, name in names.items() if name in states}
    state = {**of_task, "operators": operators}
    log = str(PartName(FEEDBACK, first_step, subtask))
    if log in states:
        state["logged"] = states[log]
    return state
