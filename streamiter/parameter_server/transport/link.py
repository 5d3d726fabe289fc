"""The way to a shard."""

from __future__ import annotations

from typing import Any, Protocol

from streamiter.parameter_server.waiting import Waiting

__all__ = ["ShardLink"]


class ShardLink(Protocol):
    """Takes requests of one client to one shard, which handles them in order, each once."""

    def send(self, request: Any) -> Any | Waiting[Any]:
        """The reply, or a Waiting for it. Raises what the shard refuses at once."""
