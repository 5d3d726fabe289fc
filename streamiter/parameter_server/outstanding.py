"""The bound on the calls that one client has under way."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import final

from streamiter.numbers import whole_number
from streamiter.parameter_server.waiting import Waiting

__all__ = ["Outstanding", "OutstandingStatistics"]


@dataclass(frozen=True, slots=True)
class OutstandingStatistics:
    """Calls under way."""

    now: int
    peak: int
    waiting: int
    """Callers that wait for room at this moment."""
    waited: int
    """Calls so far that had to wait for room."""


class _Room(Waiting[None]):
    __slots__ = ("is_given",)

    def __init__(self, on_given_up: Callable[[], None]) -> None:
        super().__init__(on_given_up)
        self.is_given = False


@final
class Outstanding:
    """At most ``limit`` calls at a time; more wait for room, the first one first.

    Each call that has come in (``take`` gave None, or what it gave has succeeded; ``acquire`` has returned) is followed
    by one ``release``. Room goes straight from who releases it to who has waited longest: nobody gets in between.

    >>> async def main():
    ...     outstanding = Outstanding(limit=1)
    ...     await outstanding.acquire()
    ...     second = asyncio.ensure_future(outstanding.acquire())
    ...     await asyncio.sleep(0)
    ...     outstanding.release()
    ...     await second
    ...     return outstanding.statistics()
    >>> asyncio.run(main())
    OutstandingStatistics(now=1, peak=1, waiting=0, waited=1)
    """

    def __init__(self, limit: int) -> None:
        self._limit = whole_number("Outstanding(limit=)", limit, 1)
        self._now = self._peak = self._waited = 0
        self._queue: deque[_Room] = deque()

    def take(self) -> _Room | None:
        """None: there is room, and it is taken. Otherwise settled once there is, and has been taken for the caller.

        The callbacks of the Waiting are called within somebody else's ``release``. Who awaits it directly and is
        cancelled cannot know whether room had been taken already: ``acquire`` sees to that.
        """
        if self._now < self._limit:  # then nobody waits: release would have handed the room on
            self._now += 1
            self._peak = max(self._peak, self._now)
            return None
        self._waited += 1
        room = _Room(on_given_up=lambda: self._queue.remove(room))
        self._queue.append(room)
        return room

    async def acquire(self) -> None:
        """Come in; wait for room if there is none. Raises what ``fail_waiting`` was given."""
        room = self.take()
        if room is None:
            return
        try:
            await room
        except asyncio.CancelledError:
            if room.is_given:  # in the turn in which this task was cancelled
                self.release()
            raise

    def release(self) -> None:
        """A call is over."""
        assert self._now > 0
        if self._queue:
            room = self._queue.popleft()
            room.is_given = True
            room.succeed(None)
        else:
            self._now -= 1

    def fail_waiting(self, error: Exception) -> None:
        """Who waits for room gets this error: the client leaves. Calls under way release as always."""
        while self._queue:
            self._queue.popleft().fail(error)

    def statistics(self) -> OutstandingStatistics:
        """How many calls there are and were."""
        return OutstandingStatistics(self._now, self._peak, len(self._queue), self._waited)
