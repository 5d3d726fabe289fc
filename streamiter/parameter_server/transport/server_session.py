"""The shard's memory of one client's requests."""

from __future__ import annotations

from typing import Any, final

from streamiter.parameter_server.transport.messages import Received, Standing

__all__ = ["ServerSession"]


@final
class ServerSession:
    """Gives each numbered request out once and in order, and keeps its outcome until the client has it. Pure data.

    What it keeps is bounded: never more than ``window`` requests and outcomes, of which ``reorder`` came before their
    turn. What does not fit is not taken; the client sends it again.
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
        return Standing.RECEIVED if number in self._early or number in self._under_way else Standing.UNKNOWN

    def is_over(self, number: int) -> bool:
        """Whether the client has had its reply: a late message about it needs no answer."""
        return number < self._next and number not in self._under_way and number not in self._outcomes
