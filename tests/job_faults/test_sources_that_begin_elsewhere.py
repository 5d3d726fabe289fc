"""Sources that abandon their positions, or whose positions have changed: the other steps keep their state."""

import asyncio
import shutil
from pathlib import Path

import pytest
from job_faults.held_store import HeldStore
from job_faults.service import Serve, checkpoints_in, one_line
from job_faults.sums import Topics, check_committed, sums_flow, until_committed, write

from streamiter import Checkpoints, Flow
from streamiter.errors import JobFailed, OffsetOutOfRange
from streamiter.operators import Operator, Output
from streamiter.topics import MemoryBroker, OutgoingBatch, Topic, TopicReader, topic
from streamiter.topics.memory import MemoryReader


async def counted(serve: Serve, topics: Topics, folder: Path, start: int, stop: int) -> None:
    """Run the flow with these numbers, and take a checkpoint after them."""
    await write(topics.numbers, start, stop)
    service = serve(sums_flow("sums", topics), checkpoints_in(folder))
    await until_committed(topics.sums, stop)
    await service.suspended()


async def test_steps_after_a_source_that_starts_at_another_position_keep_their_state(
    serve: Serve, topics: Topics, tmp_path: Path
) -> None:
    """The steps shared the task of the source, and all sums silently started again."""
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


async def test_steps_after_another_source_keep_their_state(serve: Serve, topics: Topics, tmp_path: Path) -> None:
    """The input moved to a topic with another name, and the sums started again."""
    await counted(serve, topics, tmp_path, 0, 30)
    moved = topics.numbers.beside("moved")
    await moved.create()
    await write(moved, 30, 60)
    flow = sums_flow("sums", Topics.same(moved, topics.sums), source="moved")
    service = serve(flow, checkpoints_in(tmp_path), changed_steps=["numbers", "moved"])
    await until_committed(topics.sums, 60)
    await service.suspended()
    await check_committed(topics.sums, 60)


async def test_the_error_of_a_missing_offset_names_the_choices(serve: Serve, topics: Topics, tmp_path: Path) -> None:
    """A topic's message advised an option that the job does not have."""
    await counted(serve, topics, tmp_path, 0, 30)
    await topics.numbers.delete()
    await topics.numbers.create()
    error = await serve(sums_flow("sums", topics), checkpoints_in(tmp_path)).failed()
    assert isinstance(error, JobFailed)
    assert isinstance(error.__cause__, OffsetOutOfRange)
    for choice in ("changed_steps=['numbers'] lets this source begin", "restore=None", "restore=<number>"):
        assert choice in one_line(error)


@pytest.mark.parametrize("kept_in", ["memory", "sqlite", "another file"])
async def test_a_topic_that_was_deleted_and_has_more_records_now_is_noticed(
    kept_in: str, serve: Serve, tmp_path: Path
) -> None:
    """The job continued at its old offset, and the 30 records before it were never counted, without an error."""
    broker = MemoryBroker()
    file = tmp_path / "kept" / "numbers.db"
    file.parent.mkdir()
    topics = Topics.same(
        broker.topic("numbers") if kept_in == "memory" else topic(f"sqlite:///{file}?topic=numbers"),
        broker.topic("sums"),
    )
    await topics.create()
    await counted(serve, topics, tmp_path, 0, 30)
    if kept_in == "another file":
        shutil.rmtree(file.parent)
        file.parent.mkdir()
    else:
        await topics.numbers.delete()
    await topics.numbers.create()
    await write(topics.numbers, 30, 90)
    error = await serve(sums_flow("sums", topics), checkpoints_in(tmp_path)).failed()
    assert isinstance(error.__cause__, OffsetOutOfRange)
    for said in (
        "step 'numbers'",
        "topic 'numbers', partition 0: offset 30 belongs to a topic of this name that was deleted",
        "created again, with other records, and has the offsets 0 to 60",
        "changed_steps=['numbers'] lets this source begin",
        "restore=None",
    ):
        assert said in one_line(error)
    service = serve(sums_flow("sums", topics), checkpoints_in(tmp_path), changed_steps=["numbers"])
    await until_committed(topics.sums, 90)
    await service.suspended()
    await check_committed(topics.sums, 90)
    await counted(serve, topics, tmp_path, 90, 120)


async def test_a_file_that_was_replaced_by_a_longer_one_is_noticed(serve: Serve, tmp_path: Path) -> None:
    """A log was rotated, and the job skipped as many lines of the new log as it had read of the old one."""
    log = tmp_path / "log.jsonl"

    def count() -> Flow:
        flow = Flow("count")
        lines = flow.source(topic(f"file:{log}?chunk_bytes=16"), name="lines")
        lines.process(_Slow, name="slow").collect(name="lines seen")
        return flow

    async def interrupted(beyond: int) -> None:
        service = serve(count(), checkpoints_in(tmp_path / "kept"))
        await service.until(lambda: service.taken > 0 and service.records_in("slow") > beyond)
        await service.suspended()

    log.write_text("".join(f"{number}\n" for number in range(20_000)))
    await interrupted(20)
    with log.open("a") as appended:
        appended.write("20000\n")
    await interrupted(10)
    log.write_text("".join(f"{number}\n" for number in range(200_000, 230_000)))
    error = await serve(count(), checkpoints_in(tmp_path / "kept")).failed()
    assert isinstance(error.__cause__, OffsetOutOfRange)
    assert "step 'lines'" in one_line(error)
    assert "log.jsonl', partition 0: offset" in one_line(error)
    assert "belongs to a file that began with other lines: this file was replaced" in one_line(error)
    assert "changed_steps=['lines']" in one_line(error)


class _Slow(Operator):
    """Passes records on slowly, so that a run can be interrupted in the middle of the file."""

    async def process(self, record: int, out: Output) -> None:
        await asyncio.sleep(0)
        out.emit(record)


async def test_snapshots_from_before_topics_had_identities_are_still_valid(
    serve: Serve, topics: Topics, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An upgrade lost the state of months, or the identity of a topic was not stored from the next checkpoint on."""
    with monkeypatch.context() as before:
        before.setattr(MemoryReader, "identities", TopicReader.identities)
        await counted(serve, topics, tmp_path, 0, 30)
    await counted(serve, topics, tmp_path, 30, 60)
    await check_committed(topics.sums, 60)
    await topics.numbers.delete()
    await topics.numbers.create()
    await write(topics.numbers, 60, 160)
    error = await serve(sums_flow("sums", topics), checkpoints_in(tmp_path)).failed()
    assert "offset 60 belongs to a topic of this name that was deleted" in one_line(error)


async def test_identities_move_with_their_partitions_to_other_subtasks(serve: Serve, tmp_path: Path) -> None:
    """With another parallelism the offsets were distributed again, and their identities were lost."""
    broker = MemoryBroker()
    numbers = broker.topic("numbers")
    await numbers.create(partitions=3)
    for parallelism in (2, 3, 1, 2):
        service = serve(_copies(numbers, parallelism), checkpoints_in(tmp_path))
        await service.until(lambda service=service: service.taken > 0)
        await service.suspended()
    await numbers.delete()
    await numbers.create(partitions=3)
    error = await serve(_copies(numbers, 3), checkpoints_in(tmp_path)).failed()
    assert isinstance(error.__cause__, OffsetOutOfRange)
    assert "belongs to a topic of this name that was deleted" in one_line(error)


def _copies(numbers: Topic, parallelism: int) -> Flow:
    flow = Flow("copies")
    flow.source(numbers, name="numbers", parallelism=parallelism).map(lambda number: number).collect(
        name="numbers seen"
    )
    return flow


async def test_positions_that_were_abandoned_once_are_kept_by_a_restart(
    serve: Serve, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A transaction had expired, and the source started again from its beginning, so all records were counted twice."""
    topics = Topics.same(*(topic(f"sqlite:///{tmp_path}/topics.db?topic={name}") for name in ("numbers", "sums")))
    await topics.create()
    await counted(serve, topics, tmp_path / "kept", 0, 30)
    await topics.numbers.delete()
    await topics.numbers.create()
    store = HeldStore(tmp_path / "kept")
    store.may_save.set()
    kept = Checkpoints(store, interval_s=0.1, alignment_timeout_s=0.5, transaction_timeout_s=3.0)
    service = serve(sums_flow("sums", topics), kept, changed_steps=["numbers"])
    await write(topics.numbers, 30, 60)
    await until_committed(topics.sums, 60)
    store.may_save.clear()
    store.saves.clear()
    await service.until(store.saves.is_set)
    await asyncio.sleep(3.0)  # The transaction has its own timeout, on its own clock.
    store.may_save.set()
    await service.until(lambda: len(service.jobs) == 2)
    await write(topics.numbers, 60, 90)
    await until_committed(topics.sums, 90)
    await service.suspended()
    await check_committed(topics.sums, 90)
    assert caplog.text.count("the state of 'numbers' is left behind, as changed_steps= says") == 1


async def test_a_source_that_ends_counts_from_its_first_start_and_names_partitions_without_offset(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """After a restart a history was said to begin; a partition without offset was read twice, in silence."""
    numbers = MemoryBroker().topic("numbers")
    await numbers.create(partitions=2)
    read = []
    for count in (10, 5):
        writer = await numbers.open_writer()
        for partition in range(2):
            await writer.write(OutgoingBatch([b"1"] * count, partition=partition))
        await writer.close()
        flow = Flow("ends")
        flow.source(numbers, start={0: 4}, stop="latest", name="numbers").map(int)
        job = await flow.start(checkpoints=checkpoints_in(tmp_path))
        await job.wait()
        read += [task.source.read_records for task in job.statistics().tasks if task.source is not None]
    assert read == [16, 26]
    [said] = [record.getMessage() for record in caplog.records if "names no offset" in record.getMessage()]
    assert said.endswith("for the partitions 1 of topic memory://numbers, which are read from their earliest record")
