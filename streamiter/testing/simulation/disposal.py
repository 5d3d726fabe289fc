"""Dropping all that runs in an event loop, as the end of a process would."""

from __future__ import annotations

import asyncio
import inspect
import warnings
from types import CoroutineType
from typing import Any, Final

from streamiter.testing.simulation.event_loop import SimulatedEventLoop
from streamiter.testing.simulation.network import Crashed

__all__ = ["drop_all"]

# A coroutine that awaits something in each of its finally blocks has to be closed once for each of them.
_CLOSINGS_MAX: Final = 100


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
        for task in reversed(unfinished):
            task._log_destroy_pending = False  # type: ignore[attr-defined]  # asyncio's own way not to warn of it
            coroutine = task.get_coro()
            if inspect.iscoroutine(coroutine):
                _unwind(coroutine)


def _unwind(coroutine: CoroutineType[Any, Any, Any]) -> None:
    if inspect.getcoroutinestate(coroutine) == inspect.CORO_CREATED:
        # Has not begun: what it was given to await would never be awaited, which Python warns of when it is found.
        frame = coroutine.cr_frame
        for given in list(frame.f_locals.values()) if frame is not None else []:
            if inspect.iscoroutine(given):
                _unwind(given)
    for _ in range(_CLOSINGS_MAX):
        try:
            coroutine.close()
        except (Exception, asyncio.CancelledError, GeneratorExit, Crashed):  # noqa: S112
            continue  # RuntimeError: it awaits once more; any other: one of its finally blocks has failed
        return
