"""Barriers: one checkpoint of all tasks at a time."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from streamiter.records import CheckpointBarrier
from streamiter.runtime.gate_records import BarrierTrigger
from streamiter.runtime.task import Task

__all__ = ["Coordinator", "JobSnapshot"]

JobSnapshot = dict[str, Any]
"""States of the tasks by name: plain data."""

FIRST_CHECKPOINT: Final = 1


@dataclass
class _Pending:
    checkpoint: int
    waiting_for: set[str]
    states: JobSnapshot
    complete: asyncio.Future[JobSnapshot]


class Coordinator:
    """Starts barriers where records enter, and gathers the states they make the tasks give."""

    def __init__(self) -> None:
        self._tasks: Sequence[Task] = ()
        self._next = FIRST_CHECKPOINT
        self._pending: _Pending | None = None
        self._one_at_a_time = asyncio.Lock()

    def watch(self, tasks: Sequence[Task]) -> None:
        """These are the tasks of the job."""
        self._tasks = tasks

    async def trigger(self, *, suspend: bool = False) -> JobSnapshot:
        """Send a barrier through the job; gives the states of all tasks.

        That of a task which ended before the barrier came is its state at its end.
        """
        async with self._one_at_a_time:
            await self._all_have_passed()
            barrier = CheckpointBarrier(self._next, suspend=suspend)
            self._next += 1
            running = [task for task in self._tasks if not task.ended]
            complete: asyncio.Future[JobSnapshot] = asyncio.get_running_loop().create_future()
            self._pending = _Pending(barrier.checkpoint, {task.name for task in running}, {}, complete)
            for task in running:
                if task.feeder is not None or hasattr(task.head.operator, "wanted_inputs"):
                    task.post(BarrierTrigger(barrier))
            self._check()
            states = await asyncio.shield(complete)
            self._pending = None
            return {task.name: states.get(task.name) or await task.snapshot() for task in self._tasks}

    async def _all_have_passed(self) -> None:
        """Wait for a barrier that nobody waits for any more: a second one in a loop would cut its log off."""
        if self._pending is not None:
            await asyncio.shield(self._pending.complete)

    def acknowledge(self, task: Task, checkpoint: int, state: dict[str, Any]) -> None:
        """A task gives its state at a barrier."""
        pending = self._pending
        if pending is not None and pending.checkpoint == checkpoint:
            pending.states[task.name] = state
            pending.waiting_for.discard(task.name)
            self._check()

    def ended(self, task: Task) -> None:
        """A task has come to its end: no state is to be expected from it."""
        if self._pending is not None:
            self._pending.waiting_for.discard(task.name)
            self._check()

    def _check(self) -> None:
        pending = self._pending
        if pending is not None and not pending.waiting_for and not pending.complete.done():
            pending.complete.set_result(pending.states)
