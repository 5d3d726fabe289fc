"""A server that starts Ray itself, in a process without Ray."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile

import pytest

SCRIPT = """
import asyncio, json, signal
from streamiter.errors import ShardLost
from streamiter.parameter_server.server import ParameterServer
from streamiter.testing import VirtualClock

async def used(server):
    await server.create_matrix("w", rows=1, columns=3)
    client = server.client(worker=0)
    await client.add("w", row=0, values=[1.0, 2.0, 3.0])
    return client, (await client.get("w", row=0)).tolist()

async def main():
    before = signal.getsignal(signal.SIGTERM)
    first = ParameterServer(on="ray")  # starts Ray, and ends it
    clock = VirtualClock()
    second = ParameterServer(on="ray", heartbeat_timeout_s=1.0, clock=clock)
    _, values = await used(first)
    client, _ = await used(second)
    import ray
    address = ray.util.get_node_ip_address()
    await first.close()
    ended = not ray.is_initialized()
    cause = ""
    while not cause:
        try:
            await client.get("w", row=0)
        except ShardLost as error:
            cause = str(error)
    await clock.advance(10.0)  # sends heartbeats, and checks those of other workers
    await second.close()
    print(json.dumps([values, address, ended, cause, ray.is_initialized(), signal.getsignal(signal.SIGTERM) is before]))

asyncio.run(main())
"""


@pytest.mark.usefixtures("ray_cluster")
def test_ray_ends_with_the_server_that_started_it_and_is_not_started_again() -> None:
    """Processes of Ray outlived their program, a heartbeat restarted Ray after the end, and SIGTERM had no effect.

    Shards accepted connections from other machines.
    """
    folder = tempfile.mkdtemp(prefix="ray")
    try:
        done = subprocess.run(
            [sys.executable, "-W", "error", "-c", SCRIPT],
            env=os.environ | {"RAY_TMPDIR": folder},
            capture_output=True,
            text=True,
            check=False,
            timeout=300,
        )
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    assert done.returncode == 0, done.stderr
    values, address, ended, cause, is_there_again, is_sigterm_as_before = json.loads(done.stdout.splitlines()[-1])
    assert values == [1.0, 2.0, 3.0]
    assert address == "127.0.0.1"
    assert ended
    assert "Ray has been ended" in cause
    assert not is_there_again
    assert is_sigterm_as_before
