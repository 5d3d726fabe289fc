"""The client's memory of what it has asked one shard."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any, Final, final

from streamiter.parameter_server.transport.messages import (
    ClientMessage,
    Control,
    Received,
    SessionId,
    Standing,
)

__all__ = ["ClientSession", "LinkTiming"]


@dataclass(frozen=True, slots=True)
class LinkTiming:
    """When a client asks again, in seconds.

    An unanswered request is asked for after ``resend_s``, then after twice as long, and so on up to ``resend_most_s``.
    Replies are acknowledged with the next message, or after ``acknowledge_s`` if there is none. A shard that has said
    nothing for ``lost_after_s`` is lost.
    """

    resend_s: float = 1.0
    """Longer than it takes to push or pull 10 M floats (0.25 s), or each of them would be asked for."""
    resend_most_s: float = 10.0
    acknowledge_s: float = 0.05
    """Replies may be large, and the shard keeps them until then."""
    lost_after_s: float = 120.0
    """Above what the longest function on a shard takes: it answers nothing meanwhile."""


_DEFAULT_TIMING: Final = LinkTiming()


@dataclass(slots=True)
class _Unanswered:
    request: Any
    """None once the shard is known to have it."""
    due_s: float
    pause_s: float
    is_received: bool = False
    is_asked_for: bool = False
    """The shard has yet to say how it stands."""
    is_given_up: bool = False


@final
class ClientSession:
    """Numbers requests, and says what to send again when. Pure data; times are given, in seconds of any one clock."""

    def __init__(self, identity: SessionId, *, window: int, timing: LinkTiming = _DEFAULT_TIMING) -> None:
        self.id = identity
        self._window = window
        self._timing = timing
        self._next = 1
        self._unanswered: dict[int, _Unanswered] = {}
        self._acknowledge_s: float | None = None
        """When replies that have come are to be acknowledged at the latest."""
        self._heard_s = 0.0

    @property
    def unanswered(self) -> int:
        """Requests without a reply: no more than the window."""
        return len(self._unanswered)

    @property
    def has_room(self) -> bool:
        """Whether one more request may be sent."""
        return len(self._unanswered) < self._window

    # -- what to send ----------------------------------------------------------------------------------

    def send(self, request: Any, now_s: float) -> ClientMessage:
        """The message for a new request."""
        assert self.has_room
        if not self._unanswered:
            self._heard_s = now_s
        number = self._next
        self._next += 1
        pause_s = self._timing.resend_s
        self._unanswered[number] = _Unanswered(request, now_s + pause_s, pause_s)
        return self._message(number, request)

    def give_up(self, number: int) -> ClientMessage | None:
        """Nobody waits for this reply any more; the shard is told, now and as often as it takes."""
        if (entry := self._unanswered.get(number)) is None:
            return None
        entry.is_given_up = entry.is_asked_for = True
        # It may be sent again, and its arrays are the caller's from now on.
        entry.request = copy.deepcopy(entry.request)
        return self._message(number, Control.CANCEL)

    def due(self, now_s: float) -> list[ClientMessage]:
        """What is to be sent at this time though nobody asks for it: no request, only questions of how they stand."""
        messages = []
        for number, entry in self._unanswered.items():
            if entry.due_s <= now_s:
                entry.pause_s = min(2 * entry.pause_s, self._timing.resend_most_s)
                entry.due_s = now_s + entry.pause_s
                entry.is_asked_for = True
                messages.append(self._message(number, Control.CANCEL if entry.is_given_up else Control.POLL))
        if self._acknowledge_s is not None and self._acknowledge_s <= now_s:
            messages.append(self._message(0, Control.ACKNOWLEDGE))
        return messages

    def close(self) -> ClientMessage:
        """The last message."""
        return self._message(0, Control.CLOSE)

    @property
    def next_due_s(self) -> float | None:
        """When ``due`` and ``is_lost`` are to be asked next; None: when something else has happened."""
        times = [entry.due_s for entry in self._unanswered.values()]
        if times:
            times.append(self._heard_s + self._timing.lost_after_s)
        if self._acknowledge_s is not None:
            times.append(self._acknowledge_s)
        return min(times, default=None)

    def is_lost(self, now_s: float) -> bool:
        """Whether the shard owes replies and has said nothing for too long."""
        return bool(self._unanswered) and now_s >= self._heard_s + self._timing.lost_after_s

    def _message(self, number: int, request: Any) -> ClientMessage:
        self._acknowledge_s = None
        return ClientMessage(self.id, number, Received(self._next, tuple(self._unanswered)), request)

    # -- what has come ---------------------------------------------------------------------------------

    def answered(self, number: int, now_s: float) -> bool:
        """A reply has come; whether it is the first to this request."""
        self._heard_s = now_s
        if self._acknowledge_s is None:
            self._acknowledge_s = now_s + self._timing.acknowledge_s
        return self._unanswered.pop(number, None) is not None

    def stands(self, number: int, standing: Standing, now_s: float) -> ClientMessage | None:
        """The shard has said how a request stands; gives what to send because of it."""
        self._heard_s = now_s
        entry = self._unanswered.get(number)
        if entry is None:
            return None
        if standing is Standing.RECEIVED:
            entry.is_received = True
            entry.request = None
        if entry.is_received or not entry.is_asked_for:
            return None  # Nothing to do, or an answer that came twice.
        entry.is_asked_for = False
        entry.pause_s = self._timing.resend_s
        entry.due_s = now_s + entry.pause_s
        return self._message(number, entry.request)
