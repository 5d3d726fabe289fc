"""A server whose shards were started by another process."""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from contextlib import suppress
from types import TracebackType
from typing import Any, final

from streamiter.clock import Clock, SystemClock
from streamiter.errors import ParameterServerError, RolledBack, WorkerHasLeft
from streamiter.numbers import whole_number
from streamiter.parameter_server.client import MAX_CALLS, Client
from streamiter.parameter_server.directory import MatrixDirectory
from streamiter.parameter_server.matrix import Matrix
from streamiter.parameter_server.transport.ray.connections import Connections
from streamiter.parameter_server.transport.ray.protocol import Describe, RayAddress

__all__ = ["RemoteServer"]


@final
class RemoteServer:
    """Clients of workers in this process, by way of ``ParameterServer.connect(address)``.

    ``close`` has them leave; the server itself goes on.
    """

    def __init__(self, address: RayAddress, *, clock: Clock | None = None) -> None:
        self.name = address.name
        self._connections = Connections(address, clock or SystemClock())
        links = self._connections.open(f"directory {uuid.uuid4().hex}").links
        self._links = links
        self._directory = MatrixDirectory(links, look_up=self._look_up)
        self._clients: dict[int, Client] = {}

    async def create_matrix(self, name: str, **settings: Any) -> None:
        """Make a matrix; nothing happens if it is there with the same settings."""
        await self._directory.create(Matrix.of(name, settings))

    def client(
        self, worker: int, *, read_my_writes: bool = False, cache_bytes: int = 0, max_calls: int = MAX_CALLS
    ) -> Client:
        """Register a worker, as :meth:`ParameterServer.client` does; its first call waits for the shards."""
        worker = whole_number("RemoteServer.client(worker=)", worker, 0)
        if worker in self._clients:
            raise ParameterServerError(
                f"worker {worker}: expected one without a client in this process, given one that has one; use that, "
                "or let it leave first"
            )

        def go_back(clocks: Mapping[str, int]) -> None:
            client.go_back(clocks)

        client = Client(
            worker,
            self._connections.open(f"worker {worker}", worker, go_back).links,
            self._directory,
            read_my_writes=read_my_writes,
            cache_bytes=cache_bytes,
            max_calls=max_calls,
            on_left=self._client_left,
        )
        self._clients[worker] = client
        return client

    def _client_left(self, worker: int) -> None:
        self._clients.pop(worker, None)
        self._connections.close(worker)

    async def _look_up(self, name: str) -> Matrix | None:
        """A matrix that somebody else has made."""
        for link in self._links:
            matrix: Matrix | None = await link.send(Describe(name))
            if matrix is not None:
                return matrix
        return None

    async def close(self) -> None:
        """All workers of this process leave. May be called more than once."""
        try:
            for client in list(self._clients.values()):
                while not client.has_left:
                    # A newer client of the same number has replaced it; or the shards went back, and it is there again.
                    with suppress(WorkerHasLeft, RolledBack):
                        await client.leave("its process has ended")
        finally:
            await self._connections.close_all()

    async def __aenter__(self) -> RemoteServer:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()
