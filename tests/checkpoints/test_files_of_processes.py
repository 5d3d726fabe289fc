"""A snapshot of several processes has a file of each process: it exists as a whole or not at all."""

import asyncio
import contextlib
import json
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
from checkpoints.snapshots import CONTENT, content_of, header, ids, parts, save, save_and_commit
from checkpoints.store_contract import MakeStore
from cli.test_cli_checkpoints import checkpoints as command

from streamiter.engine.storage.flow_record import snapshot_name
from streamiter.engine.storage.snapshot import CheckpointId, PartsFile, SnapshotPart
from streamiter.engine.storage.store import CheckpointStore, store_at
from streamiter.errors import CheckpointError, ConfigurationError, ProducerFenced

SEVENTH = CheckpointId(7, "a")


def ready(files: list[PartsFile]) -> Callable[[], Awaitable[list[PartsFile]]]:
    async def others() -> list[PartsFile]:
        return files

    return others


async def save_in_three(store: CheckpointStore, make_store: MakeStore, number: int, run: str = "a") -> list[PartsFile]:
    """Store a snapshot whose parts are those of three processes, not committed."""
    files = []
    for process, part in enumerate(parts()[1:], 1):
        other = make_store()
        await other.follow("clicks", run, process)
        files.append(await other.save_parts(header(number, run), [part], process))
    await store.save(header(number, run), parts()[:1], ready(files))
    return files


@pytest.fixture
async def store(make_store: MakeStore) -> CheckpointStore:
    store = make_store()
    await store.claim("clicks", "a")
    return store


def folder_of(tmp_path: Path) -> Path:
    return tmp_path / "made" / "here" / "clicks"


async def test_the_parts_of_all_processes_are_one_snapshot(store: CheckpointStore, make_store: MakeStore) -> None:
    """The state of the subtasks in other processes was missing after a restart."""
    await save_in_three(store, make_store, 7)
    snapshot = await make_store().open("clicks", SEVENTH)
    assert snapshot.header == header(7)
    assert await content_of(snapshot) == CONTENT
    snapshot.verify()
    snapshot.close()


async def test_parts_without_a_manifest_are_no_snapshot_and_are_pruned_with_their_snapshot(
    store: CheckpointStore, make_store: MakeStore, tmp_path: Path
) -> None:
    """A run that ended before the manifest left gigabytes, or a restart took parts without the rest."""
    await save_in_three(store, make_store, 7)
    await store.commit("clicks", SEVENTH)
    other = make_store()
    await other.follow("clicks", "a", 1)
    await other.save_parts(header(8), [SnapshotPart("alone", b"")], 1)
    await other.save_parts(header(5), [SnapshotPart("alone", b"")], 2)
    assert await ids(store) == [SEVENTH]
    assert await store.prune("clicks", keep=1) == []
    names = [snapshot_name(SEVENTH, process) for process in (1, 2, 0)]
    assert sorted(path.name for path in folder_of(tmp_path).glob("0*")) == names
    await save_and_commit(store, 9)
    assert await store.prune("clicks", keep=1) == [SEVENTH]
    assert [path.name for path in folder_of(tmp_path).glob("0*")] == [snapshot_name(CheckpointId(9, "a"))]


@pytest.mark.parametrize("damage", ["lost", "exchanged", "changed"])
async def test_a_missing_or_damaged_file_of_a_process_is_named(
    store: CheckpointStore, make_store: MakeStore, tmp_path: Path, damage: str
) -> None:
    """A restart continued without the state of one process, or the message did not say which file was missing."""
    await save_in_three(store, make_store, 7)
    await store.commit("clicks", SEVENTH)
    first, second = (folder_of(tmp_path) / snapshot_name(SEVENTH, process) for process in (1, 2))
    if damage == "lost":
        second.unlink()
    elif damage == "exchanged":
        second.write_bytes(first.read_bytes())
    else:
        content = second.read_bytes()
        second.write_bytes(content[:70] + b"?" + content[71:])
    with (
        pytest.raises(CheckpointError, match=rf"{second}.*(no such file|given another file|damaged)"),
        contextlib.closing(await store.open("clicks", SEVENTH)) as snapshot,
    ):
        snapshot.verify()
    assert await ids(store) == [SEVENTH]
    verified = command("verify", "here", cwd=folder_of(tmp_path).parent.parent)
    assert (verified.returncode, second.name in verified.stderr) == (1, True)


async def test_a_file_for_a_run_that_was_replaced_is_refused_and_removed(
    store: CheckpointStore, make_store: MakeStore, tmp_path: Path
) -> None:
    """A process of an old run wrote parts after a newer run had claimed the flow, and they were never removed."""
    other = make_store()
    await other.follow("clicks", "a", 1)
    newer = make_store()
    await newer.claim("clicks", "b")
    with pytest.raises(ProducerFenced):
        await other.save_parts(header(7), [SnapshotPart("alone", b"")], 1)
    assert list(folder_of(tmp_path).glob("0*")) == []
    await save(newer, 7, "b")
    assert await ids(newer) == [CheckpointId(7, "b")]


async def test_a_folder_that_another_process_does_not_see_is_refused(store: CheckpointStore, tmp_path: Path) -> None:
    """Each machine wrote to its own disk, and the first restart had the state of one of them."""
    with pytest.raises(ConfigurationError, match=r"process 2 does not find the claim of process 0 .*share"):
        await store_at(tmp_path / "another disk").follow("clicks", "a", 2)


async def test_a_snapshot_waits_for_the_files_of_all_processes(store: CheckpointStore, make_store: MakeStore) -> None:
    """A manifest without the last file could be committed."""
    answered: asyncio.Future[list[PartsFile]] = asyncio.get_running_loop().create_future()
    saving = asyncio.ensure_future(store.save(header(7), parts(), lambda: answered))
    await asyncio.sleep(0.1)
    assert await ids(store) == []
    answered.set_result([])
    assert await saving > 0
    assert await ids(store) == [SEVENTH]


async def test_the_command_line_shows_all_files_as_one_snapshot(
    store: CheckpointStore, make_store: MakeStore, tmp_path: Path
) -> None:
    """The size of a checkpoint was that of process 0, and its other parts were not shown."""
    await save_in_three(store, make_store, 7)
    await store.commit("clicks", SEVENTH)
    place = folder_of(tmp_path).parent
    shown = json.loads(command("show", "here", "--json", cwd=place.parent).stdout)
    assert list(shown["parts"]) == list(CONTENT)
    assert shown["size_bytes"] == sum(path.stat().st_size for path in folder_of(tmp_path).glob("0*"))
    assert command("verify", "here", cwd=place.parent).returncode == 0
