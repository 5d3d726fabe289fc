"""Messages between a client and the process of a shard: numbered requests, replies, and errors as plain values.

A request keeps the arrays that its caller wants filled at the client. An error of a shard is sent as a ``Failure`` and
raised at the client as an error of the same class.
"""

from __future__ import annotations

import asyncio
import enum
import traceback
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Final, NamedTuple

import numpy as np

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
from streamiter.parameter_server.requests import AddRequest, GetReply, GetRequest, Request
from streamiter.parameter_server.storage.block import Numbers


class SessionId(NamedTuple):
    """Identifies a session: one numbering of the requests of one client to one shard."""

    client: str
    incarnation: int = 0
    """Rises with each new client of the same name: a shard refuses requests of the older clients."""
    generation: int = 0
    """Rises each time the shards go back to a snapshot: a shard ignores messages of another generation."""


class SessionControl(enum.Enum):
    """What a client sends in place of a request."""

    PING = "ping"
    """Numbered as a request is. The reply tells the client that the shard has handled all earlier requests."""
    ACKNOWLEDGE = "acknowledge"
    """Without a number: the message only acknowledges replies, and its answer is a sign of life of the shard."""
    CLOSE = "close"
    """Without a number: the client has ended."""


@dataclass(frozen=True, slots=True)
class GiveUp:
    """In place of a request: the client no longer waits for the reply to request ``number``."""

    number: int


Sendable = Request[Any] | GiveUp | SessionControl


class ClientMessage(NamedTuple):
    """A message from a client to a shard; the call that carries the message returns the outcome of the request."""

    session: SessionId
    number: int
    """Requests are numbered 1, 2, 3, …; 0: the message has no request."""
    acknowledged: tuple[int, ...]
    """Requests whose outcome has arrived since the client's last message: the shard forgets these outcomes."""
    request: Sendable


Outputs = list[Numbers | None] | None
"""The array to be filled for each part of a get; None: no array is to be filled."""


def without_outputs(request: Sendable) -> tuple[Any, Outputs]:
    """Return the request without the arrays that its caller wants filled, and these arrays.

    The arrays stay at the client, and are filled when the reply comes.
    """
    if isinstance(request, AddRequest) and request.get is not None:
        get, outputs = without_outputs(request.get)
        return (request if outputs is None else replace(request, get=get)), outputs
    if not isinstance(request, GetRequest) or all(part.out is None for part in request.parts):
        return request, None
    return (
        replace(request, parts=[part._replace(out=None) for part in request.parts]),
        [part.out for part in request.parts],
    )


def fill(reply: Any, outputs: Outputs) -> Any:
    """Copy the values of a reply into these arrays, and return the reply with the arrays as its values."""
    if outputs is None:
        return reply
    assert isinstance(reply, GetReply)
    values = list(reply.values)
    for index, out in enumerate(outputs):
        if out is not None:
            np.copyto(out, values[index])
            values[index] = out
    return reply._replace(values=values)


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
"""The errors that are made from a message alone, by name."""


class Failure(NamedTuple):
    """An error of a shard as a plain value, which can be sent."""

    kind: str
    """The name of the error's class."""
    message: str
    clocks: dict[str, int] | None = None
    """The clocks of a RolledBack error."""
    trace: str | None = None
    """The traceback of an error that is not one of our own."""


def failure_of(error: BaseException) -> Failure:
    """Return the error as a plain value.

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
    """Return the error to raise at the client: of the same class, if the class is one of our own.

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
        error.add_note(f"On the shard:\n{failure.trace}")
    return error


def outcome_of(call: Callable[[], Any]) -> Any:
    """Return the result of a call, or its error as a ``Failure``."""
    try:
        return call()
    except (Exception, asyncio.CancelledError) as error:
        return failure_of(error)
