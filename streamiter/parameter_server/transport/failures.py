"""Errors as values that can be sent."""

from __future__ import annotations

import asyncio
import traceback
from collections.abc import Callable
from typing import Any, Final, NamedTuple

from streamiter.errors import (
    CheckpointError,
    ConfigurationError,
    InternalError,
    ModelError,
    OutOfRange,
    OutOfTurn,
    ParameterServerError,
    PlainDataError,
    RolledBack,
    RowsInDifferentBlocks,
    ServerReset,
    ShardLost,
    StreamiterError,
    UnknownMatrix,
    UnknownWorker,
    WorkerHasLeft,
)

__all__ = ["Failure", "error_of", "failure_of", "outcome_of"]

_BY_NAME: Final[dict[str, type[StreamiterError]]] = {
    kind.__name__: kind
    for kind in (
        CheckpointError,
        ConfigurationError,
        InternalError,
        ModelError,
        OutOfRange,
        OutOfTurn,
        ParameterServerError,
        PlainDataError,
        RowsInDifferentBlocks,
        ServerReset,
        ShardLost,
        UnknownMatrix,
        UnknownWorker,
        WorkerHasLeft,
    )
}
"""Those that are made from a message alone."""


class Failure(NamedTuple):
    """What a shard raised: the class by name, the message, and for an error that is not our own where it was raised."""

    kind: str
    message: str
    clocks: dict[str, int] | None = None
    """Of RolledBack."""
    trace: str | None = None


def failure_of(error: BaseException) -> Failure:
    """The error as a value.

    >>> failure_of(UnknownMatrix("matrix 'w': expected …"))
    Failure(kind='UnknownMatrix', message="matrix 'w': expected …", clocks=None, trace=None)
    """
    kind = type(error).__name__
    if isinstance(error, RolledBack):
        return Failure(kind, str(error), error.clocks)
    if _BY_NAME.get(kind) is type(error):
        return Failure(kind, str(error))
    return Failure(kind, str(error), trace="".join(traceback.format_exception(error)))


def error_of(failure: Failure) -> StreamiterError:
    """The error to raise on the other side: of the same class, if it is one of ours.

    >>> error_of(Failure("UnknownMatrix", "matrix 'w': expected …"))
    UnknownMatrix("matrix 'w': expected …")
    >>> error_of(Failure("ZeroDivisionError", "division by zero"))
    ParameterServerError('a shard raised ZeroDivisionError: division by zero')
    """
    if failure.clocks is not None:
        return RolledBack(failure.message, failure.clocks)
    if failure.trace is None and (kind := _BY_NAME.get(failure.kind)) is not None:
        return kind(failure.message)
    error = ParameterServerError(f"a shard raised {failure.kind}: {failure.message}")
    if failure.trace is not None:
        error.add_note(f"There it was:\n{failure.trace}")
    return error


def outcome_of(call: Callable[[], Any]) -> Any:
    """What a call returns, or what it raises as a ``Failure``."""
    try:
        return call()
    except (Exception, asyncio.CancelledError) as error:
        return failure_of(error)
