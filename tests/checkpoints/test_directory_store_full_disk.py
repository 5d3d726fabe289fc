"""The store in a directory on a disk that is full or read-only."""

import contextlib
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from checkpoints.snapshots import CONTENT, Frames, content_of, header, ids, save, save_and_commit
from support.waiting import PATIENCE_S

from streamiter.engine.storage.flow_record import CommitPointer
from streamiter.engine.storage.snapshot import CheckpointId, SnapshotPart
from streamiter.engine.storage.store import store_at
from streamiter.errors import ConfigurationError, StorageFull

MIB = 1 << 20
SmallDisk = tuple[Path, Callable[[], bool]]


def make_read_only(disk: Path) -> None:
    subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True, timeout=PATIENCE_S)


def fill(disk: Path) -> None:
    """Fill the disk to the last byte."""
    with open(disk / "filler", "wb", buffering=0) as filler, contextlib.suppress(OSError):
        while True:
            filler.write(bytes(4096))


async def test_a_directory_that_may_not_be_written_to_is_an_error(small_disk: SmallDisk) -> None:
    """The error for a directory of another user, or on a read-only disk, did not name the directory."""
    disk, _ = small_disk
    make_read_only(disk)
    with pytest.raises(
        ConfigurationError, match=r"expected a directory for checkpoints that this process may write to.*Read-only"
    ):
        await store_at(disk).claim("clicks", "a")


async def test_a_full_disk_fails_the_save_and_nothing_else(small_disk: SmallDisk) -> None:
    """Half a snapshot counted as one, or filled the disk, or a full disk damaged the committed snapshot."""
    disk, give_more_room = small_disk
    store = store_at(disk)
    await store.claim("clicks", "a")
    await save_and_commit(store, 1)
    large = [SnapshotPart("p", b"", (Frames([bytes(MIB // 2)] * 10),))]
    for number in range(2, 5):
        with pytest.raises(
            StorageFull, match=rf"^flow 'clicks': expected room for checkpoints in {disk}, given No space left"
        ):
            await store.save(header(number), large)
    assert await ids(store) == [CheckpointId(1, "a")]
    assert [path.suffix for path in (disk / "clicks").iterdir() if path.stat().st_size > 2000] == []
    snapshot = await store.open("clicks", CheckpointId(1, "a"))
    assert await content_of(snapshot) == CONTENT
    snapshot.close()
    give_more_room()
    await store.save(header(5), large)
    await store.commit("clicks", CheckpointId(5, "a"))
    await store.close()


async def test_on_a_full_disk_commits_fail_as_a_whole_and_pruning_works(small_disk: SmallDisk) -> None:
    """The few bytes of the record did not fit, and even removing snapshots needed space."""
    disk, _ = small_disk
    store = store_at(disk)
    await store.claim("clicks", "a")
    await save_and_commit(store, 1, 2)
    third = await save(store, 3)
    fill(disk)
    for call in (
        store.commit("clicks", third),
        store_at(disk).claim("clicks", "b"),
        store_at(disk).claim("other", "b"),
    ):
        with pytest.raises(StorageFull):
            await call
    assert await store.pointer("clicks") == CommitPointer("a", CheckpointId(2, "a"))
    assert await store.prune("clicks", keep=1) == [CheckpointId(1, "a"), third]
    (disk / "filler").unlink()
    await save_and_commit(store, 4)
    await store.close()
