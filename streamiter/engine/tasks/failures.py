"""The error of a job that fails: what it says."""

from __future__ import annotations

import asyncio
import types
from collections.abc import Awaitable, Callable, Generator, Mapping
from typing import TYPE_CHECKING, Any, Protocol, TypeVar, final

from streamiter.errors import (
    ConfigurationError,
    InternalError,
    JobFailed,
    OffsetOutOfRange,
    StreamiterError,
    described,
    raising_line,
    shortened,
)
from streamiter.operators.output import RecordFailure
from streamiter.operators.source import SourceBatch

if TYPE_CHECKING:
    from streamiter.engine.storage.store import Checkpoints

T = TypeVar("T")


class StepNote(Protocol):
    """Where one of several processes notes the step that runs. Others can read it while a step holds Python's lock."""

    running: memoryview
    """One number: the number of the step that runs, or 0."""

    def number(self, step: str) -> int:
        """Return the number of a step."""


@final
class FailuresOf:
    """In this block, an error ends the job as a failure of a step, unless the failure names a step already.

    In several processes, which have a ``note``, ``sys.exit`` is an error, too: in one process it ends the program, but
    one process of several would be lost without a reason.
    """

    def __init__(self, step: str, note: StepNote | None = None) -> None:
        self._step = step
        self._note = note

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if isinstance(error, SystemExit) and self._note is not None:
            raise RecordFailure(self._step) from _exit_as_error(error)
        if isinstance(error, Exception) and not isinstance(error, RecordFailure):
            raise RecordFailure(self._step) from error


def _exit_as_error(ended: SystemExit) -> ConfigurationError:
    code = "" if ended.code is None else repr(ended.code)
    error = ConfigurationError(
        f"expected a step that returns or raises an error, given sys.exit({code}) in {raising_line(ended)}, which "
        "would end one of several processes; raise an error to end the flow"
    )
    error.__cause__ = ended
    return error


def noted(awaitable: Awaitable[T], step: str, note: StepNote | None) -> Awaitable[T]:
    """Return what awaits code of a step. The step is noted whenever the code runs, and not while it waits."""
    return awaitable if note is None else _noted(awaitable, step, note)


@types.coroutine
def _noted(awaitable: Awaitable[T], step: str, note: StepNote) -> Generator[Any, Any, T]:
    # A coroutine itself, not what its __await__ returns: tools that tell where a task waits follow coroutines.
    code: Any = awaitable if isinstance(awaitable, types.CoroutineType) else awaitable.__await__()
    running, number = note.running, note.number(step)
    before = running[0]
    resume = send = code.send
    given = None
    # This runs at each turn of each coroutine, which may take two microseconds.
    try:
        while True:
            running[0] = number
            waits_for = resume(given)
            running[0] = 0
            try:
                given = yield waits_for
            except BaseException as error:
                resume, given = code.throw, error
            else:
                resume = send
    except StopIteration as end:
        return end.value  # type: ignore[no-any-return]
    except SystemExit as end:
        raise RecordFailure(step) from _exit_as_error(end)
    finally:
        running[0] = before


async def unless_cancelled(awaitable: Awaitable[T], step: str) -> T:
    """Await ``awaitable``, and raise RecordFailure for a cancellation that no stop of the job caused.

    asyncio would end the task without a message.
    """
    try:
        return await awaitable
    except asyncio.CancelledError as error:
        check_stopped(error, step)
        raise


def check_stopped(error: asyncio.CancelledError, step: str) -> None:
    """Raise RecordFailure if no stop of the job has caused a cancellation."""
    task = asyncio.current_task()
    if task is not None and not task.cancelling():
        cancelled = RuntimeError("the awaitable of the step was cancelled, although the job was not stopped")
        cancelled.__cause__ = error
        raise RecordFailure(step) from cancelled


async def call_unless_cancelled(function: Callable[[], Awaitable[T]], step: str) -> T:
    """Call ``function`` in a new task, and await the result as ``unless_cancelled`` does.

    A task that is cancelled before it begins leaves no coroutine behind that was never awaited.
    """
    return await unless_cancelled(function(), step)


def first_failure(error: BaseException) -> BaseException:
    """Return the first error of a group, or the error itself."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


def reason_in(flow: str, error: BaseException) -> str:
    """Return what an error says, without the name of the flow, with which the message around it begins.

    >>> reason_in("f", StreamiterError("flow 'f', checkpoint 3: no space left"))
    'checkpoint 3: no space left'
    """
    return str(error).removeprefix(f"flow {flow!r}: ").removeprefix(f"flow {flow!r}, ")


@final
class Failures:
    """Makes the errors of one job: they name the flow, the step, the line of the user and the process."""

    def __init__(
        self, flow: str, lines: Mapping[str, str], checkpoints: Checkpoints | None, process: int | None
    ) -> None:
        """``lines``: the line of the user that added each step. ``process``: None if there is only one."""
        self.checkpoints = checkpoints
        """The settings of the job's checkpoints, if there are any."""
        self._flow = flow
        self._lines = lines
        self._process = "" if process is None else f", in process {process}"

    def error_of(self, failure: BaseException) -> BaseException:
        """Return the error of a job that ends because of ``failure``; this is its cause."""
        if isinstance(failure, RecordFailure):
            return self._error_of_step(failure)
        error: StreamiterError
        if isinstance(failure, (StreamiterError, MemoryError)):  # the error of a checkpoint, which no step has caused
            where = f"{self._process}, in a checkpoint" if isinstance(failure, MemoryError) else self._process
            error = JobFailed(f"flow {self._flow!r}{where}: {self._reason(failure)}", step="checkpoint")
        else:
            reason = f"{self._reason(failure)}; please report this"
            error = InternalError(f"flow {self._flow!r}{self._process}: {reason}")
        error.__cause__ = failure
        return error

    def _reason(self, error: BaseException) -> str:
        """Return what the error says, without the name of the flow, which the error of the job says already."""
        if isinstance(error, MemoryError):  # Python's own has no text.
            return (
                f"MemoryError: {str(error) or 'no memory is left'}; give this process more memory, or keep less in it"
            )
        if not isinstance(error, StreamiterError):
            return described(error)
        return reason_in(self._flow, error)

    def _error_of_step(self, failure: RecordFailure) -> JobFailed:
        cause = failure.__cause__ or failure
        step = failure.step
        where = f" ({self._lines[step]})" if step in self._lines else ""
        message = f"flow {self._flow!r}, step {step!r}{where}{_place(failure)}{self._process}: {self._reason(cause)}"
        if self.checkpoints is not None and isinstance(cause, OffsetOutOfRange):
            message += f"; changed_steps=[{step!r}] lets this source begin where its "
            if not self.checkpoints.has_store:
                message += "first_start= says, in one run; restore=None does so with all sources"
            else:
                message += (
                    'start= says (its first_start= if that is "committed"), and keeps the state of all other steps; '
                    "restore=None is a fresh start of the whole flow; restore=<number> resumes from another checkpoint"
                )
        error = JobFailed(message, step=step)
        error.__cause__ = cause
        return error


def _place(failure: RecordFailure) -> str:
    if failure.origin is not None:
        return f" at {failure.origin}"
    if failure.has_record:
        return f" on record {shortened(failure.record)}"
    return f" in {failure.within}" if failure.within else ""


def within_batch(batch: SourceBatch) -> str:
    """Return which batch of a source it is, for a failure that no record of the batch caused alone."""
    offsets = getattr(batch.records, "offsets", None)
    if offsets is not None and len(offsets):
        return f"the batch of partition {batch.records.partition}, offsets {offsets[0]} to {offsets[-1]}"
    return f"the batch after which its source continues at {batch.positions}"
