"""Checkpoints of a flow with a server, also restored with other workers, other shards or other settings."""

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from parameter_server.flows.counting import (
    MATRIX,
    RECORDS,
    Counts,
    Dealt,
    checkpoints,
    count_of_each,
    counting_flow,
    cut_off_again_and_again,
    ended,
    handled,
)
from support.soak import in_soak
from support.waiting import PATIENCE_S, until

from streamiter import Flow, Operator
from streamiter.engine.storage.store import MemoryStore
from streamiter.errors import CheckpointError, ConfigurationError, JobFailed
from streamiter.operators import Output
from streamiter.operators.operator import Context
from streamiter.operators.source import Positions, SourceBatch
from streamiter.parameter_server import ASP, BSP, SSP, ParameterServer, psf
from streamiter.parameter_server import snapshots as holding
from streamiter.parameter_server.consistency import Consistency
from streamiter.parameter_server.optimizers import FTRL, Adam
from streamiter.parameter_server.storage.block import Frozen
from streamiter.testing import VirtualClock

MANY = 100
KINDS = [ASP(), BSP(), SSP(staleness=0), SSP(staleness=2)]


@pytest.mark.parametrize("turns", [1, 13, 25, 37, *in_soak(*range(4, 40, 3))])
@pytest.mark.parametrize("consistency", KINDS, ids=repr)
async def test_each_record_counts_once_whenever_the_flow_is_cut_off(consistency: Consistency, turns: int) -> None:
    """Requests that a worker sent after its barrier were in the checkpoint, and were sent again after the restart."""
    makes = [lambda: counting_flow(consistency=consistency, workers=3, records=60)] * 5
    server = await cut_off_again_and_again(makes, turns=turns)
    assert await count_of_each(server) == [1.0] * 60


@pytest.mark.parametrize("consistency", KINDS, ids=repr)
async def test_a_run_on_the_same_server_resumes_from_its_checkpoint(consistency: Consistency) -> None:
    """A server that outlived a failed run kept the changes made after the last checkpoint."""
    server, store = ParameterServer(shards=2), MemoryStore()
    for turns in (5, 9):
        flow, _ = counting_flow(server=server, consistency=consistency, records=100)
        job = await flow.start(checkpoints=checkpoints(store))
        for _ in range(turns):
            await asyncio.sleep(0)
        await job.checkpoint()
        await handled(job, job.statistics().step("count").records_in + 2)
        await job.stop("abort")
    flow, _ = counting_flow(server=server, consistency=consistency, records=100)
    await ended(await flow.start(checkpoints=checkpoints(store)))
    assert await count_of_each(server) == [1.0] * 100


async def test_a_flow_resumes_from_a_snapshot_in_memory() -> None:
    """A job resumed from a snapshot in memory with changes that the first job had made after the snapshot."""
    flow, _ = counting_flow(records=200)
    job = await flow.start()
    await handled(job, 20)
    snapshot = await job.snapshot()
    await ended(job)
    for _ in range(2):
        again, server = counting_flow(records=200)
        await ended(await again.start(snapshot=snapshot))
        assert await count_of_each(server) == [1.0] * 200


async def test_a_restart_without_a_checkpoint_starts_with_a_new_server() -> None:
    """A restart without a checkpoint started with counts of the earlier run."""
    store = MemoryStore()
    flow, _ = counting_flow()
    job = await flow.start(checkpoints=checkpoints(store))
    await handled(job, 6)
    await job.stop("suspend")
    again, server = counting_flow()
    await ended(await again.start(checkpoints=checkpoints(store), restore=None))
    assert await count_of_each(server) == [1.0] * RECORDS


@pytest.mark.parametrize("how", ["abort", "failure"])
async def test_a_server_that_was_cut_off_before_the_first_checkpoint_is_not_used_again(how: str) -> None:
    """The next run used the server again, and the records of the aborted run counted twice."""

    class FailsLater(Counts):
        async def process(self, record: int, out: Output) -> None:
            if record == 11 and how == "failure":
                raise ValueError("a bad record")
            await super().process(record, out)

    store = MemoryStore()
    flow, server = counting_flow(lambda: FailsLater(BSP()))
    job = await flow.start(checkpoints=checkpoints(store))
    await handled(job, 6)
    if how == "abort":
        await job.stop("abort")
    else:
        with pytest.raises(JobFailed, match="a bad record"):
            await ended(job)
    again, _ = counting_flow(server=server)
    with pytest.raises(JobFailed, match="given none, and parameters that its last run has changed before it was cut"):
        await again.start(checkpoints=checkpoints(store))
    new, server = counting_flow()
    await ended(await new.start(checkpoints=checkpoints(store)))
    assert await count_of_each(server) == [1.0] * RECORDS


async def test_a_server_whose_next_run_finished_may_be_used_again() -> None:
    """A server was refused forever after an abort, although a later run had restored a checkpoint and ended."""
    server, store = ParameterServer(), MemoryStore()
    flow, _ = counting_flow(server=server)
    job = await flow.start(checkpoints=checkpoints(store))
    await handled(job, 6)
    await job.checkpoint()
    await job.stop("abort")
    for restore in ("last", None):
        flow, _ = counting_flow(server=server)
        await ended(await flow.start(checkpoints=checkpoints(store), restore=restore))  # type: ignore[arg-type]
    assert await count_of_each(server) == [2.0] * RECORDS


# -- aborted checkpoints ---------------------------------------------------------------------------------------


class HeldBack(Dealt):
    """Gives the second record of subtask 1 when the door is open."""

    def __init__(self, door: asyncio.Event) -> None:
        super().__init__(MANY)
        self._door = door

    def open(self, context: Context, positions: Positions | None) -> None:
        super().open(context, positions)
        self._is_held_back = context.subtask_index == 1

    async def read(self) -> SourceBatch | None:
        if self._is_held_back and self._next == 3:
            await self._door.wait()
        return await super().read()


@pytest.mark.parametrize("consistency", [BSP(), SSP(staleness=3)], ids=repr)
async def test_a_checkpoint_held_up_by_a_worker_without_data_is_aborted_and_the_next_one_works(
    consistency: Consistency,
) -> None:
    """Workers that had stopped for the checkpoint never resumed, or requests stayed held forever."""
    clock, door, store = VirtualClock(), asyncio.Event(), MemoryStore()

    def make() -> tuple[Flow, ParameterServer]:
        flow, server = Flow("held up", parallelism=2), ParameterServer(shards=2)
        numbers = flow.from_source(lambda: HeldBack(door), name="numbers")
        numbers.process(lambda: Counts(consistency, columns=MANY), name="count", parameter_server=server).collect(
            name="results"
        )
        return flow, server

    flow, server = make()
    job = await flow.start(checkpoints=checkpoints(store, alignment_timeout_s=5.0), clock=clock)
    await until(lambda: _clock(server, 0) > _clock(server, 1) == 1)
    taking = asyncio.create_task(job.checkpoint())
    await clock.advance(5.0)
    with pytest.raises(
        CheckpointError,
        match=r"checkpoint 1: expected all workers of a parameter server at the same clock, given count\[1\] behind",
    ):
        await taking
    assert [shard.held for shard in server.statistics().shards] == [0, 0]
    door.set()
    await handled(job, 8)
    number = await job.checkpoint()
    await job.stop("abort")
    flow, server = make()
    job = await flow.start(checkpoints=checkpoints(store))
    assert job.statistics().checkpoints.restored >= number  # type: ignore[union-attr]
    await ended(job)
    assert await count_of_each(server) == [1.0] * MANY


def _clock(server: ParameterServer, worker: int) -> int:
    shards = server.statistics().shards
    return min((of_one.clocks[str(worker)] for shard in shards for of_one in shard.matrices), default=0)


class WaitsInItsSnapshot(Counts):
    """Takes worker 1's snapshot when the door is open, so that a barrier passes worker 0 long before worker 1."""

    def __init__(self, door: asyncio.Event, consistency: Consistency) -> None:
        super().__init__(consistency)
        self._door = door

    async def snapshot(self) -> Any:
        if self.client.worker == 1:
            await self._door.wait()
        return 0

    def restore(self, state: Any) -> None: ...


@pytest.mark.parametrize("consistency", KINDS, ids=repr)
async def test_requests_held_for_an_aborted_checkpoint_are_applied(consistency: Consistency) -> None:
    """Adds of the worker whose barrier had passed were dropped with the aborted checkpoint."""
    clock, door, store = VirtualClock(), asyncio.Event(), MemoryStore()
    flow, server = counting_flow(lambda: WaitsInItsSnapshot(door, consistency))
    job = await flow.start(checkpoints=checkpoints(store, alignment_timeout_s=5.0), clock=clock)
    await handled(job, 6)
    taking = asyncio.create_task(job.checkpoint())
    await until(lambda: any(shard.held for shard in server.statistics().shards))
    await clock.advance(5.0)
    with pytest.raises(CheckpointError, match=r"its barrier has not passed count\[1\]"):
        await taking
    assert [shard.held for shard in server.statistics().shards] == [0, 0]
    door.set()
    await ended(job)
    assert await count_of_each(server) == [1.0] * RECORDS


class SlowSnapshot(Operator):
    """Takes its snapshot when the door is open; it uses no server."""

    def __init__(self, door: asyncio.Event) -> None:
        self._door = door

    def process(self, record: Any, out: Output) -> None: ...

    async def snapshot(self) -> None:
        await self._door.wait()


async def test_a_state_taken_for_an_aborted_checkpoint_is_released() -> None:
    """Each state of an aborted checkpoint left its block copying every changed row forever."""
    clock, door, store, released = VirtualClock(), asyncio.Event(), MemoryStore(), []
    flow, server = counting_flow(consistency=ASP(), sparse=True)
    beside = flow.from_source(lambda: Dealt(RECORDS), name="beside").process(lambda: SlowSnapshot(door), name="other")
    beside.collect(name="nothing")
    with pytest.MonkeyPatch.context() as patch:
        release = Frozen.release

        def counted(self: Frozen) -> None:
            released.append(self)
            release(self)

        patch.setattr(Frozen, "release", counted)
        job = await flow.start(checkpoints=checkpoints(store, alignment_timeout_s=5.0), clock=clock)
        taking = asyncio.create_task(job.checkpoint())
        await handled(job, RECORDS)
        await clock.advance(5.0)
        with pytest.raises(CheckpointError, match="has not passed beside"):
            await taking
        assert len(released) == 2
    door.set()
    await ended(job)
    assert await count_of_each(server) == [1.0] * RECORDS


async def test_a_cancelled_wait_for_a_checkpoint_leaves_no_requests_held() -> None:
    """A caller limited a snapshot with ``asyncio.wait_for``, and the timeout left requests held."""
    door = asyncio.Event()
    flow, server = counting_flow(lambda: WaitsInItsSnapshot(door, ASP()))
    job = await flow.start()
    await handled(job, 6)
    taking = asyncio.create_task(job.snapshot())
    await until(lambda: any(shard.held for shard in server.statistics().shards))
    taking.cancel()
    await asyncio.wait([taking])
    assert [shard.held for shard in server.statistics().shards] == [0, 0]
    door.set()
    await ended(job)
    assert await count_of_each(server) == [1.0] * RECORDS


async def test_a_worker_far_past_its_barrier_waits_before_too_many_requests_are_held(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Held clocks of a fast worker filled the memory of a shard while another worker was slow."""
    monkeypatch.setattr(holding, "_HELD_BYTES", 1_000)
    server = ParameterServer()
    await server.create_matrix(MATRIX, rows=1, columns=2, consistency=ASP())
    fast, slow = server.client(worker=0), server.client(worker=1)
    server.checkpoint_begins(1)
    fast.pass_barrier(1)
    counted = 0

    async def clock_on() -> None:
        nonlocal counted
        while counted < 100:
            await fast.clock(MATRIX)
            counted += 1

    clocking = asyncio.create_task(clock_on())
    for _ in range(100):
        await asyncio.sleep(0)
    assert 0 < counted < 10
    slow.pass_barrier(1)
    assert (await server.take_state(1))["matrices"][MATRIX]["clocks"]["progress"] == {0: 0, 1: 0}
    async with asyncio.timeout(PATIENCE_S):
        await clocking
    assert fast.clock_of(MATRIX) == 100
    await server.close()


BLOCKS = [ASP(), BSP(), SSP(staleness=2)]


@pytest.mark.parametrize(("workers", "turns"), [((2, 4), 3), ((4, 2), 11), ((1, 3, 2), 24)], ids=str)
@pytest.mark.parametrize("consistency", BLOCKS, ids=repr)
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
