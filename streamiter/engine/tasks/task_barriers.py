"""What a task does at a checkpoint barrier, and how its state becomes parts of a snapshot.

:class:`TaskBarriers` takes the state of one task when a barrier passes the task. The state is a list of parts: one for
each operator of the task, and one for the task itself. Parts are named after steps (:class:`PartName`), so that a chain
may have other operators in the next run.

A task may work with a *service*: a parameter server, on which each task is a worker. A worker counts its progress with
a *clock*, and waits for workers whose clock is behind. If a barrier reached one worker at an earlier clock than
another, the workers would wait for each other: the one behind the barrier waits for a clock that the other can reach
only with records that are held behind its own barrier. So all workers of a service stop at the same clock before a
barrier: a :class:`ClockCoordinator`, with a :class:`ClockAlignment` in each process, lets a task whose worker is at the
highest clock stop reading until the barrier has passed it; the others continue until they have reached that clock. A
step may move its clock several times within one record and wait for the others in between, so every change of a clock
is reported at once.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple, Protocol, TypeAlias, final

from streamiter.engine.inbox.alignment import BarrierReturned
from streamiter.engine.inbox.inbox import Inbox
from streamiter.engine.storage.snapshot import SnapshotPart
from streamiter.engine.tasks.chain import Chain
from streamiter.engine.tasks.feeder import Feeder
from streamiter.engine.tasks.instance import OperatorInstance
from streamiter.errors import PlainDataError
from streamiter.operators.operator import Boundary
from streamiter.operators.output import RecordFailure
from streamiter.operators.services import ServiceWorker
from streamiter.operators.source import Positions
from streamiter.values.deferred import Deferred, PlainValue, release_all
from streamiter.values.helpers.closing import undone_on_failure
from streamiter.values.plain_data import PlainData
from streamiter.values.records import CheckpointBarrier, Control

TaskState: TypeAlias = dict[str, PlainValue]
"""The state of a task: the entries of ``Task.snapshot``, as plain data."""

TaskStates: TypeAlias = dict[str, TaskState]
"""The states of tasks, and of parameter servers, by name."""

TakenParts: TypeAlias = dict[str, list[SnapshotPart]]
"""The parts that each task and service has given, by name."""

STEP, TASK, FEEDBACK, SERVICE = "step", "task", "feedback", "service"


Acknowledge: TypeAlias = Callable[[str, int, list[SnapshotPart]], None]
"""Receives the state of a task at a barrier: the name of the task, the checkpoint, the parts of the state."""


class Suspension(Enum):
    """Whether the job stops a task at a barrier."""

    NONE = "none"
    """The task runs, or its input has ended."""
    UNDER_WAY = "under way"
    """The task waits for the return of the barrier, and handles nothing else any more."""
    DONE = "done"
    """The task has stopped."""


class TaskAtBarriers(Protocol):
    """A task, as far as its barriers use it."""

    name: str
    inbox: Inbox
    chain: Chain
    feeder: Feeder | None
    first: OperatorInstance

    async def snapshot(self) -> TaskState:
        """Return the state of the task and its operators."""


@final
class TaskBarriers:
    """Takes the state of one task at each checkpoint barrier, and passes the barrier on.

    If no loop leads back to the task, it gives its state to the job at once. Otherwise the inbox logs the feedback that
    arrives after the state was taken, until the barrier has returned on every feedback channel; the log is a part of
    the state. A barrier of an abandoned checkpoint is passed on, but no state is taken.
    """

    def __init__(
        self, task: TaskAtBarriers, boundary: Boundary | None, acknowledge: Acknowledge, plain_data: PlainData
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
        self._inbox = task.inbox
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

    def serve_with(self, worker: ServiceWorker, clocks: ClockAlignment, *, keeps_last_state: bool) -> None:
        """Have barriers pass this worker, too. ``keeps_last_state``: whether a suspended job leaves a checkpoint."""
        self.worker, self.clocks, self._keeps_last_state = worker, clocks, keeps_last_state

    def arrange_stop(self) -> None:
        """Stop reading, or read again, so that all workers of a parameter server reach the same clock."""
        if self.clocks is not None:
            self._inbox.stand_still(self.clocks.stands_still(self._task.name))

    def expect(self, barrier: CheckpointBarrier) -> list[Control]:
        """Prepare for a barrier that the job has posted; return the barrier if it is passed now."""
        if self._task.feeder is not None:
            if not barrier.suspend:
                return [barrier]
            self._task.feeder.stop(barrier)
            return []
        outlives_inputs = self._boundary is not None and self._boundary.outlives_inputs
        return self._inbox.expect_barrier(barrier, starts_here=outlives_inputs or self._inbox.stands_still)

    async def pass_barrier(self, barrier: CheckpointBarrier) -> None:
        """Take the state of the task, then pass the barrier on."""
        number, is_abandoned = barrier.checkpoint, barrier.checkpoint <= self._abandoned
        self._inbox.is_at_barrier = True
        parts = [] if is_abandoned else await self.parts()
        self._inbox.is_at_barrier = False
        if self._boundary is not None:
            self._boundary.checkpoint_begins(number)
        is_kept = not barrier.suspend or self._keeps_last_state
        if self.worker is not None and is_kept and not is_abandoned:
            self.worker.pass_barrier(number)
        if self.clocks is not None:
            self.clocks.passed(self._task.name)
        self._task.chain.write_control(barrier)
        if self._inbox.has_feedback:
            self._await_return(barrier, parts)
        else:
            self._complete(barrier, parts)

    def _await_return(self, barrier: CheckpointBarrier, parts: list[SnapshotPart]) -> None:
        self._pending, self._pending_parts = barrier, parts
        if barrier.suspend:
            self.suspension = Suspension.UNDER_WAY
            self._inbox.only_feedback()
        returned = self._inbox.start_feedback_log(barrier)
        if barrier.checkpoint <= self._abandoned:
            self._inbox.feedback.close()
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
        else:
            release_all(returned.logged)
        self._complete(barrier, parts)

    def _complete(self, barrier: CheckpointBarrier, parts: list[SnapshotPart]) -> None:
        self._acknowledge(self._task.name, barrier.checkpoint, parts)
        if self._boundary is not None:
            self._boundary.checkpoint_ends(barrier.checkpoint)
        if barrier.suspend:
            self.suspension = Suspension.DONE

    def abandon(self, checkpoint: int) -> None:
        """Drop the state for this checkpoint. The task still passes its barrier on."""
        self._abandoned = max(self._abandoned, checkpoint)
        if self._pending is not None and self._pending.checkpoint <= checkpoint:
            self._inbox.feedback.close()
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
    with undone_on_failure(lambda: release_all(state)):
        for name, piece in (*pieces, (PartName(TASK, first_step, subtask), of_task)):
            parts.append(encode_part(name, piece, plain_data))
    return parts


def release_parts(parts: Iterable[SnapshotPart]) -> None:
    for part in parts:
        for deferred in part.deferred:
            deferred.release()


def release_taken(taken: TakenParts) -> None:
    """Drop the parts that tasks and services have given."""
    release_parts(part for parts in taken.values() for part in parts)
    taken.clear()


def encode_part(name: PartName, state: PlainValue, plain_data: PlainData) -> SnapshotPart:
    try:
        content, deferred = plain_data.encode_state(state, name=f"state of step {name.step!r}")
    except (PlainDataError, MemoryError) as error:
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


class _Reading(Enum):
    """Whether a task reads its input while the workers are aligned."""

    MOVING = "moving"
    STOPPED = "stopped"
    """Its worker is at the highest clock, and the barrier has not passed it."""
    PASSED = "passed"
    """The barrier has passed it, so it continues."""


@dataclass
class _Member:
    task: str
    worker: ServiceWorker
    call_again: Callable[[], None]
    """Make its task ask again whether it must stop."""
    reading: _Reading = _Reading.MOVING
    clocks: Mapping[str, int] = field(default_factory=dict)

    def resume(self) -> None:
        """Let its task ask again, and read again if it has stopped."""
        if self.reading is _Reading.STOPPED:
            self.reading = _Reading.MOVING
        self.call_again()


@final
class ClockAlignment:
    """The alignment for one service in one process. Tasks ask it after every batch, and workers report every clock.

    It reports to the :class:`ClockCoordinator` in process 0, which tells all processes the highest clocks.
    """

    def __init__(self, report: Callable[[int, Mapping[str, int], list[str]], object]) -> None:
        """``report`` calls ``reported`` of the coordinator, with the number of this process."""
        self._report = report
        self._members: dict[str, _Member] = {}
        self._number = 0
        self._furthest: dict[str, int] = {}
        self._reported: tuple[dict[str, int], list[str]] | None = None
        self._is_aligning = False

    def add(self, task: str, worker: ServiceWorker, call_again: Callable[[], None]) -> None:
        self._members[task] = _Member(task, worker, call_again)
        worker.call_when_further(lambda: self.further(task))

    def told(self, number: int, clocks: Mapping[str, int] | None) -> None:
        """Learn the highest clocks of all processes; ``clocks`` are None if the alignment is over."""
        if number > self._number:
            self._begin(number)
        if not self._is_aligning:
            return
        if clocks is None:
            self._end()
            return
        if further := self._further(clocks):
            self._furthest |= further
            for member in self._members.values():
                if member.reading is _Reading.MOVING or (
                    member.reading is _Reading.STOPPED and self._is_behind(member)
                ):
                    member.resume()
            self._check()

    def _begin(self, number: int) -> None:
        self._number = number
        self._is_aligning = True
        self._reported = None
        self._furthest = {}
        for member in self._members.values():
            member.reading = _Reading.MOVING
            self._note_clock(member)
        if self._furthest:
            for member in self._members.values():
                member.call_again()
        self._check()

    def _end(self) -> None:
        self._is_aligning = False
        if self._furthest:
            for member in self._members.values():
                member.resume()

    def stands_still(self, task: str) -> bool:
        """Return whether this task, which has just handled a batch, must stop reading."""
        member = self._unpassed(task)
        if member is None:
            return False
        self._release_those_behind(member)
        is_behind = not self._furthest or self._is_behind(member)
        member.reading = _Reading.MOVING if is_behind else _Reading.STOPPED
        self._check()
        return member.reading is _Reading.STOPPED

    def further(self, task: str) -> None:
        """The worker of this task has moved its clock, perhaps within a record, and may wait for those behind it."""
        if (member := self._unpassed(task)) is not None:
            self._release_those_behind(member)
            self._check()

    def passed(self, task: str) -> None:
        """The barrier has passed this task: it continues."""
        if (member := self._members.get(task)) is not None and self._is_aligning:
            member.reading = _Reading.PASSED
            self._is_aligning = any(other.reading is not _Reading.PASSED for other in self._members.values())

    def ended(self, task: str) -> None:
        self._members.pop(task, None)
        if self._is_aligning:
            self._check()

    def _behind(self) -> list[str]:
        """Return the tasks that delay the others: tasks at an earlier clock, or else all that have not stopped."""
        moving = [member for member in self._members.values() if member.reading is _Reading.MOVING]
        late = [member for member in moving if self._is_behind(member)]
        return [member.task for member in late or moving]

    def _unpassed(self, task: str) -> _Member | None:
        """Return the member of a task that the barrier has not passed; None if no barrier is due."""
        if not self._is_aligning:
            return None
        member = self._members.get(task)
        return None if member is None or member.reading is _Reading.PASSED else member

    def _release_those_behind(self, member: _Member) -> None:
        """Let the tasks continue that stopped at an earlier clock than the member has reached."""
        if self._note_clock(member):
            for other in self._members.values():
                if other.reading is _Reading.STOPPED and self._is_behind(other):
                    other.resume()

    def _note_clock(self, member: _Member) -> bool:
        """Note the clocks of a worker; return whether one of them is the highest so far."""
        member.clocks = dict(member.worker.counted_clocks())
        further = self._further(member.clocks)
        self._furthest |= further
        return bool(further)

    def _further(self, clocks: Mapping[str, int]) -> dict[str, int]:
        """Return the clocks that are higher than the highest known ones."""
        return {name: clock for name, clock in clocks.items() if clock > self._furthest.get(name, -1)}

    def _is_behind(self, member: _Member) -> bool:
        return any(member.clocks.get(name, 0) < clock for name, clock in self._furthest.items())

    def _check(self) -> None:
        now = dict(self._furthest), self._behind()
        if now != self._reported:
            self._reported = now
            self._report(self._number, *now)


@final
class ClockCoordinator:
    """Starts the alignments for one service in all processes, and knows when all tasks have stopped at one clock."""

    def __init__(self, processes: int, tell: Callable[[int, Mapping[str, int] | None], object]) -> None:
        """``tell`` calls ``told`` of the alignments in all processes."""
        self._processes = processes
        self._tell = tell
        self._number = 0
        self._furthest: dict[str, int] = {}
        self._reports: dict[int, tuple[Mapping[str, int], list[str]]] = {}
        """The last report of each process: the highest clocks that it knows, and its tasks that have not stopped."""
        self._all_stopped = asyncio.Event()

    def seek(self) -> asyncio.Event:
        """Start an alignment; the event is set when all tasks of all processes have stopped at the same clock."""
        stopped = self._all_stopped = asyncio.Event()
        self._number += 1
        self._furthest, self._reports = {}, {}
        self._tell(self._number, {})
        return stopped

    def give_up(self) -> None:
        """No barrier is sent, or no worker waits for another: let all tasks of all processes continue."""
        self._tell(self._number, None)

    def behind(self) -> list[str]:
        """Return the tasks that the others wait for, and the processes that have not answered."""
        silent = [f"process {process}" for process in range(self._processes) if process not in self._reports]
        return [task for _, behind in self._reports.values() for task in behind] + silent

    def reported(self, process: int, number: int, clocks: Mapping[str, int], behind: list[str]) -> None:
        """Take the report of a process."""
        if number != self._number or self._all_stopped.is_set():
            return
        self._reports[process] = clocks, behind
        if any(clock > self._furthest.get(name, -1) for name, clock in clocks.items()):
            for name, clock in clocks.items():
                self._furthest[name] = max(clock, self._furthest.get(name, -1))
            self._tell(number, dict(self._furthest))
        if self._all_stopped.is_set() or len(self._reports) < self._processes:
            return
        if not self._furthest:  # No worker waits for another, so the barrier may reach each at any clock.
            self._all_stopped.set()
            self.give_up()
        elif all(not late and reached == self._furthest for reached, late in self._reports.values()):
            self._all_stopped.set()
