"""Checkpoints of loops through topics store the positions of feedback in the topic, and a restart reads exactly it."""

import asyncio
import random
import uuid
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from checkpoints.deferred_support import unnamed_files
from iteration.iteration_support import SMALL, ended, run_shuffled
from iteration.topic_loops_support import (
    KINDS,
    Door,
    Kind,
    MakeTopic,
    check_undisturbed,
    end_of,
    logged_in_last,
    token_flow,
    values_in,
)
from support.soak import ForEachSeed, in_soak
from support.waiting import PATIENCE_S, until

from streamiter import (
    Checkpoints,
    FeedbackLimits,
    Flow,
    IterationBodyResult,
    IterationConfig,
    Stream,
    feedback_through,
    iterate_bounded_streams_until_termination,
)
from streamiter.engine.graph.feedback import FeedbackChannel, RecordPoint, TopicRange
from streamiter.engine.inbox.alignment import FeedbackLog
from streamiter.engine.inbox.port_log import Port
from streamiter.engine.job.job import Job
from streamiter.engine.storage.disk_queue import SpillQueue
from streamiter.engine.storage.store import MemoryStore
from streamiter.engine.tasks.topic_outgoing import Message
from streamiter.engine.tasks.topic_returning import ReturningPump, TopicReturnPath
from streamiter.errors import CheckpointError, JobFailed
from streamiter.testing import VirtualClock
from streamiter.topics import MemoryBroker, OutgoingBatch, ReadRequest, Topic
from streamiter.topics.memory import MemoryTopic
from streamiter.topics.topic import TopicWriter
from streamiter.values.plain_data import PlainData
from streamiter.values.records import CheckpointBarrier, DataBatch

TOKENS, MOST = 12, 30
RARELY_S = 100.0


def flow_of(loop: Topic | None, out: Topic, kind: Kind = "asynchronous", **options: Any) -> Flow:
    return token_flow(loop, out, tokens=TOKENS, most=MOST, kind=kind, **options)


async def is_undisturbed(out: Topic) -> None:
    check_undisturbed(await values_in(out), tokens=TOKENS, most=MOST)


async def visits(job: Job, count: int) -> None:
    """Wait until ``count`` visits were counted, or the loop has ended."""

    def are_done() -> bool:
        statistics = job.statistics()
        return statistics.step("visits").records_in >= count or statistics.loops[0].ended_in is not None

    await until(are_done)


async def crashed_after_a_checkpoint(job: Job, *, more_turns: int = 0) -> bool:
    """Take a checkpoint and abort the job; return whether the job had ended before."""
    try:
        await asyncio.wait_for(job.checkpoint(), PATIENCE_S)
    except CheckpointError:
        await ended(job)
        return True
    for _ in range(more_turns):
        await asyncio.sleep(0)
    await job.stop("abort")
    return False


def ranges_of(logged: list[Any]) -> list[TopicRange]:
    assert all(isinstance(each, TopicRange) for each in logged), logged
    return logged


# -- restarts -------------------------------------------------------------------------------------------------


# Killed processes cover each kind, and the cases of loops each kind in memory.
ON_TOPICS = pytest.mark.parametrize(
    ("make_topic", "kind"),
    [("sqlite", "one ahead"), ("kafka", "asynchronous"), *in_soak(("sqlite", "unbounded"), ("kafka", "synchronous"))],
    indirect=["make_topic"],
)


@ON_TOPICS
async def test_after_crashes_a_loop_has_the_results_of_an_undisturbed_one(make_topic: MakeTopic, kind: Kind) -> None:
    """A run read feedback from after its checkpoint, or lost feedback from before it."""
    loop, out = await make_topic(partitions=3), await make_topic(name="out")
    name, store, found = f"tokens {uuid.uuid4().hex}", MemoryStore(), list[Any]()
    for run in range(3):
        store = store.another()
        flow = flow_of(loop, out, kind, name=name)
        job = await flow.start(checkpoints=Checkpoints(store, interval_s=RARELY_S), channel_limits=SMALL)
        await visits(job, 20 * run)
        if await crashed_after_a_checkpoint(job, more_turns=50):
            break
        found += await logged_in_last(store, name)
    job = await flow_of(loop, out, kind, name=name).start(checkpoints=Checkpoints(store.another(), interval_s=RARELY_S))
    await ended(job)
    await is_undisturbed(out)
    assert ranges_of(found)


async def crashing(seed: int, kind: Kind) -> list[list[TopicRange]]:
    """Crash several times, sometimes before the last run's feedback is read; return the ranges in each checkpoint."""
    broker, store, chance = MemoryBroker(), MemoryStore(), random.Random(seed)
    loop, out = broker.topic("loop"), broker.topic("out")
    await loop.create(partitions=2 + seed % 3)
    await out.create()
    found: list[list[TopicRange]] = []
    for _ in range(6):
        store = store.another()
        job = await flow_of(loop, out, kind).start(
            checkpoints=Checkpoints(store, interval_s=RARELY_S), channel_limits=SMALL
        )
        for _ in range(chance.choice([0, 0, 5, 40, 150])):
            await asyncio.sleep(0)
        if await crashed_after_a_checkpoint(job, more_turns=chance.randrange(60)):
            break
        found.append(ranges_of(await logged_in_last(store)))
        if chance.random() < 0.3:  # The home partitions of producers may change then.
            await loop.create(partitions=5)
    else:
        job = await flow_of(loop, out, kind).start(checkpoints=Checkpoints(store.another(), interval_s=RARELY_S))
        await ended(job)
    await is_undisturbed(out)
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_feedback_survives_several_crashes(kind: Kind) -> None:
    """Feedback of an earlier run was lost when the next run crashed before it had read this feedback."""
    found = [ranges for seed in range(2) for ranges in run_shuffled(crashing(seed, kind), seed)]
    runs = max(len({lying.run for lying in ranges}) for ranges in found)
    assert runs > (1 if kind in ("asynchronous", "unbounded") else 0)


@pytest.mark.soak
@pytest.mark.parametrize("kind", KINDS)
def test_feedback_survives_several_crashes_under_further_seeds(for_each_soak_seed: ForEachSeed, kind: Kind) -> None:
    """The order of a crash and the writes of feedback is rarely the wrong one."""
    for_each_soak_seed(lambda seed: run_shuffled(crashing(seed, kind), seed))


@ON_TOPICS
async def test_a_suspended_loop_resumes(make_topic: MakeTopic, kind: Kind, tmp_path: Path) -> None:
    """The pumps stopped before the feedback from before the last barrier was in the topic."""
    loop, out = await make_topic(partitions=2), await make_topic(name="out")
    name = f"tokens {uuid.uuid4().hex}"
    for run in range(3):
        job = await flow_of(loop, out, kind, name=name).start(
            checkpoints=Checkpoints(tmp_path, interval_s=RARELY_S), channel_limits=SMALL
        )
        await visits(job, 7 * run)
        await asyncio.wait_for(job.stop("suspend"), PATIENCE_S)
    job = await flow_of(loop, out, kind, name=name).start(checkpoints=Checkpoints(tmp_path, interval_s=RARELY_S))
    await ended(job)
    await is_undisturbed(out)


# -- other writers of the topic -------------------------------------------------------------------------------


async def test_later_records_of_a_zombie_are_not_read(make_topic: MakeTopic) -> None:
    """Two pods ran for a minute, and the new one read the feedback that the old one still wrote as its own."""
    loop, out = await make_topic(partitions=3), await make_topic(name="out")
    name = f"tokens {uuid.uuid4().hex}"
    store = MemoryStore()  # While a disk stores the checkpoint, the zombie could reach its end.
    door = asyncio.Event()
    door.set()
    zombie = await flow_of(loop, out, name=name, door=door).start(
        checkpoints=Checkpoints(store, interval_s=RARELY_S), channel_limits=SMALL
    )
    await visits(zombie, 20)
    door.clear()
    taking = asyncio.create_task(zombie.checkpoint())
    await asyncio.sleep(0)
    door.set()
    await taking
    door.clear()
    left = ranges_of(await logged_in_last(store, name))
    job = await flow_of(loop, out, name=name).start(
        checkpoints=Checkpoints(store.another(), interval_s=RARELY_S), channel_limits=SMALL
    )
    await visits(job, 5)
    await writes_on(loop, left[0])
    await ended(job)
    door.set()
    with pytest.raises(JobFailed, match=r"another run of the flow.* has taken over|has claimed the flow since"):
        await ended(zombie)
    runs = await runs_in(loop, left[0].partition)
    old, new = left[0].run, next(run for run in runs if run != left[0].run)
    assert set(runs) == {old, new}
    assert old in runs[runs.index(new) :]
    await is_undisturbed(out)


async def writes_on(loop: Topic, lying: TopicRange) -> None:
    """Write records after the last barrier of a run, as the run does until it is fenced."""
    writer = await loop.open_writer()
    for sequence in range(lying.stop.sequence + 1, lying.stop.sequence + 4):
        message = Message(lying.run, lying.producer, "data", 1, sequence, lying.partition)
        records = PlainData().encode_batch([(0, 3)])
        await writer.write(OutgoingBatch([records], headers=[message.headers()], partition=lying.partition))
    await writer.close()


async def runs_in(loop: Topic, partition: int) -> list[str]:
    """Return the run of each record in a partition."""
    reader = await loop.open_reader(ReadRequest(stop="latest"))
    runs: list[str] = []
    while (batch := await reader.read()) is not None:
        if batch.partition == partition:
            runs += [Message.from_headers(headers).run for headers in batch.headers]
    await reader.close()
    return runs


class Twice(MemoryTopic):
    """A topic that writes each batch twice."""

    def __init__(self, broker: MemoryBroker, name: str) -> None:
        super().__init__(broker.topic(name)._store, name)

    async def open_writer(self) -> TopicWriter:  # type: ignore[override]
        return TwiceWriter(await super().open_writer())


class TwiceWriter(TopicWriter):
    def __init__(self, writer: TopicWriter) -> None:
        self._writer = writer

    async def write(self, batch: OutgoingBatch) -> None:
        await self._writer.write(batch)
        await self._writer.write(batch)

    async def flush(self) -> None:
        await self._writer.flush()

    async def close(self) -> None:
        await self._writer.close()


async def test_a_record_that_is_stored_twice_counts_once() -> None:
    """A writer sent records again because the answer was lost, and the records counted twice."""
    broker, store = MemoryBroker(), MemoryStore()
    loop, out = broker.topic("loop"), broker.topic("out")
    await loop.create(partitions=2)
    await out.create()
    twice = Twice(broker, "loop")
    job = await flow_of(twice, out).start(checkpoints=Checkpoints(store, interval_s=RARELY_S), channel_limits=SMALL)
    await visits(job, 30)
    await crashed_after_a_checkpoint(job)
    assert ranges_of(await logged_in_last(store))
    job = await flow_of(twice, out).start(checkpoints=Checkpoints(store.another(), interval_s=RARELY_S))
    await ended(job)
    await is_undisturbed(out)


# -- missing topics and records -------------------------------------------------------------------------------


async def crashed(loop: Topic | None, out: Topic, store: MemoryStore, **options: Any) -> list[Any]:
    """Crash while feedback is in transit; return the feedback in the checkpoint."""
    settings = Checkpoints(store, interval_s=RARELY_S)
    job = await flow_of(loop, out, **options).start(checkpoints=settings, channel_limits=SMALL)
    await visits(job, 30)
    await crashed_after_a_checkpoint(job)
    return await logged_in_last(store)


async def error_of_restart(loop: Topic | None, out: Topic, store: MemoryStore) -> str:
    """Start from the checkpoint, and return the error of the start or of the job."""
    with pytest.raises(JobFailed) as failed:
        await ended(await flow_of(loop, out).start(checkpoints=Checkpoints(store.another(), interval_s=RARELY_S)))
    return str(failed.value)


async def foreign_records(loop: Topic, count: int) -> None:
    """Write records of another run, which readers skip, to each partition."""
    partitions = (await loop.describe()).partitions
    headers = Message("another run", 0, "data", 1, 0, 0).headers()
    writer = await loop.open_writer()
    for partition in range(partitions):
        await writer.write(OutgoingBatch([b""] * count, headers=[headers] * count, partition=partition))
    await writer.close()


@pytest.fixture
def broker() -> MemoryBroker:
    return MemoryBroker()


async def made(broker: MemoryBroker, **settings: str) -> tuple[Topic, Topic, MemoryStore]:
    loop, out = broker.topic("loop"), broker.topic("out")
    await loop.create(partitions=2, settings=settings)
    await out.create()
    return loop, out, MemoryStore()


async def test_a_range_that_fell_out_of_retention_is_an_error_with_the_numbers(broker: MemoryBroker) -> None:
    """A job that had been down for a month started with only a part of its feedback, and without an error."""
    loop, out, store = await made(broker, retention_records="500")
    ranges = ranges_of(await crashed(loop, out, store))
    await foreign_records(loop, 600)
    earliest, end = (await loop.describe()).offsets[0]
    message = await error_of_restart(loop, out, store)
    assert "step 'variable 0'" in message
    assert any(
        f"memory://loop, partition 0: expected the offsets {lying.start.offset} to {lying.stop.offset}, where"
        in message
        for lying in ranges
        if lying.partition == 0
    )
    assert f"given {earliest} to {end - 1}; the topic's retention has removed it" in message
    assert "Start without state (restore=None), or resume from a checkpoint whose feedback is still there" in message
    begun = await flow_of(loop, out).start(checkpoints=Checkpoints(store.another()), restore=None)
    await ended(begun)


@pytest.mark.parametrize("created_again", ["not", "empty", "full"])
async def test_a_topic_that_was_deleted_is_an_error(broker: MemoryBroker, created_again: str) -> None:
    """The loop started without its feedback, as if the topic had always been empty."""
    loop, out, store = await made(broker)
    ranges = ranges_of(await crashed(loop, out, store))
    await loop.delete()
    if created_again != "not":
        await loop.create(partitions=2)
    if created_again == "full":
        await foreign_records(loop, 2_000)
    message = await error_of_restart(loop, out, store)
    assert "Start without state (restore=None)" in message
    if created_again == "full":
        assert any(
            f"partition {lying.partition}, offset {lying.stop.offset}: expected the records {lying.start.sequence} to "
            f"{lying.stop.sequence - 1} of producer {lying.producer} in run {lying.run!r} before it" in message
            for lying in ranges
        )
    else:
        assert "given none of them" in message


async def test_a_deleted_topic_without_feedback_is_no_error(broker: MemoryBroker) -> None:
    """A checkpoint without feedback in the topic still required the old topic."""
    loop, out, store = await made(broker)
    job = await flow_of(loop, out).start(checkpoints=Checkpoints(store, interval_s=RARELY_S))
    await ended(job)
    await loop.delete()
    await loop.create(partitions=2)
    await ended(await flow_of(loop, out).start(checkpoints=Checkpoints(store.another(), interval_s=RARELY_S)))
    await is_undisturbed(out)


async def test_another_topic_or_none_is_refused_by_name(broker: MemoryBroker) -> None:
    """After an edit of the flow, feedback in the old topic was lost."""
    loop, out, store = await made(broker)
    await crashed(loop, out, store)
    other = broker.topic("other loop")
    await other.create(partitions=2)
    assert "expected the topic 'loop', which has feedback of the checkpoint" in await error_of_restart(
        other, out, store
    )
    assert "the topic 'loop', where the checkpoint has feedback, given a loop in memory" in (
        await error_of_restart(None, out, store)
    )
    await ended(await flow_of(loop, out).start(checkpoints=Checkpoints(store.another(), interval_s=RARELY_S)))
    await is_undisturbed(out)


async def test_a_loop_that_was_in_memory_resumes_through_a_topic(broker: MemoryBroker) -> None:
    """Feedback in the checkpoint came after the topic's feedback, or was stored twice in the next checkpoint."""
    loop, out, store = await made(broker)
    logged = await crashed(None, out, store)
    assert logged
    assert not any(isinstance(each, TopicRange) for each in logged)
    again = store.another()
    job = await flow_of(loop, out).start(checkpoints=Checkpoints(again, interval_s=RARELY_S), channel_limits=SMALL)
    await crashed_after_a_checkpoint(job)
    kept = await logged_in_last(again)
    assert {isinstance(each, TopicRange) for each in kept} >= {False}
    await ended(await flow_of(loop, out).start(checkpoints=Checkpoints(again.another(), interval_s=RARELY_S)))
    await is_undisturbed(out)


# -- the size of checkpoints ----------------------------------------------------------------------------------

BLOCK_BYTES = 100_000


def block_flow(loop: Topic, out: Topic, blocks: int, door: asyncio.Event) -> Flow:
    """Return a flow whose blocks wait at a door when they are fed back."""
    flow = Flow(f"{blocks} blocks")

    def body(variables: list[Stream], data: list[Stream]) -> IterationBodyResult:
        [variable] = variables
        begun = variable.filter(lambda block: block[0] < 0)
        many = begun.flat_map(lambda _: [np.full(BLOCK_BYTES // 8, float(n)) for n in range(blocks)])
        held = variable.filter(lambda block: block[0] >= 0).process(lambda: Door(door), name="door")
        return IterationBodyResult([feedback_through(many, loop)], [held.map(lambda block: float(block[0]))])

    limits = FeedbackLimits(memory_bytes=2 * BLOCK_BYTES)
    config = IterationConfig(max_epochs_ahead=None, feedback_limits=limits)
    initial = flow.from_items([np.array([-1.0])], name="initial")
    [held] = iterate_bounded_streams_until_termination([initial], [], body, config)
    held.sink(out, name="held")
    return flow


async def under_way(loop: Topic, out: Topic, blocks: int, store: MemoryStore) -> tuple[int, list[TopicRange]]:
    """Crash after a checkpoint with this number of waiting blocks; return its size and its ranges."""
    door = asyncio.Event()
    job = await block_flow(loop, out, blocks, door).start(
        checkpoints=Checkpoints(store, interval_s=RARELY_S), channel_limits=SMALL
    )
    async with asyncio.timeout(PATIENCE_S):
        while await end_of(loop) < blocks:
            await asyncio.sleep(0)
    taking = asyncio.create_task(job.checkpoint())
    for _ in range(10):  # The barrier must arrive before the head continues.
        await asyncio.sleep(0)
    door.set()
    await asyncio.wait_for(taking, PATIENCE_S)
    checkpoints = job.statistics().checkpoints
    assert checkpoints is not None
    await job.stop("abort")
    return checkpoints.last_size_bytes, ranges_of(await logged_in_last(store, f"{blocks} blocks"))


async def test_a_checkpoint_is_no_larger_with_more_feedback_in_the_topic(broker: MemoryBroker) -> None:
    """Each checkpoint stored all feedback in the topic a second time."""
    sizes = {}
    for blocks in (40, 140):
        loop, out, store = broker.topic(f"loop {blocks}"), broker.topic(f"out {blocks}"), MemoryStore()
        await loop.create(settings={"max_record_bytes": str(2 * BLOCK_BYTES)})
        await out.create()
        sizes[blocks], [lying] = await under_way(loop, out, blocks, store)
        assert lying.stop.sequence - lying.start.sequence >= blocks - 30
        opened = asyncio.Event()
        opened.set()
        again = Checkpoints(store.another(), interval_s=RARELY_S)
        await ended(await block_flow(loop, out, blocks, opened).start(checkpoints=again))
        assert sorted(await values_in(out)) == [float(n) for n in range(blocks)]
    assert sizes[140] < 10_000
    assert sizes[140] - sizes[40] < 100


async def test_an_abandoned_checkpoint_keeps_no_feedback(broker: MemoryBroker) -> None:
    """The next checkpoint contained the log of the abandoned one, or the old barrier ended the new log."""
    clock, door, store = VirtualClock(), asyncio.Event(), MemoryStore()
    loop, out = broker.topic("loop"), broker.topic("out")
    await loop.create(settings={"max_record_bytes": str(2 * BLOCK_BYTES)})
    await out.create()
    settings = Checkpoints(store, interval_s=5.0, alignment_timeout_s=1.0)
    job = await block_flow(loop, out, 20, door).start(checkpoints=settings, channel_limits=SMALL, clock=clock)
    async with asyncio.timeout(PATIENCE_S):
        while await end_of(loop) < 20:
            await asyncio.sleep(0)
    await clock.advance(5.0)
    await clock.advance(1.0)
    await until(lambda: job.statistics().checkpoints.given_up == 1)  # type: ignore[union-attr]
    door.set()
    await clock.advance(5.0)
    await until(lambda: job.statistics().checkpoints.committed is not None)  # type: ignore[union-attr]
    await job.stop("abort")
    [*logged] = ranges_of(await logged_in_last(store, "20 blocks"))
    assert len(logged) <= 1
    again = Checkpoints(store.another(), interval_s=RARELY_S)
    await ended(await block_flow(loop, out, 20, door).start(checkpoints=again))
    assert sorted(await values_in(out)) == [float(n) for n in range(20)]


# -- another parallelism -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "parallelisms"),
    # Each kind with one way of more and fewer heads; how the records are shared out does not depend on the kind.
    list(zip(KINDS, [(2, 3, 1), (4, 1, 2), (1, 4, 3), (4, 1, 2)], strict=True)),
)
async def test_feedback_in_a_topic_is_redistributed_to_other_heads(
    broker: MemoryBroker, kind: Kind, parallelisms: tuple[int, ...]
) -> None:
    """Feedback in the partition of a removed head was never read."""
    loop, out, store = broker.topic("loop"), broker.topic("out"), MemoryStore()
    await loop.create(partitions=4)
    await out.create()
    found: list[TopicRange] = []
    for parallelism in parallelisms:
        store = store.another()
        job = await flow_of(loop, out, kind, parallelism=parallelism).start(
            checkpoints=Checkpoints(store, interval_s=RARELY_S), channel_limits=SMALL
        )
        await visits(job, 25)
        await crashed_after_a_checkpoint(job, more_turns=20)
        found += [each for each in await logged_in_last(store) if isinstance(each, TopicRange)]
    checkpoints = Checkpoints(store.another(), interval_s=RARELY_S)
    await ended(await flow_of(loop, out, kind, parallelism=4).start(checkpoints=checkpoints))
    await is_undisturbed(out)
    assert found


async def test_redistributed_feedback_that_is_missing_is_an_error(broker: MemoryBroker) -> None:
    """A restart with another number of heads ignored that the topic with its feedback had been deleted."""
    loop, out, store = await made(broker)
    await crashed(loop, out, store)
    await loop.delete()
    settings = Checkpoints(store.another(), interval_s=RARELY_S)
    with pytest.raises(CheckpointError, match=r"memory://loop, partition \d: expected the offsets .* none of them"):
        await flow_of(loop, out, parallelism=1).start(checkpoints=settings)


async def test_redistributed_feedback_leaves_no_file(broker: MemoryBroker) -> None:
    """Queues that held batches of the topic for the new heads left their files open."""
    before = unnamed_files()
    on_disk = FeedbackLimits(memory_bytes=0)
    loop, out, store = await made(broker)
    assert ranges_of(await crashed(loop, out, store, limits=on_disk))
    checkpoints = Checkpoints(store.another(), interval_s=RARELY_S)
    job = await flow_of(loop, out, parallelism=1, limits=on_disk).start(checkpoints=checkpoints)
    await ended(job)
    assert unnamed_files() == before
    await is_undisturbed(out)


def test_an_abandoned_checkpoint_releases_restored_batches(broker: MemoryBroker, tmp_path: Path) -> None:
    """After an abandoned checkpoint, the files of restored batches stayed open until the process ended."""

    def make_queue(memory_bytes: int = 100) -> SpillQueue:
        return SpillQueue(name="loop", directory=tmp_path, memory_limit_bytes=memory_bytes, disk_limit_bytes=1 << 20)

    before, plain_data = unnamed_files(), PlainData()
    pump = ReturningPump("run", broker.topic("loop"), {}, 100, plain_data, VirtualClock())
    outgoing = FeedbackChannel("out", make_queue())
    given = {"name": "back", "topic": "loop", "run": "run", "producer": 0}
    channel = TopicReturnPath(pump, outgoing, queue=make_queue(1 << 20), **given).channel
    port = Port(0, "feedback", channel)
    log = FeedbackLog([port], make_queue)
    batches = [("data", 1, 10, plain_data.encode_batch(np.zeros(10)))] * 5
    log.restore([(0, [batches], [])])
    log.start(CheckpointBarrier(1))
    while port.peek() is not None:
        port.take()
    assert len(unnamed_files()) > len(before)
    log.close()
    assert unnamed_files() == before
    channel.close()


def test_restored_batches_wait_on_disk_and_the_batches_of_the_topic_wait_there(
    broker: MemoryBroker, tmp_path: Path
) -> None:
    """A loop was in memory, and is through a topic now: all feedback of its checkpoint was in memory at once."""
    plain_data = PlainData()
    pump = ReturningPump("run", broker.topic("loop"), {}, 100, plain_data, VirtualClock())
    queue = SpillQueue(name="loop", directory=tmp_path, memory_limit_bytes=100, disk_limit_bytes=1 << 20)
    outgoing = FeedbackChannel(
        "out", SpillQueue(name="out", directory=tmp_path, memory_limit_bytes=0, disk_limit_bytes=0)
    )
    path = TopicReturnPath(pump, outgoing, name="back", queue=queue, topic="loop", run="run", producer=0)
    path.channel.restore([("data", 1, 10, plain_data.encode_batch(np.zeros(10)))] * 5, [])
    path.begin(0, 0)
    assert queue.statistics().batches_on_disk == 4
    assert pump._is_full(path.channel)
    while path.channel.peek() is not None:
        path.channel.take()
    for sequence in range(3):
        path.put(DataBatch(np.zeros(10), 1), RecordPoint(sequence, sequence), path.own)
    assert queue.statistics().batches_on_disk == 0
    assert pump._is_full(path.channel)
    path.channel.close()
