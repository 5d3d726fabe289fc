"""Kills processes of shards, and waits until a client receives the error."""

from __future__ import annotations

import os
import signal

from streamiter.parameter_server import Client, psf
from streamiter.parameter_server.server import ParameterServer

__all__ = ["call_until_error", "kill"]


async def kill(server: ParameterServer, shard: int) -> None:
    """Kill the process of a shard by its id."""
    process_id = await server.address().hosts[shard].__ray_call__.remote(lambda host: os.getpid())
    os.kill(process_id, signal.SIGKILL)


async def call_until_error(client: Client) -> None:
    """Call the server until the client receives the loss of a shard as an error."""
    while True:
        await client.aggregate(psf.Sum("w", row=0))
