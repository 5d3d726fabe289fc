"""Bugs put into the sessions on purpose, each of a kind that is easily made there."""

from __future__ import annotations

from typing import Any

import pytest

from streamiter.parameter_server.calls import WaitingReply
from streamiter.parameter_server.transport.remote_link import RemoteLink
from streamiter.parameter_server.transport.sessions import (
    ClientMessage,
    ClientSession,
    Received,
    RequestState,
    ServerMessage,
    ServerSession,
    SessionControl,
    _OpenSession,
    outcome_of,
)


def handle_every_message(patch: pytest.MonkeyPatch) -> None:
    """A shard that looks at no numbers: what comes twice is done twice."""

    def receive(self: _OpenSession, message: ClientMessage) -> Any:
        number = message.number
        if isinstance(message.request, SessionControl):
            return ServerMessage(self.id, number, RequestState.UNKNOWN)
        reply = outcome_of(lambda: self._shard.handle(message.request))
        if not isinstance(reply, WaitingReply):
            return ServerMessage(self.id, number, reply)
        answer: WaitingReply[ServerMessage] = WaitingReply()
        reply.when_settled(lambda: answer.succeed(ServerMessage(self.id, number, outcome_of(reply.result))))
        return answer

    patch.setattr(_OpenSession, "receive", receive)


def handle_in_order_of_arrival(patch: pytest.MonkeyPatch) -> None:
    """A shard that handles each request once, but the one that has come, not the one whose turn it is."""
    receive = _OpenSession.receive
    came: dict[int, set[int]] = {}

    def receive_next(self: _OpenSession, message: ClientMessage) -> Any:
        numbers = came.setdefault(id(self), set())
        if message.number in numbers and not isinstance(message.request, SessionControl):
            message = message._replace(request=SessionControl.POLL)
        elif not isinstance(message.request, SessionControl):
            numbers.add(message.number)
            self._session._next = message.number
        answer = receive(self, message)
        self._session._next = 1
        return answer

    patch.setattr(_OpenSession, "receive", receive_next)


def acknowledge_what_was_only_asked(patch: pytest.MonkeyPatch) -> None:
    """A client that says it has all replies to what it has sent."""
    message = ClientSession._message

    def too_early(self: ClientSession, number: int, request: Any) -> ClientMessage:
        made = message(self, number, request)
        return made._replace(received=Received(made.received.below, ()))

    patch.setattr(ClientSession, "_message", too_early)


def acknowledge_up_to_the_newest_reply(patch: pytest.MonkeyPatch) -> None:
    """A client that takes the highest number it was answered for one up to which it has all replies."""
    message, answered = ClientSession._message, ClientSession.answered
    newest: dict[int, int] = {}

    def remember(self: ClientSession, number: int, now_s: float) -> bool:
        newest[id(self)] = max(number, newest.get(id(self), 0))
        return answered(self, number, now_s)

    def too_early(self: ClientSession, number: int, request: Any) -> ClientMessage:
        made = message(self, number, request)
        above = tuple(n for n in made.received.missing if n > newest.get(id(self), 0))
        return made._replace(received=Received(made.received.below, above))

    patch.setattr(ClientSession, "answered", remember)
    patch.setattr(ClientSession, "_message", too_early)


def take_whatever_comes_early(patch: pytest.MonkeyPatch) -> None:
    """A reorder buffer without a bound."""
    take = ServerSession.take

    def take_all(self: ServerSession, number: int, request: Any) -> bool:
        if number <= self._next or number in self._early:
            return take(self, number, request)
        self._early[number] = request
        return True

    patch.setattr(ServerSession, "take", take_all)


def let_what_comes_early_take_all_room(patch: pytest.MonkeyPatch) -> None:
    """A bound on all that is kept, and what comes early fills it: what has its turn is never taken."""

    def take(self: ServerSession, number: int, request: Any) -> bool:
        if number < self._next or number in self._early or len(self._early) >= self.reorder:
            return False
        self._early[number] = request
        return True

    patch.setattr(ServerSession, "take", take)


def evict_what_came_early(patch: pytest.MonkeyPatch) -> None:
    """A reorder buffer that makes room by dropping what it has said it has."""
    take = ServerSession.take

    def take_and_evict(self: ServerSession, number: int, request: Any) -> bool:
        if number > self._next and number not in self._early and len(self._early) >= self.reorder:
            self._early.pop(next(iter(self._early)))
        return take(self, number, request)

    patch.setattr(ServerSession, "take", take_and_evict)


def keep_only_the_newest_replies(patch: pytest.MonkeyPatch) -> None:
    """A cache of replies with a size of its own, in place of what the client has yet to acknowledge."""
    settle = ServerSession.settle

    def settle_and_drop(self: ServerSession, number: int, outcome: Any) -> None:
        settle(self, number, outcome)
        while len(self._outcomes) > 2:
            del self._outcomes[next(iter(self._outcomes))]

    patch.setattr(ServerSession, "settle", settle_and_drop)


def forget_a_reply_that_was_sent(patch: pytest.MonkeyPatch) -> None:
    """A reply to a request that waited is sent when it comes, and not kept."""
    settle_waiting = _OpenSession._settle_waiting

    def settle_and_forget(self: _OpenSession, number: int, waiting: WaitingReply[Any]) -> None:
        settle_waiting(self, number, waiting)
        self._session._outcomes.pop(number, None)

    patch.setattr(_OpenSession, "_settle_waiting", settle_and_forget)


def ask_once(patch: pytest.MonkeyPatch) -> None:
    """A client that believes a request which was received needs no more questions: its reply may be lost."""
    stands = ClientSession.stands

    def never_again(
        self: ClientSession, number: int, standing: RequestState, now_s: float
    ) -> ClientMessage | None:
        made = stands(self, number, standing, now_s)
        if standing is RequestState.RECEIVED and (entry := self._unanswered.get(number)) is not None:
            entry.due_s = 1e9
        return made

    patch.setattr(ClientSession, "stands", never_again)


def send_whole_requests_while_they_wait(patch: pytest.MonkeyPatch) -> None:
    """A shard that calls unknown what waits for a clock: its arrays are sent over and over."""
    outcome = ServerSession.outcome

    def unknown(self: ServerSession, number: int) -> Any:
        return RequestState.UNKNOWN if number in self._under_way else outcome(self, number)

    patch.setattr(ServerSession, "outcome", unknown)


def settle_with_each_reply(patch: pytest.MonkeyPatch) -> None:
    """A link that takes the next reply for the one to its oldest request."""
    receive = RemoteLink.receive

    def receive_any(self: RemoteLink, message: ServerMessage | None) -> None:
        if message is not None and self._calls and not isinstance(message.outcome, RequestState):
            message = message._replace(number=next(iter(self._calls)))
        receive(self, message)

    patch.setattr(RemoteLink, "receive", receive_any)


def never_cancel(patch: pytest.MonkeyPatch) -> None:
    """A link that drops what is given up, and tells nobody: its numbers are a gap, the shard waits on."""

    def give_up(self: ClientSession, number: int) -> None:
        self._unanswered.pop(number, None)

    patch.setattr(ClientSession, "give_up", give_up)


PLANTED = [
    (handle_every_message, "requests were handled as"),
    (handle_in_order_of_arrival, "requests were handled as"),
    (acknowledge_what_was_only_asked, "these hang"),
    (acknowledge_up_to_the_newest_reply, "these hang"),
    (take_whatever_comes_early, "before their turn"),
    (let_what_comes_early_take_all_room, "these hang"),
    (evict_what_came_early, "these hang"),
    (keep_only_the_newest_replies, "these hang"),
    (forget_a_reply_that_was_sent, "these hang"),
    (ask_once, "these hang"),
    (send_whole_requests_while_they_wait, "sent whole"),
    (settle_with_each_reply, "was given"),
    (never_cancel, "stay open"),
]
"""What is planted, and what is then said to be broken."""
