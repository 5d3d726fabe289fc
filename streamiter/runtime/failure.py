"""Failures of a job: a cancellation that no stop caused, and the one error that names the failed step."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import TypeVar

from streamiter.errors import JobFailed, OffsetOutOfRange, StreamiterError, shortened
from streamiter.operators.output import RecordFailure

T = TypeVar("T")


async def unless_cancelled(awaitable: Awaitable[T], step: str) -> T:
    """Await ``awaitable``, and raise RecordFailure for a cancellation that no stop of the job caused.

    asyncio would end the task without a message.
    """
    try:
        return await awaitable
    except asyncio.CancelledError as error:
        task = asyncio.current_task()
        if task is None or task.cancelling():
            raise
        cancelled = RuntimeError("the awaitable of the step was cancelled, although the job was not stopped")
        cancelled.__cause__ = error
        raise RecordFailure(step) from cancelled


async def call_unless_cancelled(function: Callable[[], Awaitable[T]], step: str) -> T:
    """Call ``function`` in a new task, and await the result as ``unless_cancelled`` does.

    A task that is cancelled before it begins leaves no coroutine behind that was never awaited.
    """
    return await unless_cancelled(function(), step)


def first_failure(error: BaseException) -> BaseException:
    """Return the first failure of a group of failures."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


def job_failed(
    flow: str, failure: RecordFailure, lines: Mapping[str, str], *, has_checkpoints: bool = False
) -> JobFailed:
    """Return the error for a failed job; it names the step, the user's line, and the record or its offsets."""
    cause = failure.__cause__ or failure
    step = failure.step
    where = f" ({lines[step]})" if step in lines else ""
    what = str(cause) if isinstance(cause, StreamiterError) else f"{type(cause).__name__}: {cause}"
    message = f"flow {flow!r}, step {step!r}{where}{_place(failure)}: {what}"
    if has_checkpoints and isinstance(cause, OffsetOutOfRange):
        message += (
            f"; changed_steps=[{step!r}] lets this source begin where its start= says, and keeps the state of all "
            "other steps; restore=None is a fresh start of the whole flow; restore=<number> resumes from another "
            "checkpoint"
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
