"""The clock that advances only on a test's request."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamiter.errors import ConfigurationError
from streamiter.testing import VirtualClock
from streamiter.values.helpers.clock import Clock


async def test_the_clock_does_not_advance_by_itself() -> None:
    """A test that depended on the machine's speed failed on the slowest machine."""
    clock: Clock = VirtualClock(start_ms=1000)
    await asyncio.sleep(0.001)
    assert (clock.now_ms(), clock.monotonic_s()) == (1000, 0.0)


async def test_both_times_move_together() -> None:
    """Time stamps and durations of one run disagreed."""
    clock = VirtualClock(start_ms=1000)
    await clock.advance(1.5)
    await clock.advance(0.25)
    assert (clock.now_ms(), clock.monotonic_s()) == (2750, 1.75)


@given(delays=st.lists(st.integers(0, 20), max_size=12), steps=st.lists(st.integers(0, 8), min_size=1, max_size=6))
def test_due_timers_fire_in_order_each_at_its_own_time(delays: list[int], steps: list[int]) -> None:
    """The times of timers depended on how the test cut the time into steps."""
    asyncio.run(_fires_in_order(delays, steps))


async def _fires_in_order(delays: list[int], steps: list[int]) -> None:
    clock, fired = VirtualClock(), list[tuple[float, int]]()
    for number, delay in enumerate(delays):
        clock.call_later(delay / 4, lambda number=number: fired.append((clock.monotonic_s(), number)))  # type: ignore[misc]
    for step in steps:
        await clock.advance(step / 4)
    expected = sorted((delay / 4, number) for number, delay in enumerate(delays) if delay <= sum(steps))
    assert fired == expected
    assert clock.timers == len(delays) - len(expected)


async def test_a_timer_set_by_another_fires_in_the_same_span() -> None:
    """A flush every second came only once in three seconds."""
    clock, fired = VirtualClock(), list[float]()

    def again() -> None:
        fired.append(clock.monotonic_s())
        clock.call_later(1.0, again)

    clock.call_later(1.0, again)
    await clock.advance(3.5)
    assert fired == [1.0, 2.0, 3.0]


async def test_tasks_run_between_two_timers() -> None:
    """The second timer fired before the task that the first timer had woken."""
    clock, heard = VirtualClock(), list[str]()

    async def sleeper() -> None:
        await clock.sleep(1)
        heard.append(f"awake at {clock.monotonic_s()}")
        await clock.sleep(0.5)
        heard.append(f"again at {clock.monotonic_s()}")

    task = asyncio.create_task(sleeper())
    clock.call_later(2, lambda: heard.append("timer at 2"))
    await clock.advance(0)
    await clock.advance(2)
    assert heard == ["awake at 1.0", "again at 1.5", "timer at 2"]
    await task


async def test_cancelled_timers_do_not_fire() -> None:
    """A timer that another timer of the same moment had cancelled still fired."""
    clock, fired = VirtualClock(), list[str]()
    first = clock.call_later(1, lambda: fired.append("first"))
    clock.call_later(2, lambda: third.cancel())
    third = clock.call_later(2, lambda: fired.append("third"))
    first.cancel()
    await clock.advance(5)
    first.cancel()
    assert fired == []
    assert clock.timers == 0


async def test_a_cancelled_sleep_leaves_no_timer() -> None:
    """A timer woke a task that had ended."""
    clock = VirtualClock()
    task = asyncio.create_task(clock.sleep(5))
    await clock.advance(1)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert clock.timers == 0
    await clock.advance(10)


async def test_the_error_of_a_callback_is_raised_by_advance() -> None:
    """The error of a callback was only in a log, and the test passed."""
    clock = VirtualClock()

    def fail() -> None:
        raise ValueError("no")

    clock.call_later(1, fail)
    with pytest.raises(ValueError, match="no"):
        await clock.advance(2)
    assert clock.monotonic_s() == 1.0


async def test_time_does_not_go_back() -> None:
    """A negative step, a mistake in a test, moved the clock back."""
    with pytest.raises(ConfigurationError, match="expected seconds of at least 0, given -1"):
        await VirtualClock().advance(-1)
