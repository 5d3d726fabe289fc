"""How a simulation says what it has found."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from types import CodeType, FrameType
from typing import Any

__all__ = ["SimulationFailed", "where_tasks_wait"]


class SimulationFailed(AssertionError):
    """A flow did not do under one seed what it does undisturbed.

    ``seed`` replays it exactly; ``what`` is the finding in a line or two, ``trace_hash`` that of the run so far.
    """

    def __init__(self, flow: str, seed: int, what: str, *, trace_hash: str, events: Sequence[str]) -> None:
        self.seed = seed
        self.what = what
        self.trace_hash = trace_hash
        lines = [
            f"flow {flow!r}, seed {seed}: {what}",
            f"run simulate(…, seed={seed}) again to see exactly the same (trace {trace_hash}). The last events:",
            *(f"  {event}" for event in events),
        ]
        super().__init__("\n".join(lines))


def where_tasks_wait(tasks: Iterable[asyncio.Task[Any]]) -> list[str]:
    """A line for each task: its name, and the line of code it waits in."""
    return [f"{task.get_name()} waits in {_innermost(task.get_coro())}" for task in tasks]


def _innermost(awaitable: Any) -> str:
    """The last frame of a chain of coroutines."""
    place = "code that has not begun"
    while awaitable is not None:
        frame: FrameType | None = getattr(awaitable, "cr_frame", None) or getattr(awaitable, "gi_frame", None)
        code: CodeType | None = getattr(awaitable, "cr_code", None) or getattr(awaitable, "gi_code", None)
        if frame is None or code is None:
            break
        place = f"{code.co_qualname} ({code.co_filename.rpartition('/')[2]}:{frame.f_lineno})"
        awaitable = getattr(awaitable, "cr_await", None) or getattr(awaitable, "gi_yieldfrom", None)
    return place
