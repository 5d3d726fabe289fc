"""Which checkpoint the next run of a job starts from, and with which errors."""

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from runtime.checkpointed_sums import broker_of_sums, expected, handled, settings, summing, write, written
from support.waiting import PATIENCE_S

from streamiter import Operator
from streamiter.engine.storage.snapshot import CheckpointId
from streamiter.engine.storage.store import store_at
from streamiter.errors import CheckpointError, JobFailed
from streamiter.topics import MemoryBroker, OutgoingBatch


@pytest.fixture
async def broker() -> MemoryBroker:
    return await broker_of_sums()


async def test_a_fresh_start_keeps_committed_outputs(broker: MemoryBroker, tmp_path: Path) -> None:
    """restore=None deleted the results of the runs before."""
    await write(broker.topic("numbers"), range(4))
    for _ in range(2):
        job = await summing(broker, stop="latest").start(checkpoints=settings(tmp_path), restore=None)
        await asyncio.wait_for(job.wait(), PATIENCE_S)
    assert await written(broker.topic("sums")) == expected(4) * 2


async def test_a_crash_before_the_first_commit_is_a_fresh_start(broker: MemoryBroker, tmp_path: Path) -> None:
    """A process that died in its first seconds could not be started again without an operator's help."""
    await write(broker.topic("numbers"), range(4))
    job = await summing(broker).start(checkpoints=settings(tmp_path))
    await job.stop("abort")
    job = await summing(broker, stop="latest").start(checkpoints=settings(tmp_path))
    await asyncio.wait_for(job.wait(), PATIENCE_S)
    assert await written(broker.topic("sums")) == expected(4)


async def test_checkpoints_without_their_commit_records_are_no_fresh_start(
    broker: MemoryBroker, tmp_path: Path
) -> None:
    """The service was pointed at an empty cluster, and silently started with empty state."""
    job = await summing(broker).start(checkpoints=settings(tmp_path))
    await job.stop("suspend")
    await broker.topic("streamiter-commits").delete()
    with pytest.raises(CheckpointError, match="has no commit record of this flow, so it is unknown"):
        await summing(broker).start(checkpoints=settings(tmp_path))


async def test_a_committed_checkpoint_that_the_store_does_not_have_is_an_error(
    broker: MemoryBroker, tmp_path: Path
) -> None:
    """The volume was not mounted, and the service started fresh, although it had committed results."""
    job = await summing(broker).start(checkpoints=settings(tmp_path / "a"))
    await job.stop("suspend")
    with pytest.raises(
        CheckpointError, match=r"checkpoint 1 of .* cannot be read: .*Give the store that the last run had"
    ) as raised:
        await summing(broker).start(checkpoints=settings(tmp_path / "b"))
    assert str(raised.value).count("flow 'sums of numbers'") == 1


async def test_a_chosen_checkpoint_is_resumed_from(broker: MemoryBroker, tmp_path: Path) -> None:
    """After a bad deployment, the state of the day before could not be restored."""
    job = await summing(broker).start(checkpoints=settings(tmp_path))
    for count in (5, 10):
        await write(broker.topic("numbers"), range(count - 5, count))
        await handled(job, "sink sums", count)
        await job.checkpoint()
    await job.stop("abort")
    with pytest.raises(CheckpointError, match="expected a checkpoint 7 in the store, given 1, 2"):
        await summing(broker).start(checkpoints=settings(tmp_path), restore=7)
    job = await summing(broker, stop="latest").start(checkpoints=settings(tmp_path), restore=1)
    await asyncio.wait_for(job.wait(), PATIENCE_S)
    assert await written(broker.topic("sums")) == expected(10) + expected(10)[5:]


async def test_a_checkpoint_that_was_never_committed_is_not_resumed_from(broker: MemoryBroker, tmp_path: Path) -> None:
    """A job was killed between snapshot and commit, and a restart from this snapshot lost half of the outputs."""
    job = await summing(broker).start(checkpoints=settings(tmp_path))
    await job.checkpoint()
    await job.stop("suspend")
    store = store_at(tmp_path)
    await store.claim("sums of numbers", "killed")
    [_, last] = await store.list("sums of numbers")
    await store.save(replace(last, id=CheckpointId(3, "killed")), [])
    await store.close()
    with pytest.raises(CheckpointError, match="checkpoint 3 was never committed: its run ended before"):
        await summing(broker).start(checkpoints=settings(tmp_path), restore=3)
    for restore in (1, 2, "last"):  # Restore an older checkpoint, and then a newer one again.
        job = await summing(broker).start(checkpoints=settings(tmp_path), restore=restore)  # type: ignore[arg-type]
        await job.stop("abort")


async def test_a_snapshot_that_its_own_run_did_not_commit_is_not_resumed_from(
    broker: MemoryBroker, tmp_path: Path
) -> None:
    """The snapshot was newer than the last one that this run had committed, so its outputs were aborted."""
    store = store_at(tmp_path)
    job = await summing(broker).start(checkpoints=settings(store))
    await job.checkpoint()
    run = (await store.list("sums of numbers"))[-1]
    await store.save(replace(run, id=CheckpointId(2, run.id.run)), [])
    await job.stop("abort")
    with pytest.raises(CheckpointError, match="checkpoint 2 was never committed: its run ended before"):
        await summing(broker).start(checkpoints=settings(tmp_path), restore=2)
    job = await summing(broker).start(checkpoints=settings(tmp_path), restore=1)
    await job.stop("abort")


class Broken(Operator):
    """An operator that cannot be opened."""

    def open(self, context: Any) -> None:
        raise OSError("no licence")

    def process(self, record: Any, out: Any) -> None:
        out.emit(record)


@pytest.mark.parametrize("restore", [None, 1], ids=["fresh", "checkpoint 1"])
async def test_a_failed_start_leaves_the_checkpoint_for_the_next_one(
    broker: MemoryBroker, tmp_path: Path, restore: int | None
) -> None:
    """A start with restore=None failed, and the plain start after it had empty sums."""
    await write(broker.topic("numbers"), range(4))
    job = await summing(broker).start(checkpoints=settings(tmp_path))
    await handled(job, "sink sums", 4)
    await job.checkpoint()
    await job.stop("suspend")
    flow = summing(broker)
    flow.source(broker.topic("numbers"), name="more").process(Broken, name="broken").collect(name="never")
    with pytest.raises(JobFailed, match="no licence"):
        await flow.start(checkpoints=settings(tmp_path), restore=restore, changed_steps=["more", "broken", "never"])
    await write(broker.topic("numbers"), range(4, 6))
    job = await summing(broker, stop="latest").start(checkpoints=settings(tmp_path))
    statistics = await asyncio.wait_for(job.wait(), PATIENCE_S)
    assert statistics.checkpoints is not None
    assert statistics.checkpoints.restored == 2
    assert await written(broker.topic("sums")) == expected(6)


async def test_an_invalid_commit_record_does_not_prevent_a_fresh_start(broker: MemoryBroker, tmp_path: Path) -> None:
    """The error advised restore=None, which gave the same error again."""
    job = await summing(broker).start(checkpoints=settings(tmp_path))
    await job.stop("suspend")
    writer = await broker.topic("streamiter-commits").open_writer()
    await writer.write(OutgoingBatch([b"something else"], keys=[b"sums of numbers"]))
    await writer.close()
    with pytest.raises(CheckpointError, match="expected a commit record, given b'something else'"):
        await summing(broker).start(checkpoints=settings(tmp_path))
    for restore in (1, None):
        job = await summing(broker).start(checkpoints=settings(tmp_path), restore=restore)
        await job.stop("suspend")


def cut_off_the_last(folder: Path) -> None:
    [*_, last] = sorted(folder.rglob("*.checkpoint"))
    last.write_bytes(last.read_bytes()[:-3])


async def test_a_damaged_checkpoint_is_reported_as_damaged(broker: MemoryBroker, tmp_path: Path) -> None:
    """A damaged checkpoint was reported as a wrong folder."""
    job = await summing(broker).start(checkpoints=settings(tmp_path))
    await job.checkpoint()
    await job.stop("suspend")
    cut_off_the_last(tmp_path)
    with pytest.raises(CheckpointError, match=r"checkpoint 2 .* cannot be read: .*damaged.*there is 1") as raised:
        await summing(broker).start(checkpoints=settings(tmp_path))
    assert str(raised.value).count("flow 'sums of numbers'") == 1
    job = await summing(broker).start(checkpoints=settings(tmp_path), restore=1)
    await job.stop("abort")


async def test_changed_steps_that_stay_in_the_program_keep_their_state(
    broker: MemoryBroker, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """With the option left in the program, or misspelt in it, each restart started with empty sums."""
    for count in (2, 4, 6):
        await write(broker.topic("numbers"), range(count - 2, count))
        job = await summing(broker).start(checkpoints=settings(tmp_path), changed_steps=["sum", "smu"])
        await handled(job, "sink sums", 2)
        await job.stop("suspend")
    assert await written(broker.topic("sums")) == expected(6)
    assert "changed_steps= names 'smu', which neither the flow nor checkpoint 1 has" in caplog.text
    assert "did you mean 'sum'?" in caplog.text
