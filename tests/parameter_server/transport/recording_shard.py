"""A shard that records its requests and lets some of them wait."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any, Literal

from streamiter.errors import OutOfTurn
from streamiter.parameter_server.calls import WaitingReply
from streamiter.testing.simulated_time import SimulatedTime

__all__ = ["Ask", "RecordingShard"]

# A waiting request is answered after at most this time, or by a later request of any client.
_LONGEST_WAIT_S = 40.0


@dataclass(frozen=True)
class Ask:
    """A request: the ``index``-th of a client, counted from 0."""

    client: str
    index: int
    kind: Literal["answered", "waits", "refused", "endless"]


class RecordingShard:
    """Answers with the position of the request among all requests, so that all replies differ."""

    def __init__(self, time: SimulatedTime, chances: random.Random) -> None:
        self._time = time
        self._chances = chances
        self.handled: dict[str, list[int]] = {}
        self.replies: dict[Ask, int] = {}
        self.parked: dict[Ask, WaitingReply[Any]] = {}
        self.given_up: list[Ask] = []

    def handle(self, request: Ask) -> Any:
        self.handled.setdefault(request.client, []).append(request.index)
        self.replies[request] = reply = len(self.replies)
        released = next((ask for ask in self.parked if ask.kind == "waits"), None)
        if released is not None and self._chances.random() < 0.3:
            self.release(released)
        if request.kind == "refused":
            raise OutOfTurn(f"{request.client}, {request.index}: refused as {reply}")
        if request.kind == "answered":
            return reply
        self.parked[request] = waiting = WaitingReply(lambda: self._given_up(request))
        if request.kind == "waits":  # The other kind waits until its call is cancelled.
            self._time.call_later(self._chances.random() * _LONGEST_WAIT_S, lambda: self.release(request))
        return waiting

    def release(self, request: Ask) -> None:
        """Answer a request if it still waits."""
        if (waiting := self.parked.pop(request, None)) is not None:
            waiting.succeed(self.replies[request])

    def _given_up(self, request: Ask) -> None:
        del self.parked[request]
        self.given_up.append(request)
