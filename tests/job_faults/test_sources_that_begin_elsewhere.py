"""Sources whose positions are left behind, or that are others than before: what steps keep is still theirs."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from job_faults.held_store import HeldStore
from job_faults.service import Serve, checkpoints_in, one_line
from job_faults.sums import Topics, check_committed, sums_flow, until_committed, write

from streamiter import Checkpoints
from streamiter.errors import JobFailed, OffsetOutOfRange
from streamiter.topics import MemoryBroker, topic


@pytest.fixture
async def topics() -> Topics:
    """In memory."""
    broker = MemoryBroker()
    made = Topics.same(broker.topic("numbers"), broker.topic("sums"))
    await made.create()
    return made


async def counted(serve: Serve, topics: Topics, folder: Path, start: int, stop: int) -> None:
    """A run that takes a checkpoint behind these numbers."""
    await write(topics.numbers, start, stop)
    service = serve(sums_flow("sums", topics), checkpoints_in(folder))
    await until_committed(topics.sums, stop)
    await service.suspended()


async def test_steps_behind_a_source_that_begins_elsewhere_keep_their_state(
    serve: Serve, topics: Topics, tmp_path: Path
) -> None:
    """They shared its task, and all sums began anew without a word."""
    await counted(serve, topics, tmp_path, 0, 30)
    await topics.numbers.delete()
    await topics.numbers.create()
    await write(topics.numbers, 30, 60)
    service = serve(sums_flow("sums", topics), checkpoints_in(tmp_path), changed_steps=["numbers"])
    await until_committed(topics.sums, 60)
    await service.suspended()
    await check_committed(topics.sums, 60)
    await counted(serve, topics, tmp_path, 60, 90)
    await check_committed(topics.sums, 90)


async def test_steps_behind_another_source_keep_their_state(
    serve: Serve, topics: Topics, tmp_path: Path
) -> None:
    """The input moved to a topic of another name."""
    await counted(serve, topics, tmp_path, 0, 30)
    moved = topics.numbers.beside("moved")
    await moved.create()
    await write(moved, 30, 60)
    flow = sums_flow("sums", Topics.same(moved, topics.sums), source="moved")
    service = serve(flow, checkpoints_in(tmp_path), changed_steps=["numbers", "moved"])
    await until_committed(topics.sums, 60)
    await service.suspended()
    await check_committed(topics.sums, 60)


async def test_an_offset_that_is_not_there_names_the_choices(
    serve: Serve, topics: Topics, tmp_path: Path
) -> None:
    """What the message of a topic advises was no option of the job."""
    await counted(serve, topics, tmp_path, 0, 30)
    await topics.numbers.delete()
    await topics.numbers.create()
    error = await serve(sums_flow("sums", topics), checkpoints_in(tmp_path)).failed()
    assert isinstance(error, JobFailed)
    assert isinstance(error.__cause__, OffsetOutOfRange)
    for choice in ("changed_steps=['numbers'] lets this source begin", "restore=None", "restore=<number>"):
        assert choice in one_line(error)


async def test_what_is_left_behind_once_is_not_left_behind_by_a_restart(
    serve: Serve, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A transaction had expired, and the source began at its start once more: all of it was counted twice."""
    topics = Topics.same(
        *(topic(f"sqlite:///{tmp_path}/topics.db?topic={name}") for name in ("numbers", "sums"))
    )
    await topics.create()
    await counted(serve, topics, tmp_path / "kept", 0, 30)
    await topics.numbers.delete()
    await topics.numbers.create()
    store = HeldStore(tmp_path / "kept")
    store.may_save.set()
    kept = Checkpoints(store, interval_s=0.1, alignment_timeout_s=0.5, transaction_timeout_s=1.0)
    service = serve(sums_flow("sums", topics), kept, changed_steps=["numbers"])
    await write(topics.numbers, 30, 60)
    await until_committed(topics.sums, 60)
    store.may_save.clear()
    store.saves.clear()
    await service.until(store.saves.is_set)
    await asyncio.sleep(1.0)  # its own timeout, on its own clock
    store.may_save.set()
    await service.until(lambda: len(service.jobs) == 2)
    await write(topics.numbers, 60, 90)
    await until_committed(topics.sums, 90)
    await service.suspended()
    await check_committed(topics.sums, 90)
    assert caplog.text.count("the state of 'numbers' is left behind, as changed_steps= says") == 1
