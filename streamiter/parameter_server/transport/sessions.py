"""Numbered sessions of clients and shards, and their messages."""

from __future__ import annotations

import asyncio
import copy
import enum
import traceback
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final, NamedTuple, Protocol, final

import numpy as np
import numpy.typing as npt

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
from streamiter.parameter_server.calls import WaitingReply
from streamiter.parameter_server.requests import AddRequest, ClockRequest, GetReply, GetRequest, UpdateRequest

__all__ = [
    "WINDOW",
    "Answer",
    "ClientMessage",
    "ClientSession",
    "Failure",
    "LinkTiming",
    "Received",
    "RequestHandler",
    "RequestState",
    "ServerMessage",
    "ServerSession",
    "SessionControl",
    "SessionId",
    "ShardSessions",
    "error_of",
    "fill",
    "outcome_of",
    "without_outputs",
]


class SessionId(NamedTuple):
    """One numbering of requests, of one client to one shard.

    ``incarnation`` rises with each new client of the same name: the shard refuses the requests of older ones.
    ``generation`` rises with each rollback of the shards: messages of another one are neither applied nor answered.

    What a client and a shard send each other where messages may be dropped, delayed, reordered and repeated.
    """

    client: str
    incarnation: int = 0
    generation: int = 0


class Received(NamedTuple):
    """Which replies have come: all to requests below ``below``, but those of ``missing`` (no more than the window)."""

    below: int
    missing: tuple[int, ...]


class SessionControl(enum.Enum):
    """What a client sends in place of a request."""

    POLL = "poll"
    """What has become of this request? The answer is its reply, or its ``RequestState``."""
    CANCEL = "cancel"
    """Nobody waits for the reply to this request any more. Answered like POLL."""
    ACKNOWLEDGE = "acknowledge"
    """No request: only what the message says of replies. Not answered."""
    CLOSE = "close"
    """The client has ended. Not answered."""


class RequestState(enum.Enum):
    """What a shard answers about a request whose reply it cannot give now."""

    RECEIVED = "received"
    """It is here, and waits for its turn or for a clock: do not send it again."""
    UNKNOWN = "unknown"
    """It has not come, or there was no room for it: send it again."""


class ClientMessage(NamedTuple):
    """From a client. Requests are numbered 1, 2, …; 0: about none."""

    session: SessionId
    number: int
    received: Received
    request: Any
    """A request, or a ``SessionControl``."""


class ServerMessage(NamedTuple):
    """From a shard, about one request."""

    session: SessionId
    number: int
    outcome: Any
    """The reply, or a ``Failure``, or a ``RequestState``."""


Outputs = list[npt.NDArray[Any] | None] | None
"""For each part of a get where to write it; None: there is nothing to write."""


def without_outputs(request: Any) -> tuple[Any, Outputs]:
    """The request as it can be sent, and the arrays that its reply is to be written to.

    Arrays that a caller wants filled: they stay here, and are filled when the reply comes.
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
    """The reply, with its values in these arrays."""
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
"""Those that are made from a message alone."""


class Failure(NamedTuple):
    """What a shard raised: the class by name, the message, and for an error that is not our own where it was raised.

    Errors as values that can be sent.
    """

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


@dataclass(frozen=True, slots=True)
class LinkTiming:
    """When a client asks again, in seconds.

    An unanswered request is asked for after ``resend_s``, then after twice as long, and so on up to ``resend_most_s``.
    Replies are acknowledged with the next message, or after ``acknowledge_s`` if there is none. A shard that has said
    nothing for ``lost_after_s`` is lost.
    """

    resend_s: float = 1.0
    """Longer than it takes to push or pull 10 M floats (0.25 s), or each of them would be asked for."""
    resend_most_s: float = 10.0
    acknowledge_s: float = 0.05
    """Replies may be large, and the shard keeps them until then."""
    lost_after_s: float = 120.0
    """Above what the longest function on a shard takes: it answers nothing meanwhile."""


_DEFAULT_TIMING: Final = LinkTiming()


@dataclass(slots=True)
class _Unanswered:
    request: Any
    """None once the shard is known to have it."""
    due_s: float
    pause_s: float
    is_received: bool = False
    is_asked_for: bool = False
    """The shard has yet to say how it stands."""
    is_given_up: bool = False


@final
class ClientSession:
    """Numbers requests, and says what to send again when. Pure data; times are given, in seconds of any one clock.

    The client's memory of what it has asked one shard.
    """

    def __init__(self, identity: SessionId, *, window: int, timing: LinkTiming = _DEFAULT_TIMING) -> None:
        self.id = identity
        self._window = window
        self._timing = timing
        self._next = 1
        self._unanswered: dict[int, _Unanswered] = {}
        self._acknowledge_s: float | None = None
        """When replies that have come are to be acknowledged at the latest."""
        self._heard_s = 0.0

    @property
    def unanswered(self) -> int:
        """Requests without a reply: no more than the window."""
        return len(self._unanswered)

    @property
    def has_room(self) -> bool:
        """Whether one more request may be sent."""
        return len(self._unanswered) < self._window

    # -- what to send ----------------------------------------------------------------------------------

    def send(self, request: Any, now_s: float) -> ClientMessage:
        """The message for a new request."""
        assert self.has_room
        if not self._unanswered:
            self._heard_s = now_s
        number = self._next
        self._next += 1
        pause_s = self._timing.resend_s
        self._unanswered[number] = _Unanswered(request, now_s + pause_s, pause_s)
        return self._message(number, request)

    def give_up(self, number: int) -> ClientMessage | None:
        """Nobody waits for this reply any more; the shard is told, now and as often as it takes."""
        if (entry := self._unanswered.get(number)) is None:
            return None
        entry.is_given_up = entry.is_asked_for = True
        # It may be sent again, and its arrays are the caller's from now on.
        entry.request = copy.deepcopy(entry.request)
        return self._message(number, SessionControl.CANCEL)

    def due(self, now_s: float) -> list[ClientMessage]:
        """What is to be sent at this time though nobody asks for it: no request, only questions of how they stand."""
        messages = []
        for number, entry in self._unanswered.items():
            if entry.due_s <= now_s:
                entry.pause_s = min(2 * entry.pause_s, self._timing.resend_most_s)
                entry.due_s = now_s + entry.pause_s
                entry.is_asked_for = True
                messages.append(
                    self._message(number, SessionControl.CANCEL if entry.is_given_up else SessionControl.POLL)
                )
        if self._acknowledge_s is not None and self._acknowledge_s <= now_s:
            messages.append(self._message(0, SessionControl.ACKNOWLEDGE))
        return messages

    def close(self) -> ClientMessage:
        """The last message."""
        return self._message(0, SessionControl.CLOSE)

    @property
    def next_due_s(self) -> float | None:
        """When ``due`` and ``is_lost`` are to be asked next; None: when something else has happened."""
        times = [entry.due_s for entry in self._unanswered.values()]
        if times:
            times.append(self._heard_s + self._timing.lost_after_s)
        if self._acknowledge_s is not None:
            times.append(self._acknowledge_s)
        return min(times, default=None)

    def is_lost(self, now_s: float) -> bool:
        """Whether the shard owes replies and has said nothing for too long."""
        return bool(self._unanswered) and now_s >= self._heard_s + self._timing.lost_after_s

    def _message(self, number: int, request: Any) -> ClientMessage:
        self._acknowledge_s = None
        return ClientMessage(self.id, number, Received(self._next, tuple(self._unanswered)), request)

    # -- what has come ---------------------------------------------------------------------------------

    def answered(self, number: int, now_s: float) -> bool:
        """A reply has come; whether it is the first to this request."""
        self._heard_s = now_s
        if self._acknowledge_s is None:
            self._acknowledge_s = now_s + self._timing.acknowledge_s
        return self._unanswered.pop(number, None) is not None

    def stands(self, number: int, standing: RequestState, now_s: float) -> ClientMessage | None:
        """The shard has said how a request stands; gives what to send because of it."""
        self._heard_s = now_s
        entry = self._unanswered.get(number)
        if entry is None:
            return None
        if standing is RequestState.RECEIVED:
            entry.is_received = True
            entry.request = None
        if entry.is_received or not entry.is_asked_for:
            return None  # Nothing to do, or an answer that came twice.
        entry.is_asked_for = False
        entry.pause_s = self._timing.resend_s
        entry.due_s = now_s + entry.pause_s
        return self._message(number, entry.request)


@final
class ServerSession:
    """Gives each numbered request out once and in order, and keeps its outcome until the client has it. Pure data.

    What it keeps is bounded: never more than ``window`` requests and outcomes, of which ``reorder`` came before their
    turn. What does not fit is not taken; the client sends it again.

    The shard's memory of one client's requests.
    """

    def __init__(self, *, window: int, reorder: int) -> None:
        self.window = window
        self.reorder = reorder
        self._next = 1
        """The request whose turn it is."""
        self._early: dict[int, Any] = {}
        self._under_way: set[int] = set()
        self._outcomes: dict[int, Any] = {}

    @property
    def kept(self) -> int:
        """Requests and outcomes that take up room."""
        return len(self._early) + len(self._under_way) + len(self._outcomes)

    @property
    def early(self) -> int:
        """Requests that wait for one before them."""
        return len(self._early)

    def forget(self, received: Received) -> None:
        """The client has these replies."""
        for number in [n for n in self._outcomes if n < received.below and n not in received.missing]:
            del self._outcomes[number]

    def take(self, number: int, request: Any) -> bool:
        """Whether the request is taken: it is new, and there is room."""
        if number < self._next or number in self._early:
            return False
        room = self.window - self.kept
        if number > self._next and (room < 2 or len(self._early) >= self.reorder):
            return False  # What has its turn always finds room before what comes early.
        if room < 1:
            return False
        self._early[number] = request
        return True

    def next_request(self) -> tuple[int, Any] | None:
        """The request to be handled now, with its number; ``settle`` is told its outcome. None: it has not come yet."""
        number = self._next
        if number not in self._early:
            return None
        self._next += 1
        self._under_way.add(number)
        return number, self._early.pop(number)

    def settle(self, number: int, outcome: Any) -> None:
        """The outcome of a request that was given out."""
        self._under_way.remove(number)
        self._outcomes[number] = outcome

    def outcome(self, number: int) -> Any:
        """What came of a request, or how it stands."""
        if number in self._outcomes:
            return self._outcomes[number]
        return (
            RequestState.RECEIVED
            if number in self._early or number in self._under_way
            else RequestState.UNKNOWN
        )

    def is_over(self, number: int) -> bool:
        """Whether the client has had its reply: a late message about it needs no answer."""
        return number < self._next and number not in self._under_way and number not in self._outcomes


WINDOW: Final = 64
"""Unanswered requests of one client on one shard: enough to keep a connection busy (a thousand calls of some ms each a
second take a handful), and more than a client has waiting at a time: parked gets, subscriptions, a barrier."""

Answer = ServerMessage | None
"""None: there is nothing to say."""


class RequestHandler(Protocol):
    """A shard."""

    def handle(self, request: Any) -> Any | WaitingReply[Any]:
        """The reply, or a Waiting for it; raises what the shard refuses."""


@final
class ShardSessions:
    """Has a shard handle the requests of each client in order and once, however their messages come.

    ``receive`` handles a message to its end: coroutines that await what it gives may interleave as they like. It is
    called in one thread only.

    The shard's side of the sessions of all clients.
    """

    def __init__(
        self, shard: RequestHandler, *, window: int = WINDOW, reorder: int = WINDOW, generation: int = 0
    ) -> None:
        self._shard = shard
        self._window = window
        self._reorder = reorder
        self._generation = generation
        self._open: dict[str, _OpenSession] = {}
        self._newest: dict[str, int] = {}
        """By client: its newest incarnation, so that what is left of an older one is not applied."""

    def receive(self, message: ClientMessage) -> Answer | WaitingReply[Answer]:
        """Take a message; gives what to answer, or a Waiting for it where the request has to wait.

        A carrier whose calls return may await it (``answer``); one that only sends messages sends the answer when it is
        settled. If that is lost, the client asks again.
        """
        client, incarnation, generation = message.session
        if generation != self._generation:
            return None
        newest = self._newest.get(client, incarnation)
        if incarnation < newest:
            return None if message.number == 0 else self._refusal(message, newest)
        if message.request is SessionControl.CLOSE:
            self._newest[client] = incarnation + 1
            self._end(client)
            return None
        opened = self._open.get(client)
        if opened is None or opened.id.incarnation < incarnation:
            self._end(client)
            self._newest[client] = incarnation
            opened = self._open[client] = _OpenSession(
                message.session, self._shard, ServerSession(window=self._window, reorder=self._reorder)
            )
        return opened.receive(message)

    async def answer(self, message: ClientMessage) -> Answer:
        """``receive``, and wait for the answer."""
        answer = self.receive(message)
        return await answer if isinstance(answer, WaitingReply) else answer

    def restart(self, generation: int) -> None:
        """The shard has gone back to a snapshot: nothing of what was sent before counts; replaced clients stay so."""
        self._generation = generation
        for client in list(self._open):
            self._end(client)

    def _end(self, client: str) -> None:
        if (opened := self._open.pop(client, None)) is not None:
            opened.end()

    def _refusal(self, message: ClientMessage, newest: int) -> ServerMessage:
        client, incarnation, _ = message.session
        error = WorkerHasLeft(
            f"{client}: expected client {newest} of this name or a newer one, given client {incarnation}, which was "
            "replaced or closed; use the newest client"
        )
        return ServerMessage(message.session, message.number, failure_of(error))


class _OpenSession:
    """One client's session, with what it waits for on the shard, and who waits for its answers."""

    def __init__(self, identity: SessionId, shard: RequestHandler, session: ServerSession) -> None:
        self.id = identity
        self._shard = shard
        self._session = session
        self._waiting: dict[int, WaitingReply[Any]] = {}
        self._given_up_with_client: set[int] = set()
        """Those of the waiting that nobody but this client is interested in."""
        self._answers: dict[int, WaitingReply[Answer]] = {}

    def receive(self, message: ClientMessage) -> Answer | WaitingReply[Answer]:
        session, number, request = self._session, message.number, message.request
        session.forget(message.received)
        if request is SessionControl.ACKNOWLEDGE:
            return None
        is_new = not isinstance(request, SessionControl) and session.take(number, request)
        if is_new:
            self._handle_what_is_next()
        elif request is SessionControl.CANCEL and number in self._given_up_with_client:
            self._waiting[number].give_up()
        if session.is_over(number):
            return None
        outcome = session.outcome(number)
        if outcome is RequestState.UNKNOWN and not isinstance(request, SessionControl):
            return None  # No room for it; the client asks when some has been made.
        if is_new and outcome is RequestState.RECEIVED:
            answer: WaitingReply[Answer] = WaitingReply()
            self._answers[number] = answer
            return answer
        return ServerMessage(self.id, number, outcome)

    def end(self) -> None:
        """Nothing more is handled, and nobody is answered."""
        waiting, self._waiting = self._waiting, {}
        answers, self._answers = self._answers, {}
        for number in self._given_up_with_client:
            waiting[number].give_up()
        for answer in answers.values():
            answer.succeed(None)

    def _handle_what_is_next(self) -> None:
        while (following := self._session.next_request()) is not None:
            number, request = following
            reply = outcome_of(partial(self._shard.handle, request))
            if isinstance(reply, WaitingReply):
                self._waiting[number] = reply
                # Adds, clocks and updates have been promised, and others count on them.
                if not isinstance(request, (AddRequest, ClockRequest, UpdateRequest)):
                    self._given_up_with_client.add(number)
                reply.when_settled(partial(self._settle_waiting, number, reply))
            else:
                self._settle(number, reply)

    def _settle_waiting(self, number: int, waiting: WaitingReply[Any]) -> None:
        if self._waiting.pop(number, None) is not None:
            self._given_up_with_client.discard(number)
            self._settle(number, outcome_of(waiting.result))

    def _settle(self, number: int, outcome: Any | Failure) -> None:
        self._session.settle(number, outcome)
        if (answer := self._answers.pop(number, None)) is not None:
            answer.succeed(ServerMessage(self.id, number, outcome))
