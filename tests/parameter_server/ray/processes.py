"""Ends of processes."""

from __future__ import annotations

import os
import signal

from streamiter.parameter_server import Client, psf
from streamiter.parameter_server.server import ParameterServer

__all__ = ["asking_for_ever", "kill"]


async def kill(server: ParameterServer, shard: int) -> None:
    """End the process of a shard, by its own id."""
    process_id = await server.address().hosts[shard].__ray_call__.remote(lambda host: os.getpid())
    os.kill(process_id, signal.SIGKILL)


async def asking_for_ever(client: Client) -> None:
    """Until the client is told of the loss of a shard."""
    while True:
        await client.aggregate(psf.Sum("w", row=0))
