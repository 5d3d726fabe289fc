"""The clock of a run. All code takes its time from a `Clock`, so a test can run in virtual time."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Protocol


class TimerHandle(Protocol):
    """A call that is due later and can be cancelled."""

    def cancel(self) -> None:
        """Cancel the call; no effect after it has run."""


class Clock(Protocol):
    """The source of time of a job."""

    def now_ms(self) -> int:
        """Return the milliseconds since 1970-01-01 UTC, for time stamps."""

    def monotonic_s(self) -> float:
        """Return the seconds of a clock that never goes back, for durations."""

    def call_later(self, delay_s: float, callback: Callable[[], None]) -> TimerHandle:
        """Call ``callback`` in the running event loop after ``delay_s`` seconds."""

    async def sleep(self, delay_s: float) -> None:
        """Wait ``delay_s`` seconds."""


class SystemClock:
    """The system clock."""

    def now_ms(self) -> int:
        return time.time_ns() // 1_000_000

    # Not a function of Python: a task calls it twice for each batch.
    monotonic_s = staticmethod(time.monotonic)

    def call_later(self, delay_s: float, callback: Callable[[], None]) -> TimerHandle:
        return asyncio.get_running_loop().call_later(delay_s, callback)

    async def sleep(self, delay_s: float) -> None:
        await asyncio.sleep(delay_s)
