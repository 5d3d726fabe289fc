"""The alignment of the workers of a parameter server: all of them stop at the same clock before a barrier.

A worker counts its progress with a *clock*, and waits for workers whose clock is behind. If a barrier reached one
worker at an earlier clock than another, the workers would wait for each other: the one behind the barrier waits for a
clock that the other can reach only with records that are held behind its own barrier. So a task whose worker is at the
highest clock stops reading until the barrier has passed it; the others continue until they have reached that clock. A
step may move its clock several times within one record and wait for the others in between, so every change of a clock
is reported at once.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import final

from streamiter.operators.operator import ServiceWorker


@dataclass
class _Member:
    task: str
    worker: ServiceWorker
    call_again: Callable[[], None]
    """Make its task ask again whether it must stop."""
    has_stopped: bool = False
    has_passed: bool = False
    clocks: Mapping[str, int] = field(default_factory=dict)


@final
class ClockAlignment:
    """The alignment for one service of a job. Each task asks it after every batch, and workers report every clock."""

    def __init__(self) -> None:
        self._members: dict[str, _Member] = {}
        self._furthest: dict[str, int] = {}
        self._is_aligning = False
        self._all_stopped = asyncio.Event()

    def add(self, task: str, worker: ServiceWorker, call_again: Callable[[], None]) -> None:
        """Add a task with a worker."""
        self._members[task] = _Member(task, worker, call_again)
        worker.call_when_further(lambda: self.further(task))

    def seek(self) -> asyncio.Event:
        """Start the alignment; the event is set when all tasks have stopped at the same clock."""
        self._is_aligning = True
        self._all_stopped.clear()
        self._furthest = {}
        for member in self._members.values():
            member.has_stopped = member.has_passed = False
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
        if not self._is_aligning:
            return False
        member = self._members.get(task)
        if member is None or member.has_passed:
            return False
        self._release_those_behind(member)
        member.has_stopped = not self._is_behind(member)
        self._check()
        return member.has_stopped

    def further(self, task: str) -> None:
        """The worker of this task has moved its clock, perhaps within a record, and may wait for those behind it."""
        member = self._members.get(task)
        if self._is_aligning and member is not None and not member.has_passed:
            self._release_those_behind(member)

    def passed(self, task: str) -> None:
        """The barrier has passed this task: it continues."""
        if (member := self._members.get(task)) is not None and self._is_aligning:
            member.has_stopped, member.has_passed = False, True
            if all(other.has_passed for other in self._members.values()):
                self._is_aligning = False

    def ended(self, task: str) -> None:
        """The task has ended: remove it."""
        self._members.pop(task, None)
        if self._is_aligning:
            self._check()

    def give_up(self) -> None:
        """No barrier is sent: let all tasks continue."""
        if self._is_aligning:
            self._is_aligning = False
            for member in self._members.values():
                member.has_stopped = False
                member.call_again()

    def behind(self) -> list[str]:
        """Return the tasks that delay the others: those at an earlier clock; if there are none, those that have not
        stopped.
        """
        moving = [
            member for member in self._members.values() if not (member.has_stopped or member.has_passed)
        ]
        return [member.task for member in moving if self._is_behind(member)] or [
            member.task for member in moving
        ]

    def _release_those_behind(self, member: _Member) -> None:
        """Let tasks continue that stopped at an earlier clock than this one has reached."""
        if self._note_clock(member):
            for other in self._members.values():
                if other.has_stopped and self._is_behind(other):
                    other.has_stopped = False
                    other.call_again()

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
        if all(member.has_stopped or member.has_passed for member in self._members.values()):
            self._all_stopped.set()
