"""Checkpoints of a flow with a server, restored with other workers, other shards or other settings."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from parameter_server.flows.counting import (
    MATRIX,
    RECORDS,
    Counts,
    checkpoints,
    count_of_each,
    counting_flow,
    cut_off_again_and_again,
    ended,
    handled,
)

from streamiter import Flow, Operator
from streamiter.engine.storage.store import MemoryStore
from streamiter.errors import CheckpointError, ConfigurationError, JobFailed
from streamiter.operators import Output
from streamiter.parameter_server import ASP, BSP, SSP, ParameterServer, psf
from streamiter.parameter_server.consistency import Consistency
from streamiter.parameter_server.optimizers import FTRL, Adam

KINDS = [ASP(), BSP(), SSP(staleness=2)]


@pytest.mark.parametrize("turns", [3, 11, 24])
@pytest.mark.parametrize("workers", [(2, 4), (4, 2), (1, 3, 2)], ids=str)
@pytest.mark.parametrize("consistency", KINDS, ids=repr)
async def test_a_checkpoint_resumes_with_another_number_of_workers(
    consistency: Consistency, workers: tuple[int, ...], turns: int
) -> None:
    """A new worker started at clock 0 and all waited for it, or the others waited for a removed worker."""
    makes = [
        lambda count=count: counting_flow(consistency=consistency, workers=count, records=60)  # type: ignore[misc]
        for count in workers
    ]
    server = await cut_off_again_and_again(makes, turns=turns)
    assert await count_of_each(server) == [1.0] * 60


@pytest.mark.parametrize("block", [None, (1, 7)], ids=["other blocks", "the same blocks"])
@pytest.mark.parametrize("sparse", [False, True], ids=["dense", "sparse"])
async def test_a_checkpoint_resumes_with_another_number_of_shards(sparse: bool, block: tuple[int, int] | None) -> None:
    """A server that needed more memory could not resume with more shards."""
    makes = [
        lambda shards=shards: counting_flow(  # type: ignore[misc]
            consistency=BSP(), shards=shards, records=60, block=block, sparse=sparse
        )
        for shards in (2, 5, 1)
    ]
    server = await cut_off_again_and_again(makes, turns=11)
    assert await count_of_each(server) == [1.0] * 60


async def suspended(store: MemoryStore, **options: Any) -> None:
    """Run a flow and suspend it with a checkpoint."""
    flow, _ = counting_flow(**options)
    job = await flow.start(checkpoints=checkpoints(store))
    await handled(job, 6)
    await job.stop("suspend")


@pytest.mark.parametrize(
    ("before", "now", "said"),
    [
        ({"dtype": "float32"}, {}, "dtype was float32, now float64"),
        ({}, {"sparse": True}, "sparse was False, now True"),
        ({}, {"rows": 2, "columns": RECORDS + 1}, f"rows was 1, now 2, columns was {RECORDS}, now {RECORDS + 1}"),
        ({"sparse": True}, {"sparse": True, "default": 2.0}, "default was 0.0, now 2.0"),
        (
            {"rows": 4, "on_clock": psf.Optimize(MATRIX, FTRL())},
            {"rows": 4, "on_clock": psf.Optimize(MATRIX, Adam())},
            "on_clock was Optimize with ftrl, now Optimize with adam",
        ),
    ],
    ids=["dtype", "sparse", "rows and columns", "default", "update function"],
)
async def test_settings_that_do_not_fit_the_checkpoint_are_refused(
    before: dict[str, Any], now: dict[str, Any], said: str
) -> None:
    """A run resumed with half of a matrix, or with numbers read as another type, without an error."""
    store = MemoryStore()
    await suspended(store, operator=counts_with(**before), shards=2)
    flow, server = counting_flow(counts_with(**now), shards=2)
    with pytest.raises(JobFailed) as failed:
        await flow.start(checkpoints=checkpoints(store))
    assert "step 'count'" in str(failed.value)
    assert "matrix 'counts': expected the settings that it has in the snapshot" in str(failed.value)
    assert f"({said})" in str(failed.value)
    assert "restore=None" in str(failed.value)
    assert server.workers == []


def counts_with(**settings: Any) -> Callable[[], Operator]:
    return lambda: Counts(BSP(), **{"columns": RECORDS, **settings})


class AddsThenClocks(Counts):
    """Adds with one record, and clocks with the next one."""

    async def process(self, record: int, out: Output) -> None:
        await self.client.add(MATRIX, row=0, columns=[record], values=[1.0])
        if record % 4 >= 2:
            await self.client.clock(MATRIX)
            await self.client.get(MATRIX, row=0)


@pytest.mark.parametrize("turns", [3, 7, 8, 9, 10, 11, 15])
async def test_adds_that_wait_for_a_clock_are_part_of_the_checkpoint(turns: int) -> None:
    """A barrier between an add and its clock dropped the add."""
    server = await cut_off_again_and_again([lambda: counting_flow(lambda: AddsThenClocks(BSP()))] * 4, turns=turns)
    assert await count_of_each(server) == [1.0] * RECORDS


@pytest.mark.parametrize("now", [ASP(), SSP(staleness=0)], ids=repr)
async def test_adds_that_waited_for_a_clock_count_under_another_consistency(now: Consistency) -> None:
    """Adds in the snapshot that waited for a clock were lost under another consistency."""
    before, after = ParameterServer(shards=2), ParameterServer(shards=3)
    await before.create_matrix(MATRIX, rows=1, columns=6, consistency=BSP(), block=(1, 2))
    await before.client(worker=0).add(MATRIX, row=0, values=[1.0] * 6)
    await after.create_matrix(MATRIX, rows=1, columns=6, consistency=now, block=(1, 2))
    client = after.client(worker=0)
    await after.restore(await before.snapshot())
    assert (await client.get(MATRIX, row=0)).tolist() == [1.0] * 6


async def test_a_server_of_another_name_does_not_receive_the_state() -> None:
    """A server's name was mistyped, and training silently restarted from the initial values."""
    store = MemoryStore()
    await suspended(store)
    flow, _ = counting_flow(server=ParameterServer(name="weights"))
    with pytest.raises(CheckpointError, match="no step 'parameter server', whose state it has; a new step 'weights'"):
        await flow.start(checkpoints=checkpoints(store))


async def test_a_new_server_in_the_flow_starts_empty_if_it_is_named_as_changed() -> None:
    """A server that was new in a flow could not start without state, unlike other steps with state."""
    store = MemoryStore()
    await suspended(store)
    flow, _ = counting_flow(server=ParameterServer(name="weights"))
    changed = ["parameter server", "weights"]
    job = await flow.start(checkpoints=checkpoints(store), changed_steps=changed)
    assert (await ended(job)).state == "finished"


async def test_a_snapshot_of_a_flow_without_the_server_is_refused() -> None:
    """A flow resumed from a snapshot without its parameters in the middle of a training."""
    flow = Flow("counting")
    flow.from_items(list(range(4)), name="numbers").map(str, name="count").collect(name="results")
    job = await flow.start()
    snapshot = await job.snapshot()
    await job.stop("abort")
    other, _ = counting_flow()
    with pytest.raises(ConfigurationError, match="is only in the"):
        await other.start(snapshot=snapshot)
