"""All connections of one process to the shards of one server."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import Final, final

from streamiter.clock import Clock
from streamiter.parameter_server.transport.ray.connection import Connection
from streamiter.parameter_server.transport.ray.protocol import RayAddress

__all__ = ["Connections", "ended"]


# Whoever answers at all does so at once. What is still under way when Ray ends a process it reports as a failure.
_END_S: Final = 1.0


async def ended(tasks: set[asyncio.Task[None]]) -> None:
    """Return when these tasks have ended by themselves, or have been cancelled because they have not."""
    if tasks:
        _, late = await asyncio.wait(tasks, timeout=_END_S)
        for task in late:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


@final
class Connections:
    """Opens and closes them. A worker's newest connection has the highest incarnation, across processes, too."""

    def __init__(
        self, address: RayAddress, clock: Clock, *, on_used: Callable[[], None] = lambda: None
    ) -> None:
        self._address = address
        self._clock = clock
        self._on_used = on_used
        self._open: dict[int, Connection] = {}
        self._others: list[Connection] = []
        self._incarnation = 0

    def open(
        self,
        client: str,
        worker: int | None = None,
        on_back: Callable[[Mapping[str, int]], None] = lambda clocks: None,
    ) -> Connection:
        """A connection of a worker, or of what is none (None)."""
        # Milliseconds: workers in other processes take the place of one that died later than that.
        self._incarnation = max(self._incarnation + 1, self._clock.now_ms())
        connection = Connection(
            self._address,
            self._clock,
            worker=worker,
            name=client,
            incarnation=self._incarnation,
            on_back=on_back,
            on_used=self._on_used,
        )
        if worker is None:
            self._others.append(connection)
        else:
            self._open[worker] = connection
        return connection

    def close(self, worker: int) -> None:
        """The client of this worker has left."""
        if (connection := self._open.pop(worker, None)) is not None:
            connection.close()

    def of_workers(self) -> dict[int, Connection]:
        """Those of workers that have not left."""
        return dict(self._open)

    def joined(self) -> tuple[int, ...]:
        """The workers of this process that the shards have answered."""
        return tuple(worker for worker, connection in self._open.items() if connection.has_joined)

    async def close_all(self) -> None:
        """Nothing is sent any more."""
        connections = (*self._open.values(), *self._others)
        self._open.clear()
        self._others.clear()
        await ended({task for connection in connections for task in connection.close()})
