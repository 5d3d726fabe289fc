"""The store in a directory with damaged, renamed or lost files."""

import asyncio
import json
import zlib
from pathlib import Path

import pytest
from checkpoints.snapshots import ids, save, save_and_commit
from checkpoints.store_contract import MakeStore

from streamiter.engine.storage.flow_record import CommitPointer, unpack_record
from streamiter.engine.storage.snapshot import CheckpointId, Damage, OtherFormat
from streamiter.errors import CheckpointError


async def test_a_damaged_snapshot_is_left_out_of_the_list_and_refused(make_store: MakeStore, folder: Path) -> None:
    """The list, from which a user chooses another snapshot, showed a damaged one."""
    store = make_store()
    await store.claim("clicks", "a")
    await save_and_commit(store, 1, 2)
    damaged = folder / "0000000002-a.checkpoint"
    damaged.write_bytes(damaged.read_bytes()[:-1])
    assert await ids(store) == [CheckpointId(1, "a")]
    with pytest.raises(CheckpointError, match=rf"^{damaged}: the checkpoint is damaged: .*it is cut off"):
        await store.open("clicks", CheckpointId(2, "a"))


async def test_content_that_is_damaged_is_found_by_verifying_and_by_reading(
    make_store: MakeStore, folder: Path
) -> None:
    """The list checks only the header, and damaged content of a snapshot was returned."""
    store = make_store()
    await store.claim("clicks", "a")
    await save(store, 1)
    file = folder / "0000000001-a.checkpoint"
    file.write_bytes(file.read_bytes().replace(b"positions", b"positronS"))
    snapshot = await store.open("clicks", CheckpointId(1, "a"))
    for reading in (asyncio.to_thread(snapshot.verify), snapshot.content("read/0")):
        with pytest.raises(CheckpointError, match="part 'read/0': the checkpoint is damaged: frame 0 does not match"):
            await reading
    snapshot.close()


async def test_a_renamed_or_copied_snapshot_is_refused(make_store: MakeStore, folder: Path) -> None:
    """The state of one flow was in the folder of another, or an older state had the name of the newest."""
    store = make_store()
    await store.claim("clicks", "a")
    await store.claim("views", "a")
    await save(store, 1)
    (folder / "0000000002-a.checkpoint").write_bytes((folder / "0000000001-a.checkpoint").read_bytes())
    (folder.parent / "views" / "0000000001-a.checkpoint").write_bytes((folder / "0000000001-a.checkpoint").read_bytes())
    assert await ids(store, None) == [CheckpointId(1, "a")]
    with pytest.raises(
        CheckpointError, match="expected checkpoint 2 of run a of flow 'clicks', given checkpoint 1 of run a"
    ):
        await store.open("clicks", CheckpointId(2, "a"))
    with pytest.raises(CheckpointError, match="of flow 'views', given checkpoint 1 of run a of flow 'clicks'"):
        await store.open("views", CheckpointId(1, "a"))


async def test_every_change_of_the_record_is_found(make_store: MakeStore, folder: Path) -> None:
    """After a flipped bit in a number, the job resumed from another checkpoint, or fenced the wrong run."""
    store = make_store()
    await store.claim("clicks", "a")
    await save_and_commit(store, 1)
    record = folder / "record.json"
    whole = record.read_bytes()
    for position in range(len(whole) - 1):
        for bit in range(8):
            flipped = whole[:position] + bytes([whole[position] ^ 1 << bit]) + whole[position + 1 :]
            with pytest.raises((Damage, OtherFormat)):
                unpack_record(flipped)
    for length in range(len(whole) - 1):
        with pytest.raises(Damage):
            unpack_record(whole[:length])
    record.write_bytes(whole[:-10])
    for call in (store.pointer("clicks"), store.commit("clicks", CheckpointId(1, "a")), store.prune("clicks", keep=1)):
        with pytest.raises(
            CheckpointError, match=rf"^{record}: expected the runs and the last commit of .* given a damaged"
        ):
            await call


@pytest.mark.parametrize("place", ["flow", "runs", "committed", "is_lost", "runs/run", "runs/committed"])
async def test_a_record_without_a_field_is_damaged(make_store: MakeStore, folder: Path, place: str) -> None:
    """A record without its last commit was read as the record of a flow without commits."""
    store = make_store()
    await store.claim("clicks", "a")
    await save_and_commit(store, 1)
    record = json.loads((folder / "record.json").read_bytes())["record"]
    part, _, field = place.rpartition("/")
    del (record[part][0] if part else record)[field]
    packed = json.dumps(record, separators=(",", ":")).encode()
    with pytest.raises(Damage, match="it holds what no version of this format has"):
        unpack_record(b'{"format":1,"crc32":%d,"record":%s}\n' % (zlib.crc32(packed), packed))


async def test_a_damaged_record_can_be_replaced(make_store: MakeStore, folder: Path) -> None:
    """The message about a damaged record did not say how to continue: start fresh, or choose a checkpoint."""
    store = make_store()
    await store.claim("clicks", "a")
    await save_and_commit(store, 1)
    (folder / "record.json").write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"remove it and start from a checkpoint that you choose"):
        await make_store().claim("clicks", "b")
    assert await make_store().claim("clicks", "b", forget_committed=True) is None
    assert await store.pointer("clicks") == CommitPointer("b", None)


async def test_a_record_of_a_newer_version_is_distinguished_from_a_damaged_one(
    make_store: MakeStore, folder: Path
) -> None:
    """After a return to an older version of the program, the newer record was reported as damaged."""
    store = make_store()
    await store.claim("clicks", "a")
    record = folder / "record.json"
    record.write_text(json.dumps(json.loads(record.read_text()) | {"format": 2}))
    with pytest.raises(CheckpointError, match=r"written by another streamiter \(format 2\), expected format 1"):
        await store.pointer("clicks")


async def test_a_record_that_was_lost_is_not_taken_for_a_first_run(make_store: MakeStore, folder: Path) -> None:
    """A flow that had lost its record started fresh without a request, at the first or the second start."""
    store = make_store()
    await store.claim("clicks", "a")
    await save_and_commit(store, 1, 2)
    (folder / "record.json").unlink()
    for run in ("b", "c"):
        assert await store.claim("clicks", run) is None
        assert await store.pointer("clicks") is None
        assert await store.prune("clicks", keep=1) == []
    await store.commit("clicks", CheckpointId(1, "a"))  # The user has chosen this checkpoint.
    assert await store.pointer("clicks") == CommitPointer("c", CheckpointId(1, "a"))
    assert await make_store().claim("clicks", "d") == CommitPointer("c", CheckpointId(1, "a"))


async def test_pruning_removes_nothing_if_the_committed_snapshot_is_missing(
    make_store: MakeStore, folder: Path
) -> None:
    """The older snapshots, the only remaining ones of the flow, were removed."""
    store = make_store()
    await store.claim("clicks", "a")
    await save_and_commit(store, 1, 2, 3)
    (folder / "0000000003-a.checkpoint").unlink()
    assert await store.prune("clicks", keep=1) == []
    assert await ids(store) == [CheckpointId(1, "a"), CheckpointId(2, "a")]
