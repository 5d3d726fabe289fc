"""Jobs with checkpoints: committed outputs, the state after a restart, and refused starts."""

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Iterable, Sequence
from pathlib import Path
from typing import Any, Literal

import pytest
from job_faults.held_store import HeldStore
from runtime.checkpointed_sums import broker_of_sums, expected, handled, settings, summing, write, written
from support.waiting import PATIENCE_S, until

from streamiter import Flow
from streamiter.engine.job.job import Job, StopMode
from streamiter.engine.job.running import run_jobs
from streamiter.engine.storage.snapshot import CheckpointId, SnapshotHeader, SnapshotPart
from streamiter.engine.storage.store import CheckpointStore, OtherFiles, blobs_at, store_at
from streamiter.errors import CheckpointError, JobFailed, ProducerFenced, StorageFull, StoreUnavailable
from streamiter.operators.operator import Context
from streamiter.operators.source import Positions, Source, SourceBatch
from streamiter.testing import VirtualClock
from streamiter.topics import MemoryBroker, OutgoingBatch
from streamiter.topics.memory_log import MemoryTransactions


@pytest.fixture
async def broker() -> MemoryBroker:
    return await broker_of_sums()


async def test_outputs_are_visible_with_the_checkpoint_after_them(broker: MemoryBroker, tmp_path: Path) -> None:
    """Readers acted on results that a crash revoked a second later."""
    await write(broker.topic("numbers"), range(10))
    job = await summing(broker).start(checkpoints=settings(tmp_path))
    await handled(job, "sink sums", 10)
    assert await written(broker.topic("sums")) == []
    assert await job.checkpoint() == 1
    assert await written(broker.topic("sums")) == expected(10)
    await write(broker.topic("numbers"), range(10, 20))
    await handled(job, "sink sums", 20)
    assert await written(broker.topic("sums")) == expected(10)
    await job.stop("abort")


async def test_a_snapshot_in_memory_holds_back_no_outputs(broker: MemoryBroker, tmp_path: Path) -> None:
    """Sinks held all records behind the barrier of a snapshot until the checkpoint after the next one."""
    await write(broker.topic("numbers"), range(10))
    job = await summing(broker).start(checkpoints=settings(tmp_path))
    await handled(job, "sink sums", 10)
    await job.snapshot()
    await write(broker.topic("numbers"), range(10, 20))
    await handled(job, "sink sums", 20)
    await job.checkpoint()
    assert await written(broker.topic("sums")) == expected(20)
    await job.stop("abort")


async def test_checkpoints_come_at_their_interval(broker: MemoryBroker, tmp_path: Path) -> None:
    """Nothing was committed while the job ran, and a crash after a week lost the week."""
    clock = VirtualClock()
    await write(broker.topic("numbers"), range(3))
    job = await summing(broker).start(checkpoints=settings(tmp_path, interval_s=5.0), clock=clock)
    await handled(job, "sink sums", 3)
    for number in range(1, 4):
        await clock.advance(5.0)
        await until(lambda number=number: job.statistics().checkpoints.committed == number)
    assert await written(broker.topic("sums")) == expected(3)
    await job.stop("abort")


@pytest.mark.parametrize("then", ["latest", None], ids=["bounded", "endless"])
async def test_a_finished_job_reads_on_when_its_topic_has_new_records(
    broker: MemoryBroker, tmp_path: Path, caplog: pytest.LogCaptureFixture, then: Literal["latest"] | None
) -> None:
    """A nightly job with checkpoints read nothing from its second night on, and ended well each time.

    Or the last records of a bounded job were never committed, or a night without records wrote them again.
    """
    for night, count in enumerate((3, 7, 7, 9)):
        await write(broker.topic("numbers"), range(len(await written(broker.topic("sums"))), count))
        job = await summing(broker, stop="latest" if night < 3 else then).start(checkpoints=settings(tmp_path))
        if night == 3 and then is None:
            await handled(job, "sink sums", 2)
            await job.stop("suspend")
        else:
            assert (await asyncio.wait_for(job.wait(), PATIENCE_S)).state == "finished"
        assert await written(broker.topic("sums")) == expected(count)
    assert "is the last of a job whose inputs have all ended" in caplog.text


async def test_an_older_run_that_still_runs_is_fenced(broker: MemoryBroker, tmp_path: Path) -> None:
    """Two pods of one service ran for a minute, and every record of that minute was stored twice."""
    await write(broker.topic("numbers"), range(5))
    zombie = await summing(broker).start(checkpoints=settings(tmp_path))
    await handled(zombie, "sink sums", 5)
    job = await summing(broker).start(checkpoints=settings(tmp_path))
    await handled(job, "sink sums", 5)
    with pytest.raises(ProducerFenced):
        await zombie.checkpoint()
    with pytest.raises(JobFailed, match="flow 'sums of numbers': ") as ended:
        await asyncio.wait_for(zombie.wait(), PATIENCE_S)
    assert (ended.value.step, type(ended.value.__cause__)) == ("checkpoint", ProducerFenced)
    with pytest.raises(JobFailed) as asked_again:  # the error of the end
        await zombie.checkpoint()
    assert type(asked_again.value.__cause__) is ProducerFenced
    await job.stop("suspend")
    assert await written(broker.topic("sums")) == expected(5)


async def test_an_older_run_without_input_ends_long_before_its_next_checkpoint(
    broker: MemoryBroker, tmp_path: Path
) -> None:
    """With a checkpoint every half hour and no records, the run that was replaced stayed for half an hour."""
    clock = VirtualClock()
    options = {"checkpoints": settings(tmp_path, interval_s=1800.0, transaction_timeout_s=3600.0), "clock": clock}
    zombie = await summing(broker).start(**options)
    job = await summing(broker).start(**options)
    await clock.advance(10.0)
    with pytest.raises(JobFailed, match=r"another run of the flow, .*, has taken over") as ended:
        await asyncio.wait_for(zombie.wait(), PATIENCE_S)
    assert type(ended.value.__cause__) is ProducerFenced
    await job.stop("suspend")


async def test_a_sink_of_an_older_run_that_writes_fails_it(broker: MemoryBroker, tmp_path: Path) -> None:
    """The message blamed the disk instead of naming the refused step and the newer run."""
    zombie = await summing(broker).start(checkpoints=settings(tmp_path))
    job = await summing(broker).start(checkpoints=settings(tmp_path))
    await write(broker.topic("numbers"), range(5))
    with pytest.raises(JobFailed, match="step 'sink sums'") as ended:
        await asyncio.wait_for(zombie.wait(), PATIENCE_S)
    assert (ended.value.step, type(ended.value.__cause__)) == ("sink sums", ProducerFenced)
    await handled(job, "sink sums", 5)
    await job.stop("suspend")
    assert await written(broker.topic("sums")) == expected(5)


async def test_running_a_flow_to_its_end_raises_the_error_of_its_job(broker: MemoryBroker, tmp_path: Path) -> None:
    """A service that was replaced started another run of itself, and the two runs replaced each other forever."""
    jobs: list[Job] = []

    @contextlib.asynccontextmanager
    async def noted(job: Job, stops: Sequence[StopMode]) -> AsyncIterator[None]:
        jobs.append(job)
        yield

    options = {"checkpoints": settings(tmp_path)}
    running = asyncio.create_task(run_jobs(summing(broker).start, options, while_running=noted))
    await until(lambda: bool(jobs))
    job = await summing(broker).start(checkpoints=settings(tmp_path))
    with pytest.raises(ProducerFenced):
        await jobs[0].checkpoint()
    with pytest.raises(JobFailed) as ended:
        await asyncio.wait_for(running, PATIENCE_S)
    assert (type(ended.value.__cause__), len(jobs)) == (ProducerFenced, 1)
    await job.stop("suspend")


async def test_nothing_is_committed_before_its_snapshot_is_stored(broker: MemoryBroker, tmp_path: Path) -> None:
    """A crash between commit and store left outputs without a snapshot, and the next run wrote all of them again."""
    await write(broker.topic("numbers"), range(10))
    store = HeldStore(tmp_path)
    job = await summing(broker).start(checkpoints=settings(store))
    await handled(job, "sink sums", 10)
    taking = asyncio.create_task(job.checkpoint())
    await until(store.saves.is_set)
    assert await written(broker.topic("sums")) == []
    commits = await written(broker.topic("streamiter-commits"))
    assert [commit["checkpoint"] for commit in commits] == [None]  # the start of the run
    await job.stop("abort")  # The abort has the effect of a crash: the snapshot is not stored.
    with pytest.raises(CheckpointError, match="given one that has ended"):
        await taking
    job = await summing(broker, stop="latest").start(checkpoints=settings(tmp_path))
    await asyncio.wait_for(job.wait(), PATIENCE_S)
    assert await written(broker.topic("sums")) == expected(10)


async def test_nothing_is_committed_where_its_snapshot_cannot_be_stored(broker: MemoryBroker, tmp_path: Path) -> None:
    """The disk of the checkpoints was full, and outputs became visible, and again after the restart."""
    await write(broker.topic("numbers"), range(10))
    job = await summing(broker).start(checkpoints=settings(FullStore(blobs_at(tmp_path))))
    await handled(job, "sink sums", 10)
    with pytest.raises(StorageFull, match=r"^flow 'sums of numbers': no room for checkpoint 1$"):
        await job.checkpoint()
    assert await written(broker.topic("sums")) == []
    await job.stop("abort")
    job = await summing(broker, stop="latest").start(checkpoints=settings(tmp_path))
    await asyncio.wait_for(job.wait(), PATIENCE_S)
    assert await written(broker.topic("sums")) == expected(10)


class FullStore(CheckpointStore):
    """A store on a full disk."""

    async def save(
        self, header: SnapshotHeader, parts: Iterable[SnapshotPart], others: OtherFiles | None = None
    ) -> int:
        raise StorageFull(f"flow {header.flow!r}: no room for checkpoint {header.id.number}")  # as files do


class LateStore(CheckpointStore):
    """A store that does not answer when a checkpoint is committed, while ``is_away``."""

    is_away = False

    async def commit(self, flow: str, checkpoint: CheckpointId) -> None:
        if self.is_away:
            raise StoreUnavailable("away")
        await super().commit(flow, checkpoint)


async def test_a_commit_that_the_store_has_not_heard_of_is_not_removed(
    broker: MemoryBroker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The store was away for one commit. Then the output had no room, and the snapshot was removed that the last commit
    record names: the next run had no state.
    """
    await write(broker.topic("numbers"), range(10))
    store = LateStore(blobs_at(tmp_path))
    job = await summing(broker).start(checkpoints=settings(store))
    await handled(job, "sink sums", 10)
    assert await job.checkpoint() == 1
    store.is_away = True
    assert await job.checkpoint() == 2
    store.is_away = False

    async def no_room(self: object) -> None:
        raise StorageFull("no room for outputs")

    with monkeypatch.context() as patched:
        patched.setattr(MemoryTransactions, "commit", no_room)
        with pytest.raises(StorageFull, match="no room for outputs"):
            await job.checkpoint()
    await job.stop("abort")
    job = await summing(broker, stop="latest").start(checkpoints=settings(tmp_path))
    await asyncio.wait_for(job.wait(), PATIENCE_S)
    assert await written(broker.topic("sums")) == expected(10)


class AwayStore(CheckpointStore):
    """A store that does not answer after the commit."""

    async def prune(self, flow: str, *, keep: int) -> list[CheckpointId]:
        raise StoreUnavailable("away")


async def test_a_checkpoint_counts_although_older_ones_cannot_be_removed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The store was away for a moment behind the last commit, and a job that had done everything failed."""
    flow = Flow("numbers")
    flow.from_items([1, 2, 3], name="numbers").collect(name="collected")
    job = await flow.start(checkpoints=settings(AwayStore(blobs_at(tmp_path))))
    statistics = await asyncio.wait_for(job.wait(), PATIENCE_S)
    assert statistics.checkpoints is not None
    assert (statistics.checkpoints.taken, statistics.checkpoints.given_up) == (1, 0)
    assert "flow 'numbers': away" in caplog.text
    assert (await store_at(tmp_path).list("numbers"))[-1].job_ended


async def test_outputs_in_another_place_are_reported_as_at_least_once(
    broker: MemoryBroker, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Only one of two clusters was exactly once, and no message said so."""
    other = MemoryBroker()
    await other.topic("copies").create()
    await write(broker.topic("numbers"), range(3))
    flow = summing(broker)
    flow.source(broker.topic("numbers"), name="again").sink(other.topic("copies"), name="copy")
    with caplog.at_level(logging.WARNING):
        job = await flow.start(checkpoints=settings(tmp_path))
    assert "step 'copy': delivers at least once to" in caplog.text
    assert "'sink sums'" not in caplog.text
    await handled(job, "copy", 3)
    async with asyncio.timeout(PATIENCE_S):
        while await written(other.topic("copies")) != [0, 1, 2]:
            await asyncio.sleep(0)
    await job.stop("abort")


@pytest.mark.parametrize("has_results", [True, False], ids=["beside results", "alone"])
async def test_dead_letters_in_another_place_do_not_change_the_place_of_commits(
    has_results: bool, broker: MemoryBroker, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Dead letters were sent to another cluster, and from then on results came twice after each restart."""
    logs = MemoryBroker()
    await logs.topic("refused").create()
    await write(broker.topic("numbers"), range(3))
    writer = await broker.topic("numbers").open_writer()
    await writer.write(OutgoingBatch([b"no JSON"]))
    await writer.close()
    flow = Flow("with dead letters")
    numbers = flow.source(broker.topic("numbers"), on_error="dead_letter", dead_letter=logs.topic("refused"))
    if has_results:
        numbers.sink(broker.topic("sums"))
    else:
        numbers.collect(name="sink sums")
    job = await flow.start(checkpoints=settings(tmp_path))
    [letters] = [each.step for task in job.statistics().tasks for each in task.steps if "dead" in each.step]
    await handled(job, "sink sums", 3)
    await handled(job, letters, 1)
    assert await written(broker.topic("sums")) == []
    await job.checkpoint()
    assert await written(broker.topic("sums")) == ([0, 1, 2] if has_results else [])
    demoted = [record.getMessage() for record in caplog.records if "delivers at least once" in record.message]
    assert [letters in message for message in demoted] == ([True] if has_results else [])
    await job.stop("abort")


class Reported(Source):
    """Emits ten numbers, then waits; it cannot report its positions."""

    bounded = False

    def open(self, context: Context, positions: Positions | None) -> None:
        self.next = (positions or {}).get("next", 0)
        self.reports = 0

    async def read(self) -> SourceBatch:
        if self.next == 10:
            await asyncio.Event().wait()
        self.next += 1
        return SourceBatch([self.next], {"next": self.next})

    def report_positions(self, group: str, positions: Positions) -> None:
        self.reports += 1
        raise KeyError(group)


async def test_a_source_that_cannot_report_its_lag_does_not_end_the_job(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The monitoring failed, the source's client raised a KeyError, and the service ended."""
    source = Reported()
    flow = Flow("reporting")
    flow.from_source(lambda: source, name="in").collect(name="all")
    job = await flow.start(checkpoints=settings(tmp_path))
    await handled(job, "all", 10)
    for count in range(1, 4):
        await job.checkpoint()
        await until(lambda count=count: source.reports >= count)
    assert caplog.text.count("its lag cannot be reported") == 1
    assert "step 'in': its lag cannot be reported: KeyError: 'streamiter-reporting'" in caplog.text
    assert (await job.stop("suspend")).state == "suspended"


async def test_a_sink_with_delivery_at_least_once_writes_at_once(broker: MemoryBroker, tmp_path: Path) -> None:
    """Dashboards waited ten seconds for each point."""
    await write(broker.topic("numbers"), range(3))
    job = await summing(broker, delivery="at_least_once").start(checkpoints=settings(tmp_path))
    async with asyncio.timeout(PATIENCE_S):
        while await written(broker.topic("sums")) != expected(3):
            await asyncio.sleep(0)
    await job.stop("abort")


async def test_added_and_removed_steps_are_named(broker: MemoryBroker, tmp_path: Path) -> None:
    """A renamed step silently lost its state."""
    job = await summing(broker).start(checkpoints=settings(tmp_path))
    await job.stop("suspend")
    flow = Flow("sums of numbers")
    numbers = flow.source(broker.topic("numbers"), stop="latest")
    numbers.key_by(lambda n: n % 2).reduce(lambda a, b: a + b, name="total").sink(broker.topic("sums"))
    both = r"no step 'sum', whose state it has; a new step 'total', .*changed_steps=\['sum', 'total'\]"
    with pytest.raises(CheckpointError, match=both):
        await flow.start(checkpoints=settings(tmp_path))
    with pytest.raises(CheckpointError, match="given a new step 'total', without state in it"):
        await flow.start(checkpoints=settings(tmp_path), changed_steps=["sum"])
    job = await flow.start(checkpoints=settings(tmp_path), changed_steps=["sum", "total"])
    assert (await asyncio.wait_for(job.wait(), PATIENCE_S)).state == "finished"


async def test_without_outputs_in_transactions_the_store_knows_the_committed_checkpoint(
    broker: MemoryBroker, tmp_path: Path
) -> None:
    """A flow without sinks, which keeps state and serves it from memory, could not be restarted."""

    def counting(stop: Any = None) -> tuple[Flow, Any]:
        flow = Flow("counting")
        numbers = flow.source(broker.topic("numbers"), stop=stop)
        return flow, numbers.key_by(lambda n: n % 2).reduce(lambda a, b: a + b, name="sum").collect(name="all")

    await write(broker.topic("numbers"), range(6))
    flow, _ = counting()
    job = await flow.start(checkpoints=settings(tmp_path))
    await handled(job, "all", 6)
    await job.checkpoint()
    await job.stop("abort")
    await write(broker.topic("numbers"), range(6, 9))
    flow, collected = counting("latest")
    job = await flow.start(checkpoints=settings(tmp_path))
    await asyncio.wait_for(job.wait(), PATIENCE_S)
    assert collected.items == expected(9)
