"""The clock of a stamping step: ends its epochs at all subtasks at once.

>>> import asyncio
>>> from streamiter.testing import VirtualClock
>>> async def main():
...     clock, posted = VirtualClock(), []
...     epochs = StampingClock(clock, seconds=5.0)
...     epochs.join(0, posted.append)
...     await clock.advance(5.0)
...     before = epochs.last_ended, len(posted)
...     epochs.has_records(0)
...     await clock.advance(5.0)
...     return before, (epochs.last_ended, len(posted))
>>> asyncio.run(main())
((-1, 0), (0, 1))
"""

from __future__ import annotations

from collections.abc import Callable
from typing import final

from streamiter.clock import Clock, TimerHandle
from streamiter.iteration.stamping_pace import GoAlong
from streamiter.records import Control
from streamiter.runtime.watermarks import BEFORE_ALL_EPOCHS

__all__ = ["StampingClock"]


@final
class StampingClock:
    """Shared by the subtasks of one step, in one event loop.

    Every so many seconds, counted from when the first subtask has joined, the epoch under way ends if any of
    them has records of it. They are told, with at most one ``GoAlong`` under way to each; one that is blocked
    meanwhile goes along with several epochs at once. So what comes in at the same time is of the same epoch,
    at whichever subtask.
    """

    def __init__(self, clock: Clock, seconds: float) -> None:
        self._clock = clock
        self._seconds = seconds
        self._due_s = clock.monotonic_s() + seconds
        self._timer: TimerHandle | None = None
        self._posts: dict[int, Callable[[Control], None]] = {}
        self._told: set[int] = set()
        self._last_with_records = BEFORE_ALL_EPOCHS
        self.last_ended = BEFORE_ALL_EPOCHS

    @property
    def remaining_s(self) -> float:
        """Seconds until the time comes again."""
        return self._due_s - self._clock.monotonic_s()

    def join(self, subtask: int, post: Callable[[Control], None]) -> None:
        """A subtask is there."""
        self._posts[subtask] = post
        if self._timer is None:
            self._wait()

    def leave(self, subtask: int) -> None:
        """A subtask has no more records; when all have left, the clock stops."""
        self._posts.pop(subtask, None)
        if not self._posts:
            self._stop()

    def has_records(self, epoch: int) -> None:
        """A subtask has passed on records of ``epoch``."""
        self._last_with_records = max(self._last_with_records, epoch)

    def told(self, subtask: int) -> None:
        """A subtask has heard ``GoAlong``."""
        self._told.discard(subtask)

    def go_on_after(self, epoch: int, remaining_s: float) -> None:
        """A joined subtask is restored: it had gone along with ``epoch``, so the others have to as well.

        The time comes again when as much of it has passed as was left at the snapshot.
        """
        self.last_ended = max(self.last_ended, epoch)
        self._tell()
        self._due_s = self._clock.monotonic_s() + min(max(0.0, remaining_s), self._seconds)
        self._stop()
        self._wait()

    def _wait(self) -> None:
        self._timer = self._clock.call_later(max(0.0, self.remaining_s), self._time_has_come)

    def _stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _time_has_come(self) -> None:
        # From one due time to the next, whatever it is now: lateness must not add up. After a pause of the
        # whole machine only once.
        late_s = max(0.0, -self.remaining_s)
        self._due_s += self._seconds * (1 + late_s // self._seconds)
        self._wait()
        if self._last_with_records > self.last_ended:
            self.last_ended = self._last_with_records
            self._tell()

    def _tell(self) -> None:
        for subtask, post in self._posts.items():
            if subtask not in self._told:
                self._told.add(subtask)
                post(GoAlong())
