"""Jobs on a full disk, a locked file, without their object store, or with too few files or too little memory."""

import contextlib
import os
import shutil
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO

import msgspec
import orjson
import pytest
from job_faults.held_store import HeldStore
from job_faults.scarce import Outcome
from job_faults.service import Serve, Service, checkpoints_in, nothing_unheard, one_line
from job_faults.sums import Topics, check_committed, feeding, sums_flow, until_committed, write
from support.processes import process
from support.s3_server import S3Server
from support.waiting import PATIENCE_S

from streamiter import Checkpoints, RocksState
from streamiter.engine.graph.statistics import JobStatistics
from streamiter.errors import (
    CheckpointError,
    ConfigurationError,
    JobFailed,
    StorageFull,
    StoreUnavailable,
    TopicUnavailable,
)
from streamiter.topics import topic
from streamiter.topics.compacted import COMMIT_TOPIC, last_value
from streamiter.values.helpers.clock import SystemClock

SmallDisk = tuple[Path, Callable[[], bool]]


def topics_in(file: Path, **options: object) -> Topics:
    """Return topics in one file."""
    numbers, sums = (topic(f"sqlite:///{file}?topic={name}", **options) for name in ("numbers", "sums"))
    return Topics.same(numbers, sums)


def fill(folder: Path) -> Path:
    """Fill the remaining space with a file; return its path."""
    filler = folder / "filler"
    with filler.open("wb", buffering=0) as file:
        while has_room(file):
            pass
    return filler


def has_room(file: BinaryIO) -> bool:
    """Return whether one more block can be written."""
    try:
        file.write(b"x" * 4096)
    except OSError:
        return False
    return True


async def outlives_a_full_disk(service: Service, disk: Path, topics: Topics) -> JobStatistics:
    """Let three checkpoints fail on the full disk, and later ones succeed with space, in one job; return its end."""
    async with feeding(topics.numbers) as feed:
        await service.works()
        filler = fill(disk)
        await service.until(lambda: service.given_up >= 3)
        filler.unlink()
        await service.works()
    await until_committed(topics.sums, feed.count)
    statistics = await service.suspended()
    await check_committed(topics.sums, feed.count)
    assert len(service.jobs) == 1
    return statistics


async def test_outputs_wait_for_room_for_the_checkpoints(
    serve: Serve, small_disk: SmallDisk, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A log file filled the volume at night, and in the morning the night's outputs were missing or doubled."""
    disk, _ = small_disk
    topics = topics_in(tmp_path / "topics.db")
    await topics.create()
    with nothing_unheard(caplog):
        service = serve(sums_flow("sums", topics), checkpoints_in(disk / "kept"))
        statistics = await outlives_a_full_disk(service, disk, topics)
    assert statistics.state == "suspended"
    assert "expected room for checkpoints in" in caplog.text
    assert "The next one is tried in 0.1 s" in caplog.text


async def test_a_transaction_that_waited_too_long_for_room_is_resumed_from_the_checkpoint(
    serve: Serve, small_disk: SmallDisk, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The disk was full for hours, and the job continued without a transaction, or lost records that it had read."""
    disk, _ = small_disk
    topics = topics_in(tmp_path / "topics.db")
    await topics.create()
    kept = checkpoints_in(disk / "kept", transaction_timeout_s=1.0, alignment_timeout_s=0.5)
    with nothing_unheard(caplog):
        service = serve(sums_flow("sums", topics), kept)
        async with feeding(topics.numbers) as feed:
            await service.works()
            filler = fill(disk)
            error = await service.failed()
            filler.unlink()
        again = serve(sums_flow("sums", topics), kept)
        await until_committed(topics.sums, feed.count)
        await again.suspended()
    await check_committed(topics.sums, feed.count)
    one_line(error)


def topics_on(disk: Path, elsewhere: Path, **options: object) -> Topics:
    """Return topics with the outputs on the disk that will be full, and the inputs elsewhere."""
    numbers = topic(f"sqlite:///{elsewhere}/numbers.db?topic=numbers", **options)
    sums = topic(f"sqlite:///{disk}/sums.db?topic=sums", **options)
    return Topics.same(numbers, sums)


async def test_a_commit_without_room_is_tried_again(
    serve: Serve, small_disk: SmallDisk, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The commit record was already in the transaction, and records after the barrier were written a second time."""
    disk, _ = small_disk
    topics = topics_on(disk, tmp_path)
    await topics.create()
    with nothing_unheard(caplog):
        service = serve(sums_flow("sums", topics), checkpoints_in(tmp_path / "kept"))
        statistics = await outlives_a_full_disk(service, disk, topics)
    assert "no room left to write" in caplog.text
    assert statistics.checkpoints is not None
    # A transaction has a commit record for each attempt; the last one counts.
    record = await last_value(topics.sums.beside(COMMIT_TOPIC), b"sums", clock=SystemClock())
    assert record is not None
    assert orjson.loads(record.value or b"")["checkpoint"]["number"] == statistics.checkpoints.committed


async def test_a_write_without_room_ends_the_job_and_the_next_job_writes_the_records_once(
    serve: Serve, small_disk: SmallDisk, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Records that could not be stored filled the memory."""
    disk, _ = small_disk
    topics = topics_on(disk, tmp_path)
    await topics.create()
    with nothing_unheard(caplog):
        service = serve(sums_flow("sums", topics, padding=20_000), checkpoints_in(tmp_path / "kept"))
        await write(topics.numbers, 0, 10)
        await service.works()
        filler = fill(disk)
        await write(topics.numbers, 10, 150)
        error = await service.failed()
        filler.unlink()
        again = serve(sums_flow("sums", topics), checkpoints_in(tmp_path / "kept"))
        await until_committed(topics.sums, 150)
        await again.suspended()
    await check_committed(topics.sums, 150)
    assert isinstance(error, JobFailed)
    assert isinstance(error.__cause__, StorageFull)
    assert "step 'sums'" in one_line(error)


async def test_records_held_after_a_barrier_are_not_written_twice_on_a_full_disk(
    serve: Serve, small_disk: SmallDisk, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Held records were part of a transaction that failed for lack of room, and came again with the next checkpoint."""
    disk, _ = small_disk
    topics = topics_on(disk, tmp_path)
    await topics.create()
    store = HeldStore(tmp_path / "kept")
    with nothing_unheard(caplog):
        service = serve(sums_flow("sums", topics, padding=20_000), Checkpoints(store, interval_s=0.5))
        await write(topics.numbers, 0, 10)
        await service.until(store.saves.is_set)
        await write(topics.numbers, 10, 40)  # A transaction keeps fewer records in memory.
        await service.until(lambda: service.records_in("sums") == 40)
        filler = fill(disk)
        store.may_save.set()
        error = await service.failed()
        filler.unlink()
        again = serve(sums_flow("sums", topics), checkpoints_in(tmp_path / "kept"))
        await until_committed(topics.sums, 40)
        await again.suspended()
    await check_committed(topics.sums, 40)
    assert isinstance(error.__cause__, StorageFull)
    assert "step 'sums'" in one_line(error)


async def test_a_last_checkpoint_without_room_is_a_failure(
    serve: Serve, small_disk: SmallDisk, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A deployment reported that the job had been suspended, although its last checkpoint was missing."""
    disk, _ = small_disk
    topics = topics_in(tmp_path / "topics.db")
    await topics.create()
    kept = checkpoints_in(disk / "kept")
    with nothing_unheard(caplog):
        service = serve(sums_flow("sums", topics), kept)
        async with feeding(topics.numbers) as feed:
            await service.works()
            filler = fill(disk)
            with pytest.raises(JobFailed) as told:
                await service.suspended()
            error = await service.failed()
            filler.unlink()
        again = serve(sums_flow("sums", topics), kept)
        await until_committed(topics.sums, feed.count)
        await again.suspended()
    await check_committed(topics.sums, feed.count)
    assert isinstance(error.__cause__, StorageFull)
    assert one_line(told.value) == one_line(error)


@pytest.mark.parametrize("how", ["full", "gone"])
async def test_a_disk_without_room_for_state_or_lost_ends_the_job_with_the_step_and_the_cause(
    serve: Serve, small_disk: SmallDisk, tmp_path: Path, caplog: pytest.LogCaptureFixture, how: str
) -> None:
    """RocksDB's bare exception from closing hid the failure, and the state of the job stayed "running"."""
    disk, _ = small_disk
    topics = topics_in(tmp_path / "topics.db")
    await topics.create()
    kept, state = checkpoints_in(tmp_path / "kept"), RocksState(disk / "state", memory_bytes=16 << 20)
    with nothing_unheard(caplog):
        service = serve(sums_flow("sums", topics, state=state), kept)
        async with feeding(topics.numbers) as feed:
            await service.works()
            if how == "full":
                filler = fill(disk)
            else:
                shutil.rmtree(disk / "state")
            error = await service.failed(may_have_notes=how == "gone")
            if how == "full":
                filler.unlink()
            again = serve(sums_flow("sums", topics, state=state), kept)
            await again.works()
        await until_committed(topics.sums, feed.count)
        await again.suspended()
    await check_committed(topics.sums, feed.count)
    assert service.jobs[-1].statistics().state == "failed"
    assert isinstance(error, JobFailed)
    assert type(error.__cause__) is (StorageFull if how == "full" else CheckpointError)
    assert f"step 'sum': expected {'room for' if how == 'full' else 'to read and write'} its state" in one_line(error)


_LOCK = """
import sqlite3, sys
connection = sqlite3.connect(sys.argv[1], isolation_level=None)
connection.execute("BEGIN IMMEDIATE")
print("locked", flush=True)
sys.stdin.read()
"""


@contextlib.contextmanager
def locked(file: Path) -> Iterator[None]:
    """Let another process hold a write transaction on the file during the block."""
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with process([sys.executable, "-c", _LOCK, str(file)], **pipes) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "locked\n"
        yield


def locked_topics(folder: Path, **options: object) -> Topics:
    """Return topics with the outputs in a separate file, so that numbers can arrive while it is locked."""
    numbers = topic(f"sqlite:///{folder}/numbers.db?topic=numbers")
    sums = f"sqlite:///{folder}/sums.db?topic=sums"
    return Topics(numbers, topic(sums, **options), numbers, topic(sums))


async def test_a_commit_waits_for_a_file_that_is_locked(
    serve: Serve, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A backup of the file took a second, and the job ended."""
    topics = locked_topics(tmp_path)
    await topics.create()
    with nothing_unheard(caplog):
        service = serve(sums_flow("sums", topics), checkpoints_in(tmp_path / "kept"))
        async with feeding(topics.numbers) as feed:
            await service.works()
            with locked(tmp_path / "sums.db"):
                before = feed.count
                await service.until(lambda: feed.count >= before + 100)
            await service.works()
        await until_committed(topics.sums, feed.count)
        await service.suspended()
    await check_committed(topics.sums, feed.count)
    assert len(service.jobs) == 1


async def test_a_file_that_stays_locked_ends_the_job_and_the_next_one_resumes(
    serve: Serve, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A failed commit counted as committed, or was written again."""
    topics = locked_topics(tmp_path, lock_timeout_s=0.3)
    await topics.create()
    with nothing_unheard(caplog):
        service = serve(sums_flow("sums", topics), checkpoints_in(tmp_path / "kept"))
        async with feeding(topics.numbers) as feed:
            await service.works()
            with locked(tmp_path / "sums.db"):
                error = await service.failed()
        again = serve(sums_flow("sums", topics), checkpoints_in(tmp_path / "kept"))
        await until_committed(topics.sums, feed.count)
        await again.suspended()
    await check_committed(topics.sums, feed.count)
    assert isinstance(error, JobFailed)
    assert isinstance(error.__cause__, TopicUnavailable)
    assert "another writer has kept the file locked for longer than lock_timeout_s" in one_line(error)


@pytest.mark.parametrize("fault", ["stop", "freeze"])
async def test_a_job_continues_while_its_store_does_not_answer(
    serve: Serve, s3_server: S3Server, s3_url: str, tmp_path: Path, caplog: pytest.LogCaptureFixture, fault: str
) -> None:
    """The object store was away for a minute, and the job ended, or its outputs were missing or doubled."""
    file = tmp_path / "topics.db"
    topics = Topics.same(*(topic(f"sqlite:///{file}?topic={name}") for name in ("numbers", "sums")))
    await topics.create()
    with nothing_unheard(caplog):
        service = serve(sums_flow("sums", topics), checkpoints_in(s3_url.replace("after_s=20", "after_s=0.5")))
        async with feeding(topics.numbers) as feed:
            await service.works()
            (s3_server.stop if fault == "stop" else s3_server.freeze)()
            try:
                await service.until(lambda: service.given_up >= 2)
            finally:
                (s3_server.start if fault == "stop" else s3_server.thaw)()
            await service.works()
        await until_committed(topics.sums, feed.count)
        statistics = await service.suspended()
    await check_committed(topics.sums, feed.count)
    assert (len(service.jobs), statistics.state) == (1, "suspended")
    place = s3_url.partition("?")[0]
    assert f"expected the object store {place} to keep checkpoints, given no answer for 0.5 s" in caplog.text
    assert "The next one is tried in 0.1 s" in caplog.text
    assert "hush" not in caplog.text


async def test_a_job_does_not_start_without_its_store(serve: Serve, s3_server: S3Server, s3_url: str) -> None:
    """A store that did not answer was taken for an empty one, and the job started without its state."""
    topics = Topics.same(*(topic(f"memory://{name}") for name in ("numbers", "sums")))
    await topics.create()
    s3_server.stop()
    try:
        service = serve(sums_flow("sums", topics), checkpoints_in(s3_url.replace("after_s=20", "after_s=0.2")))
        with pytest.raises(StoreUnavailable, match=r"given no answer for 0\.2 s; .* check the store, the network"):
            await service.suspended()
    finally:
        s3_server.start()


async def test_a_missing_bucket_is_an_error_at_the_start(serve: Serve, s3_url: str) -> None:
    """A wrong bucket looked like an outage, and each checkpoint was given up."""
    topics = Topics.same(*(topic(f"memory://{name}") for name in ("numbers", "sums")))
    await topics.create()
    service = serve(sums_flow("sums", topics), checkpoints_in(s3_url.replace("s3://state", "s3://other")))
    with pytest.raises(ConfigurationError, match=r"given s3://other\S+ \(answer 404 NoSuchBucket\)") as failed:
        await service.suspended()
    assert "hush" not in "".join(traceback.format_exception(failed.value))


limits_of_linux = pytest.mark.skipif(sys.platform != "linux", reason="the limits of a process are those of Linux")


def outcomes_of(kind: str, folder: Path) -> list[Outcome]:
    """Run the program in a process of its own, whose limits are not those of the tests."""
    program = Path(__file__).with_name("scarce.py")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OPENBLAS_NUM_THREADS": "1"}
    command = [sys.executable, str(program), kind, str(folder)]
    ran = subprocess.run(command, env=environment, capture_output=True, timeout=PATIENCE_S, check=False)
    assert not ran.returncode, ran.stderr.decode()
    return msgspec.json.decode(ran.stdout, type=list[Outcome])


@limits_of_linux
def test_without_files_to_open_a_job_fails_with_the_limit_and_never_with_rights(tmp_path: Path) -> None:
    """A process had no file descriptors left, and was told to make the folder of its topics writable."""
    outcomes = outcomes_of("files", tmp_path)
    failed = [each for each in outcomes if each.state != "finished"]
    assert len(outcomes) - len(failed) == 6, "each flow finishes without a limit, and with enough files"
    assert {each.state for each in failed} == {None, "failed"}
    for each in failed:
        assert "Too many open files" in each.error, each
        assert "raise the limit on open files of this process (ulimit -n)" in each.error, each
        assert "writable" not in each.error, each
    for step in ("count", "lines", "b", "variable 0"):
        assert any(f"step {step!r}" in each.error for each in failed), step


@limits_of_linux
def test_a_job_without_memory_fails_with_the_step_that_needed_it(tmp_path: Path) -> None:
    """Memory that ended in a checkpoint was reported as a fault of streamiter, or as a bad file descriptor."""
    outcomes = outcomes_of("memory", tmp_path)
    places = ("step 'hungry'", "step 'hungry'", "in a checkpoint")
    for each, place in zip(outcomes, places, strict=True):
        assert each.state == "failed", each
        assert each.causes[:2] == ["JobFailed", "MemoryError"], each
        assert each.error.startswith(f"flow 'scarce', {place}"), each
        assert each.error.endswith("MemoryError: no memory is left; give this process more memory, or keep less in it")
