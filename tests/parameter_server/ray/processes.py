"""Ends of processes."""

from __future__ import annotations

import os
import signal

from streamiter.parameter_server.server import ParameterServer

__all__ = ["kill"]


async def kill(server: ParameterServer, shard: int) -> None:
    """End the process of a shard, by its own id."""
    process_id = await server.address().hosts[shard].__ray_call__.remote(lambda host: os.getpid())
    os.kill(process_id, signal.SIGKILL)
