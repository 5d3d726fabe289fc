"""Bugs planted in the sessions, each of a kind that is easily made there."""

from __future__ import annotations

from typing import Any

import pytest

from streamiter.parameter_server.calls import WaitingReply
from streamiter.parameter_server.requests import ClientMessage, SessionControl, outcome_of
from streamiter.parameter_server.transport import RemoteLink, _OpenSession, _SentCall


def handle_every_message(patch: pytest.MonkeyPatch) -> None:
    """The shard ignores the numbers of requests and handles a request twice that arrives twice."""

    def receive(self: _OpenSession, message: ClientMessage) -> Any:
        if message.number == 0:
            return None
        reply = outcome_of(lambda: self._handle(message.request))
        if not isinstance(reply, WaitingReply):
            return reply
        outcome: WaitingReply[Any] = WaitingReply()
        reply.when_settled(lambda: outcome.succeed(outcome_of(reply.result)))
        return outcome

    patch.setattr(_OpenSession, "receive", receive)


def handle_in_order_of_arrival(patch: pytest.MonkeyPatch) -> None:
    """The shard handles each request once, but in order of arrival instead of in order of numbers."""
    receive = _OpenSession.receive

    def receive_next(self: _OpenSession, message: ClientMessage) -> Any:
        came: set[int] = self.__dict__.setdefault("came", set())
        if message.number and message.number not in came:
            came.add(message.number)
            self._next = message.number
        return receive(self, message)

    patch.setattr(_OpenSession, "receive", receive_next)


def acknowledge_before_the_reply_has_come(patch: pytest.MonkeyPatch) -> None:
    """The client acknowledges replies to all requests that it has sent."""
    send_call = RemoteLink._send_call

    def too_early(self: RemoteLink, call: _SentCall) -> None:
        self._answered.extend(self._calls)
        send_call(self, call)

    patch.setattr(RemoteLink, "_send_call", too_early)


def never_acknowledge(patch: pytest.MonkeyPatch) -> None:
    """The client has its replies and does not acknowledge them."""
    take = RemoteLink._take_outcome

    def take_and_forget(self: RemoteLink, number: int, outcome: Any) -> None:
        take(self, number, outcome)
        self._answered.clear()

    patch.setattr(RemoteLink, "_take_outcome", take_and_forget)


def keep_only_the_newest_outcomes(patch: pytest.MonkeyPatch) -> None:
    """The shard keeps a fixed number of outcomes instead of all that the client has not acknowledged."""
    receive = _OpenSession.receive

    def receive_and_drop(self: _OpenSession, message: ClientMessage) -> Any:
        outcome = receive(self, message)
        settled = [number for number, one in self._outcomes.items() if one.is_settled]
        for number in settled[:-1]:
            del self._outcomes[number]
        return outcome

    patch.setattr(_OpenSession, "receive", receive_and_drop)


def forget_a_reply_that_was_sent(patch: pytest.MonkeyPatch) -> None:
    """The shard sends the reply to a request that waited, and does not keep it."""
    settle = _OpenSession._settle

    def settle_and_forget(self: _OpenSession, number: int, reply: WaitingReply[Any]) -> None:
        settle(self, number, reply)
        self._outcomes.pop(number, None)

    patch.setattr(_OpenSession, "_settle", settle_and_forget)


def settle_with_each_reply(patch: pytest.MonkeyPatch) -> None:
    """The link takes the next reply for the reply to its oldest request."""
    take = RemoteLink._take_outcome

    def take_any(self: RemoteLink, number: int, outcome: Any) -> None:
        take(self, next(iter(self._calls), number), outcome)

    patch.setattr(RemoteLink, "_take_outcome", take_any)


def never_report_cancelled_calls(patch: pytest.MonkeyPatch) -> None:
    """The link does not report a cancelled call to the shard, which continues to wait."""
    patch.setattr(RemoteLink, "_give_up", lambda self, call: None)


def cancel_outside_of_the_order(patch: pytest.MonkeyPatch) -> None:
    """The link reports a cancelled call outside of the order of requests, possibly before the request arrives."""
    handle = _OpenSession._handle
    receive = _OpenSession.receive

    def receive_at_once(self: _OpenSession, message: ClientMessage) -> Any:
        request = message.request
        if message.number and not isinstance(request, SessionControl) and hasattr(request, "number"):
            handle(self, request)
        return receive(self, message)

    def handle_others(self: _OpenSession, request: Any) -> Any:
        return None if hasattr(request, "number") else handle(self, request)

    patch.setattr(_OpenSession, "receive", receive_at_once)
    patch.setattr(_OpenSession, "_handle", handle_others)


PLANTED = [
    (handle_every_message, "was given"),
    (handle_in_order_of_arrival, "requests were handled as"),
    (acknowledge_before_the_reply_has_come, "these hang"),
    (never_acknowledge, "the shard keeps outcomes"),
    (keep_only_the_newest_outcomes, "was given"),
    (forget_a_reply_that_was_sent, "was given"),
    (settle_with_each_reply, "was given"),
    (never_report_cancelled_calls, "these hang"),
    (cancel_outside_of_the_order, "these hang"),
]
"""The planted bugs, and a part of the error that finds each of them."""
