"""Tasks that wait for blocking calls may be cancelled."""

from __future__ import annotations

import asyncio
import threading

import pytest

from streamiter_files.chunks import OneAtATime


async def test_a_call_waits_for_the_one_whose_waiter_was_cancelled() -> None:
    """Two appends ran at once and mixed their lines, because the cancelling of a task does not stop its thread."""
    calls = OneAtATime()
    may_end, order = threading.Event(), []
    began = asyncio.Event()
    loop = asyncio.get_running_loop()

    def slow() -> None:
        loop.call_soon_threadsafe(began.set)
        may_end.wait()
        order.append("slow")

    waiting = asyncio.ensure_future(calls.run(slow))
    await began.wait()
    waiting.cancel()
    await asyncio.wait([waiting])
    second = asyncio.ensure_future(calls.run(lambda: order.append("second")))
    for _ in range(10):
        await asyncio.sleep(0)
    may_end.set()
    await second
    assert waiting.cancelled()
    assert order == ["slow", "second"]


async def test_the_error_of_an_abandoned_call_is_raised_by_the_next_once() -> None:
    """An append failed after its flush was cancelled, and its records counted as stored."""
    calls = OneAtATime()
    may_end = threading.Event()

    def failing() -> None:
        may_end.wait()
        raise OSError("disk")

    waiting = asyncio.ensure_future(calls.run(failing))
    await asyncio.sleep(0)
    waiting.cancel()
    await asyncio.wait([waiting])
    may_end.set()
    with pytest.raises(OSError, match="disk"):
        await calls.run(int)
    assert await calls.run(int) == 0
