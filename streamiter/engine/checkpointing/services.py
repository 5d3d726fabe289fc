"""The services of a job: the parameter servers that its operators share.

A :class:`~streamiter.operators.services.Service` has one worker for each subtask of each step that uses it.
:class:`JobServices` opens and closes the services in one process, lets the coordinator stop their workers at the same
clock before a barrier, and takes their state.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, final

from streamiter.engine.graph.graph import Step
from streamiter.engine.inbox.inbox import nothing
from streamiter.engine.plan.messages import Exchange, Messages
from streamiter.engine.storage.snapshot import SnapshotPart, StepState
from streamiter.engine.tasks.failures import FailuresOf
from streamiter.engine.tasks.task import Task
from streamiter.engine.tasks.task_barriers import (
    SERVICE,
    ClockAlignment,
    ClockCoordinator,
    PartName,
    encode_part,
    release_parts,
)
from streamiter.errors import GraphError
from streamiter.operators.services import Service
from streamiter.values.deferred import PlainValue
from streamiter.values.helpers.closing import close_each, undone_on_failure
from streamiter.values.plain_data import PlainData


def service_key(name: str) -> str:
    """Return the name of a service's state among the states of the tasks."""
    return f"{SERVICE} {name}"


@final
class JobServices:
    """All services of one job. Each subtask of a step with a service is a worker; workers are numbered by step."""

    def __init__(
        self,
        flow: str,
        steps: Sequence[Step],
        tasks: Sequence[Task],
        messages: Messages | None,
        exchange: Exchange,
        *,
        plain_data: PlainData,
        has_checkpoints: bool,
    ) -> None:
        self._flow = flow
        self._process = exchange.own
        self._plain_data = plain_data
        self._has_checkpoints = has_checkpoints
        self._tasks: dict[Service, dict[int, Task]] = {}
        """By service: the tasks of this process, by the number of the worker."""
        self._workers: dict[Service, int] = {}
        """The number of workers in all processes."""
        by_name = {task.name: task for task in tasks}
        for step in steps:
            if (service := step.service) is not None:
                first = self._workers.get(service, 0)
                self._workers[service] = first + step.parallelism
                here = self._tasks.setdefault(service, {})
                for subtask in range(step.parallelism):
                    if (task := by_name.get(f"{step.name}[{subtask}]")) is not None:
                        here[first + subtask] = task
        _check_names(flow, list(self._tasks), steps)
        self._alignments: dict[Service, ClockAlignment] = {}
        """By service: the alignment of its workers in this process, before a barrier."""
        self._coordinators: list[ClockCoordinator] = []
        """In process 0, the coordinators of the alignments of all processes."""
        for service in self._tasks:
            self._connect(service, messages, exchange)
        self._begun: list[Service] = []
        """The services that serve this job. A service that has refused the job may serve another job."""

    def _connect(self, service: Service, messages: Messages | None, exchange: Exchange) -> None:
        """Connect the parts of a service in all processes, and their alignments."""
        if messages is not None:
            of_service = f"service {service.name}"
            service.divide(
                exchange.own,
                exchange.processes,
                lambda process, *contents: messages.send(process, of_service, *contents),
            )
            messages.handle(of_service, service.received)
        report, tell = f"clocks of {service.name}", f"align {service.name}"
        alignment = self._alignments[service] = ClockAlignment(partial(exchange.send, 0, report))
        exchange.handle(tell, lambda process, *told: alignment.told(*told))
        if not exchange.own:
            coordinator = ClockCoordinator(exchange.processes, partial(exchange.tell, tell))
            exchange.handle(report, coordinator.reported)
            self._coordinators.append(coordinator)

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
            given = () if states is None else states.get(service_key(service.name), ())
            with FailuresOf(service.name if not tasks else next(iter(tasks.values())).first.step.name):
                workers = await service.begin_job(
                    self._flow, self._workers[service], given, here=list(tasks), has_checkpoints=self._has_checkpoints
                )
            self._begun.append(service)
            alignment = self._alignments[service]
            for task, worker in zip(tasks.values(), workers, strict=True):
                alignment.add(task.name, worker, partial(task.inbox.post, nothing))
                task.serve_with(worker, alignment, keeps_last_state=self._has_checkpoints)

    async def close(self, *, went_well: bool) -> list[Exception]:
        """End the services for this job; return the errors. It may be called more than once."""
        return await close_each(partial(service.end_job, went_well=went_well) for service in self._begun)

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
        """Wait until all workers of each service are at the same clock. Then they read no more until a barrier.

        Only the coordinator calls it, in process 0.
        """
        for stopped in [coordinator.seek() for coordinator in self._coordinators]:
            await stopped.wait()

    def resume_reading(self) -> None:
        """Let workers that have stopped read again, because no barrier follows."""
        for coordinator in self._coordinators:
            coordinator.give_up()

    def behind(self) -> list[str]:
        """Return the tasks that the other workers of their service wait for, and the processes without an answer."""
        return [task for coordinator in self._coordinators for task in coordinator.behind()]

    def begin_checkpoint(self, checkpoint: int) -> None:
        for service in self._tasks:
            service.checkpoint_begins(checkpoint)

    def abandon_checkpoint(self, checkpoint: int) -> None:
        for service in self._tasks:
            service.checkpoint_abandoned(checkpoint)

    async def parts(self, checkpoint: int) -> dict[str, list[SnapshotPart]]:
        """Return the state of each service at this checkpoint, after all workers have passed its barrier.

        It has the part of each service that is in this process, with the number of the process in its name.
        """
        parts: dict[str, list[SnapshotPart]] = {}
        with undone_on_failure(lambda: release_parts(part for of_service in parts.values() for part in of_service)):
            for service in self._tasks:
                state = await service.take_state(checkpoint)
                if state is None:
                    continue
                name = PartName(SERVICE, service.name, self._process)
                parts[service_key(service.name)] = [encode_part(name, state, self._plain_data)]
        return parts

    def statistics(self) -> dict[str, Any]:
        return {service.name: service.statistics() for service in self._tasks}


def _check_names(flow: str, services: Sequence[Service], steps: Sequence[Step]) -> None:
    names = {step.name for step in steps}
    seen: dict[str, Service] = {}
    for service in services:
        if service.name in seen or service.name in names:
            other = "a step" if service.name in names else "another one"
            raise GraphError(
                f"flow {flow!r}: expected a name of its own for each parameter server, given {service.name!r}, which "
                f"{other} has; give ParameterServer(name=…)"
            )
        seen[service.name] = service
