"""Where shards live."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, final

from streamiter.parameter_server.requests import TakeState
from streamiter.parameter_server.shard import Shard
from streamiter.parameter_server.statistics import ShardStatistics
from streamiter.parameter_server.transport.link import ShardLink

__all__ = ["Hosting", "InProcess"]


class Hosting(Protocol):
    """Keeps shards, and gives the ways to them."""

    @property
    def drawn_as(self) -> str:
        """Where they are, for drawings and errors."""

    def links(
        self,
        client: str,
        worker: int | None = None,
        on_back: Callable[[Mapping[str, int]], None] = lambda clocks: None,
    ) -> Sequence[ShardLink]:
        """A link to each shard, for a client of this name; what it sends is handled in order.

        ``on_back`` is told where the worker stands when the shards go back to a snapshot by themselves.
        """

    def release(self, worker: int) -> None:
        """The client of this worker has left."""

    def statistics(self) -> tuple[ShardStatistics, ...]:
        """Where the shards stand, or stood a moment ago."""

    async def take_states(self) -> list[Any]:
        """The states of all shards at one moment, with ``Deferred`` pieces."""

    async def close(self) -> None:
        """Let go of the shards. May be called more than once."""


@final
class InProcess:
    """Shards in this process: a shard is its own link, and nothing is copied."""

    def __init__(self, count: int) -> None:
        self._shards = [Shard(number) for number in range(count)]

    @property
    def drawn_as(self) -> str:
        return "in this process"

    def links(
        self,
        client: str,
        worker: int | None = None,
        on_back: Callable[[Mapping[str, int]], None] = lambda clocks: None,
    ) -> Sequence[ShardLink]:
        return self._shards

    def release(self, worker: int) -> None:
        pass

    def statistics(self) -> tuple[ShardStatistics, ...]:
        return tuple(shard.statistics() for shard in self._shards)

    async def take_states(self) -> list[Any]:
        return [shard.handle(TakeState()) for shard in self._shards]

    async def close(self) -> None:
        pass
