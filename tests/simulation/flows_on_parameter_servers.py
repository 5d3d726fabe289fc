"""Operators of these flows use a parameter server: each add of a worker counts once, under all faults."""

from __future__ import annotations

from typing import Any

import numpy as np

from streamiter import Flow, Operator
from streamiter.operators.operator import Context
from streamiter.operators.output import Output
from streamiter.parameter_server import ASP, BSP, SSP, ParameterServer
from streamiter.parameter_server.consistency import Consistency
from streamiter.testing import Simulation

WORKERS = 3
COLUMNS = 7
RECORDS_OF_A_WORKER = 15


class _AddsToOwnRow(Operator):
    """Adds to its own row, with one clock for each record, and emits the row at the end."""

    def __init__(self, consistency: Consistency) -> None:
        self._consistency = consistency

    async def open(self, context: Context) -> None:
        self._client = context.parameter_server
        self._row = context.subtask_index
        await self._client.create_matrix("counts", rows=WORKERS, columns=COLUMNS, consistency=self._consistency)

    async def process(self, record: int, out: Output) -> None:
        await self._client.get("counts", rows=range(WORKERS), columns=[record % COLUMNS])
        await self._client.add("counts", row=self._row, columns=[record % COLUMNS, 0], values=[1.0, 0.5])
        await self._client.clock("counts")

    async def finish(self, out: Output) -> None:
        row = await self._client.get("counts", row=self._row)
        out.emit([self._row, *row.tolist()])


class _ReadsWhatAllHaveAdded(Operator):
    """Emits each read: under BSP, a read at a clock contains all adds before this clock, and no other adds."""

    async def open(self, context: Context) -> None:
        self._client = context.parameter_server
        self._number = context.subtask_index
        await self._client.create_matrix("sums", rows=1, columns=COLUMNS, consistency=BSP())

    async def process(self, record: int, out: Output) -> None:
        read = await self._client.get("sums", row=0)
        out.emit([self._number, record, *read.tolist()])
        await self._client.add("sums", row=0, columns=np.array([record % COLUMNS]), values=float(record))
        await self._client.clock("sums")


def _flow(name: str, simulation: Simulation, operator: Any, *, shards: int) -> Flow:
    flow = Flow(name, parallelism=WORKERS)
    numbers = range(WORKERS * RECORDS_OF_A_WORKER)
    records = flow.source(simulation.input("records", numbers, partitions=WORKERS, over_s=3.0))
    server = ParameterServer(shards=shards)
    worked = records.process(operator, name="work", parameter_server=server)
    worked.sink(simulation.output("results", order="any"))
    return flow


def bulk_synchronous_server(simulation: Simulation) -> Flow:
    """Return a flow whose workers all read the same sums at the same clock, before and after a restart."""
    return _flow("bulk synchronous", simulation, _ReadsWhatAllHaveAdded, shards=2)


def stale_synchronous_server(simulation: Simulation) -> Flow:
    """Return a flow whose workers are at most two clocks apart."""
    return _flow("stale synchronous", simulation, lambda: _AddsToOwnRow(SSP(staleness=2)), shards=3)


def asynchronous_server(simulation: Simulation) -> Flow:
    """Return a flow whose workers never wait for each other, and pass barriers at any time."""
    return _flow("asynchronous", simulation, lambda: _AddsToOwnRow(ASP()), shards=2)
