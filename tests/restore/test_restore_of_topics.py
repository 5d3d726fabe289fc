"""Topics outlive a process: reading resumes at the snapshot, and publishing with the next version."""

import asyncio
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import orjson
import pytest
from restore.counted_calls import count_calls
from restore.topic_cases import loop_through_a_topic, numbered, stored_models, stored_sink, stored_source, written

from streamiter import topic
from streamiter.engine.tasks.topic_returning import TopicReturnPath
from streamiter.testing import RestoreProcess, check_flow_restore
from streamiter.testing.restore.check import Comparison
from streamiter.testing.restore.driving import Build, BuiltFlow, RunSettings, run_in_steps
from streamiter.topics import ReadRequest
from streamiter_files.reader import FilesReader
from streamiter_sqlite.topic import SqliteReader


def test_reading_an_sqlite_topic_resumes(
    tmp_path: Path, restore_process: RestoreProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The stored positions counted records that were only read ahead, and these records were lost."""
    url = f"sqlite:///{tmp_path}/topics.db?topic=clicks"
    asyncio.run(written(topic(url), numbered()))
    calls = count_calls(SqliteReader, monkeypatch)
    check_flow_restore(functools.partial(stored_source, url), process=restore_process)
    assert calls


FILES: dict[str, tuple[str, Callable[[int], str]]] = {
    "csv": ("a,b\n", lambda n: f"{n},{n / 7}\n"),
    "jsonl": ("", lambda n: f'{{"n": {n}}}\n'),
    "libsvm": ("", lambda n: f"{n % 2} 1:{n / 3} 4:2\n"),
    "dummy": ("", lambda n: f"{n % 2} {n},{n + 3}\n"),
}


@pytest.mark.parametrize("kind", FILES)
def test_reading_files_resumes(
    kind: str, tmp_path: Path, restore_process: RestoreProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One of several files is longer than a batch, so positions are inside a file and between files."""
    header, line = FILES[kind]
    for number, length in enumerate((3, 9_000, 2)):
        (tmp_path / f"part-{number}.{kind}").write_text(header + "".join(map(line, range(length))))
    calls = count_calls(FilesReader, monkeypatch)
    build = functools.partial(stored_source, f"file:{tmp_path}/*.{kind}")
    check_flow_restore(build, cuts=3, process=restore_process)
    assert calls


def test_feedback_in_a_topic_is_read_again(
    tmp_path: Path, restore_process: RestoreProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Feedback in transit at the barrier is in the topic, between records of other producers."""
    url = f"sqlite:///{tmp_path}/topics.db?topic=loop"
    asyncio.run(written(topic(url), [[]]))
    calls = count_calls(TopicReturnPath, monkeypatch)
    for seed in range(10):  # Only some cuts find feedback in transit.
        check_flow_restore(
            functools.partial(loop_through_a_topic, url),
            cut_at="turns",
            cuts=3,
            ordered=False,
            compare_state=False,
            process=restore_process,
            seed=seed,
        )
        if calls:
            break
    assert calls


def crash_and_resume(build: Build, after: int, process: RestoreProcess) -> None:
    """Run some steps, take a snapshot and stop; then resume in a fresh process, and run to the end."""
    options = RunSettings()
    undisturbed = asyncio.run(run_in_steps(BuiltFlow(build, (), gated=True), options, only=after, cuts=True))
    cut = undisturbed.cuts[-1]
    assert cut.after == after
    comparison = Comparison("crash", build, options, None, (), process)
    assert comparison.restored(cut, []).violations == []


async def values_in(url: str) -> list[Any]:
    reader = await topic(url).open_reader(ReadRequest(stop="latest"))
    try:
        values: list[Any] = []
        while (batch := await reader.read()) is not None:
            values += batch.values
        return values
    finally:
        await reader.close()


@pytest.mark.parametrize("after", range(7))
def test_a_restored_sink_writes_no_record_twice(after: int, tmp_path: Path, restore_process: RestoreProcess) -> None:
    """Records from before the barrier are already in the topic, and must not be written again."""
    url = f"sqlite:///{tmp_path}/topics.db?topic=out"
    asyncio.run(written(topic(url), [[]]))
    crash_and_resume(functools.partial(stored_sink, url), after, restore_process)
    assert [orjson.loads(value) for value in asyncio.run(values_in(url))] == [{"n": n} for n in range(6)]


@pytest.mark.parametrize("after", range(5))
def test_published_versions_continue_without_a_gap_in_the_same_generation(
    after: int, tmp_path: Path, restore_process: RestoreProcess
) -> None:
    """A publisher began a new generation after each restart, so readers started from the beginning."""
    url = f"sqlite:///{tmp_path}/topics.db?topic=models"
    asyncio.run(written(topic(url), [[]]))
    crash_and_resume(functools.partial(stored_models, url), after, restore_process)
    updates = [orjson.loads(value) for value in asyncio.run(values_in(url))]
    assert [(update["generation"], update["version"]) for update in updates] == [(1, 1), (1, 2), (1, 3), (1, 4)]
    assert [update["parameters"]["weights"][0] for update in updates] == [n / 7 for n in range(4)]
