"""How far the subtasks of a stamping step have come, so that those without input hold nobody back.

>>> pace, posted = StampingPace(subtasks=3), []
>>> pace.is_idle(2, posted.append)
>>> pace.has_completed(0, 4), len(posted)
(None, 0)
>>> pace.has_completed(1, 3), len(posted)
(None, 1)
>>> pace.told(2), pace.reached
(None, 3)
"""

from __future__ import annotations

from collections.abc import Callable
from typing import final

from streamiter.records import Control
from streamiter.runtime.watermarks import BEFORE_ALL_EPOCHS

__all__ = ["GoAlong", "StampingPace"]


@final
class GoAlong(Control):
    """Posted to a subtask: others have come further."""

    __slots__ = ()


@final
class StampingPace:
    """Shared by the subtasks of one step, in one event loop.

    Idle ones are told, with at most one ``GoAlong`` under way to each, when the slowest of the others has
    completed an epoch. Those that have ended are waited for no more. Where nobody has input, all go along to
    the last epoch that anyone has completed: what was passed on is not to wait for what may never come.
    """

    def __init__(self, subtasks: int) -> None:
        self._completed = dict.fromkeys(range(subtasks), BEFORE_ALL_EPOCHS)
        """By subtask that has input: the last epoch it has completed."""
        self._idle: dict[int, Callable[[Control], None]] = {}
        self._furthest = BEFORE_ALL_EPOCHS
        self._told: set[int] = set()

    @property
    def reached(self) -> int:
        """The epoch that those without input go along to."""
        return min(self._completed.values(), default=self._furthest)

    def has_completed(self, subtask: int, epoch: int) -> None:
        """A subtask with input has completed an epoch."""
        self._completed[subtask] = epoch
        self._furthest = max(self._furthest, epoch)
        if self._idle:
            self._tell()

    def has_ended(self, subtask: int, epoch: int) -> None:
        """A subtask completes no further epoch after this one."""
        self._completed.pop(subtask, None)
        self._idle.pop(subtask, None)
        self._furthest = max(self._furthest, epoch)
        self._tell()

    def is_idle(self, subtask: int, post: Callable[[Control], None]) -> None:
        """A subtask has no input for now."""
        self._completed.pop(subtask, None)
        self._idle[subtask] = post
        self._tell()

    def goes_on(self, subtask: int, epoch: int) -> None:
        """A subtask that was idle has input again; it has gone along up to this epoch."""
        self._idle.pop(subtask, None)
        self._completed[subtask] = epoch

    def told(self, subtask: int) -> None:
        """A subtask has heard ``GoAlong``."""
        self._told.discard(subtask)

    def _tell(self) -> None:
        if self.reached == BEFORE_ALL_EPOCHS:
            return
        for subtask, post in self._idle.items():
            if subtask not in self._told:
                self._told.add(subtask)
                post(GoAlong())
