"""The shard's side of the sessions of all clients."""

from __future__ import annotations

from functools import partial
from typing import Any, Final, Protocol, final

from streamiter.errors import WorkerHasLeft
from streamiter.parameter_server.requests import Add, Clock, Update
from streamiter.parameter_server.transport.failures import Failure, failure_of, outcome_of
from streamiter.parameter_server.transport.messages import (
    ClientMessage,
    Control,
    ServerMessage,
    SessionId,
    Standing,
)
from streamiter.parameter_server.transport.server_session import ServerSession
from streamiter.parameter_server.waiting import Waiting

__all__ = ["WINDOW", "Answer", "RequestHandler", "ShardSessions"]

WINDOW: Final = 64
"""Unanswered requests of one client on one shard: enough to keep a connection busy (a thousand calls of some ms each a
second take a handful), and more than a client has waiting at a time: parked gets, subscriptions, a barrier."""

Answer = ServerMessage | None
"""None: there is nothing to say."""


class RequestHandler(Protocol):
    """A shard."""

    def handle(self, request: Any) -> Any | Waiting[Any]:
        """The reply, or a Waiting for it; raises what the shard refuses."""


@final
class ShardSessions:
    """Has a shard handle the requests of each client in order and once, however their messages come.

    ``receive`` handles a message to its end: coroutines that await what it gives may interleave as they like. It is
    called in one thread only.
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

    def receive(self, message: ClientMessage) -> Answer | Waiting[Answer]:
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
        if message.request is Control.CLOSE:
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
        return await answer if isinstance(answer, Waiting) else answer

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
        self._waiting: dict[int, Waiting[Any]] = {}
        self._given_up_with_client: set[int] = set()
        """Those of the waiting that nobody but this client is interested in."""
        self._answers: dict[int, Waiting[Answer]] = {}

    def receive(self, message: ClientMessage) -> Answer | Waiting[Answer]:
        session, number, request = self._session, message.number, message.request
        session.forget(message.received)
        if request is Control.ACKNOWLEDGE:
            return None
        is_new = not isinstance(request, Control) and session.take(number, request)
        if is_new:
            self._handle_what_is_next()
        elif request is Control.CANCEL and number in self._given_up_with_client:
            self._waiting[number].give_up()
        if session.is_over(number):
            return None
        outcome = session.outcome(number)
        if outcome is Standing.UNKNOWN and not isinstance(request, Control):
            return None  # No room for it; the client asks when some has been made.
        if is_new and outcome is Standing.RECEIVED:
            answer: Waiting[Answer] = Waiting()
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
            if isinstance(reply, Waiting):
                self._waiting[number] = reply
                # Adds, clocks and updates have been promised, and others count on them.
                if not isinstance(request, (Add, Clock, Update)):
                    self._given_up_with_client.add(number)
                reply.when_settled(partial(self._settle_waiting, number, reply))
            else:
                self._settle(number, reply)

    def _settle_waiting(self, number: int, waiting: Waiting[Any]) -> None:
        if self._waiting.pop(number, None) is not None:
            self._given_up_with_client.discard(number)
            self._settle(number, outcome_of(waiting.result))

    def _settle(self, number: int, outcome: Any | Failure) -> None:
        self._session.settle(number, outcome)
        if (answer := self._answers.pop(number, None)) is not None:
            answer.succeed(ServerMessage(self.id, number, outcome))
