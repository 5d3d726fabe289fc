"""The records that a sink holds until the commit, and the effect on the job when its transaction has ended."""

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import orjson
import pytest
from support.waiting import PATIENCE_S, until
from topics.topic_case import ManualClock, patiently

from streamiter import Checkpoints, Flow, IterationBodyResult, iterate_unbounded_streams
from streamiter.engine.checkpointing.commit import JobTransaction, TransactionalWriter, held_batches
from streamiter.engine.storage.disk_queue import SpillQueue
from streamiter.engine.storage.snapshot import CheckpointId
from streamiter.errors import ProducerFenced, TransactionExpired
from streamiter.topics import MemoryBroker, OutgoingBatch, Topic
from streamiter.values.plain_data import PlainData

TOPIC = MemoryBroker().topic("out")


class Written:
    """Records the batches that reach the transaction, with a turn of the event loop for each."""

    def __init__(self) -> None:
        self.batches: list[OutgoingBatch] = []

    async def __call__(self, topic: Topic, batch: OutgoingBatch) -> None:
        await asyncio.sleep(0)
        self.batches.append(batch)

    def values(self) -> list[int]:
        return [int(value or b"") for batch in self.batches for value in batch.values]


@pytest.fixture
def written() -> Written:
    return Written()


@pytest.fixture
def held() -> Iterator[SpillQueue]:
    """Return a queue with three bytes in memory, and some ten batches on disk."""
    held = held_batches("sink", PlainData(), memory_limit_bytes=3, disk_limit_bytes=1000)
    yield held
    held.close()


def batch(number: int) -> OutgoingBatch:
    return OutgoingBatch([b"%d" % number], keys=[b"key"], headers=[(("name", b"value"),)], partition=2)


async def test_held_batches_are_written_in_order_and_unchanged(written: Written, held: SpillQueue) -> None:
    """Batches from disk came after later batches, or without their headers."""
    writer = TransactionalWriter(TOPIC, written, held, step="sink")
    await writer.write(batch(0))
    writer.seal()
    for number in range(1, 8):
        await writer.write(batch(number))
    assert written.values() == [0]
    await writer.unseal()
    await writer.write(batch(8))
    assert written.batches == [batch(number) for number in range(9)]


async def test_a_sink_that_never_stops_does_not_keep_the_commit_from_ending(written: Written, held: SpillQueue) -> None:
    """A sink held new batches as fast as it wrote old ones, and no second checkpoint started."""
    writer = TransactionalWriter(TOPIC, written, held, step="sink")
    writer.seal()

    async def write_for_ever() -> None:
        number = 0
        while True:
            await writer.write(batch(number))
            number += 1
            await asyncio.sleep(0)

    writing = asyncio.create_task(write_for_ever())
    async with asyncio.timeout(PATIENCE_S):
        while not len(held):
            await asyncio.sleep(0)
        for _ in range(3):
            await writer.unseal()
            writer.seal()
    writing.cancel()
    await asyncio.wait([writing])
    assert written.values() == list(range(len(written.batches)))


async def test_without_room_for_held_batches_the_sink_waits(written: Written, held: SpillQueue) -> None:
    """Records between barrier and commit filled the disk of the machine."""
    writer = TransactionalWriter(TOPIC, written, held, step="sink")
    writer.seal()
    accepted = 0

    async def write_many() -> None:
        nonlocal accepted
        for number in range(100):
            await writer.write(batch(number))
            accepted += 1

    writing = asyncio.create_task(write_many())
    while not accepted:
        await asyncio.sleep(0)
    for _ in range(10):
        await asyncio.sleep(0)
    assert 1 < accepted < 100
    assert not written.batches
    await writer.unseal()
    await asyncio.wait_for(writing, PATIENCE_S)
    assert written.values() == list(range(100))


async def test_a_sink_after_a_loop_does_not_block_the_barrier_in_it(tmp_path: Path) -> None:
    """Output of the body for feedback before the barrier filled the sink, which waited for that barrier."""
    broker = MemoryBroker()
    for name in ("in", "out"):
        await broker.topic(name).create()
    writer = await broker.topic("in").open_writer()
    count = 30_000
    await writer.write(OutgoingBatch([orjson.dumps(number) for number in range(count)]))
    await writer.close()
    padding = "x" * 1_500  # Each round has 45 MB, more than a sink holds in memory.

    def body(variables: Any, data: Any) -> Any:
        numbers = variables[0].union(data[0])
        return IterationBodyResult([numbers.map(lambda x: x)], [numbers.map(lambda x: [x, padding])])

    flow = Flow("circling")
    source = flow.source(broker.topic("in"))
    [seen] = iterate_unbounded_streams([flow.from_items([0], name="initial")], [source], body)
    seen.sink(broker.topic("out"))
    job = await flow.start(checkpoints=Checkpoints(tmp_path, interval_s=200.0, alignment_timeout_s=60.0))
    await until(lambda: job.statistics().step("sink out").records_in >= count)
    assert await asyncio.wait_for(job.checkpoint(), PATIENCE_S) == 1
    await job.stop("abort")


TIMEOUT_S = 60.0
FLOW = "sums"
CHECKPOINT = CheckpointId(1, "run")


async def opened(broker: MemoryBroker, clock: ManualClock, *, is_newest_run: bool) -> JobTransaction:
    """Return an open transaction of a run which is the newest for the store, or not."""
    await broker.topic("sums").create()

    async def asked() -> bool:
        return is_newest_run

    transaction = JobTransaction(
        FLOW, broker.topic("sums"), clock=clock, timeout_s=TIMEOUT_S, plain_data=PlainData(), is_newest_run=asked
    )
    await patiently(transaction.open())
    return transaction


async def take_over(broker: MemoryBroker) -> None:
    """Take over as a newer run does."""
    await patiently(broker.topic("sums").open_transactions(f"streamiter-{FLOW}"))


async def error_at_commit(transaction: JobTransaction) -> ProducerFenced:
    with pytest.raises(ProducerFenced) as caught:
        await patiently(transaction.commit(CHECKPOINT, continues=True))
    await patiently(transaction.close())
    return caught.value


async def test_a_transaction_that_is_open_for_too_long_is_not_reported_as_another_run() -> None:
    """After a pause of the machine, a service ended because of "another run" that did not exist."""
    clock = ManualClock()
    broker = MemoryBroker(clock=clock)
    transaction = await opened(broker, clock, is_newest_run=True)
    clock.advance(2 * TIMEOUT_S)
    assert isinstance(await error_at_commit(transaction), TransactionExpired)


async def test_a_run_whose_transaction_was_open_for_too_long_ends_if_there_is_a_newer_run() -> None:
    """A run slept, was replaced, started again by itself, and ended the run that had replaced it."""
    clock = ManualClock()
    broker = MemoryBroker(clock=clock)
    transaction = await opened(broker, clock, is_newest_run=False)
    clock.advance(2 * TIMEOUT_S)
    error = await error_at_commit(transaction)
    assert not isinstance(error, TransactionExpired)
    assert "another run of the flow has taken over, so this one must end" in str(error)


@pytest.mark.parametrize("is_newest_run", [True, False])
@pytest.mark.parametrize("age_s", [0.9 * TIMEOUT_S, 1.1 * TIMEOUT_S])
async def test_a_fence_is_a_timeout_only_if_the_time_is_up_and_no_newer_run_is_known(
    age_s: float, is_newest_run: bool
) -> None:
    """One condition alone was wrong: a newer run claims the store a moment later, or the old run has slept too long."""
    clock = ManualClock()
    broker = MemoryBroker(clock=clock)
    transaction = await opened(broker, clock, is_newest_run=is_newest_run)
    await take_over(broker)
    clock.advance(age_s)
    error = await error_at_commit(transaction)
    assert isinstance(error, TransactionExpired) == (age_s > TIMEOUT_S and is_newest_run)
