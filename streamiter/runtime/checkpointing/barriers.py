"""The barriers and the services of a job: one checkpoint of all tasks at a time.

A *barrier* is a control record that divides a stream: a checkpoint has the effect of all records before it and of none
behind it. :class:`Barriers` sends a barrier into the tasks that bring input, and collects the state that each task
gives when the barrier passes it. If that takes too long, the checkpoint is *abandoned*: its barrier still passes all
tasks, but their state is dropped. If several processes run the flow, those of process 0 send each barrier to the
others, and wait until it has passed them.

A :class:`~streamiter.operators.operator.Service` is a parameter server that operators share. It has one worker for
each subtask of each step that uses it. :class:`JobServices` opens and closes the services of a job, stops their workers
at the same clock before a barrier, and takes their state.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final, final

from streamiter.checkpoints.plain_data import PlainData
from streamiter.checkpoints.snapshot import SnapshotPart, StepState
from streamiter.clock import Clock
from streamiter.closing import close_each
from streamiter.deferred import PlainValue
from streamiter.errors import CheckpointError, GraphError
from streamiter.operators.operator import Service
from streamiter.records import CheckpointBarrier
from streamiter.runtime.checkpointing.checkpoint_messages import CheckpointMessages
from streamiter.runtime.checkpointing.task_barriers import (
    SERVICE,
    AlignmentOfProcesses,
    ClockAlignment,
    PartName,
    encode_part,
    release_parts,
)
from streamiter.runtime.failures import FailuresOf
from streamiter.runtime.graph import Step
from streamiter.runtime.inbox import nothing
from streamiter.runtime.job_settings import OwnProcess
from streamiter.runtime.task import Task

TakenParts = dict[str, list[SnapshotPart]]
"""The parts that each task has given, by the name of the task."""

FIRST_CHECKPOINT: Final = 1


class CheckpointTimedOut(CheckpointError):
    """A barrier did not pass all tasks in time."""


class WorkersApart(CheckpointTimedOut):
    """The workers of a parameter server did not reach the same clock in time, so no barrier was sent."""


class JobIsOver(CheckpointError):
    """The last checkpoint of the job is taken."""


@dataclass
class _Pending:
    checkpoint: int
    waiting_for: dict[str, None]
    """The names of the running tasks, and of the other processes."""
    parts: TakenParts = field(default_factory=dict)
    is_abandoned: bool = False
    passed: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when all tasks have passed the barrier on, also if the checkpoint was abandoned."""


@final
class Barriers:
    """Sends barriers into the tasks that bring input, and collects the states of all tasks."""

    def __init__(self, clock: Clock, messages: CheckpointMessages) -> None:
        self._clock = clock
        self._messages = messages
        messages.when_passed(self._has_passed_elsewhere)
        self._runs_elsewhere = self._suspended_elsewhere = False
        self._tasks: Sequence[Task] = ()
        self._services: JobServices | None = None
        self._kept: JobServices | None = None
        """The services whose state belongs to the checkpoints; None for none."""
        self._on_abandoned: Callable[[int], None] = lambda checkpoint: None
        self._next = FIRST_CHECKPOINT
        self._pending: _Pending | None = None
        self.one_at_a_time = asyncio.Lock()
        """The caller holds it from the barrier until the collected state is committed or dropped."""

    def watch(self, tasks: Sequence[Task], services: JobServices, on_abandoned: Callable[[int], None]) -> None:
        """Set the tasks and services of the job; ``on_abandoned`` is called for each checkpoint that is abandoned."""
        self._tasks = tasks
        self._services = services
        self._on_abandoned = on_abandoned

    def keep_services(self) -> None:
        """From now on, the state of services belongs to the checkpoints that process 0 begins."""
        self._kept = self._services

    def number_after(self, checkpoint: int) -> None:
        """Give the next barriers numbers above that of an existing checkpoint."""
        self._next = max(self._next, checkpoint + 1)

    @property
    def last_number(self) -> int:
        return self._next - 1

    @property
    def all_ended(self) -> bool:
        """Whether all tasks have ended with their input; those of other processes before the last barrier."""
        return not self._runs_elsewhere and all(task.ended and not task.suspended for task in self._tasks)

    @property
    def any_suspended(self) -> bool:
        """Whether a barrier has stopped a task, in any process."""
        return self._suspended_elsewhere or any(task.suspended for task in self._tasks)

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

        A task that ended before the barrier gives its state at its end. ``on_begin`` is called when the barrier is
        sent, after all earlier barriers have passed. Raises CheckpointTimedOut after ``timeout_s`` seconds; then, and
        if the call is cancelled, the checkpoint is abandoned. If the state of parameter servers is kept
        (``keeps_state``), all their workers must reach the same clock first, within ``stand_still_timeout_s``.
        """
        due_s = None if timeout_s is None else self._clock.monotonic_s() + timeout_s
        if self._pending is not None:
            # A second barrier in a loop would end the feedback log of the one before it.
            await self._until_passed(self._pending, due_s)
        services = self._kept = self._services if keeps_state else None
        if services:
            await self._align_workers(services, self._sooner(due_s, stand_still_timeout_s))
        barrier = CheckpointBarrier(self._next, suspend=suspend)
        self._next += 1
        on_begin()
        self._runs_elsewhere = False
        pending = self._begin(barrier.checkpoint)
        pending.waiting_for = {**dict.fromkeys(self._messages.names), **pending.waiting_for}
        self._messages.send_barrier(barrier)
        self.start(barrier)
        parts = await self.collect(due_s)
        self._suspended_elsewhere = suspend and self._runs_elsewhere
        return parts

    def start(self, barrier: CheckpointBarrier) -> None:
        """Send a barrier into the tasks of this process; ``collect`` must follow."""
        self._begin(barrier.checkpoint)
        for task in self._tasks:
            if not task.ended and (task.feeder is not None or task.may_hold_back_barriers):
                task.announce(barrier)
        self._check()

    def _begin(self, checkpoint: int) -> _Pending:
        """Return the pending checkpoint. Its barrier may have passed a task already, from another process."""
        pending = self._pending
        if pending is None or pending.checkpoint != checkpoint:
            running = dict.fromkeys(task.name for task in self._tasks if not task.ended)
            pending = self._pending = _Pending(checkpoint, running)
            if self._kept:
                self._kept.begin_checkpoint(checkpoint)
        return pending

    async def collect(self, due_s: float | None = None) -> TakenParts:
        """Return the state of all tasks, which the caller releases, when the barrier has passed them."""
        pending = self._pending
        assert pending is not None
        try:
            await self._until_passed(pending, due_s)
            for task in self._tasks:
                if task.name not in pending.parts:
                    pending.parts[task.name] = await task.barriers.parts()
            if self._kept:
                pending.parts.update(await self._kept.parts(pending.checkpoint))
        except BaseException as error:
            self._abandon(pending, is_late=isinstance(error, CheckpointTimedOut))
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
        """Wait until a coroutine is done or the time is over; return whether it is done. If not, it is cancelled."""
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

    def _abandon(self, pending: _Pending, *, is_late: bool = False) -> None:
        """Drop the state of a checkpoint. If its barrier has not passed all tasks, it still passes the others."""
        if pending.is_abandoned:
            return
        pending.is_abandoned = True
        self._messages.abandon(pending.checkpoint, is_late=is_late)
        release_parts(part for parts in pending.parts.values() for part in parts)
        pending.parts.clear()
        if self._services:
            self._services.abandon_checkpoint(pending.checkpoint)
        if pending.passed.is_set():
            return
        self._on_abandoned(pending.checkpoint)
        for task in self._tasks:
            if not task.ended:
                task.abandon(pending.checkpoint)

    def delayed_by(self, checkpoint: int) -> str:
        """Return the tasks that the barrier of this checkpoint has not passed, for the log."""
        pending = self._pending
        return "" if pending is None or pending.checkpoint != checkpoint else _some(pending.waiting_for)

    def abandon(self, checkpoint: int) -> None:
        """Drop the state of this checkpoint, if it is pending, because process 0 says so."""
        if self._pending is not None and self._pending.checkpoint == checkpoint:
            self._abandon(self._pending)

    def acknowledge(self, task: str, checkpoint: int, parts: list[SnapshotPart]) -> None:
        """Take the state of a task that has passed a barrier; it is dropped if the checkpoint was abandoned.

        In another process than 0, a barrier may come through a channel before process 0 has said that it begins.
        """
        pending = self._begin(checkpoint)
        if pending.is_abandoned:
            release_parts(parts)
        else:
            pending.parts[task] = parts
        pending.waiting_for.pop(task, None)
        self._check()

    def _has_passed_elsewhere(self, process: str, checkpoint: int, runs: bool) -> None:
        if self._pending is not None and self._pending.checkpoint == checkpoint:
            self._runs_elsewhere |= runs
            self._pending.waiting_for.pop(process, None)
            self._check()

    def ended(self, task: Task) -> None:
        """Do not wait for a task that has ended."""
        if self._pending is not None:
            self._pending.waiting_for.pop(task.name, None)
            self._check()

    def _check(self) -> None:
        pending = self._pending
        if pending is not None and not pending.waiting_for and not pending.passed.is_set():
            pending.passed.set()
            self._messages.report_passed(pending.checkpoint, runs=not self.all_ended)


def _some(names: Iterable[str]) -> str:
    """Return the first three names, and the number of the others."""
    shown = list(names)
    return ", ".join(shown[:3]) + (f" and {len(shown) - 3} more" if len(shown) > 3 else "")


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
        own: OwnProcess,
        *,
        plain_data: PlainData,
        has_checkpoints: bool,
    ) -> None:
        self._flow = flow
        self._own = own
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
        self._of_processes: dict[Service, AlignmentOfProcesses] = {}
        """In process 0 only."""
        for service in self._tasks:
            self._connect(service)
        self._begun: list[Service] = []
        """The services that serve this job. A service that has refused the job may serve another job."""

    def _connect(self, service: Service) -> None:
        """Connect the parts of a service, and of its alignment, in all processes."""
        messages, own, processes = self._own.messages, self._own.number, self._own.placement.processes
        to_service, to_alignment = f"service {service.name}", f"clocks of {service.name}"
        if messages is not None:
            service.divide(own, processes, lambda process, *contents: messages.send(process, to_service, *contents))
            messages.handle(to_service, service.received)
        if own:
            assert messages is not None
            alignment = ClockAlignment(partial(messages.send, 0, to_alignment))
            messages.handle(to_alignment, lambda process, *contents: alignment.told(*contents))
        else:

            def tell(*contents: Any) -> None:
                for process in range(1, processes):
                    assert messages is not None
                    messages.send(process, to_alignment, *contents)
                alignment.told(*contents)

            together = self._of_processes[service] = AlignmentOfProcesses(processes, tell)
            alignment = ClockAlignment(partial(together.reported, 0))
            if messages is not None:
                messages.handle(to_alignment, together.reported)
        self._alignments[service] = alignment

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

        Called in process 0, for all processes.
        """
        for event in [alignment.seek() for alignment in self._of_processes.values()]:
            await event.wait()

    def tasks_behind(self) -> list[str]:
        """Return the tasks that others wait for at a clock."""
        return [task for alignment in self._of_processes.values() for task in alignment.behind()]

    def resume_reading(self) -> None:
        """Let workers that have stopped read again, because no barrier follows."""
        for alignment in self._of_processes.values():
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
        """Return the state of each service at this checkpoint, after all workers have passed its barrier.

        It has the part of each service that is in this process, with the number of the process in its name.
        """
        parts: dict[str, list[SnapshotPart]] = {}
        try:
            for service in self._tasks:
                state = await service.take_state(checkpoint)
                if state is None:
                    continue
                name = PartName(SERVICE, service.name, self._own.number)
                parts[service_key(service.name)] = [encode_part(name, state, self._plain_data)]
        except BaseException:
            release_parts(part for of_service in parts.values() for part in of_service)
            raise
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
