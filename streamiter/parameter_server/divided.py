"""The shards of a server whose flow runs in several processes: shard j is in process j modulo their number.

All processes run the same program, so each has made the server with all its shards. When a job begins, each process
keeps its own shards and replaces the others by links. Messages arrive in order, each once. So a request is a message
with a number, and the reply is a message with the same number.

In a message, requests and replies are plain data without tuples, which links encode fastest. A dataclass or named tuple
is a list of its name and its fields; the name of a user's class says where it can be imported, and nothing else is
imported. Other lists begin with an empty name, and those of tuples with None.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import fields, is_dataclass, replace
from functools import cache
from typing import Any, Final, TypeVar, cast, final

from streamiter.errors import ConfigurationError, ParameterServerError, ShardLost
from streamiter.parameter_server import requests
from streamiter.parameter_server.calls import AnyReply, ShardLink, WaitingReply
from streamiter.parameter_server.matrix_shard import clock_function, init_functions
from streamiter.parameter_server.requests import (
    AddRequest,
    AggregateRequest,
    CreateRequest,
    Request,
    UpdateRequest,
    without_outputs,
)
from streamiter.parameter_server.rows import MatrixDirectory
from streamiter.parameter_server.shard import Shard
from streamiter.values.deferred import PlainValue
from streamiter.values.helpers.importing import importable_name, imported
from streamiter.values.plain_errors import RemoteError, error_from_plain, error_to_plain

R = TypeVar("R")
Q = TypeVar("Q", bound=Request[object])

Send = Callable[..., Callable[[], None]]
"""Takes the number of a process and the contents of a message to the same server there.

Returns a function that must be called before an array in the message changes that may not have left.
"""

_REQUEST: Final = "request"
_REPLY: Final = "reply"
_FAILURE: Final = "failure"
_GIVE_UP: Final = "give up"


@final
class DividedShards:
    """The shards of this process, ``here``, and the links to all others, which replace them in ``links``."""

    def __init__(
        self, directory: MatrixDirectory, links: list[ShardLink], here: Sequence[Shard], processes: int, send: Send
    ) -> None:
        self._directory = directory
        self._processes = processes
        self._send = send
        self._sent = 0
        """The number of the last request."""
        self._unanswered: dict[int, tuple[int, AnyReply]] = {}
        """By number: the shard, and the reply to come."""
        self._answering: dict[tuple[int, int], AnyReply] = {}
        """The replies that shards of this process have yet to give, by process and number of the request."""
        self._is_over = False
        self._shards = {shard.number: shard for shard in here}
        for number in range(len(links)):
            if number not in self._shards:
                links[number] = _LinkElsewhere(self, number)

    def ask(self, shard: int, request: Request[R]) -> WaitingReply[R]:
        """Send a request to a shard in another process; raise ShardLost if the run is over."""
        process = shard % self._processes
        if self._is_over:
            raise self._lost(shard)
        number = self._sent = self._sent + 1
        plain = to_plain(without_outputs(importable(request)))
        copy_arrays = self._send(process, _REQUEST, number, shard, plain)
        reply: WaitingReply[R] = WaitingReply(lambda: self._give_up(process, number, copy_arrays))
        self._unanswered[number] = shard, reply
        return reply

    def _give_up(self, process: int, number: int, copy_arrays: Callable[[], None]) -> None:
        copy_arrays()  # The caller was cancelled, and may change its arrays.
        if not self._is_over:
            self._send(process, _GIVE_UP, number)

    def received(self, process: int, what: str, number: int, *contents: Any) -> None:
        """Take a message of the same server in another process."""
        if what == _REQUEST:
            shard, plain = contents
            self._answer(process, number, lambda: self._shards[shard].handle(_arrived(plain)))
        elif what == _GIVE_UP:
            if (waiting := self._answering.get((process, number))) is not None:
                waiting.give_up()
        elif number in self._unanswered:  # Otherwise the run is over.
            _, waiting = self._unanswered.pop(number)
            if what == _FAILURE:
                waiting.fail(_raised_by_shard(contents[0]))
            else:
                waiting.succeed(from_plain(contents[0]))

    def _answer(self, process: int, number: int, handle: Callable[[], object]) -> None:
        """Send what ``handle`` returns or raises, as soon as it is known."""
        try:
            reply = handle()
            if isinstance(reply, WaitingReply):
                self._answering[process, number] = reply
                reply.when_settled(lambda: self._settled(process, number))
            elif not self._is_over:
                self._send(process, _REPLY, number, to_plain(reply))
        except (Exception, asyncio.CancelledError) as error:  # Also where the result of a function is not plain data.
            if not self._is_over:
                self._send(process, _FAILURE, number, error_to_plain(error))

    def _settled(self, process: int, number: int) -> None:
        self._answer(process, number, self._answering.pop((process, number)).result)

    def close(self) -> None:
        """The run is over, or broken off: requests to shards elsewhere fail with ShardLost."""
        self._is_over = True
        unanswered, self._unanswered = self._unanswered, {}
        for shard, reply in unanswered.values():
            reply.fail(self._lost(shard))

    def _lost(self, shard: int) -> ShardLost:
        matrices = ", ".join(map(repr, self._directory.names_on(shard)))
        return ShardLost(
            f"parameter server, shard {shard} (blocks of {matrices or 'no matrix'}): expected a run with process "
            f"{shard % self._processes}, where the shard was, given a run that has ended; start the flow again, which "
            "resumes from its last checkpoint, or use the models that it has published"
        )


def _raised_by_shard(plain: PlainValue) -> BaseException:
    """Return the error to raise at the client: of the same class, if the class is one of our own."""
    error = error_from_plain(plain)
    if not isinstance(error, RemoteError):
        return error
    raised = ParameterServerError(f"a shard raised {error}")
    for note in error.__notes__:
        raised.add_note(note)
    return raised


def _arrived(plain: PlainValue) -> Request[object]:
    request: Request[object] = from_plain(plain)
    if isinstance(request, AddRequest):
        request.owns_arrays = True
    return request


@final
class _LinkElsewhere:
    """The link to one shard in another process, for all clients of this process."""

    def __init__(self, shards: DividedShards, number: int) -> None:
        self._shards = shards
        self._number = number

    def send(self, request: Request[R]) -> WaitingReply[R]:
        return self._shards.ask(self._number, request)


def importable(request: Q) -> Q:
    """Return a request whose functions another process can import, by name.

    Raises ConfigurationError for a function that cannot be imported, such as a lambda.
    """
    if isinstance(request, (UpdateRequest, AggregateRequest)):
        function: Any = request.function.require_importable().without_arrays()
        return replace(request, function=function)
    if isinstance(request, AddRequest) and request.update is not None:
        return replace(request, update=importable(request.update))
    if isinstance(request, CreateRequest):
        matrix, on_clock = request.matrix, clock_function(request.matrix)
        init = [function.require_importable() for function in init_functions(matrix)] or matrix.init
        importable_on_clock = None if on_clock is None else on_clock.require_importable()
        return replace(request, matrix=replace(matrix, init=init, on_clock=importable_on_clock))
    return request


def to_plain(value: object) -> PlainValue:
    """Return a value as plain data: what is no list, tuple, dict, dataclass or named tuple stays as it is.

    >>> to_plain([requests.ForgetRequest("w"), (1, 2)])
    ['', ['ForgetRequest', 'w'], [None, 1, 2]]
    """
    kind: type = type(value)
    if kind is list or kind is tuple:
        return ["" if kind is list else None, *map(to_plain, cast("Sequence[object]", value))]
    if kind is dict:
        return {key: to_plain(item) for key, item in cast("dict[object, object]", value).items()}
    described = _described(kind)
    if described is None:
        return value
    name, names = described
    return [name, *[to_plain(getattr(value, field)) for field in names]]


def from_plain(plain: PlainValue) -> Any:
    """Return the value of which ``to_plain`` has made plain data.

    >>> from_plain(['', ['ForgetRequest', 'w'], [None, 1, 2]])
    [ForgetRequest(matrix='w'), (1, 2)]
    """
    kind = type(plain)
    if kind is dict:
        return {key: from_plain(item) for key, item in plain.items()}
    if kind is not list:
        return plain
    name, *items = map(from_plain, plain)
    if not name:
        return tuple(items) if name is None else items
    found, names = _found(name)
    return found(**dict(zip(names, items, strict=True)))


@cache
def _described(kind: type) -> tuple[str, Sequence[str]] | None:
    """Return the name of a dataclass or named tuple in messages, and the names of its fields; None for other types."""
    names = _names(kind)
    if names is None:
        return None
    if kind.__module__ == requests.__name__:
        return kind.__name__, names
    return importable_name(kind, kind.__name__, "a class"), names


@cache
def _found(name: str) -> tuple[Callable[..., Any], Sequence[str]]:
    kind = imported(name, "a message", "a class") if ":" in name else getattr(requests, name)
    names = _names(kind)
    if names is None:
        raise ConfigurationError(f"a message: expected the name of a dataclass, given {name!r}")
    return kind, names


def _names(kind: object) -> Sequence[str] | None:
    if not isinstance(kind, type):
        return None
    if is_dataclass(kind):
        return [field.name for field in fields(kind)]
    return getattr(kind, "_fields", None) if issubclass(kind, tuple) else None
