"""The records that a sink holds between its barrier and the commit."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import orjson
import pytest
from support.waiting import PATIENCE_S, until

from streamiter import Checkpoints, Flow, IterationBodyResult, iterate_unbounded_streams
from streamiter.engine.checkpointing.commit import TransactionalWriter, held_batches
from streamiter.engine.storage.disk_queue import SpillQueue
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
