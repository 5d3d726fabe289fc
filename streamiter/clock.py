"""Time is asked for here and nowhere else, so that a run can be given another clock."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Protocol

__all__ = ["Clock", "SystemClock", "TimerHandle"]


class TimerHandle(Protocol):
    """A call that is due later and can still be called off."""

    def cancel(self) -> None:
        """Call it off; without effect once it has run."""


class Clock(Protocol):
    """What a job takes its time from."""

    def now_ms(self) -> int:
        """Milliseconds since 1970-01-01 UTC, for time stamps."""

    def monotonic_s(self) -> float:
        """Seconds on a clock that never goes back, for durations."""

    def call_later(self, delay_s: float, callback: Callable[[], None]) -> TimerHandle:
        """Run ``callback`` in the running event loop after ``delay_s`` seconds."""

    async def sleep(self, delay_s: float) -> None:
        """Wait ``delay_s`` seconds."""


class SystemClock:
    """The machine's own clock."""

    def now_ms(self) -> int:
        return time.time_ns() // 1_000_000

    def monotonic_s(self) -> float:
        return time.monotonic()

    def call_later(self, delay_s: float, callback: Callable[[], None]) -> TimerHandle:
        return asyncio.get_running_loop().call_later(delay_s, callback)

    async def sleep(self, delay_s: float) -> None:
        await asyncio.sleep(delay_s)
