"""The store in a directory: the contract, the directory, and several processes that use it at the same time."""

import asyncio
import os
import threading
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
from checkpoints.snapshots import Frames, header, ids, parts, save, save_and_commit
from checkpoints.store_contract import MakeStore, StoreContract

from streamiter.engine.storage.flow_checkpoints import FlowCheckpoints
from streamiter.engine.storage.folder_blobs import FolderBlobs
from streamiter.engine.storage.snapshot import CheckpointId, SnapshotPart
from streamiter.engine.storage.store import store_at
from streamiter.errors import CheckpointError, ConfigurationError
from streamiter.values.helpers import files as file_locks

MIB = 1 << 20


class TestStoreInADirectory(StoreContract):
    """The checks for every store."""


# ---- the directory


async def test_reading_creates_no_directory(make_store: MakeStore, tmp_path: Path) -> None:
    """A tool with a wrong path left an empty directory there."""
    store = make_store()
    assert (await store.list(), await store.pointer("clicks")) == ([], None)
    with pytest.raises(CheckpointError, match="given none"):
        await store.open("clicks", CheckpointId(1, "a"))
    assert os.listdir(tmp_path) == []


async def test_a_file_in_place_of_the_directory_is_an_error(tmp_path: Path) -> None:
    """A path to a file instead of a directory failed without the reason."""
    (tmp_path / "file").write_bytes(b"")
    for place in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(ConfigurationError, match=rf"flow 'clicks': expected a directory .* given {place}"):
            await store_at(place).claim("clicks", "a")
    assert await store_at(tmp_path / "file").list() == []


async def test_files_of_others_in_the_directory_are_not_changed(make_store: MakeStore, folder: Path) -> None:
    """Notes, a backup or the folder of another program in the directory were removed or listed."""
    store = make_store()
    await store.claim("clicks", "a")
    await save_and_commit(store, 1, 2)
    others = [folder / "notes.txt", folder / "1.partial", folder.parent / "file", folder.parent / "Other" / "file"]
    for other in others:
        other.parent.mkdir(exist_ok=True)
        other.write_text("mine")
    (folder.parent / "empty").mkdir()
    assert await store.prune("clicks", keep=1) == [CheckpointId(1, "a")]
    assert await ids(store, None) == [CheckpointId(2, "a")]
    assert all(other.read_text() == "mine" for other in others)


async def test_a_name_that_is_no_text_is_refused(make_store: MakeStore) -> None:
    """A name that UTF-8 cannot encode failed inside the store."""
    with pytest.raises(ConfigurationError, match="expected names of text"):
        await make_store().claim("half \ud800", "a")


@pytest.mark.parametrize("run", ["", "x" * 201, "Ä" * 40])
async def test_the_id_of_a_run_is_part_of_a_file_name(make_store: MakeStore, run: str) -> None:
    """An id that is no file name was refused only when the first checkpoint was saved."""
    with pytest.raises(ConfigurationError, match="expected the id of a run of 1 to 200 letters or digits"):
        await make_store().claim("clicks", run)


# ---- several processes


@pytest.fixture
async def saving(make_store: MakeStore) -> AsyncIterator[Any]:
    """Return a run that has committed checkpoint 1 and is saving 2, its task, and the event that ends the save."""
    half, may_end = asyncio.Event(), asyncio.Event()

    class Slow(Frames):
        def frames(self) -> Iterator[bytes]:
            while not may_end.is_set():
                half.set()
                yield b"frame"

    store = make_store()
    await store.claim("clicks", "a")
    await save_and_commit(store, 1)
    saving = asyncio.ensure_future(store.save(header(2), [SnapshotPart("p", b"", (Slow(),))]))
    await half.wait()
    yield store, saving, may_end
    may_end.set()
    await asyncio.gather(saving, return_exceptions=True)


async def test_a_file_that_is_being_written_is_not_removed(saving: Any, folder: Path) -> None:
    """A half-written file was removed while its writer still ran."""
    store, task, may_end = saving
    partial = folder / "0000000002-a.checkpoint.partial"
    dead = folder / "0000000009-dead.checkpoint.partial"
    dead.write_bytes(b"half")
    assert await store.prune("clicks", keep=1) == []
    assert FlowCheckpoints(FolderBlobs(folder.parent), "clicks").prune(keep=1, newer=False) == []
    assert (partial.exists(), dead.exists()) == (True, False)
    may_end.set()
    await task
    assert await ids(store) == [CheckpointId(1, "a"), CheckpointId(2, "a")]
    assert not partial.exists()


async def test_a_tool_removes_newer_snapshots_only_while_no_run_is_alive(make_store: MakeStore, folder: Path) -> None:
    """A tool removed a snapshot that its run was about to commit."""
    store = make_store()
    await store.claim("clicks", "a")
    await save_and_commit(store, 1)
    newer = await save(store, 2)
    tool = FlowCheckpoints(FolderBlobs(folder.parent), "clicks")
    assert tool.prune(keep=1, newer=False) == []
    with pytest.raises(ConfigurationError, match="given one that is alive"):
        tool.prune(keep=1, newer=True)
    await store.commit("clicks", newer)
    assert tool.prune(keep=1, newer=False) == [CheckpointId(1, "a")]
    newest = await save(store, 3)
    await store.close()
    assert tool.prune(keep=1, newer=True) == [newest]


async def test_a_lock_that_is_never_released_is_an_error(
    make_store: MakeStore, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process was stopped at a wrong moment, by SIGSTOP or a debugger, and others silently waited forever."""
    monkeypatch.setattr(file_locks, "_TRIES", 3)
    store = make_store()
    await store.claim("clicks", "a")
    with file_locks.alone(folder / "lock"), pytest.raises(CheckpointError, match=r"is it stopped\?"):
        await store.prune("clicks", keep=1)
    assert await store.prune("clicks", keep=1) == []


@pytest.mark.parametrize("turns", [0, 1, 3, 10, 30, 60, 100, 150, 200, 300, 400, 600, 1000, 2000])
async def test_a_save_that_is_cancelled_at_any_point_leaves_nothing(
    make_store: MakeStore, folder: Path, turns: int
) -> None:
    """A save was cancelled while a thread wrote the last bytes, or renamed the file, and left a file."""
    store = make_store()
    await store.claim("clicks", "a")
    frames = Frames([bytes(MIB)] * 3)
    saving = asyncio.ensure_future(store.save(header(1), [SnapshotPart("p", b"", (frames,))]))
    for _ in range(turns):
        await asyncio.sleep(0)
    saving.cancel()
    done = await asyncio.gather(saving, return_exceptions=True)
    names = sorted(os.listdir(folder))
    if isinstance(done[0], asyncio.CancelledError):
        assert names == ["in-use", "lock", "record.json"]
    else:
        assert names == ["0000000001-a.checkpoint", "in-use", "lock", "record.json"]


async def test_a_save_that_is_cancelled_as_it_ends_leaves_nothing(
    make_store: MakeStore, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file already had its final name when the job was aborted, and no run ever committed or removed it."""
    store = make_store()
    await store.claim("clicks", "a")
    loop = asyncio.get_running_loop()
    publish = FlowCheckpoints.publish
    saving: list[asyncio.Future[int]] = []

    def cancelled_behind(self: FlowCheckpoints, *arguments: Any) -> int:
        size_bytes = publish(self, *arguments)
        loop.call_soon_threadsafe(saving[0].cancel)
        return size_bytes

    monkeypatch.setattr(FlowCheckpoints, "publish", cancelled_behind)
    saving.append(asyncio.ensure_future(store.save(header(1), parts())))
    with pytest.raises(asyncio.CancelledError):
        await saving[0]
    assert sorted(os.listdir(folder)) == ["in-use", "lock", "record.json"]


async def test_two_flows_are_saved_at_the_same_time(make_store: MakeStore) -> None:
    """Jobs in one process that share a directory disturbed each other."""
    store, other = make_store(), make_store()
    await store.claim("clicks", "a")
    await other.claim("views", "a")
    await asyncio.gather(save_and_commit(store, 1, 2), save_and_commit(other, 1, 2, 3, flow="views"))
    assert [(each.flow, each.id.number) for each in await store.list()] == [
        ("clicks", 1),
        ("clicks", 2),
        ("views", 1),
        ("views", 2),
        ("views", 3),
    ]


async def test_all_claims_at_the_same_time_are_recorded(make_store: MakeStore, folder: Path) -> None:
    """A run that was missing in the record claimed the flow again, and took it from a newer run."""
    runs = [f"run{number}" for number in range(20)]
    await asyncio.gather(*(make_store().claim("clicks", run) for run in runs))
    record = FlowCheckpoints(FolderBlobs(folder.parent), "clicks").record()
    assert record is not None
    assert sorted(each.run for each in record.runs) == sorted(runs)


async def test_a_reader_during_a_commit_sees_the_old_or_the_new_record(make_store: MakeStore, folder: Path) -> None:
    """A tool or the next run read half a record, and reported damage."""
    store = make_store()
    await store.claim("clicks", "a")
    committed = await save_and_commit(store, 1)
    committed.append(await save(store, 2))
    seen, is_done = set[CheckpointId | None](), threading.Event()

    def look() -> None:
        while not is_done.is_set():
            record = FlowCheckpoints(FolderBlobs(folder.parent), "clicks").record()
            seen.add(record.committed if record else None)

    looking = asyncio.ensure_future(asyncio.to_thread(look))
    for number in range(100):
        await store.commit("clicks", committed[number % 2])
    is_done.set()
    await looking
    assert seen <= set(committed)
