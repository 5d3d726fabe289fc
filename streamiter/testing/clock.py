"""Time that only a test moves."""

from __future__ import annotations

import asyncio
import heapq
from collections.abc import Callable
from typing import Final, final

from streamiter.errors import ConfigurationError

__all__ = [
    "Timer",
    "VirtualClock",
]


# Turns of the event loop that tasks get after each timer: more than a record needs through a chain of a
# dozen tasks, and well under a millisecond where nothing is left to do.
_TURNS: Final = 100


class VirtualClock:
    """A :class:`~streamiter.clock.Clock` that stands still until ``advance`` moves it.

    What is due fires in the order of its time (and, for equal times, in the order it was asked for), each
    at its own time: a timer set by another within the span fires in the same ``advance``. After each one
    the tasks of the event loop run on; threads, sockets and processes are not waited for.

    >>> async def main():
    ...     clock, heard = VirtualClock(), []
    ...     clock.call_later(2.0, lambda: heard.append(clock.monotonic_s()))
    ...     await clock.advance(1.5)
    ...     await clock.advance(1.5)
    ...     return heard, clock.monotonic_s()
    >>> asyncio.run(main())
    ([2.0], 3.0)
    """

    def __init__(self, *, start_ms: int = 1_700_000_000_000) -> None:
        """``start_ms`` is the date it begins at, in milliseconds since 1970-01-01 UTC."""
        self._start_ms = start_ms
        self._now_s = 0.0
        self._asked_for = 0
        self._timers: list[tuple[float, int, Timer]] = []

    def now_ms(self) -> int:
        """Milliseconds since 1970-01-01 UTC."""
        return self._start_ms + round(self._now_s * 1000)

    def monotonic_s(self) -> float:
        """Seconds it has been advanced by."""
        return self._now_s

    def call_later(self, delay_s: float, callback: Callable[[], None]) -> Timer:
        """Call ``callback`` within the ``advance`` that passes ``delay_s`` seconds from now."""
        timer = Timer(callback)
        self._asked_for += 1
        heapq.heappush(self._timers, (self._now_s + max(0.0, delay_s), self._asked_for, timer))
        return timer

    async def sleep(self, delay_s: float) -> None:
        """Return within the ``advance`` that passes ``delay_s`` seconds from now."""
        woken: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        timer = self.call_later(delay_s, lambda: woken.set_result(None))
        try:
            await woken
        finally:
            timer.cancel()

    @property
    def timers(self) -> int:
        """How many calls and sleeps are still to come."""
        return sum(not timer.is_cancelled for _, _, timer in self._timers)

    async def advance(self, seconds: float) -> None:
        """Let time pass: fire what becomes due, letting tasks run before, between and after.

        What a callback raises is raised here; time then stands where that callback was due.
        """
        if seconds < 0:
            raise ConfigurationError(
                f"VirtualClock.advance: expected seconds of at least 0, given {seconds}; time does not go back"
            )
        until_s = self._now_s + seconds
        await _let_tasks_run()
        while self._timers and self._timers[0][0] <= until_s:
            due_s, _, timer = heapq.heappop(self._timers)
            if timer.is_cancelled:
                continue
            self._now_s = due_s
            timer.fire()
            await _let_tasks_run()
        self._now_s = until_s
        await _let_tasks_run()


async def _let_tasks_run() -> None:
    for _ in range(_TURNS):
        await asyncio.sleep(0)


@final
class Timer:
    """Run once, when its clock says so, unless it was called off before.

    A call that is due later, on a clock that does not pass by itself.
    """

    __slots__ = ("_callback",)

    def __init__(self, callback: Callable[[], None]) -> None:
        self._callback: Callable[[], None] | None = callback

    @property
    def is_cancelled(self) -> bool:
        """Whether it was called off, or has run."""
        return self._callback is None

    def cancel(self) -> None:
        """Call it off; without effect once it has run."""
        self._callback = None

    def fire(self) -> None:
        """Run it."""
        callback, self._callback = self._callback, None
        assert callback is not None
        callback()
