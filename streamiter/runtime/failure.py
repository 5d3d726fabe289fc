"""What a failure says to whoever reads the log."""

from __future__ import annotations

from collections.abc import Mapping

from streamiter.errors import JobFailed, StreamiterError
from streamiter.operators.rejection import RecordFailure, shortened

__all__ = ["first_failure", "job_failed"]


def first_failure(error: BaseException) -> BaseException:
    """The failure that came first out of a group of them."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


def job_failed(flow: str, failure: RecordFailure, lines: Mapping[str, str]) -> JobFailed:
    """One error for a failed job, naming the step, the user's line, the record or the offsets."""
    cause = failure.__cause__ or failure
    step = failure.step
    where = f" ({lines[step]})" if step in lines else ""
    what = str(cause) if isinstance(cause, StreamiterError) else f"{type(cause).__name__}: {cause}"
    message = f"flow {flow!r}, step {step!r}{where}{_place(failure)}: {what}"
    error = JobFailed(message, step=step)
    error.__cause__ = cause
    return error


def _place(failure: RecordFailure) -> str:
    if failure.origin is not None:
        return f" at {failure.origin}"
    if failure.has_record:
        return f" on record {shortened(failure.record)}"
    if failure.positions:
        before = ", ".join(f"{partition}: {offset}" for partition, offset in failure.positions.items())
        return f" in the batch that ends before offset (by partition) {before}"
    return ""
