"""Barriers: one checkpoint of all tasks at a time, and what a task does at a barrier.

A *barrier* is a control record that divides a stream: a checkpoint has the effect of all records before it and of none
behind it. :class:`Barriers` sends a barrier into the tasks that bring input, and collects the state that each task
gives when the barrier passes it (:class:`TaskBarriers`). If that takes too long, the checkpoint is *abandoned*: its
barrier still passes all tasks, but their state is dropped.

The state of a task is a list of parts: one for each of its operators, and one for the task itself. Parts are named
after steps (:class:`PartName`), so that a chain may have other operators in the next run.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Final, NamedTuple, Protocol, TypeAlias, final

from streamiter.checkpoints.plain_data import PlainData
from streamiter.checkpoints.snapshot import SnapshotPart
from streamiter.clock import Clock
from streamiter.deferred import Deferred, PlainValue, release_all
from streamiter.errors import CheckpointError, PlainDataError
from streamiter.operators.operator import Boundary, ServiceWorker
from streamiter.operators.output import RecordFailure
from streamiter.operators.source import Positions
from streamiter.records import CheckpointBarrier, Control
from streamiter.runtime.feedback import BarrierReturned

if TYPE_CHECKING:
    from streamiter.runtime.services import ClockAlignment, JobServices
    from streamiter.runtime.task import Task

TakenParts = dict[str, list[SnapshotPart]]
"""The parts that each task has given, by the name of the task."""

TaskState: TypeAlias = dict[str, PlainValue]
"""The state of a task: the entries of ``Task.snapshot``, as plain data."""

TaskStates: TypeAlias = dict[str, TaskState]
"""The states of tasks, and of parameter servers, by name."""

STEP, TASK, FEEDBACK, SERVICE = "step", "task", "feedback", "service"

FIRST_CHECKPOINT: Final = 1


class CheckpointTimedOut(CheckpointError):
    """A barrier did not pass all tasks in time."""


class WorkersApart(CheckpointTimedOut):
    """The workers of a parameter server did not reach the same clock in time, so no barrier was sent."""


class JobIsOver(CheckpointError):
    """The last checkpoint of the job is taken."""


@final
class BarrierTrigger(Control):
    """A checkpoint begins. Posted to tasks where barriers start, and to tasks that may leave input unread."""

    __slots__ = ("barrier",)

    def __init__(self, barrier: CheckpointBarrier) -> None:
        self.barrier = barrier


@final
class CheckpointAbandoned(Control):
    """Drop the state that was taken for this checkpoint. Posted to all tasks; its barrier is still passed on."""

    __slots__ = ("checkpoint",)

    def __init__(self, checkpoint: int) -> None:
        self.checkpoint = checkpoint


@final
class CheckAlignment(Control):
    """Ask again whether to stop reading until all workers are at the same clock; see ``ClockAlignment``."""

    __slots__ = ()


class Acknowledge(Protocol):
    """Receives the state of a task at a barrier."""

    def __call__(self, task: Task, checkpoint: int, parts: list[SnapshotPart]) -> None: ...


@dataclass
class _Pending:
    checkpoint: int
    waiting_for: dict[str, Task]
    parts: TakenParts = field(default_factory=dict)
    is_abandoned: bool = False
    passed: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when all tasks have passed the barrier on, also if the checkpoint was abandoned."""


@final
class Barriers:
    """Sends barriers into the tasks that bring input, and collects the states of all tasks."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._tasks: Sequence[Task] = ()
        self._services: JobServices | None = None
        self._on_abandoned: Callable[[int], None] = lambda checkpoint: None
        self._next = FIRST_CHECKPOINT
        self._pending: _Pending | None = None
        self.one_at_a_time = asyncio.Lock()
        """The caller holds it from the barrier until the collected state is committed or dropped."""

    def watch(
        self, tasks: Sequence[Task], services: JobServices, on_abandoned: Callable[[int], None]
    ) -> None:
        """Set the tasks and services of the job; ``on_abandoned`` is called for each checkpoint that is abandoned."""
        self._tasks = tasks
        self._services = services
        self._on_abandoned = on_abandoned

    def number_after(self, checkpoint: int) -> None:
        """Give the next barriers numbers above that of an existing checkpoint."""
        self._next = max(self._next, checkpoint + 1)

    @property
    def last_number(self) -> int:
        return self._next - 1

    async def take(
        self,
        *,
        suspend: bool = False,
        timeout_s: float | None = None,
        stand_still_timeout_s: float | None = None,
        keeps_state: bool = True,
        on_begin: Callable[[], None] = lambda: None,
    ) -> TakenParts:
        """Send a barrier through the job; return the state of all tasks, which the caller releases.

        A task that ended before the barrier gives its state at its end. ``on_begin`` is called
        when the barrier is sent, after all earlier barriers have passed. Raises CheckpointTimedOut after
        ``timeout_s`` seconds; then, and if the call is cancelled, the checkpoint is abandoned. If the state of
        parameter servers is kept (``keeps_state``), all their workers must reach the same clock first, within
        ``stand_still_timeout_s``.
        """
        due_s = None if timeout_s is None else self._clock.monotonic_s() + timeout_s
        if self._pending is not None:
            # A second barrier in a loop would end the feedback log of the one before it.
            await self._until_passed(self._pending, due_s)
        services = self._services if keeps_state else None
        if services:
            await self._align_workers(services, self._sooner(due_s, stand_still_timeout_s))
        barrier = CheckpointBarrier(self._next, suspend=suspend)
        self._next += 1
        on_begin()
        if services:
            services.begin_checkpoint(barrier.checkpoint)
        running = [task for task in self._tasks if not task.ended]
        pending = self._pending = _Pending(barrier.checkpoint, {task.name: task for task in running})
        for task in running:
            if task.feeder is not None or task.may_hold_back_barriers:
                task.post(BarrierTrigger(barrier))
        self._check()
        try:
            await self._until_passed(pending, due_s)
            for task in self._tasks:
                if task.name not in pending.parts:
                    pending.parts[task.name] = await task.barriers.parts()
            if services:
                pending.parts.update(await services.parts(barrier.checkpoint))
        except BaseException:
            self._abandon(pending)
            raise
        self._pending = None
        return pending.parts

    def _sooner(self, due_s: float | None, timeout_s: float | None) -> float | None:
        if timeout_s is None:
            return due_s
        then_s = self._clock.monotonic_s() + timeout_s
        return then_s if due_s is None else min(due_s, then_s)

    async def _align_workers(self, services: JobServices, due_s: float | None) -> None:
        """Wait until all workers of parameter servers stop at one clock. Raises WorkersApart at ``due_s``."""
        try:
            in_time = await self._in_time(services.stop_reading(), due_s)
        except BaseException:
            services.resume_reading()
            raise
        if not in_time:
            behind = services.tasks_behind()
            services.resume_reading()
            raise WorkersApart(
                f"checkpoint {self._next}: expected all workers of a parameter server at the same clock, given "
                f"{_some(behind)} behind the others; check whether their input has stopped, or raise "
                "alignment_timeout_s"
            )

    async def _until_passed(self, pending: _Pending, due_s: float | None) -> None:
        if due_s is None or pending.passed.is_set():
            await pending.passed.wait()
            return
        await self._in_time(pending.passed.wait(), due_s)
        if not pending.passed.is_set():
            raise CheckpointTimedOut(
                f"checkpoint {pending.checkpoint}: its barrier has not passed {_some(pending.waiting_for)} in time; "
                "check what delays these tasks, or raise alignment_timeout_s"
            )

    async def _in_time(self, waiting: Coroutine[object, object, object], due_s: float | None) -> bool:
        """Wait until a coroutine is done or the time is over; return whether it is done. Then it is cancelled."""
        done: asyncio.Future[object] = asyncio.ensure_future(waiting)
        is_late = asyncio.Event()
        late: asyncio.Future[object] = asyncio.ensure_future(is_late.wait())
        timer = None
        if due_s is not None:
            timer = self._clock.call_later(max(0.0, due_s - self._clock.monotonic_s()), is_late.set)
        try:
            await asyncio.wait([done, late], return_when=asyncio.FIRST_COMPLETED)
            return done.done()
        finally:
            if timer is not None:
                timer.cancel()
            late.cancel()
            done.cancel()

    def _abandon(self, pending: _Pending) -> None:
        """Drop the state of a checkpoint. If its barrier has not passed all tasks, it still passes the others."""
        pending.is_abandoned = True
        release_parts(part for parts in pending.parts.values() for part in parts)
        pending.parts.clear()
        if self._services:
            self._services.abandon_checkpoint(pending.checkpoint)
        if pending.passed.is_set():
            return
        self._on_abandoned(pending.checkpoint)
        for task in self._tasks:
            if not task.ended:
                task.post(CheckpointAbandoned(pending.checkpoint))

    def acknowledge(self, task: Task, checkpoint: int, parts: list[SnapshotPart]) -> None:
        """Take the state of a task that has passed a barrier; it is dropped if the checkpoint was abandoned."""
        pending = self._pending
        if pending is None or pending.checkpoint != checkpoint or pending.is_abandoned:
            release_parts(parts)
        else:
            pending.parts[task.name] = parts
        if pending is not None and pending.checkpoint == checkpoint:
            pending.waiting_for.pop(task.name, None)
            self._check()

    def ended(self, task: Task) -> None:
        """Do not wait for a task that has ended."""
        if self._pending is not None:
            self._pending.waiting_for.pop(task.name, None)
            self._check()

    def _check(self) -> None:
        if self._pending is not None and not self._pending.waiting_for:
            self._pending.passed.set()


def _some(names: Iterable[str]) -> str:
    """Return the first three names, and the number of the others."""
    shown = list(names)
    return ", ".join(shown[:3]) + (f" and {len(shown) - 3} more" if len(shown) > 3 else "")


class Suspension(Enum):
    """Whether the job stops a task at a barrier."""

    NONE = "none"
    """The task runs, or its input has ended."""
    UNDER_WAY = "under way"
    """The task waits for the return of the barrier, and handles nothing else any more."""
    DONE = "done"
    """The task has stopped."""


@final
class TaskBarriers:
    """Takes the state of one task at each checkpoint barrier, and passes the barrier on.

    If no loop leads back to the task, it gives its state to the job at once. Otherwise the gate logs the feedback that
    arrives after the state was taken, until the barrier has returned on every feedback channel; the log is a part of
    the state. A barrier of an abandoned checkpoint is passed on, but no state is taken.
    """

    def __init__(
        self, task: Task, boundary: Boundary | None, acknowledge: Acknowledge, plain_data: PlainData
    ) -> None:
        """``boundary``: the first operator, if it belongs to the border of a loop. ``acknowledge`` takes the state."""
        self.positions: Positions = {}
        """Of a source: the positions that belong to the last state."""
        self.suspension = Suspension.NONE
        self.worker: ServiceWorker | None = None
        """Access to the parameter server that the first step works with, if it has one."""
        self.clocks: ClockAlignment | None = None
        """Lets all workers of that parameter server stop at the same clock before a barrier."""
        self._task = task
        self._gate = task.gate
        self._boundary = boundary
        self._acknowledge = acknowledge
        self._plain_data = plain_data
        self._keeps_last_state = True
        self._abandoned = 0
        """The last abandoned checkpoint."""
        self._pending: CheckpointBarrier | None = None
        """The barrier that has not returned yet."""
        self._pending_parts: list[SnapshotPart] = []
        """The state for its checkpoint, without the log."""

    @property
    def is_suspending(self) -> bool:
        """Whether the state at the last barrier is taken, and only the return of the barrier is handled."""
        return self.suspension is not Suspension.NONE and self._gate.has_feedback

    def serve_with(self, worker: ServiceWorker, clocks: ClockAlignment, *, keeps_last_state: bool) -> None:
        """Have barriers pass this worker, too. ``keeps_last_state``: whether a suspended job leaves a checkpoint."""
        self.worker, self.clocks, self._keeps_last_state = worker, clocks, keeps_last_state

    def arrange_stop(self) -> None:
        """Stop reading, or read again, so that all workers of a parameter server reach the same clock."""
        if self.clocks is not None:
            self._gate.stand_still(self.clocks.stands_still(self._task.name))

    def announce(self, barrier: CheckpointBarrier) -> list[Control]:
        """Prepare for a barrier that the job has posted; return the barrier if it is passed now."""
        if self._task.feeder is not None:
            if not barrier.suspend:
                return [barrier]
            self._task.feeder.stop(barrier)
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
            self.clocks.passed(self._task.name)
        self._task.chain.write_control(barrier)
        if self._gate.has_feedback:
            self._await_return(barrier, parts)
        else:
            self._complete(barrier, parts)

    def _await_return(self, barrier: CheckpointBarrier, parts: list[SnapshotPart]) -> None:
        self._pending, self._pending_parts = barrier, parts
        if barrier.suspend:
            self.suspension = Suspension.UNDER_WAY
            self._gate.only_feedback()
        returned = self._gate.start_feedback_log(barrier)
        if barrier.checkpoint <= self._abandoned:
            self._gate.drop_feedback_log()
        if returned is not None:
            self.barrier_returned(returned)

    def barrier_returned(self, returned: BarrierReturned) -> None:
        """Complete the state with the feedback that was logged until the barrier returned."""
        barrier, parts = self._pending, self._pending_parts
        self._pending, self._pending_parts = None, []
        assert barrier is not None
        if returned.checkpoint > self._abandoned:
            name = PartName(FEEDBACK, self._task.first.step.name, self._task.first.subtask)
            parts.append(encode_part(name, returned.logged, self._plain_data))
        self._complete(barrier, parts)

    def _complete(self, barrier: CheckpointBarrier, parts: list[SnapshotPart]) -> None:
        self._acknowledge(self._task, barrier.checkpoint, parts)
        if self._boundary is not None:
            self._boundary.checkpoint_ends(barrier.checkpoint)
        if barrier.suspend:
            self.suspension = Suspension.DONE

    def abandon(self, checkpoint: int) -> None:
        """Drop the state for this checkpoint. The task still passes its barrier on."""
        self._abandoned = max(self._abandoned, checkpoint)
        if self._pending is not None and self._pending.checkpoint <= checkpoint:
            self._gate.drop_feedback_log()
            self.release()

    def release(self) -> None:
        """Drop the state that waits for the return of a barrier."""
        release_parts(self._pending_parts)
        self._pending_parts = []

    async def parts(self) -> list[SnapshotPart]:
        """Take the state of the task now; return it as parts of a snapshot."""
        state = await self._task.snapshot()
        self.positions = state["positions"]
        return encode_task(self._task.first.step.name, self._task.first.subtask, state, self._plain_data)


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
            parts.append(encode_part(name, piece, plain_data))
    except BaseException:
        release_all(state)
        raise
    return parts


def release_parts(parts: Iterable[SnapshotPart]) -> None:
    for part in parts:
        for deferred in part.deferred:
            deferred.release()


def encode_part(name: PartName, state: PlainValue, plain_data: PlainData) -> SnapshotPart:
    try:
        content, deferred = plain_data.encode_state(state, name=f"state of step {name.step!r}")
    except PlainDataError as error:
        raise RecordFailure(name.step) from error
    return SnapshotPart(str(name), content, deferred)


def held_in_memory(deferred: Deferred) -> list[bytes]:
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
