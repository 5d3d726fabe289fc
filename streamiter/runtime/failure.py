"""What a failure says to whoever reads the log."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import TypeVar

from streamiter.errors import JobFailed, OffsetOutOfRange, StreamiterError
from streamiter.operators.rejection import RecordFailure, shortened

__all__ = ["call_unless_cancelled", "first_failure", "job_failed", "unless_cancelled"]

T = TypeVar("T")


async def unless_cancelled(awaitable: Awaitable[T], step: str) -> T:
    """Await it. A cancellation that nobody asked for is a failure: asyncio would drop the task without a word."""
    try:
        return await awaitable
    except asyncio.CancelledError as error:
        task = asyncio.current_task()
        if task is None or task.cancelling():
            raise
        cancelled = RuntimeError("what it waited for was cancelled, though nobody stopped the job")
        cancelled.__cause__ = error
        raise RecordFailure(step) from cancelled


async def call_unless_cancelled(function: Callable[[], Awaitable[T]], step: str) -> T:
    """The same for what is to be a task: one that is cancelled before it begins has no coroutine to leave behind."""
    return await unless_cancelled(function(), step)


def first_failure(error: BaseException) -> BaseException:
    """The failure that came first out of a group of them."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


def job_failed(
    flow: str, failure: RecordFailure, lines: Mapping[str, str], *, has_checkpoints: bool = False
) -> JobFailed:
    """One error for a failed job, naming the step, the user's line, the record or the offsets."""
    cause = failure.__cause__ or failure
    step = failure.step
    where = f" ({lines[step]})" if step in lines else ""
    what = str(cause) if isinstance(cause, StreamiterError) else f"{type(cause).__name__}: {cause}"
    message = f"flow {flow!r}, step {step!r}{where}{_place(failure)}: {what}"
    if has_checkpoints and isinstance(cause, OffsetOutOfRange):
        message += (
            f"; changed_steps=[{step!r}] lets this source begin where its start= says, and keeps the state of all "
            "other steps; restore=None begins the whole flow anew; restore=<number> goes on from another checkpoint"
        )
    error = JobFailed(message, step=step)
    error.__cause__ = cause
    return error


def _place(failure: RecordFailure) -> str:
    if failure.origin is not None:
        return f" at {failure.origin}"
    if failure.has_record:
        return f" on record {shortened(failure.record)}"
    return f" in {failure.place}" if failure.place else ""
