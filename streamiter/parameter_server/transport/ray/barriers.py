"""Fences: the states of all shards between the same two calls of each worker."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from functools import partial
from typing import Any, final

from streamiter.parameter_server.calls import WaitingReply
from streamiter.parameter_server.requests import LeaveRequest, TakeState
from streamiter.parameter_server.shard import Shard
from streamiter.parameter_server.transport.sessions import Failure, RequestHandler, error_of, outcome_of

__all__ = [
    "Fence",
    "Fences",
    "PassFences",
    "TakeBetween",
]


def settle(waiting: WaitingReply[Any], outcome: Any) -> None:
    """Settle a wait with an outcome, which may itself have to wait."""
    if isinstance(outcome, WaitingReply):
        waiting.on_given_up = outcome.give_up
        outcome.when_settled(lambda: settle(waiting, outcome_of(outcome.result)))
    elif isinstance(outcome, Failure):
        waiting.fail(error_of(outcome))
    else:
        waiting.succeed(outcome)


@dataclass(slots=True)
class Fence:
    """The worker sends this to all shards between two of its calls. Reply: None."""

    worker: int
    number: int


@dataclass(slots=True)
class TakeBetween:
    """Reply: the state when these workers have come to their fences, before anything behind a fence is handled.

    One at a time: one with a higher ``number`` ends those before it.
    """

    number: int
    workers: tuple[int, ...]


@dataclass(slots=True)
class PassFences:
    """Nothing is taken any more at fences up to this ``number``, whether they have come or are to come. Reply: None."""

    number: int


@dataclass(slots=True)
class _StalledFence:
    """What a worker has sent behind a fence."""

    fence: int
    requests: deque[tuple[Any, WaitingReply[Any]]] = field(default_factory=deque)


@final
class Fences:
    """Stalls what comes behind a fence until the state was taken. Nobody's fence waits for anything but its message.

    So it is a matter of a message's way, and a call to several shards is either in their states or not.

    The state of all shards between the same two calls of each worker.
    """

    def __init__(self, shard: Shard, handler: RequestHandler) -> None:
        self._shard = shard
        self._handler = handler
        self._over = 0
        """Fences up to this number are passed by."""
        self._taking: TakeBetween | None = None
        self._state: WaitingReply[Any] = WaitingReply()
        self._stalled: dict[int, _StalledFence] = {}
        """By worker."""

    def handle(self, request: Any) -> Any:
        """As the shard does."""
        if isinstance(request, TakeBetween):
            return self._take(request)
        if isinstance(request, PassFences):
            self._end(request.number)
            return None
        stalled = self._stalled.get(getattr(request, "worker", None))  # type: ignore[arg-type]
        if stalled is not None:
            waiting: WaitingReply[Any] = WaitingReply()
            stalled.requests.append((request, waiting))
            return waiting
        if isinstance(request, Fence):
            if request.number > self._over:
                self._stalled[request.worker] = _StalledFence(request.number)
                self._check()
            return None
        reply = self._handler.handle(request)
        if isinstance(request, LeaveRequest):
            self._check()
        return reply

    def _take(self, request: TakeBetween) -> WaitingReply[Any]:
        self._end(request.number - 1)
        self._taking = request
        self._state = WaitingReply(partial(self._end, request.number))
        state = self._state
        self._check()
        return state

    def _check(self) -> None:
        taking = self._taking
        # Who has left, or has yet to join, has nothing behind a fence.
        if taking is not None and all(
            worker in self._stalled or worker not in self._shard.workers for worker in taking.workers
        ):
            self._state.succeed(self._handler.handle(TakeState()))
            self._end(taking.number)

    def _end(self, number: int) -> None:
        """Go on with all that fences up to this number have stalled."""
        if number <= self._over:
            return
        self._over = number
        self._taking = None
        # A fence may come before what it is for, which ends those before both: it stays.
        over = [worker for worker, stalled in self._stalled.items() if stalled.fence <= number]
        for requests in [self._stalled.pop(worker).requests for worker in over]:
            for request, waiting in requests:
                if not waiting.is_settled:
                    settle(waiting, outcome_of(partial(self.handle, request)))
