"""The clock of a run. All code takes its time from a `Clock`, so a test can run in virtual time."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine
from typing import Final, Protocol


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


# A rounding error of time plus delay must not delay what is due.
_ROUNDING_S: Final = 1e-6


async def in_time(waiting: Coroutine[object, object, object], clock: Clock, due_s: float | None) -> bool:
    """Wait until a coroutine is done or the clock is at ``due_s``; return whether it is done, and cancel it if not."""
    if due_s is None:
        await waiting
        return True
    limit = clock.sleep(max(0.0, due_s - clock.monotonic_s()))
    done, late = asyncio.ensure_future(waiting), asyncio.ensure_future(limit)
    try:
        await asyncio.wait([done, late], return_when=asyncio.FIRST_COMPLETED)
        return done.done()
    finally:
        late.cancel()
        done.cancel()


def is_in_event_loop() -> bool:
    """Return whether an event loop runs this code."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


def is_due(left_s: float) -> bool:
    """Return whether a duration is over, of which ``left_s`` seconds are left.

    >>> is_due(0.001), is_due(1e-9), is_due(-1.0)
    (False, True, True)
    """
    return left_s <= _ROUNDING_S


# An hour is made up for in ten hours, and durations by the clock are hardly longer meanwhile.
_RATE_WHILE_AHEAD: Final = 0.9


class ForwardTime:
    """A time that never goes back, from a wall clock that may be set back and a monotonic clock. Pure data.

    While it is ahead of the wall clock it advances at nine tenths of the speed, until the wall clock has caught up.

    >>> time = ForwardTime()
    >>> time.now_ms(100_000, 1.0), time.now_ms(101_000, 2.0)  # then it is set back by a minute
    (100000, 101000)
    >>> time.now_ms(42_000, 3.0), time.now_ms(43_000, 4.0), time.now_ms(900_000, 5.0)
    (101900, 102800, 900000)
    """

    def __init__(self) -> None:
        self._told_ms = 0.0
        self._at_s = 0.0

    def now_ms(self, wall_ms: int, monotonic_s: float) -> int:
        """Return the time now, for the present times of both clocks."""
        going_on_ms = self._told_ms + (monotonic_s - self._at_s) * 1000 * _RATE_WHILE_AHEAD
        if not self._told_ms or wall_ms >= going_on_ms:
            self._told_ms, self._at_s = wall_ms, monotonic_s
            return wall_ms
        self._told_ms, self._at_s = going_on_ms, monotonic_s
        return int(going_on_ms)


class SystemClock:
    """The system clock; its time never goes back, whatever the machine's clock is set to."""

    def __init__(self) -> None:
        self._forward = ForwardTime()

    def now_ms(self) -> int:
        return self._forward.now_ms(time.time_ns() // 1_000_000, time.monotonic())

    # Not a function of Python: a task calls it twice for each batch.
    monotonic_s = staticmethod(time.monotonic)

    def call_later(self, delay_s: float, callback: Callable[[], None]) -> TimerHandle:
        return asyncio.get_running_loop().call_later(delay_s, callback)

    async def sleep(self, delay_s: float) -> None:
        await asyncio.sleep(delay_s)
