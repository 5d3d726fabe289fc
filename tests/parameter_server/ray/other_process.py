"""A worker in a process of its own."""

from __future__ import annotations

import os
from typing import Any

import numpy as np

from streamiter.errors import RolledBack
from streamiter.parameter_server.server import ParameterServer

__all__ = ["RemoteChannels", "gradient", "train"]


def gradient(worker: int, iteration: int, columns: int) -> Any:
    """Return the values that a worker adds in an iteration: whole numbers, so that sums are exact in any order."""
    return np.random.default_rng((worker, iteration)).integers(-1000, 1000, columns).astype(float)


async def train(client: Any, iterations: int, columns: int, before: Any = None) -> list[int]:
    """Read, add and clock; after a loss, resume from the snapshot. Return the clocks of all rollbacks.

    At the end it waits for the others: while they train, a loss can still roll it back.
    """
    went_back: list[int] = []
    iteration = 0
    while iteration <= iterations:
        try:
            if iteration == iterations:
                await client.barrier()
                break
            if before is not None:
                await before(iteration)
            await client.get("w", row=0)
            await client.add("w", row=0, values=gradient(client.worker, iteration, columns))
            await client.clock("w")
        except RolledBack as error:
            iteration = error.clocks["w"]
            went_back.append(iteration)
        else:
            iteration += 1
    return went_back


class RemoteChannels:
    """An actor of Ray whose methods are called from a test and run in the actor's process."""

    def __init__(self, address: Any) -> None:
        self._server = ParameterServer.connect(address)
        self._clients: dict[int, Any] = {}

    async def process_id(self) -> int:
        """Return the id of the process, so that a test can kill it."""
        return os.getpid()

    async def join(self, worker: int) -> None:
        """Register a worker."""
        client = self._clients[worker] = self._server.client(worker=worker)
        await client.join()

    async def call(self, worker: int, method: str, *args: Any, **options: Any) -> Any:
        """Make one call of a client."""
        return await getattr(self._clients[worker], method)(*args, **options)

    async def train(self, worker: int, iterations: int, columns: int) -> list[int]:
        """Run all iterations of a worker."""
        return await train(self._clients[worker], iterations, columns)
