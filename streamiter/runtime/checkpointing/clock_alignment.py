"""All workers of a service at the same clock, before a barrier comes to them.

A worker whose barrier came at an earlier clock than another's would be waited for by it: by one before its barrier
for a clock that lies behind a barrier, and is held. So a task whose worker has come as far as any other reads no
more until the barrier has passed it; the others go on until they are there, too. A step may move its clock several
times while it handles one record, and wait for the others in between: they have to hear of that at once.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import final

from streamiter.operators.operator import ServiceWorker

__all__ = ["ClockAlignment"]


@dataclass
class _Member:
    task: str
    worker: ServiceWorker
    call_again: Callable[[], None]
    """Have its task ask again whether to stand still."""
    stands: bool = False
    has_passed: bool = False
    clocks: Mapping[str, int] = field(default_factory=dict)


@final
class ClockAlignment:
    """Of one service of a job. Asked by each task after everything that it has handled, and told of every clock."""

    def __init__(self) -> None:
        self._members: dict[str, _Member] = {}
        self._furthest: dict[str, int] = {}
        self._is_sought = False
        self._all_stand = asyncio.Event()

    def add(self, task: str, worker: ServiceWorker, call_again: Callable[[], None]) -> None:
        """A task takes part."""
        self._members[task] = _Member(task, worker, call_again)
        worker.call_when_further(lambda: self.further(task))

    def seek(self) -> asyncio.Event:
        """From now on stand still at the same clock; the event says when all do."""
        self._is_sought = True
        self._all_stand.clear()
        self._furthest = {}
        for member in self._members.values():
            member.stands = member.has_passed = False
            self._note(member)
        if not self._furthest:  # Nobody waits for anybody, so a barrier may come to each wherever it is.
            self._is_sought = False
            self._all_stand.set()
            return self._all_stand
        for member in self._members.values():
            member.call_again()
        self._check()
        return self._all_stand

    def stands_still(self, task: str) -> bool:
        """Whether this task, which has just handled something, is to read no more for now."""
        if not self._is_sought:
            return False
        member = self._members.get(task)
        if member is None or member.has_passed:
            return False
        self._go_on_behind(member)
        member.stands = not self._is_behind(member)
        self._check()
        return member.stands

    def further(self, task: str) -> None:
        """The worker of this task has come further, perhaps in the middle of a record: it may wait for those behind."""
        member = self._members.get(task)
        if self._is_sought and member is not None and not member.has_passed:
            self._go_on_behind(member)

    def passed(self, task: str) -> None:
        """The barrier has passed this task: it goes on."""
        if (member := self._members.get(task)) is not None and self._is_sought:
            member.stands, member.has_passed = False, True
            if all(other.has_passed for other in self._members.values()):
                self._is_sought = False

    def ended(self, task: str) -> None:
        """Nobody waits for this task any more."""
        self._members.pop(task, None)
        if self._is_sought:
            self._check()

    def give_up(self) -> None:
        """No barrier comes: go on."""
        if self._is_sought:
            self._is_sought = False
            for member in self._members.values():
                member.stands = False
                member.call_again()

    def behind(self) -> list[str]:
        """The tasks that hold the others up: those at an earlier clock; or those that still handle something."""
        moving = [member for member in self._members.values() if not (member.stands or member.has_passed)]
        return [member.task for member in moving if self._is_behind(member)] or [
            member.task for member in moving
        ]

    def _go_on_behind(self, member: _Member) -> None:
        """Have those go on who stand where this one has been before."""
        if self._note(member):
            for other in self._members.values():
                if other.stands and self._is_behind(other):
                    other.stands = False
                    other.call_again()

    def _note(self, member: _Member) -> bool:
        """Take down where it is; says whether that is further than any was."""
        member.clocks = dict(member.worker.counted_clocks())
        further = {
            name: clock for name, clock in member.clocks.items() if clock > self._furthest.get(name, -1)
        }
        self._furthest.update(further)
        return bool(further)

    def _is_behind(self, member: _Member) -> bool:
        return any(member.clocks.get(name, 0) < clock for name, clock in self._furthest.items())

    def _check(self) -> None:
        if all(member.stands or member.has_passed for member in self._members.values()):
            self._all_stand.set()
