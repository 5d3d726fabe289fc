"""Tests wait for conditions that no event announces."""

import asyncio
from collections.abc import Callable
from typing import Final

__all__ = ["PATIENCE_S", "turn", "until"]

PATIENCE_S: Final = 240.0
"""The one limit of all waits in tests, in seconds: a guard against hanging, which no verdict depends on.

It is far above the longest wait on a busy machine. The limit of a whole test, in pyproject.toml, is longer,
so that the wait fails, and names its condition.
"""

# The interval between checks if only threads, connections or timers can change the condition.
_LOOK_AGAIN_S = 0.001


async def turn() -> None:
    """Let all ready tasks run once; if none is ready, wait for events from outside of this event loop.

    A loop that only spins would hold the interpreter lock: a thread requests the lock after each call of SQLite or
    Ray, and receives it 5 ms later (sys.getswitchinterval). Jobs that write through threads took forty times as long.
    """
    await asyncio.sleep(0)
    if not getattr(asyncio.get_running_loop(), "_ready", None):
        await asyncio.sleep(_LOOK_AGAIN_S)


async def until(condition: Callable[[], bool], patience_s: float = PATIENCE_S) -> None:
    """Return in the first turn of the event loop in which the condition is true; otherwise raise TimeoutError."""
    async with asyncio.timeout(patience_s):
        while not condition():
            await turn()
