"""Ending a coroutine where it stands, without an event loop."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Coroutine
from typing import Any, Final

from streamiter.testing.simulation.network import Crashed

__all__ = ["unwind"]

# A coroutine that awaits something in each of its finally blocks has to be closed once for each of them.
_CLOSINGS_MAX: Final = 100


def unwind(coroutine: Coroutine[Any, Any, Any]) -> None:
    """Close it, whatever its ``finally`` blocks raise, and whatever they await."""
    if inspect.iscoroutine(coroutine) and inspect.getcoroutinestate(coroutine) == inspect.CORO_CREATED:
        # Has not begun: what it was given to await would never be awaited, which Python warns of when it is found.
        frame = coroutine.cr_frame
        for given in list(frame.f_locals.values()) if frame is not None else []:
            if inspect.iscoroutine(given):
                unwind(given)
    for _ in range(_CLOSINGS_MAX):
        try:
            coroutine.close()
        except (Exception, asyncio.CancelledError, GeneratorExit, Crashed):  # noqa: S112
            continue  # RuntimeError: it awaits once more; any other: one of its finally blocks has failed
        return
