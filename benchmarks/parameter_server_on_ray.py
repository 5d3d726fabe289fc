"""Push a row to a shard in another process and pull it back, compared with an array in this process."""

from __future__ import annotations

import asyncio
import importlib.util
import sys
from collections.abc import Iterator
from typing import Any, Final

import numpy as np
import uvloop

from benchmarks.measuring import Contender, Figure, Stopwatch, Target, Trial, alternate
from benchmarks.parameter_server import agree, digest
from benchmarks.session import Session
from streamiter.parameter_server import Client, ParameterServer

__all__ = ["parameter_server_on_ray"]

PUSH: Final = "s to push"
PULL: Final = "s to pull"
BELOW_S: Final = 0.25
"""The published times of FlexPS and ps-lite, with one worker and one server: push 0.25–0.28 s, pull 0.83–1.1 s."""
MATRIX: Final = "w"


def parameter_server_on_ray(session: Session) -> Iterator[Figure]:
    """One worker adds and gets a row of 10 M float32 on one shard in another process of this machine."""
    if importlib.util.find_spec("ray") is None:
        hint = "ray is not installed, so this benchmark is left out; to run it: pip install '.[ray]'"
        print(hint, file=sys.stderr, flush=True)
        return
    columns = session.size(10_000_000, 100_000)
    values = np.random.default_rng(1).random(columns, np.float32)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        server = ParameterServer(on="ray")
        try:
            client = runner.run(_begin(server, columns))
            series = alternate(
                {"numpy": _numpy(values), "one shard on Ray": _served(runner, client, values)},
                repeat=session.repeat,
                agree=agree,
            )
        finally:
            runner.run(server.close())
    for unit in (PUSH, PULL):
        yield series.figure("numpy", unit)
        yield series.figure("one shard on Ray", unit, compared_with="numpy", target=Target("figure", below=BELOW_S))


async def _begin(server: ParameterServer, columns: int) -> Client:
    """Create the matrix, and return a client that has used it once."""
    await server.create_matrix(MATRIX, rows=1, columns=columns, dtype="float32")
    client = server.client(worker=0)
    await client.add(MATRIX, row=0, values=np.zeros(columns, np.float32))
    await client.get(MATRIX, row=0)
    return client


def _served(runner: asyncio.Runner, client: Client, values: Any) -> Contender:
    async def run() -> Trial:
        with Stopwatch() as push:
            await client.add(MATRIX, row=0, values=values)
        with Stopwatch() as pull:
            row = await client.get(MATRIX, row=0)
        return Trial({PUSH: push.seconds, PULL: pull.seconds}, digest(row))

    return lambda: runner.run(run())


def _numpy(values: Any) -> Contender:
    total = np.zeros_like(values)

    def run() -> Trial:
        with Stopwatch() as push:
            np.add(total, values, out=total)
        with Stopwatch() as pull:
            row = total.copy()
        return Trial({PUSH: push.seconds, PULL: pull.seconds}, digest(row))

    return run
