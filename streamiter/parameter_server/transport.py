"""Sessions: a shard in another process handles the requests of each client in order, each once.

The calls between the processes arrive, but they overtake each other, and a call is repeated where the connection breaks
before its result has come (Ray's calls of an asyncio actor behave so). Therefore a ``RemoteLink`` numbers the requests
of one client to one shard. ``ShardSessions``, in the process of the shard, handles the requests in the order of their
numbers, and answers a repeated request with the outcome of the first one.
"""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from typing import Final, Protocol, TypeVar, final

from streamiter.clock import Clock
from streamiter.errors import ParameterServerError, ServerReset, ShardLost, WorkerHasLeft
from streamiter.parameter_server.calls import AnyReply, Call, WaitingReply
from streamiter.parameter_server.requests import (
    AddRequest,
    AggregateRequest,
    ClientMessage,
    ClockRequest,
    Failure,
    GetRequest,
    GiveUp,
    NextChanges,
    Request,
    Sendable,
    SessionControl,
    SessionId,
    UpdateRequest,
    error_of,
    failure_of,
    outcome_of,
    rolled_back,
    without_outputs,
)

T = TypeVar("T")
R = TypeVar("R")

WINDOW: Final = 64
"""Unanswered requests of one client on one shard: enough to keep a connection busy (a thousand calls of some ms each a
second take a handful), and more than a client has waiting at a time: waiting gets, subscriptions, a barrier."""

LOST_AFTER_S: Final = 120.0
"""A shard that owes replies and answers nothing for so long is lost. It is above the time of the longest function on a
shard, which answers nothing while the function runs."""

# How often a link that waits for replies asks a silent shard for a sign of life.
_ASK_S: Final = 10.0

# Replies may be large, and the shard keeps a reply until the client has acknowledged it.
_ACKNOWLEDGE_S: Final = 0.05


# -- the client's end ----------------------------------------------------------------------------------------


class Carrier(Protocol):
    """Calls the process of a shard. Calls may overtake each other, and the shard may get a message twice."""

    def send(self, message: ClientMessage, answered: Callable[[object], None]) -> None:
        """Make the call, without waiting. ``answered`` is called with the outcome, in the same thread.

        The arrays of the message may change once this method returns. Raises if the shard is gone for good.
        """


class _SentCall:
    """A request with its waiting reply."""

    __slots__ = ("number", "request", "waiting")

    def __init__(self, request: Sendable) -> None:
        self.request: Sendable | None = without_outputs(request)
        self.waiting: AnyReply = WaitingReply()
        self.number = 0
        """0: not sent yet."""

    @property
    def only_reads(self) -> bool:
        """Whether the request changes nothing on the shard. Valid only before the request is sent."""
        return isinstance(self.request, (GetRequest, AggregateRequest, SessionControl))


@final
class RemoteLink:
    """Sends the requests of one client to one shard in another process.

    No more than ``window`` requests are unanswered at a time, except in a pause; further requests wait in a queue here,
    at most as many as the client has calls. The arrays of a request belong to the link until the request is sent. The
    shard carries out a call that is given up all the same, unless the call only reads.

    A shard that owes replies and answers nothing for ``lost_after_s`` is lost. ``shard`` is the shard's name in errors.
    A link runs in one thread: the thread of the event loop in which ``clock`` calls back.
    """

    def __init__(
        self,
        shard: str,
        session: SessionId,
        carrier: Carrier,
        clock: Clock,
        *,
        window: int = WINDOW,
        lost_after_s: float = LOST_AFTER_S,
    ) -> None:
        self._shard = shard
        self._session = session
        self._carrier = carrier
        self._clock = clock
        self._window = window
        self._lost_after_s = lost_after_s
        self._last = 0
        """The number of the last request."""
        self._calls: dict[int, _SentCall] = {}
        """Unanswered requests, by number."""
        self._queue: deque[_SentCall] = deque()
        self._answered: list[int] = []
        """Requests whose outcome has arrived and is not acknowledged yet."""
        self._is_timed = False
        """Whether a timer for acknowledging them runs."""
        self._heard_s = 0.0
        """When the shard last answered, or when a request was sent after a time without unanswered requests."""
        self._is_watched = False
        """Whether a timer for the shard's silence runs."""
        self._subscriptions = 0
        """Calls for changes, which wait until rows have changed."""
        self._ping: _SentCall | None = None
        """The ping of ``pause``, until ``resume``."""
        self._refusal: ParameterServerError | None = None
        """Why no request can be sent now."""
        self._is_closed = False

    @property
    def unanswered(self) -> int:
        """How many requests are sent and not answered."""
        return len(self._calls)

    @property
    def queued(self) -> int:
        """How many requests are not sent yet."""
        return len(self._queue)

    def send(self, request: Request[R]) -> WaitingReply[R]:
        """Send a request and return its waiting reply. All errors are raised by the reply, never here."""
        call = _SentCall(request)
        if self._refusal is None and isinstance(request, NextChanges) and not self._may_follow(call):
            return call.waiting
        return self._enqueue(call)

    def _enqueue(self, call: _SentCall) -> AnyReply:
        if self._refusal is not None:
            _fail([call], self._refusal)
            return call.waiting
        call.waiting.on_given_up = lambda: self._give_up(call)
        self._queue.append(call)
        self._send_queued()
        return call.waiting

    def _may_follow(self, call: _SentCall) -> bool:
        """Refuse subscriptions above half of the window: in all of it, they would block other calls for ever."""
        most = self._window // 2
        if self._subscriptions >= most:
            error = ParameterServerError(
                f"{self._shard}: expected at most {most} subscriptions of a client that wait for changes, given one "
                "more; follow several rows with one subscription, or close some"
            )
            _fail([call], error)
            return False

        def settled() -> None:
            self._subscriptions -= 1

        self._subscriptions += 1
        call.waiting.when_settled(settled)
        return True

    # -- pauses ----------------------------------------------------------------------------------------

    def pause(self) -> WaitingReply[None]:
        """Keep all requests that are sent from now on in the queue until ``resume``.

        The reply comes when the shard has handled all earlier requests of this link.
        """
        self._ping = _SentCall(SessionControl.PING)
        return self._enqueue(self._ping)

    def resume(self) -> None:
        """End a pause."""
        self._ping = None
        self._send_queued()

    # -- sending ---------------------------------------------------------------------------------------

    def _send_queued(self) -> None:
        queue = self._queue
        while queue and self._may_send():
            call = queue.popleft()
            self._send_call(call)
            if call.waiting.is_settled:  # Given up while it was in the queue.
                self._give_up(call)

    def _may_send(self) -> bool:
        if self._ping is None:
            return len(self._calls) < self._window
        # The ping and the requests before it need no room: a pause must not wait for calls that wait for a clock.
        return self._ping.number == 0

    def _send_call(self, call: _SentCall) -> None:
        if not self._calls:
            self._hear()
        self._last = number = call.number = self._last + 1
        self._calls[number] = call
        self._watch()
        request, call.request = call.request, None
        assert request is not None
        session = self._session

        def answered(outcome: object) -> None:
            if session == self._session:
                self._take_outcome(number, outcome)

        self._carry(number, request, answered)

    def _carry(self, number: int, request: Sendable, answered: Callable[[object], None]) -> None:
        acknowledged, self._answered = tuple(self._answered), []
        try:
            self._carrier.send(ClientMessage(self._session, number, acknowledged, request), answered)
        except Exception as error:
            self.lost(error)

    def _take_outcome(self, number: int, outcome: object) -> None:
        call = self._calls.pop(number, None)
        if call is None:
            return  # The calls have failed meanwhile: the shard is gone, or the link is closed.
        self._hear()
        self._answered.append(number)
        if not self._is_timed:
            self._is_timed = True
            self._clock.call_later(_ACKNOWLEDGE_S, self._acknowledge)
        if isinstance(outcome, Failure):
            call.waiting.fail(error_of(outcome))
        else:
            call.waiting.succeed(outcome)
        self._send_queued()

    def _acknowledge(self) -> None:
        """Acknowledge replies that no request has acknowledged meanwhile."""
        self._is_timed = False
        if self._answered and self._refusal is None:
            self._carry(0, SessionControl.ACKNOWLEDGE, self._hear)

    def _give_up(self, call: _SentCall) -> None:
        """The caller continues, and may change the arrays of a request that is not sent yet."""
        if self._calls.get(call.number) is call:
            self._send_call(_SentCall(GiveUp(call.number)))
        elif call in self._queue:
            if call.only_reads:
                self._queue.remove(call)
            else:
                call.request = copy.deepcopy(call.request)

    # -- silence ---------------------------------------------------------------------------------------

    def _hear(self, outcome: object = None) -> None:
        """Note that the shard answers."""
        del outcome
        self._heard_s = self._clock.monotonic_s()

    def _watch(self) -> None:
        if not self._is_watched:
            self._is_watched = True
            self._clock.call_later(min(_ASK_S, self._lost_after_s / 2), self._check_silence)

    def _check_silence(self) -> None:
        """Ask a shard that owes replies for a sign of life; take it for lost if it has been silent for too long."""
        self._is_watched = False
        if not self._calls or self._refusal is not None:
            return
        if self._clock.monotonic_s() >= self._heard_s + self._lost_after_s:
            self.lost(TimeoutError(f"nothing was heard of it for {self._lost_after_s:g} s"))
            return
        self._carry(0, SessionControl.ACKNOWLEDGE, self._hear)
        self._watch()

    # -- losses ----------------------------------------------------------------------------------------

    def lost(self, cause: BaseException) -> None:
        """The shard is gone: unanswered requests fail with ShardLost, and so do new ones until ``replaced``."""
        error = ShardLost(
            f"{self._shard}: expected its replies, given {type(cause).__name__}: {cause}; what was sent may have been "
            "applied"
        )
        error.__cause__ = cause
        self._refuse(error)

    def replaced(self, generation: int, clocks: Mapping[str, int], carrier: Carrier | None = None) -> None:
        """All shards are back at a snapshot: unanswered requests fail with RolledBack; a new session begins.

        ``clocks`` are the worker's clocks in the snapshot, by matrix. ``generation`` is the new generation of the
        shard's ``ShardSessions``.
        """
        error = rolled_back(f"{self._shard}: expected a reply, given a shard that has gone back to a snapshot;", clocks)
        if self._is_closed:
            return
        calls = self._take_calls()
        self._carrier = carrier or self._carrier
        self._session = self._session._replace(generation=generation)
        self._last = 0
        self._refusal = None
        _fail(calls, error)

    def close(self) -> None:
        """The client has ended: tell the shard, and fail unanswered requests."""
        if self._refusal is None:
            self._carry(0, SessionControl.CLOSE, _ignore)
        self._is_closed = True
        self._refuse(
            ServerReset(f"{self._shard}: expected a client that is in use, given one that was closed; make a new one")
        )

    def _refuse(self, error: ParameterServerError) -> None:
        if not isinstance(self._refusal, ServerReset):
            self._refusal = error
        _fail(self._take_calls(), error)

    def _take_calls(self) -> list[_SentCall]:
        calls = [*self._calls.values(), *self._queue]
        self._calls.clear()
        self._queue.clear()
        self._answered.clear()
        return calls


def _fail(calls: list[_SentCall], error: ParameterServerError) -> None:
    for call in calls:
        own = copy.copy(error)  # Each copy is raised in another task.
        own.__cause__ = error.__cause__
        call.waiting.fail(own)


def _ignore(outcome: object) -> None:
    del outcome


async def between_calls(links: Sequence[RemoteLink], take: Callable[[], Awaitable[T]]) -> T:
    """Call ``take`` while the shards have handled all requests sent before, and no later ones, over these links.

    So the shards have handled each call of these clients on all shards, or on none of them. No pause waits for a clock.
    """
    pings = [link.pause() for link in links]
    try:
        await Call(pings, list)
        return await take()
    finally:
        for link in links:
            link.resume()


# -- the shard's end -----------------------------------------------------------------------------------------


class RequestHandler(Protocol):
    """A shard."""

    def handle(self, request: Request[R]) -> R | WaitingReply[R]:
        """Return the reply, or a WaitingReply; raise what the shard refuses."""


@final
class ShardSessions:
    """Has a shard handle the requests of each client in order, each once, however their messages arrive.

    Used in one thread only.
    """

    def __init__(self, shard: RequestHandler, *, generation: int = 0) -> None:
        self._shard = shard
        self.generation = generation
        self._open: dict[str, _OpenSession] = {}
        self._newest: dict[str, int] = {}
        """By client: the newest incarnation, so that late requests of an older one are not applied."""

    def receive(self, message: ClientMessage) -> object | AnyReply:
        """Take a message; return the outcome of its request, or a WaitingReply for the outcome.

        An outcome is the reply or a ``Failure``. The outcome is None where the client does not wait for it any more, or
        where the generation is another one.
        """
        client, incarnation, generation = message.session
        if generation != self.generation:
            return None
        newest = self._newest.get(client, incarnation)
        if incarnation < newest:
            return _refusal(message.session, newest)
        if message.request is SessionControl.CLOSE:
            self._newest[client] = incarnation + 1
            self._end(client, None)
            return None
        opened = self._open.get(client)
        if opened is None or opened.id.incarnation < incarnation:
            if opened is not None:
                self._end(client, _refusal(opened.id, incarnation))
            self._newest[client] = incarnation
            opened = self._open[client] = _OpenSession(message.session, self._shard)
        return opened.receive(message)

    def restart(self, generation: int) -> None:
        """The shard has gone back to a snapshot: earlier messages no longer count; replaced clients stay replaced."""
        self.generation = generation
        for client in list(self._open):
            self._end(client, None)

    @property
    def kept(self) -> int:
        """How many requests and outcomes are kept."""
        return sum(opened.kept for opened in self._open.values())

    def _end(self, client: str, outcome: object) -> None:
        if (opened := self._open.pop(client, None)) is not None:
            opened.end(outcome)


def _refusal(session: SessionId, newest: int) -> Failure:
    return failure_of(
        WorkerHasLeft(
            f"{session.client}: expected client {newest} of this name or a newer one, given client "
            f"{session.incarnation}, which was replaced or closed; use the newest client"
        )
    )


@final
class _OpenSession:
    """The session of one client on a shard."""

    def __init__(self, identity: SessionId, shard: RequestHandler) -> None:
        self.id = identity
        self._shard = shard
        self._next = 1
        """The request that is handled next."""
        self._early: dict[int, Sendable] = {}
        """Requests that arrived before an earlier one, by number."""
        self._outcomes: dict[int, AnyReply] = {}
        """By number, until the client acknowledges the outcome."""
        self._waiting: dict[int, AnyReply] = {}
        """The replies that the shard has yet to give, by number."""
        self._takes_back: set[int] = set()
        """Waiting requests that the shard drops when the client gives them up or ends."""

    @property
    def kept(self) -> int:
        return len(self._outcomes)

    def receive(self, message: ClientMessage) -> object | AnyReply:
        for number in message.acknowledged:
            self._outcomes.pop(number, None)
        number = message.number
        outcome = self._outcomes.get(number)
        if outcome is None:
            if number < self._next:
                return None  # Without a request; or a late repetition: the client has the outcome.
            outcome = self._outcomes[number] = WaitingReply()
            self._early[number] = message.request
            self._handle_in_order()
        return outcome.result() if outcome.is_settled else outcome

    def end(self, outcome: object) -> None:
        """Handle nothing more; all waiting calls return this outcome."""
        waiting, self._waiting = self._waiting, {}
        for number in self._takes_back:
            waiting[number].give_up()
        for waits in self._outcomes.values():
            waits.succeed(outcome)

    def _handle_in_order(self) -> None:
        while self._next in self._early:
            number = self._next
            self._next += 1
            request = self._early.pop(number)
            reply = outcome_of(partial(self._handle, request))
            if isinstance(reply, WaitingReply):
                self._wait(number, request, reply)
            else:
                self._outcomes[number].succeed(reply)

    def _handle(self, request: Sendable) -> object | AnyReply:
        if isinstance(request, SessionControl):
            return None  # A ping.
        if isinstance(request, GiveUp):
            if request.number in self._takes_back:
                self._waiting[request.number].give_up()
            return None
        return self._shard.handle(request)

    def _wait(self, number: int, request: Sendable, reply: AnyReply) -> None:
        self._waiting[number] = reply
        # Adds, clocks and updates are promised: other shards have applied their part.
        if not isinstance(request, (AddRequest, ClockRequest, UpdateRequest)):
            self._takes_back.add(number)
        reply.when_settled(partial(self._settle, number, reply))

    def _settle(self, number: int, reply: AnyReply) -> None:
        if self._waiting.pop(number, None) is not None:
            self._takes_back.discard(number)
            self._outcomes[number].succeed(outcome_of(reply.result))
