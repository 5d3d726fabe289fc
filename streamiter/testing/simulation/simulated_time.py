"""Time in a simulation: it passes with each turn of a task, and jumps where all wait."""

from __future__ import annotations

import asyncio
import heapq
from collections.abc import Callable
from typing import Final

from streamiter.clock import TimerHandle
from streamiter.testing.timer import Timer

__all__ = ["SimulatedTime", "TaskClock"]

# The date at which every simulation begins: 2023-11-14.
_START_MS: Final = 1_700_000_000_000


class SimulatedTime:
    """The clock of what survives crashes: topics, the store, whoever feeds the inputs.

    Its timers are called between the turns of tasks.

    >>> time, heard = SimulatedTime(), []
    >>> timer = time.call_later(2.0, lambda: heard.append(time.monotonic_s()))
    >>> time.pass_until(3.0)
    >>> heard, time.now_ms() - SimulatedTime().now_ms()
    ([2.0], 3000)
    """

    def __init__(self) -> None:
        self.now_s = 0.0
        self._asked_for = 0
        self._timers: list[tuple[float, int, Timer]] = []

    def now_ms(self) -> int:
        """Milliseconds since 1970-01-01 UTC."""
        return _START_MS + round(self.now_s * 1000)

    def monotonic_s(self) -> float:
        """Seconds since the simulation began."""
        return self.now_s

    def call_later(self, delay_s: float, callback: Callable[[], None]) -> TimerHandle:
        """Call ``callback`` when so many seconds have passed, whatever has crashed meanwhile."""
        timer = Timer(callback)
        self._asked_for += 1
        heapq.heappush(self._timers, (self.now_s + max(0.0, delay_s), self._asked_for, timer))
        return timer

    async def sleep(self, delay_s: float) -> None:
        """Wait, in the running loop."""
        await asyncio.sleep(delay_s)

    @property
    def next_timer_s(self) -> float | None:
        """When the next call is due, None if there is none."""
        while self._timers and self._timers[0][2].is_cancelled:
            heapq.heappop(self._timers)
        return self._timers[0][0] if self._timers else None

    def pass_until(self, until_s: float) -> None:
        """Let time pass; what becomes due is called at its own time."""
        while self._timers and self._timers[0][0] <= until_s:
            due_s, _, timer = heapq.heappop(self._timers)
            if not timer.is_cancelled:
                self.now_s = max(self.now_s, due_s)
                timer.fire()
        self.now_s = max(self.now_s, until_s)


class TaskClock:
    """The clock of a job: its timers end with the event loop they were asked for in."""

    def __init__(self, time: SimulatedTime) -> None:
        self._time = time

    def now_ms(self) -> int:
        """Milliseconds since 1970-01-01 UTC."""
        return self._time.now_ms()

    def monotonic_s(self) -> float:
        """Seconds since the simulation began."""
        return self._time.now_s

    def call_later(self, delay_s: float, callback: Callable[[], None]) -> TimerHandle:
        """Call ``callback`` in the running loop when so many seconds have passed."""
        return asyncio.get_running_loop().call_later(delay_s, callback)

    async def sleep(self, delay_s: float) -> None:
        """Wait."""
        await asyncio.sleep(delay_s)
