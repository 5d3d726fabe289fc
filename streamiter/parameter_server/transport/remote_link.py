"""The way to a shard in another process."""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Mapping
from typing import Any, Final, Protocol, final

from streamiter.clock import Clock, TimerHandle
from streamiter.errors import ParameterServerError, RolledBack, ServerReset, ShardLost
from streamiter.parameter_server.calls import WaitingReply
from streamiter.parameter_server.requests import AggregateRequest, GetRequest, NextChanges
from streamiter.parameter_server.transport.sessions import (
    WINDOW,
    ClientMessage,
    ClientSession,
    Failure,
    LinkTiming,
    RequestState,
    ServerMessage,
    SessionId,
    error_of,
    fill,
    without_outputs,
)

__all__ = ["Carrier", "RemoteLink"]

_DEFAULT_TIMING: Final = LinkTiming()


class Carrier(Protocol):
    """Takes messages to the shard. What comes back it gives to ``RemoteLink.receive``, in the same thread.

    It may drop, delay, reorder and repeat messages both ways. If it learns that the shard is gone it says so:
    ``RemoteLink.lost`` or ``replaced``.
    """

    def send(self, message: ClientMessage) -> None:
        """Send it, without waiting. Its arrays may change once this returns. Raises if the shard is gone for good."""


class _SentCall:
    __slots__ = ("number", "outputs", "request", "waiting")

    def __init__(self, request: Any) -> None:
        self.request, self.outputs = without_outputs(request)
        self.waiting: WaitingReply[Any] = WaitingReply()
        self.number = 0
        """0: not sent yet."""

    @property
    def only_reads(self) -> bool:
        """Whether the shard is the same without it. Only before it is sent."""
        return isinstance(self.request, (GetRequest, AggregateRequest))


@final
class RemoteLink:
    """Sends the requests of one client to one shard, over a carrier that may lose messages.

    The shard handles them in order and once. No more than ``window`` are unanswered at a time; those above it wait
    here, as many as the client has calls. Arrays of a request are the link's until its reply: they may be sent again. A
    call that is given up is carried out all the same, unless it only reads.

    ``shard`` names it in errors. All of it runs in one thread, that of the event loop where ``clock`` calls back.
    """

    def __init__(
        self,
        shard: str,
        session: SessionId,
        carrier: Carrier,
        clock: Clock,
        *,
        window: int = WINDOW,
        timing: LinkTiming = _DEFAULT_TIMING,
    ) -> None:
        self._shard = shard
        self._carrier = carrier
        self._clock = clock
        self._window = window
        self._timing = timing
        self._session = ClientSession(session, window=window, timing=timing)
        self._calls: dict[int, _SentCall] = {}
        self._queue: deque[_SentCall] = deque()
        self._subscriptions = 0
        """Calls for changes, which wait until there are some."""
        self._refusal: ParameterServerError | None = None
        """Why nothing can be sent now."""
        self._is_closed = False
        self._timer: TimerHandle | None = None
        self._timer_s = 0.0

    @property
    def unanswered(self) -> int:
        """Requests on their way, or waiting on the shard."""
        return len(self._calls)

    @property
    def queued(self) -> int:
        """Requests that have not been sent yet."""
        return len(self._queue)

    def send(self, request: Any) -> WaitingReply[Any]:
        """The reply to come. Whatever goes wrong is raised by it, never here."""
        call = _SentCall(request)
        if self._refusal is not None:
            _fail([call], self._refusal)
            return call.waiting
        if isinstance(request, NextChanges) and not self._may_follow(call):
            return call.waiting
        call.waiting.on_given_up = lambda: self._give_up(call)
        self._queue.append(call)
        self._send_queued()
        return call.waiting

    # -- the carrier's side ----------------------------------------------------------------------------

    def receive(self, message: ServerMessage | None) -> None:
        """A message has come from the shard, late ones and doubles included; None is nothing."""
        if message is None or message.session != self._session.id or self._refusal is not None:
            return
        now_s, number, outcome = self._clock.monotonic_s(), message.number, message.outcome
        if isinstance(outcome, RequestState):
            again = self._session.stands(number, outcome, now_s)
            if again is not None:
                self._carry(again)
        elif self._session.answered(number, now_s):
            self._settle(self._calls.pop(number), outcome)
            self._send_queued()
        self._set_timer()

    def lost(self, cause: BaseException) -> None:
        """The shard is gone: what is unanswered fails with ShardLost, and so does what is sent until ``replaced``."""
        error = ShardLost(
            f"{self._shard}: expected its replies, given {type(cause).__name__}: {cause}; what was sent may have been "
            "applied"
        )
        error.__cause__ = cause
        self._refuse(error)

    def replaced(self, generation: int, clocks: Mapping[str, int], carrier: Carrier | None = None) -> None:
        """All shards are back at a snapshot: what is unanswered fails with RolledBack; what is sent from now on is new.

        ``clocks`` are the worker's in the snapshot, by matrix. ``generation`` is that of the shard's ``ShardSessions``.
        """
        error = RolledBack(
            f"{self._shard}: expected a reply, given a shard that has gone back to a snapshot; go on from its clocks: "
            f"{', '.join(f'{name} {clock}' for name, clock in clocks.items()) or 'none'}",
            clocks,
        )
        if self._is_closed:
            return
        calls = self._take_calls()
        self._carrier = carrier or self._carrier
        self._session = ClientSession(
            self._session.id._replace(generation=generation), window=self._window, timing=self._timing
        )
        self._refusal = None
        _fail(calls, error)

    def close(self) -> None:
        """The client has ended: tell the shard, fail what is unanswered."""
        if self._refusal is None:
            self._carry(self._session.close())
        self._is_closed = True
        self._refuse(
            ServerReset(
                f"{self._shard}: expected a client that is in use, given one that was closed; make a new one"
            )
        )

    # -- calls -----------------------------------------------------------------------------------------

    def _may_follow(self, call: _SentCall) -> bool:
        """Subscriptions take half of the window at most: in all of it, they would keep other calls out for ever."""
        most = self._window // 2
        if self._subscriptions >= most:
            error = ParameterServerError(
                f"{self._shard}: expected at most {most} subscriptions of a client that wait for changes, given one "
                "more; follow several rows with one, or close some"
            )
            _fail([call], error)
            return False

        def settled() -> None:
            self._subscriptions -= 1

        self._subscriptions += 1
        call.waiting.when_settled(settled)
        return True

    def _send_queued(self) -> None:
        queue, session = self._queue, self._session
        while queue and session.has_room:
            call = queue.popleft()
            message = session.send(call.request, self._clock.monotonic_s())
            call.number = message.number
            self._calls[call.number] = call
            call.request = None  # The session has it.
            self._carry(message)
            if session is not self._session or self._refusal is not None:
                return
        self._set_timer()

    def _settle(self, call: _SentCall, outcome: Any) -> None:
        if isinstance(outcome, Failure):
            call.waiting.fail(error_of(outcome))
        elif not call.waiting.is_settled:  # Otherwise the arrays to be filled are the caller's again.
            call.waiting.succeed(fill(outcome, call.outputs))

    def _give_up(self, call: _SentCall) -> None:
        """Whoever sent it goes on, and may change the arrays of what is still to be sent, or sent again."""
        if self._calls.get(call.number) is call:
            if (message := self._session.give_up(call.number)) is not None:
                self._carry(message)
        elif call in self._queue:
            if call.only_reads:
                self._queue.remove(call)
            else:
                call.request = copy.deepcopy(call.request)

    # -- messages --------------------------------------------------------------------------------------

    def _carry(self, message: ClientMessage) -> None:
        try:
            self._carrier.send(message)
        except Exception as error:
            self.lost(error)

    def _set_timer(self) -> None:
        due_s = self._session.next_due_s if self._refusal is None else None
        if due_s is None or (self._timer is not None and self._timer_s <= due_s):
            return
        self._stop_timer()
        self._timer_s = due_s
        self._timer = self._clock.call_later(due_s - self._clock.monotonic_s(), self._on_timer)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _on_timer(self) -> None:
        self._timer = None
        now_s, session = self._clock.monotonic_s(), self._session
        if session.is_lost(now_s):
            self.lost(TimeoutError(f"nothing was heard of it for {self._timing.lost_after_s:g} s"))
            return
        for message in session.due(now_s):
            if session is self._session and self._refusal is None:
                self._carry(message)
        self._set_timer()

    def _refuse(self, error: ParameterServerError) -> None:
        if not isinstance(self._refusal, ServerReset):
            self._refusal = error
        _fail(self._take_calls(), error)

    def _take_calls(self) -> list[_SentCall]:
        calls = [*self._calls.values(), *self._queue]
        self._calls.clear()
        self._queue.clear()
        self._stop_timer()
        return calls


def _fail(calls: list[_SentCall], error: ParameterServerError) -> None:
    for call in calls:
        one = copy.copy(error)  # Each is raised somewhere else.
        one.__cause__ = error.__cause__
        call.waiting.fail(one)
