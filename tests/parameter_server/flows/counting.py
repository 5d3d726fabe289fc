"""Flows whose steps count records on a parameter server; a lost or repeated record shows in the counts."""

import asyncio
import contextlib
import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from support.waiting import PATIENCE_S, until

from streamiter import Checkpoints, Flow, Operator
from streamiter.engine.graph.statistics import JobStatistics
from streamiter.engine.job.job import Job
from streamiter.engine.storage.store import MemoryStore
from streamiter.errors import CheckpointError
from streamiter.operators import Context, Output
from streamiter.operators.source import Positions, Source, SourceBatch
from streamiter.parameter_server import BSP, ParameterServer, psf
from streamiter.parameter_server.consistency import Consistency

__all__ = [
    "MATRIX",
    "RECORDS",
    "Counts",
    "Dealt",
    "Make",
    "checkpoints",
    "count_of_each",
    "counting_flow",
    "cut_off_again_and_again",
    "ended",
    "handled",
]

MATRIX = "counts"
RECORDS = 24
RARELY_S = 1000.0


class Dealt(Source):
    """Gives each subtask every n-th number below ``count``, one at a time; each subtask stores its own position."""

    def __init__(self, count: int) -> None:
        self._count = count

    def open(self, context: Context, positions: Positions | None) -> None:
        self._step = context.parallelism
        self._label = f"next of {context.subtask_index}"
        self._next = (positions or {}).get(self._label, context.subtask_index)

    async def read(self) -> SourceBatch | None:
        await asyncio.sleep(0)  # Other tasks get a turn, so that a barrier can pass between any two records.
        if self._next >= self._count:
            return None
        number, self._next = self._next, self._next + self._step
        return SourceBatch([number], {self._label: self._next})


class Counts(Operator):
    """Adds 1 to the column of each record, a number, and clocks."""

    def __init__(
        self, consistency: Consistency, *, columns: int = RECORDS, matrix: str = MATRIX, **settings: Any
    ) -> None:
        self._matrix = matrix
        self._settings = {"rows": 1, "columns": columns, "consistency": consistency, **settings}

    async def open(self, context: Context) -> None:
        self.client = context.parameter_server
        await self.client.create_matrix(self._matrix, **self._settings)

    async def process(self, record: int, out: Output) -> None:
        await self.client.get(self._matrix, row=0, columns=[record])
        await self.client.add(self._matrix, row=0, columns=[record], values=[1.0])
        await self.client.clock(self._matrix)
        out.emit((self.client.worker, record))


Make = Callable[[], tuple[Flow, ParameterServer]]


def counting_flow(
    operator: Callable[[], Operator] | None = None,
    *,
    server: ParameterServer | None = None,
    consistency: Consistency | None = None,
    workers: int = 2,
    sources: int = 2,
    shards: int = 2,
    records: int = RECORDS,
    **settings: Any,
) -> tuple[Flow, ParameterServer]:
    """Return a flow that deals numbers to counting workers, and the server that stores the counts."""
    server = server or ParameterServer(shards=shards)
    flow = Flow("counting")
    numbers = flow.from_source(lambda: Dealt(records), name="numbers", parallelism=sources).rebalance()
    make = operator or functools.partial(Counts, consistency or BSP(), columns=records, **settings)
    numbers.process(make, name="count", parallelism=workers, parameter_server=server).collect(name="results")
    return flow, server


async def count_of_each(server: ParameterServer, matrix: str = MATRIX) -> list[float]:
    """Return how often each record has counted."""
    row: npt.NDArray[np.float64] = await server.aggregate(psf.Pull(matrix, row=0))
    return [float(count) for count in row]


def checkpoints(store: MemoryStore, **options: Any) -> Checkpoints:
    """Return checkpoints that are taken on request and at the end."""
    return Checkpoints(store.another(), **{"interval_s": RARELY_S, **options})


async def handled(job: Job, count: int, step: str = "count") -> None:
    """Return when a step has received this many records."""
    await until(lambda: job.statistics().step(step).records_in >= count)


async def ended(job: Job) -> JobStatistics:
    """Wait for the end of a job and return its statistics."""
    async with asyncio.timeout(PATIENCE_S):
        return await job.wait()


async def cut_off_again_and_again(makes: Sequence[Make], *, turns: int) -> ParameterServer:
    """Run flows one after another; each resumes from the last checkpoint of the one before, which was cut off after it.

    ``turns`` of the event loop pass between a checkpoint and the next event: a checkpoint, a suspension or a cut.
    """
    store = MemoryStore()
    for number, make in enumerate(makes):
        flow, server = make()
        job = await flow.start(checkpoints=checkpoints(store))
        if number == len(makes) - 1:
            break
        async with asyncio.timeout(PATIENCE_S):
            with contextlib.suppress(CheckpointError):  # The job has ended.
                for _ in range(2):
                    await _some_turns(turns)
                    await job.checkpoint()
                await _some_turns(turns)
            await job.stop("suspend" if number % 2 else "abort")
    assert (await ended(job)).state == "finished"
    return server


async def _some_turns(turns: int) -> None:
    for _ in range(turns):
        await asyncio.sleep(0)
