"""What a client and a shard send each other where messages may be dropped, delayed, reordered and repeated."""

from __future__ import annotations

import enum
from typing import Any, NamedTuple

__all__ = ["ClientMessage", "Control", "Received", "ServerMessage", "SessionId", "Standing"]


class SessionId(NamedTuple):
    """One numbering of requests, of one client to one shard.

    ``incarnation`` rises with each new client of the same name: the shard refuses the requests of older ones.
    ``generation`` rises with each rollback of the shards: messages of another one are neither applied nor answered.
    """

    client: str
    incarnation: int = 0
    generation: int = 0


class Received(NamedTuple):
    """Which replies have come: all to requests below ``below``, but those of ``missing`` (no more than the window)."""

    below: int
    missing: tuple[int, ...]


class Control(enum.Enum):
    """What a client sends in place of a request."""

    POLL = "poll"
    """What has become of this request? The answer is its reply, or its ``Standing``."""
    CANCEL = "cancel"
    """Nobody waits for the reply to this request any more. Answered like POLL."""
    ACKNOWLEDGE = "acknowledge"
    """No request: only what the message says of replies. Not answered."""
    CLOSE = "close"
    """The client has ended. Not answered."""


class Standing(enum.Enum):
    """What a shard answers about a request whose reply it cannot give now."""

    RECEIVED = "received"
    """It is here, and waits for its turn or for a clock: do not send it again."""
    UNKNOWN = "unknown"
    """It has not come, or there was no room for it: send it again."""


class ClientMessage(NamedTuple):
    """From a client. Requests are numbered 1, 2, …; 0: about none."""

    session: SessionId
    number: int
    received: Received
    request: Any
    """A request, or a ``Control``."""


class ServerMessage(NamedTuple):
    """From a shard, about one request."""

    session: SessionId
    number: int
    outcome: Any
    """The reply, or a ``Failure``, or a ``Standing``."""
