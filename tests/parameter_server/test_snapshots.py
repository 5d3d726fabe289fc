"""A restore brings back the matrices of a snapshot, and nothing that came later."""

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.waiting import PATIENCE_S, until

from streamiter import Checkpoints, Flow, Operator
from streamiter.errors import ParameterServerError, ServerReset
from streamiter.operators.operator import Context
from streamiter.operators.output import Output
from streamiter.parameter_server import ASP, BSP, SSP, ParameterServer, psf
from streamiter.parameter_server.consistency import Consistency
from streamiter.topics import MemoryBroker, OutgoingBatch

COLUMNS = 3


async def test_a_matrix_made_after_the_snapshot_is_reset_by_the_restore() -> None:
    """Adds to the new matrix remained when the server was restored, and were counted twice."""
    server = ParameterServer(shards=2)
    worker = server.client(0)
    await server.create_matrix("old", rows=1, columns=COLUMNS)
    state = await server.snapshot()
    await server.create_matrix("new", rows=1, columns=COLUMNS, init=5.0)
    await worker.add("new", row=0, values=1.0)
    await worker.clock("new")
    await server.restore(state)
    assert (await worker.get("new", row=0)).tolist() == [5.0] * COLUMNS
    assert worker.clock_of("new") == server.statistics().matrix("new").minimum_clock == 0


DRAWN = psf.RandomUniform("w", row=0, low=0.0, high=1.0, seed=7)


@pytest.mark.parametrize("settings", [{}, {"sparse": True}, {"sparse": True, "vector": 5, "default": DRAWN}], ids=str)
@pytest.mark.parametrize(("shards", "block"), [(3, None), (1, None), (4, (2, 25))])
async def test_a_snapshot_is_restored_into_other_blocks(
    settings: dict[str, Any], shards: int, block: tuple[int, int] | None
) -> None:
    """A model that had outgrown its machines could not be restored on more of them."""
    shape: dict[str, Any] = {"rows": 4, "columns": 2000, "consistency": BSP(), **settings}
    before, after = ParameterServer(shards=2), ParameterServer(shards=shards)
    await before.create_matrix("w", **shape, block=(4, 700))
    await after.create_matrix("w", **shape, block=block)
    worker, other, random = before.client(0), before.client(1), np.random.default_rng(1)
    for row in range(4):
        columns = random.integers(0, 2000, 120)
        await worker.add("w", row=row, columns=columns, values=random.normal(size=120))
    for client in (worker, other):
        await client.clock("w")
    if settings and "default" not in settings:
        await worker.update(psf.Fill("w", row=2, value=3.0))
        await worker.update(psf.Increment("w", row=2, columns=np.arange(9), delta=np.ones(9)))
    await worker.add("w", row=1, values=np.arange(2000.0))  # It waits for the clock.
    await worker.add("w", row=3, columns=[1999, 0, 700], values=[1.0, 2.0, 3.0])
    await after.restore(await before.snapshot())
    found = [after.client(0), after.client(1)]
    for clients in ([worker, other], found):
        for client in clients:
            await client.clock("w")
    for row in range(4):
        expected = await worker.get("w", row=row)
        assert expected.any()
        assert (await found[0].get("w", row=row)).tobytes() == expected.tobytes()
    assert after.statistics().matrix("w").minimum_clock == 2


async def test_the_state_of_a_matrix_that_is_not_made_again_yet_is_in_the_next_snapshot() -> None:
    """A checkpoint between a restart and the first use of a matrix lost the learned values of the matrix."""
    server = ParameterServer(shards=2)
    worker = server.client(0)
    await server.create_matrix("w", rows=2, columns=COLUMNS)
    await worker.add("w", row=1, values=[1.0, 2.0, 3.0])
    state = await server.snapshot()
    for _ in range(2):
        another = ParameterServer(shards=2)
        await another.restore(state)
        state = await another.snapshot()
    await another.create_matrix("w", rows=2, columns=COLUMNS)
    assert (await another.client(0).get("w", row=1)).tolist() == [1.0, 2.0, 3.0]


async def test_workers_waiting_at_a_barrier_get_an_error_when_the_server_is_restored() -> None:
    """A restore took the other workers back to before a barrier, and the worker at the barrier waited forever."""
    server = ParameterServer(shards=2)
    early, late = server.client(0), server.client(1)
    state = await server.snapshot()
    waiting = asyncio.ensure_future(early.barrier(0))
    await asyncio.sleep(0)
    assert not waiting.done()
    await server.restore(state)
    with pytest.raises(ServerReset, match="a snapshot to go back to; ask again"):
        await asyncio.wait_for(waiting, PATIENCE_S)
    async with asyncio.timeout(PATIENCE_S):
        await asyncio.gather(early.barrier(0), late.barrier(0))


@pytest.mark.parametrize("consistency", [ASP(), BSP(), SSP(staleness=3)], ids=repr)
async def test_on_clock_runs_for_the_adds_of_the_last_workers(consistency: Consistency) -> None:
    """on_clock never ran for the last gradients, because the fast worker had ended and the slow one died."""
    server = ParameterServer(shards=2)
    await server.create_matrix(
        "w", rows=2, columns=COLUMNS, consistency=consistency, on_clock=psf.Axpy("w", x=0, y=1, a=2.0)
    )
    fast, slow = server.client(0), server.client(1)
    await fast.add("w", row=0, values=1.0)
    await fast.clock("w")
    await fast.leave()
    await slow.leave()
    assert (await server.aggregate(psf.Pull("w", row=1))).tolist() == [2.0] * COLUMNS


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"columns": COLUMNS + 1}, f"columns was {COLUMNS}, now {COLUMNS + 1}"),
        ({"columns": COLUMNS, "dtype": "float32"}, "dtype was float64, now float32"),
    ],
)
async def test_a_snapshot_that_does_not_fit_changes_nothing(settings: dict[str, Any], message: str) -> None:
    """The first of two matrices and the workers had been restored before the second matrix was refused."""
    snapshots = []
    for of_second in ({"columns": COLUMNS}, settings):
        server = ParameterServer(shards=2)
        await server.create_matrix("v", rows=1, columns=COLUMNS, consistency=SSP(staleness=1))
        await server.create_matrix("w", rows=1, **of_second)
        client = server.client(len(snapshots))
        await client.add("v", row=0, values=1.0 + len(snapshots))
        await client.clock("v")
        snapshots.append(await server.snapshot())
    with pytest.raises(ParameterServerError, match=message):
        await server.restore(snapshots[0])
    assert (await client.get("v", row=0)).tolist() == [2.0] * COLUMNS
    assert server.statistics().matrix("v").clocks == {"1": 1}


class MakesItsMatrixWithARecord(Operator):
    """Makes its matrix with the first record, not when it opens."""

    def open(self, context: Context) -> None:
        self.client = context.parameter_server

    async def process(self, record: int, out: Output) -> None:
        await self.client.create_matrix("late", rows=1, columns=COLUMNS)
        await self.client.add("late", row=0, values=1.0)
        await self.client.clock("late")


async def test_a_matrix_made_long_after_the_restart_finds_its_state(tmp_path: Path) -> None:
    """The store was already closed when the first record after the restart made the matrix."""
    records = MemoryBroker().topic("records")
    await records.create()
    for run in range(1, 4):
        server = ParameterServer(shards=2)
        flow = Flow("late")
        flow.source(records).process(MakesItsMatrixWithARecord, name="add", parameter_server=server)
        job = await flow.start(checkpoints=Checkpoints(tmp_path, interval_s=100))
        await job.checkpoint()
        writer = await records.open_writer()
        await writer.write(OutgoingBatch([b"1", b"2"]))
        await writer.close()
        await until(lambda job=job: job.statistics().step("add").records_in >= 2)
        await job.stop("suspend")
        assert (await server.aggregate(psf.Pull("late", row=0))).tolist() == [2.0 * run] * COLUMNS
