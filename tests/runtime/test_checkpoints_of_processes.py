"""Checkpoints of a flow in several processes: each case that the simulation of processes does not reach on purpose."""

import asyncio
from pathlib import Path
from typing import Any

import pytest
from processes.linked_jobs import JoinedJobs, joined_jobs
from runtime.checkpointed_sums import handled, settings, written
from support.waiting import PATIENCE_S, until

from streamiter import Flow, Operator
from streamiter.engine.plan.job_settings import JobOptions
from streamiter.engine.storage.flow_checkpoints import FlowCheckpoints
from streamiter.engine.storage.flow_record import snapshot_name
from streamiter.engine.storage.snapshot import CheckpointId
from streamiter.engine.storage.store import blobs_at
from streamiter.errors import CheckpointError, ConfigurationError, JobFailed, ProducerFenced
from streamiter.operators import Output
from streamiter.testing import VirtualClock
from streamiter.topics import MemoryBroker, OutgoingBatch


class Held(Operator):
    """Passes records on while it is open; only the subtasks other than 0 are ever closed."""

    def __init__(self, door: asyncio.Event) -> None:
        self._door = door

    def open(self, context: Any) -> None:
        self._waits = context.subtask_index > 0

    async def process(self, record: Any, out: Output) -> None:
        if self._waits:
            await self._door.wait()
        out.emit(record)


@pytest.fixture
async def broker() -> MemoryBroker:
    broker = MemoryBroker()
    await broker.topic("numbers").create(partitions=4)
    await broker.topic("sums").create()
    return broker


def summing(broker: MemoryBroker, *, door: asyncio.Event | None = None, parallelism: int = 3, stop: Any = None) -> Flow:
    """Return a flow of running sums by parity, behind a step that ``door`` holds in other processes."""
    flow = Flow("sums", parallelism=parallelism)
    numbers = flow.source(broker.topic("numbers"), stop=stop, name="in")
    if door is not None:
        numbers = numbers.process(lambda: Held(door), name="held")
    sums = numbers.key_by(lambda number: number % 4).reduce(lambda a, b: a + b, name="sum")
    sums.sink(broker.topic("sums"), name="out")
    return flow


def expected(count: int) -> list[int]:
    sums = [0] * 4
    seen = []
    for number in range(count):
        sums[number % 4] += number
        seen.append(sums[number % 4])
    return sorted(seen)


async def started(
    broker: MemoryBroker, folder: Path, processes: int = 2, *, clock: Any = None, **flow: Any
) -> JoinedJobs:
    options = {} if clock is None else {"clock": clock}
    joined = joined_jobs(
        [summing(broker, **flow) for _ in range(processes)],
        JobOptions(checkpoints=settings(folder, alignment_timeout_s=1.0), **options),
    )
    await joined.start()
    return joined


async def write(broker: MemoryBroker, values: range) -> None:
    """Write numbers; those of one sum are in one partition."""
    writer = await broker.topic("numbers").open_writer()
    await writer.write(OutgoingBatch([b"%d" % n for n in values], keys=[b"%d" % (n % 4) for n in values]))
    await writer.close()


async def test_a_checkpoint_is_given_up_and_dropped_in_all_processes(
    broker: MemoryBroker, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A slow step in another process delayed every checkpoint, or its late parts came into the next one."""
    clock, door = VirtualClock(), asyncio.Event()
    joined = await started(broker, tmp_path, clock=clock, door=door)
    await write(broker, range(40))
    await handled(joined.jobs[1], "held", 1)
    taking = asyncio.ensure_future(joined.jobs[0].checkpoint())
    for _ in range(20):
        await asyncio.sleep(0)
    await clock.advance(1.0)
    with pytest.raises(CheckpointError, match=r"its barrier has not passed .*process 1"):
        await taking
    await until(lambda: "in process 1 its barrier has not passed held[1]" in caplog.text)
    door.set()
    await handled(joined.jobs[0], "out", 40)
    assert await joined.jobs[0].checkpoint() == 2
    assert sorted(await written(broker.topic("sums"))) == expected(40)
    assert sorted(path.name for path in (tmp_path / "sums").glob("0*")) == [
        snapshot_name(CheckpointId(2, path.name.split("-", 1)[1].split(".")[0]), process)
        for path in (tmp_path / "sums").glob("*.checkpoint")
        for process in (1, 0)
    ]
    await joined.abort()


@pytest.mark.parametrize(("processes", "parallelism"), [(3, 3), (1, 3), (2, 2), (2, 4)])
async def test_a_suspended_flow_resumes_in_any_number_of_processes(
    broker: MemoryBroker, tmp_path: Path, processes: int, parallelism: int
) -> None:
    """A flow could only resume on as many machines as before."""
    joined = await started(broker, tmp_path)
    await write(broker, range(20))
    await handled(joined.jobs[0], "out", 20)
    statistics = await asyncio.wait_for(joined.jobs[0].stop("suspend"), PATIENCE_S)
    await asyncio.wait_for(joined.wait(), PATIENCE_S)
    assert statistics.state == "suspended"
    assert sorted(await written(broker.topic("sums"))) == expected(20)
    await write(broker, range(20, 33))
    joined = await started(broker, tmp_path, processes, parallelism=parallelism, stop="latest")
    await asyncio.wait_for(joined.wait(), PATIENCE_S)
    assert joined.jobs[0].statistics().state == "finished"
    assert sorted(await written(broker.topic("sums"))) == expected(33)
    headers = [FlowCheckpoints(blobs_at(tmp_path), "sums").header(each) for each in _snapshots(tmp_path)]
    assert [header.job_ended for header in headers] == [False, True]


def _snapshots(folder: Path) -> list[CheckpointId]:
    return FlowCheckpoints(blobs_at(folder), "sums").snapshots()


async def test_a_job_whose_tasks_have_ended_still_answers_barriers(broker: MemoryBroker, tmp_path: Path) -> None:
    """The tasks of one process had ended, and no checkpoint was complete until the others ended days later."""
    flows = []
    for _ in range(2):
        flow = Flow("sums", parallelism=2)
        flow.from_items(range(10), name="short").map(lambda n: n, name="wide").sink(broker.topic("sums"), name="out")
        flow.source(broker.topic("numbers"), parallelism=1, name="in").key_by(lambda n: 0).reduce(
            lambda a, b: a + b, name="sum", parallelism=1
        ).sink(broker.topic("sums"), name="endless", parallelism=1)
        flows.append(flow)
    joined = joined_jobs(flows, JobOptions(checkpoints=settings(tmp_path)))
    await joined.start()
    await until(lambda: all(task.ended for task in joined.jobs[1].statistics().tasks))
    assert await asyncio.wait_for(joined.jobs[0].checkpoint(), PATIENCE_S) == 1
    await asyncio.wait_for(joined.jobs[0].stop("suspend"), PATIENCE_S)
    await asyncio.wait_for(joined.wait(), PATIENCE_S)
    assert sorted(await written(broker.topic("sums"))) == list(range(10))


async def test_of_two_runs_in_several_processes_the_newer_one_continues(broker: MemoryBroker, tmp_path: Path) -> None:
    """Two copies of a service on two machines each took checkpoints, and stored records twice."""
    older = await started(broker, tmp_path)
    await write(broker, range(20))
    await handled(older.jobs[0], "out", 20)
    newer = await started(broker, tmp_path, 3, stop="latest")
    # Either process may be the first that hears of the newer run.
    with pytest.raises((ProducerFenced, CheckpointError, JobFailed), match="has claimed the flow since"):
        await asyncio.wait_for(older.jobs[0].checkpoint(), PATIENCE_S)
    await older.abort()
    await asyncio.wait_for(newer.wait(), PATIENCE_S)
    assert sorted(await written(broker.topic("sums"))) == expected(20)
    [last] = _snapshots(tmp_path)
    assert len(list((tmp_path / "sums").glob("*.parts"))) == 2
    FlowCheckpoints(blobs_at(tmp_path), "sums").open(last).close()


async def test_a_lost_file_of_another_process_is_named_at_the_start(broker: MemoryBroker, tmp_path: Path) -> None:
    """A restart without the disk of one machine began with a part of the state."""
    await write(broker, range(20))
    joined = await started(broker, tmp_path, stop="latest")
    await asyncio.wait_for(joined.wait(), PATIENCE_S)
    [lost] = (tmp_path / "sums").glob("*.1.parts")
    lost.unlink()
    with pytest.raises(CheckpointError, match=rf"{lost}: expected the parts .* that process 1 wrote"):
        await started(broker, tmp_path, stop="latest")


async def test_processes_with_folders_of_their_own_are_refused(broker: MemoryBroker, tmp_path: Path) -> None:
    """Each machine wrote checkpoints to its own disk."""
    joined = joined_jobs(
        [summing(broker) for _ in range(2)],
        lambda process: JobOptions(checkpoints=settings(tmp_path / f"disk of {process}")),
    )
    with pytest.raises(ConfigurationError, match="process 1 does not find the claim of process 0"):
        await joined.start()
