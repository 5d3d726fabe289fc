"""Jobs whose SQLite file another process locks, for a moment or permanently."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from job_faults.service import Serve, checkpoints_in, nothing_unheard, one_line
from job_faults.sums import Topics, check_committed, feeding, sums_flow, until_committed
from support.processes import process

from streamiter.errors import JobFailed, TopicUnavailable
from streamiter.topics import topic

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


def topics_in(folder: Path, **options: object) -> Topics:
    """Return topics with the outputs in a separate file, so that numbers can arrive while it is locked."""
    numbers = topic(f"sqlite:///{folder}/numbers.db?topic=numbers")
    sums = f"sqlite:///{folder}/sums.db?topic=sums"
    return Topics(numbers, topic(sums, **options), numbers, topic(sums))


async def test_a_commit_waits_for_a_file_that_is_locked(
    serve: Serve, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A backup of the file took a second, and the job ended."""
    topics = topics_in(tmp_path)
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
    topics = topics_in(tmp_path, lock_timeout_s=0.3)
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
