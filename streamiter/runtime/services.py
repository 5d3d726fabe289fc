"""The services of a job: parameter servers that its operators share.

A :class:`~streamiter.operators.operator.Service` has one worker for each subtask of each step that uses it.
:class:`JobServices` opens and closes the services of a job, and takes their state.

Before a barrier, :class:`ClockAlignment` stops all workers of a service at the same clock. A worker counts its progress
with a *clock*, and waits for workers whose clock is behind. If a barrier reached one worker at an earlier clock than
another, the workers would wait for each other: the one behind the barrier waits for a clock that the other can reach
only with records that are held behind its own barrier. So a task whose worker is at the highest clock stops reading
until the barrier has passed it; the others continue until they have reached that clock. A step may move its clock
several times within one record and wait for the others in between, so every change of a clock is reported at once.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from functools import partial
from typing import TYPE_CHECKING, Any, final

from streamiter.checkpoints.plain_data import PlainData
from streamiter.checkpoints.snapshot import SnapshotPart, StepState
from streamiter.deferred import PlainValue
from streamiter.errors import GraphError
from streamiter.operators.operator import Service, ServiceWorker
from streamiter.runtime.checkpointing.barriers import (
    SERVICE,
    CheckAlignment,
    PartName,
    encode_part,
    release_parts,
)
from streamiter.runtime.instance import FailuresOf

if TYPE_CHECKING:
    from streamiter.runtime.task import Task


def service_key(name: str) -> str:
    """Return the name of a service's state among the states of the tasks."""
    return f"{SERVICE} {name}"


@final
class JobServices:
    """All services of one job. Each subtask of a step with a service is a worker; workers are numbered by step."""

    def __init__(
        self, flow: str, tasks: Sequence[Task], *, plain_data: PlainData, has_checkpoints: bool
    ) -> None:
        self._flow = flow
        self._plain_data = plain_data
        self._has_checkpoints = has_checkpoints
        self._tasks: dict[Service, list[Task]] = {}
        for task in tasks:
            if (service := task.first.step.service) is not None:
                self._tasks.setdefault(service, []).append(task)
        self._alignments = {service: ClockAlignment() for service in self._tasks}
        self._begun: list[Service] = []
        """The services that serve this job. A service that has refused the job may serve another job."""
        _check_names(flow, list(self._tasks), tasks)

    def __bool__(self) -> bool:
        return bool(self._tasks)

    def names(self) -> list[str]:
        return [service.name for service in self._tasks]

    def steps(self) -> dict[str, StepState]:
        """Return the services in the form in which a snapshot lists steps with state."""
        return {service.name: StepState(1, type(service).__name__) for service in self._tasks}

    # -- life ------------------------------------------------------------------------------------------

    async def open(self, states: Mapping[str, PlainValue] | None) -> None:
        """Start the services before the tasks are opened. ``states``: the restored states, if there are any."""
        for service, tasks in self._tasks.items():
            state = None if states is None else states.get(service_key(service.name))
            with FailuresOf(tasks[0].first.step.name):
                workers = await service.begin_job(
                    self._flow, len(tasks), state, has_checkpoints=self._has_checkpoints
                )
            self._begun.append(service)
            alignment = self._alignments[service]
            for task, worker in zip(tasks, workers, strict=True):
                alignment.add(task.name, worker, partial(task.post, CheckAlignment()))
                task.serve_with(worker, alignment, keeps_last_state=self._has_checkpoints)

    async def close(self, *, went_well: bool) -> list[Exception]:
        """End the services for this job; return the errors. It may be called more than once."""
        errors: list[Exception] = []
        for service in self._begun:
            try:
                await service.end_job(went_well=went_well)
            except Exception as error:
                errors.append(error)
        return errors

    async def task_ended(self, task: Task) -> None:
        """Let the worker of a task leave, because the task has ended, unless the job is suspended."""
        if task.barriers.worker is None:
            return
        step = task.first.step
        assert step.service is not None
        self._alignments[step.service].ended(task.name)
        if not (task.suspended and self._has_checkpoints):
            with FailuresOf(step.name):
                await task.barriers.worker.leave(f"step {step.name!r} has ended")

    # -- checkpoints -----------------------------------------------------------------------------------

    async def stop_reading(self) -> None:
        """Wait until the workers of each service are at the same clock. Then they read no more until a barrier."""
        for event in [alignment.seek() for alignment in self._alignments.values()]:
            await event.wait()

    def tasks_behind(self) -> list[str]:
        """Return the tasks that others wait for at a clock."""
        return [task for alignment in self._alignments.values() for task in alignment.behind()]

    def resume_reading(self) -> None:
        """Let workers that have stopped read again, because no barrier follows."""
        for alignment in self._alignments.values():
            alignment.give_up()

    def begin_checkpoint(self, checkpoint: int) -> None:
        for service in self._tasks:
            service.checkpoint_begins(checkpoint)

    def abandon_checkpoint(self, checkpoint: int) -> None:
        """Tell the services that a checkpoint is abandoned, and let workers read again."""
        self.resume_reading()
        for service in self._tasks:
            service.checkpoint_abandoned(checkpoint)

    async def parts(self, checkpoint: int) -> dict[str, list[SnapshotPart]]:
        """Return the state of each service at this checkpoint, after all workers have passed its barrier."""
        parts: dict[str, list[SnapshotPart]] = {}
        try:
            for service in self._tasks:
                state = await service.take_state(checkpoint)
                name = PartName(SERVICE, service.name, 0)
                parts[service_key(service.name)] = [encode_part(name, state, self._plain_data)]
        except BaseException:
            release_parts(part for of_service in parts.values() for part in of_service)
            raise
        return parts

    def statistics(self) -> dict[str, Any]:
        return {service.name: service.statistics() for service in self._tasks}


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
        """Let its task read again, if it has stopped."""
        if self.reading is _Reading.STOPPED:
            self.reading = _Reading.MOVING
        self.call_again()


@final
class ClockAlignment:
    """The alignment for one service of a job. Each task asks it after every batch, and workers report every clock."""

    def __init__(self) -> None:
        self._members: dict[str, _Member] = {}
        self._furthest: dict[str, int] = {}
        self._is_aligning = False
        self._all_stopped = asyncio.Event()

    def add(self, task: str, worker: ServiceWorker, call_again: Callable[[], None]) -> None:
        self._members[task] = _Member(task, worker, call_again)
        worker.call_when_further(lambda: self.further(task))

    def seek(self) -> asyncio.Event:
        """Start the alignment; the event is set when all tasks have stopped at the same clock."""
        self._is_aligning = True
        self._all_stopped.clear()
        self._furthest = {}
        for member in self._members.values():
            member.reading = _Reading.MOVING
            self._note_clock(member)
        if not self._furthest:  # No worker waits for another, so the barrier may reach each at any clock.
            self._is_aligning = False
            self._all_stopped.set()
            return self._all_stopped
        for member in self._members.values():
            member.call_again()
        self._check()
        return self._all_stopped

    def stands_still(self, task: str) -> bool:
        """Return whether this task, which has just handled a batch, must stop reading."""
        member = self._unpassed(task)
        if member is None:
            return False
        self._release_those_behind(member)
        member.reading = _Reading.MOVING if self._is_behind(member) else _Reading.STOPPED
        self._check()
        return member.reading is _Reading.STOPPED

    def further(self, task: str) -> None:
        """The worker of this task has moved its clock, perhaps within a record, and may wait for those behind it."""
        if (member := self._unpassed(task)) is not None:
            self._release_those_behind(member)

    def passed(self, task: str) -> None:
        """The barrier has passed this task: it continues."""
        if (member := self._members.get(task)) is not None and self._is_aligning:
            member.reading = _Reading.PASSED
            self._is_aligning = any(other.reading is not _Reading.PASSED for other in self._members.values())

    def ended(self, task: str) -> None:
        self._members.pop(task, None)
        if self._is_aligning:
            self._check()

    def give_up(self) -> None:
        """No barrier is sent: let all tasks continue."""
        if self._is_aligning:
            self._is_aligning = False
            for member in self._members.values():
                member.resume()

    def behind(self) -> list[str]:
        """Return the tasks that delay the others: those at an earlier clock, or else those that have not stopped."""
        moving = [member for member in self._members.values() if member.reading is _Reading.MOVING]
        late = [member for member in moving if self._is_behind(member)]
        return [member.task for member in late or moving]

    def _unpassed(self, task: str) -> _Member | None:
        """Return the member of a task that the barrier has not passed; None if no barrier is due."""
        member = self._members.get(task)
        return (
            member
            if self._is_aligning and member is not None and member.reading is not _Reading.PASSED
            else None
        )

    def _release_those_behind(self, member: _Member) -> None:
        """Let tasks continue that stopped at an earlier clock than this one has reached."""
        if self._note_clock(member):
            for other in self._members.values():
                if other.reading is _Reading.STOPPED and self._is_behind(other):
                    other.resume()

    def _note_clock(self, member: _Member) -> bool:
        """Note the clocks of a worker; return whether one of them is the highest so far."""
        member.clocks = dict(member.worker.counted_clocks())
        further = {
            name: clock for name, clock in member.clocks.items() if clock > self._furthest.get(name, -1)
        }
        self._furthest.update(further)
        return bool(further)

    def _is_behind(self, member: _Member) -> bool:
        return any(member.clocks.get(name, 0) < clock for name, clock in self._furthest.items())

    def _check(self) -> None:
        if all(member.reading is not _Reading.MOVING for member in self._members.values()):
            self._all_stopped.set()


def _check_names(flow: str, services: Sequence[Service], tasks: Sequence[Task]) -> None:
    steps = {instance.step.name: instance.step for task in tasks for instance in task.instances}
    seen: dict[str, Service] = {}
    for service in services:
        if service.name in seen or service.name in steps:
            other = "a step" if service.name in steps else "another one"
            raise GraphError(
                f"flow {flow!r}: expected a name of its own for each parameter server, given {service.name!r}, which "
                f"{other} has; give ParameterServer(name=…)"
            )
        seen[service.name] = service
