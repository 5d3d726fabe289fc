"""Dropping all that runs in an event loop, as the end of a process would."""

from __future__ import annotations

import asyncio
import inspect
import warnings

from streamiter.testing.simulation.event_loop import SimulatedEventLoop
from streamiter.testing.simulation.unwinding import unwind

__all__ = ["drop_all"]


def drop_all(loop: SimulatedEventLoop) -> None:
    """End every task of the loop without a turn, and close the loop.

    A process that is killed runs nothing more. Here coroutines are unwound, or Python would do it some time later:
    what their ``finally`` blocks do must be without effect by then, so connections are to be cut before.
    What they raise is nobody's business, and nobody is warned of what they leave undone.
    """
    loop.set_exception_handler(lambda loop, context: None)
    unfinished = loop.unfinished
    loop.close()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        # What asks for a loop meanwhile gets this one, which is closed, and not a new one that nobody closes.
        around = asyncio._get_running_loop()
        asyncio._set_running_loop(loop)
        try:
            for task in reversed(unfinished):
                task._log_destroy_pending = False  # type: ignore[attr-defined]  # asyncio's own way not to warn of it
                coroutine = task.get_coro()
                if inspect.iscoroutine(coroutine):
                    unwind(coroutine)
        finally:
            asyncio._set_running_loop(around)
