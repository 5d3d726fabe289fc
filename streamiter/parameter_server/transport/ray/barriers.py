"""Snapshots of a shard at clocks: barriers of one after the other, in the order of their numbers."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any, final

from streamiter.errors import WorkerHasLeft
from streamiter.parameter_server.requests import Leave, PassBarrier, TakeState
from streamiter.parameter_server.shard import Shard
from streamiter.parameter_server.transport.failures import Failure, error_of, outcome_of
from streamiter.parameter_server.waiting import Waiting

__all__ = ["NumberedBarriers", "settle"]

_Stalled = deque[tuple[Any, Waiting[Any]]]


@final
class NumberedBarriers:
    """A shard whose workers pass barriers 1, 2, 3, … each when it comes to them.

    A worker that comes to its next barrier while others have yet to pass the one before it (under ASP nothing else
    would keep it) is stalled until they have. A barrier that is complete is passed by; one that a worker skips, because
    it joined behind it, is passed with the next. ``take`` is called with the number of each, and the shard's state,
    when all have passed it.
    """

    def __init__(self, shard: Shard, take: Callable[[int, Any], None], completed: int = 0) -> None:
        self._shard = shard
        self._take = take
        self._completed = completed
        self._passed: set[int] = set()
        self._stalled: dict[int, _Stalled] = {}
        self._has_aligned = False

    def handle(self, request: Any) -> Any:
        """As the shard does."""
        if isinstance(request, Leave):
            self._forget(request)
        worker = getattr(request, "worker", None)
        if (queue := self._stalled.get(worker)) is not None:  # type: ignore[arg-type]
            return _appended(queue, request)
        if isinstance(request, PassBarrier):
            return self._pass(request)
        reply = self._shard.handle(request)
        if self._has_aligned:
            self._go_on()
        return reply

    def _pass(self, request: PassBarrier) -> Waiting[Any] | None:
        worker = request.worker
        while self._completed < request.checkpoint:
            if worker in self._passed:
                queue = self._stalled[worker] = deque()
                return _appended(queue, request)
            number = self._completed + 1
            if not self._passed:
                state: Waiting[Any] = self._shard.handle(TakeState(number))
                state.when_settled(partial(self._aligned, number, state))
            self._passed.add(worker)
            self._shard.handle(PassBarrier(worker, number))
            if self._has_aligned:
                self._go_on()
        return None

    def _aligned(self, number: int, state: Waiting[Any]) -> None:
        self._completed = number
        self._passed.clear()
        self._has_aligned = True
        self._take(number, state.result())

    def _go_on(self) -> None:
        """With what is stalled. Not before the shard has gone on with what it held, which came earlier."""
        self._has_aligned = False
        stalled, self._stalled = self._stalled, {}
        for queue in stalled.values():
            for request, waiting in queue:
                if not waiting.is_settled:
                    settle(waiting, outcome_of(partial(self.handle, request)))

    def _forget(self, request: Leave) -> None:
        self._passed.discard(request.worker)
        for _, waiting in self._stalled.pop(request.worker, ()):
            waiting.fail(
                WorkerHasLeft(
                    f"worker {request.worker}: expected one that takes part, given one that does not: "
                    f"{request.reason}; make a new client"
                )
            )


def _appended(queue: _Stalled, request: Any) -> Waiting[Any]:
    waiting: Waiting[Any] = Waiting()
    queue.append((request, waiting))
    return waiting


def settle(waiting: Waiting[Any], outcome: Any) -> None:
    """Settle a wait with an outcome, which may itself have to wait."""
    if isinstance(outcome, Waiting):
        waiting.on_given_up = outcome.give_up
        outcome.when_settled(lambda: settle(waiting, outcome_of(outcome.result)))
    elif isinstance(outcome, Failure):
        waiting.fail(error_of(outcome))
    else:
        waiting.succeed(outcome)
