"""Snapshots of a shard at clocks: barriers of one after the other, in the order of their numbers."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, final

from streamiter.parameter_server.requests import Leave, PassBarrier, TakeState
from streamiter.parameter_server.shard import Shard
from streamiter.parameter_server.transport.failures import Failure, error_of, outcome_of
from streamiter.parameter_server.waiting import Waiting

__all__ = ["NumberedBarriers", "settle"]


@final
class NumberedBarriers:
    """A shard whose workers pass barriers 1, 2, 3, … each when it comes to them.

    ``take`` is called with the number of each, and the shard's state, when all have passed it. What a worker sends
    behind a barrier that others have yet to pass, its next barriers too, the shard's ``Holding`` holds. A barrier that
    is complete is passed by; one that a worker skips, because it joined behind it, is passed with the next.
    """

    def __init__(self, shard: Shard, take: Callable[[int, Any], None], completed: int = 0) -> None:
        self._shard = shard
        self._take = take
        self._completed = completed
        self._begun = completed
        """The last barrier that any worker has come to."""
        self._passed: dict[int, int] = {}
        """The last barrier of each worker."""

    def handle(self, request: Any) -> Any:
        """As the shard does."""
        if isinstance(request, PassBarrier):
            return self._pass(request)
        if isinstance(request, Leave):
            self._passed.pop(request.worker, None)
        return self._shard.handle(request)

    def _pass(self, request: PassBarrier) -> None:
        worker = request.worker
        first = max(self._completed, self._passed.get(worker, 0)) + 1
        for number in range(first, request.checkpoint + 1):
            if number > self._begun:
                self._begun = number
                state: Waiting[Any] = self._shard.handle(TakeState(number))
                state.when_settled(partial(self._aligned, number, state))
            self._passed[worker] = number
            self._shard.handle(PassBarrier(worker, number))

    def _aligned(self, number: int, state: Waiting[Any]) -> None:
        self._completed = number
        self._take(number, state.result())


def settle(waiting: Waiting[Any], outcome: Any) -> None:
    """Settle a wait with an outcome, which may itself have to wait."""
    if isinstance(outcome, Waiting):
        waiting.on_given_up = outcome.give_up
        outcome.when_settled(lambda: settle(waiting, outcome_of(outcome.result)))
    elif isinstance(outcome, Failure):
        waiting.fail(error_of(outcome))
    else:
        waiting.succeed(outcome)
