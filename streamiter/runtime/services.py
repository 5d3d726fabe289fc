"""The services of a job: parameter servers that its operators share.

A :class:`~streamiter.operators.operator.Service` has one worker for each subtask of each step that uses it.
:class:`JobServices` opens and closes the services of a job, brings their workers to the same clock before a checkpoint,
and takes their state.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, final

from streamiter.checkpoints.plain_data import PlainData
from streamiter.checkpoints.snapshot import SnapshotPart, StepState
from streamiter.errors import GraphError
from streamiter.operators.operator import Service
from streamiter.operators.output import RecordFailure
from streamiter.runtime.checkpointing.clock_alignment import ClockAlignment
from streamiter.runtime.checkpointing.task_parts import SERVICE, PartName, encode_service, release_parts
from streamiter.runtime.controls import CheckAlignment
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
        """Return the names of the services."""
        return [service.name for service in self._tasks]

    def steps(self) -> dict[str, StepState]:
        """Return the services in the form in which a snapshot lists steps with state."""
        return {service.name: StepState(1, type(service).__name__) for service in self._tasks}

    # -- life ------------------------------------------------------------------------------------------

    async def open(self, states: Mapping[str, Any] | None) -> None:
        """Start the services before the tasks are opened. ``states``: the restored states, if there are any."""
        for service, tasks in self._tasks.items():
            state = None if states is None else states.get(service_key(service.name))
            try:
                workers = await service.begin_job(
                    self._flow, len(tasks), state, has_checkpoints=self._has_checkpoints
                )
            except Exception as error:
                raise RecordFailure(tasks[0].first.step.name) from error
            self._begun.append(service)
            alignment = self._alignments[service]
            for task, worker in zip(tasks, workers, strict=True):
                alignment.add(task.name, worker, _check_again(task))
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
        if task.worker is None:
            return
        step = task.first.step
        assert step.service is not None
        self._alignments[step.service].ended(task.name)
        if not (task.suspended and self._has_checkpoints):
            try:
                await task.worker.leave(f"step {step.name!r} has ended")
            except Exception as error:
                raise RecordFailure(step.name) from error

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
        """Tell the services that the barriers of a checkpoint are sent next."""
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
                parts[service_key(service.name)] = [encode_service(name, state, self._plain_data)]
        except BaseException:
            release_parts(part for of_service in parts.values() for part in of_service)
            raise
        return parts

    def statistics(self) -> dict[str, Any]:
        """Return the statistics of each service by name."""
        return {service.name: service.statistics() for service in self._tasks}


def _check_again(task: Task) -> Callable[[], None]:
    return lambda: task.post(CheckAlignment())


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
