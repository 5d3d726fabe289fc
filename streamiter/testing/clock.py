"""A clock for tests: its time passes only when the test advances it."""

from __future__ import annotations

import asyncio
import heapq
from collections.abc import Awaitable, Callable
from typing import Final, final

from streamiter.errors import ConfigurationError

# Turns of the event loop that tasks get after each timer: more than a record needs to pass a dozen tasks, and well
# under a millisecond if there is nothing to do.
_TURNS: Final = 100


class VirtualClock:
    """A :class:`~streamiter.clock.Clock` whose time passes only in ``advance``.

    Timers fire in the order of their times, and timers of equal times in the order of their calls. A timer that another
    timer sets within the span fires in the same ``advance``. After each timer the tasks of the event loop run;
    ``advance`` does not wait for threads, sockets and processes.

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
        """``start_ms`` is its first date, in milliseconds since 1970-01-01 UTC."""
        self._start_ms = start_ms
        self._now_s = 0.0
        self._asked_for = 0
        self._timers: list[tuple[float, int, Timer]] = []

    def now_ms(self) -> int:
        """Return milliseconds since 1970-01-01 UTC."""
        return self._start_ms + round(self._now_s * 1000)

    def monotonic_s(self) -> float:
        """Return the seconds that have passed."""
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
        """The count of calls and sleeps that are not yet due."""
        return sum(not timer.is_cancelled for _, _, timer in self._timers)

    async def advance(self, seconds: float) -> None:
        """Let time pass: fire the timers that become due; tasks run before the first and after each of them.

        An exception of a callback is raised here; the time is then the one at which that callback was due.
        """
        if seconds < 0:
            raise ConfigurationError(
                f"VirtualClock.advance: expected seconds of at least 0, given {seconds}; time does not go back"
            )
        until_s = self._now_s + seconds
        await _let_tasks_run()
        await self._pass_until(until_s, _let_tasks_run)
        await _let_tasks_run()

    async def _pass_until(self, until_s: float, after_each: Callable[[], Awaitable[None]]) -> None:
        """Fire the timers that become due, and await ``after_each`` after each of them."""
        while self._timers and self._timers[0][0] <= until_s:
            due_s, _, timer = heapq.heappop(self._timers)
            if not timer.is_cancelled:
                self._now_s = due_s
                timer.fire()
                await after_each()
        self._now_s = until_s


async def _let_tasks_run() -> None:
    for _ in range(_TURNS):
        await asyncio.sleep(0)


@final
class Timer:
    """A call that is due later, on a clock of tests; it runs once, unless it is cancelled before."""

    __slots__ = ("_callback",)

    def __init__(self, callback: Callable[[], None]) -> None:
        self._callback: Callable[[], None] | None = callback

    @property
    def is_cancelled(self) -> bool:
        """Whether it was cancelled, or has run."""
        return self._callback is None

    def cancel(self) -> None:
        """Cancel it; without effect after it has run."""
        self._callback = None

    def fire(self) -> None:
        """Run the callback."""
        callback, self._callback = self._callback, None
        assert callback is not None
        callback()
