"""Barriers: one checkpoint of all tasks at a time.

A *barrier* is a control record that divides a stream: a checkpoint has the effect of all records before it and of none
behind it. :class:`Barriers` sends a barrier into the tasks that bring input, and collects the state that each task
gives when the barrier passes it. If that takes too long, the checkpoint is *abandoned*: its barrier still passes all
tasks, but their state is dropped.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, final

from streamiter.checkpoints.snapshot import SnapshotPart
from streamiter.clock import Clock
from streamiter.errors import CheckpointError
from streamiter.records import CheckpointBarrier
from streamiter.runtime.checkpointing.task_parts import release_parts
from streamiter.runtime.controls import BarrierTrigger, CheckpointAbandoned
from streamiter.runtime.task import Task

if TYPE_CHECKING:
    from streamiter.runtime.services import JobServices

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
        """The number of the last barrier."""
        return self._next - 1

    async def take(
        self,
        *,
        suspend: bool = False,
        timeout_s: float | None = None,
        stand_still_timeout_s: float | None = None,
        keeps_state: bool = True,
        on_begin: Callable[[int], None] = lambda checkpoint: None,
    ) -> TakenParts:
        """Send a barrier through the job; return the state of all tasks, which the caller releases.

        A task that ended before the barrier gives its state at its end. ``on_begin`` is called with the number of the
        checkpoint when its barrier is sent, after all earlier barriers have passed. Raises CheckpointTimedOut after
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
        on_begin(barrier.checkpoint)
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
                    pending.parts[task.name] = await task.parts()
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
        """Wait until all workers of parameter servers have stopped at the same clock. Raises WorkersApart if it is
        late.
        """
        standing = asyncio.ensure_future(services.stop_reading())
        try:
            await self._until(standing, due_s)
        except BaseException:
            services.resume_reading()
            raise
        finally:
            is_late = not standing.done()
            standing.cancel()
        if is_late:
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
        passed = asyncio.ensure_future(pending.passed.wait())
        try:
            await self._until(passed, due_s)
        finally:
            passed.cancel()
        if not pending.passed.is_set():
            raise CheckpointTimedOut(
                f"checkpoint {pending.checkpoint}: its barrier has not passed {_some(pending.waiting_for)} in time; "
                "check what delays these tasks, or raise alignment_timeout_s"
            )

    async def _until(self, done: asyncio.Future[Any], due_s: float | None) -> None:
        """Wait until ``done`` is done or the time is over."""
        if due_s is None:
            await asyncio.wait([done])
            return
        is_late = asyncio.Event()
        timer = self._clock.call_later(max(0.0, due_s - self._clock.monotonic_s()), is_late.set)
        late = asyncio.ensure_future(is_late.wait())
        try:
            await asyncio.wait([done, late], return_when=asyncio.FIRST_COMPLETED)
        finally:
            timer.cancel()
            late.cancel()

    def _abandon(self, pending: _Pending) -> None:
        """Drop the state of a checkpoint whose barrier has not passed all tasks; the barrier still passes the
        others.
        """
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
