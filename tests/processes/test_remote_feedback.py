"""Feedback between two processes never blocks its producer, keeps its order, and waits on the producer's disk."""

import asyncio
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
from processes.pipes import Pipe, open_pipe
from support.examples import random_examples

from streamiter.engine.graph.channels import LIMIT_BYTES
from streamiter.engine.processes.remote_channel import ArrivingFeedback, DepartingFeedback
from streamiter.engine.storage.disk_queue import SpillQueue
from streamiter.errors import LoopOverflow, PlainDataError
from streamiter.values.records import Control, DataBatch, EpochWatermark

MIB = 1 << 20


async def halves(
    directory: Path, random: Random, memory_bytes: int = 2 * MIB, disk_bytes: int = 1 << 30
) -> tuple[DepartingFeedback, ArrivingFeedback, Pipe]:
    first, second, _, _, pipe = await open_pipe(random)
    queues = [
        SpillQueue(
            name="tail → head", directory=directory, memory_limit_bytes=memory_bytes, disk_limit_bytes=disk_bytes
        )
        for _ in range(2)
    ]
    departing = DepartingFeedback("tail → head", first, 9, queues[0])
    return departing, ArrivingFeedback("tail → head", second, 9, queues[1]), pipe


def some_actions(random: Random) -> tuple[list[Any], int]:
    """Return actions: the size of a batch in KiB, a watermark, or a take; and a seed."""
    actions = [random.choice((0, 1, 2, 5, "watermark", "take", "take", "move")) for _ in range(random.randrange(30))]
    return actions, random.randrange(1 << 30)


@random_examples(some_actions, examples=100)
def test_feedback_arrives_in_order_however_it_is_cut(example: tuple[list[Any], int], directory: Path) -> None:
    """Feedback from the disk overtook a watermark, and what was taken with the watermark behind it freed no room."""
    asyncio.run(_run(*example, directory))


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("feedback")


async def _run(actions: list[Any], seed: int, directory: Path) -> None:
    random = Random(seed)
    departing, arriving, pipe = await halves(directory, random, memory_bytes=2048)
    departing._way.limit_bytes = 4096
    put, taken = list[str](), list[str]()
    records = 0

    def take() -> None:
        while (item := arriving.peek()) is not None:
            assert arriving.take() is item
            taken.append(repr(item))

    for number, action in enumerate(actions):
        if action == "take":
            take()
        elif action == "move":
            await asyncio.sleep(0)
            pipe.deliver(random.randrange(2), random.choice((1000, MIB)))
        else:
            item = (
                EpochWatermark(number) if action == "watermark" else DataBatch(np.zeros((number, action << 7)), number)
            )
            if isinstance(item, Control):
                departing.put_control(item)
            else:
                departing.put(item)
                records += len(item.records)
            put.append(repr(item))
    for _ in range(1000):  # Room that is not given back would stop it.
        if departing.waiting()["waiting_records"] or arriving.records:
            await pipe.settle(random)
            take()
    await pipe.settle(random)
    take()
    for item, following in zip(put, [*put[1:], ""], strict=False):
        if taken and taken[0] == item:
            del taken[0]
        else:
            assert "Watermark" in item
            assert "Watermark" in following
    assert not taken
    assert arriving.total_records == records
    departing.close()
    arriving.close()


async def test_feedback_beyond_the_window_waits_on_the_disk_of_the_producer(tmp_path: Path) -> None:
    """The head was slow, and the memory of its process was full of feedback of 63 other processes.

    Or sources of the loop filled the disk, since the head did not know that feedback for it waited there.
    """
    departing, arriving, pipe = await halves(tmp_path, Random(1))
    told = list[bool]()
    arriving.call_at_limit(lambda: told.append(arriving.is_spilling))
    for epoch in range(20):
        departing.put(DataBatch(np.zeros(MIB, np.uint8), epoch))
        await pipe.settle()
    waiting = departing.waiting()
    assert departing.is_spilling
    assert waiting["bytes_on_disk"] > 10 * MIB
    assert waiting["epoch_reached"] == 19
    assert arriving.statistics().records <= LIMIT_BYTES
    assert waiting["waiting_records"] + arriving.total_records == 20 * MIB
    assert told[-1:] == [True]
    for epoch in range(20):
        assert repr(arriving.take()) == f"DataBatch({MIB} records, epoch {epoch})"
        await pipe.settle()
    assert not departing.is_spilling
    assert told[-1:] == [False]
    assert departing.waiting()["waiting_records"] == 0
    departing.close()
    arriving.close()


async def test_errors_of_waiting_feedback_come_from_the_call_that_put_it(tmp_path: Path) -> None:
    """A batch that could not be sent was found minutes later, as an error of the connection."""
    departing, arriving, pipe = await halves(tmp_path, Random(1), disk_bytes=MIB)
    for _ in range(2):
        departing.put(DataBatch(np.zeros(MIB, np.uint8)))
    with pytest.raises(PlainDataError, match=r"tail → head, in another process: record 0 of the batch"):
        departing.put(DataBatch([{1, 2}]))
    with pytest.raises(PlainDataError, match=r"tail → head, in another process: .*at most 1024 MiB"):
        departing.put(DataBatch(np.empty(5 << 30, np.uint8)))  # It takes no memory, because it is not written.
    with pytest.raises(LoopOverflow, match="tail → head"):
        departing.put(DataBatch(np.zeros(MIB, np.uint8)))
    departing.close()
    departing.put(DataBatch([1]))
    departing.put_control(EpochWatermark(1))
    await pipe.settle()
    arriving.close()


async def test_feedback_after_the_end_of_the_head_is_dropped_and_frees_its_room(tmp_path: Path) -> None:
    """The head had ended, and the last feedback filled the producer's disk."""
    departing, arriving, pipe = await halves(tmp_path, Random(1))
    departing.put(DataBatch(np.zeros(3 * MIB, np.uint8)))
    await pipe.settle()
    arriving.close()
    for _ in range(10):
        departing.put(DataBatch(np.zeros(3 * MIB, np.uint8)))
        await pipe.settle()
    assert departing.waiting()["waiting_records"] == 0
    departing.close()
