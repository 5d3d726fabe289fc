"""The contract of checkpoint stores, as a class of checks to inherit from.

A store's test module has a fixture ``make_store``: each call makes a store of the same snapshots, as another process
would.
"""

import asyncio
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from checkpoints.snapshots import CONTENT, Frames, content_of, header, ids, parts, save, save_and_commit

from streamiter.engine.storage.flow_record import CommitPointer
from streamiter.engine.storage.snapshot import CheckpointId, SnapshotPart
from streamiter.engine.storage.store import CheckpointStore
from streamiter.errors import CheckpointError, InternalError, ProducerFenced

MakeStore = Callable[[], CheckpointStore]

FLOWS = ["clicks", "Clicks", "a/b", "..", "../clicks", "a b", "größe", "%2e", ".", "~", "漢字" * 60, "漢字" * 61]


async def check_independence(store: CheckpointStore, flow: str, flows: list[str]) -> None:
    """Check that one flow has checkpoints and the others have none, although all are claimed."""
    await store.claim(flow, "a")
    await save_and_commit(store, 1, flow=flow)
    others = [other for other in flows if other != flow]
    for other in others:
        assert (await store.pointer(other), await ids(store, other)) == (None, [])
        await store.claim(other, "b")
    assert await store.prune(others[0], keep=1) == []
    assert await store.pointer(flow) == CommitPointer("a", CheckpointId(1, "a"))
    assert await ids(store, flow) == await ids(store, None) == [CheckpointId(1, "a")]
    assert (await store.list())[0].flow == flow
    await store.close()


class StoreContract:
    """Inherit from this class and define a fixture ``make_store``."""

    # ---- kept snapshots

    async def test_a_snapshot_is_read_unchanged(self, make_store: MakeStore) -> None:
        """A restored state had a missing piece, or the pieces of two parts were exchanged."""
        store = make_store()
        await store.claim("clicks", "a")
        size_bytes = await store.save(header(7), parts())
        assert size_bytes >= sum(len(content) for content, _ in CONTENT.values())
        snapshot = await make_store().open("clicks", CheckpointId(7, "a"))
        assert snapshot.header == header(7)
        assert list(snapshot.part_names()) == list(CONTENT)
        assert await content_of(snapshot) == CONTENT
        snapshot.verify()
        snapshot.close()
        snapshot.close()

    async def test_frames_of_several_pieces_may_be_read_in_turn(self, make_store: MakeStore) -> None:
        """The subtasks of a step restored at the same time, and a shared position in the file mixed their frames up."""
        store = make_store()
        await store.claim("clicks", "a")
        many = [[b"%d of %d" % (number, piece) * 50 for number in range(300)] for piece in range(3)]
        await store.save(header(1), [SnapshotPart("p", b"", [Frames(frames) for frames in many])])
        snapshot = await store.open("clicks", CheckpointId(1, "a"))
        together = zip(*(snapshot.frames("p", number) for number in range(3)), strict=True)
        assert [list(frames) for frames in zip(*together, strict=True)] == many
        snapshot.close()

    async def test_a_request_for_a_missing_piece_is_an_error(self, make_store: MakeStore) -> None:
        """A changed program requested pieces that the snapshot does not have, without an error."""
        store = make_store()
        await store.claim("clicks", "a")
        await save(store, 1)
        snapshot = await store.open("clicks", CheckpointId(1, "a"))
        with pytest.raises(CheckpointError, match="expected deferred piece 3 of part 'größe/0', given 3 of them"):
            snapshot.frames("größe/0", 3)
        with pytest.raises(InternalError, match="it has no part 'none'"):
            await snapshot.content("none")
        snapshot.close()

    async def test_saving_releases_no_deferred_state(self, make_store: MakeStore) -> None:
        """The store released state that its owner releases, also after a failed save, so it was released twice."""
        store, deferred = make_store(), Frames()
        await store.claim("clicks", "a")
        await store.save(header(1), [SnapshotPart("p", b"", [deferred])])
        assert (deferred.taken, deferred.released) == (3, 0)

    async def test_other_tasks_run_between_two_frames(self, make_store: MakeStore) -> None:
        """Records stopped while state of a gigabyte was written."""
        turns = 0

        async def work() -> None:
            nonlocal turns
            while True:
                turns += 1
                await asyncio.sleep(0)

        seen: list[int] = []

        class Seen(Frames):
            def frames(self) -> Iterator[bytes]:
                for _ in range(20):
                    seen.append(turns)
                    yield b"frame"

        store = make_store()
        await store.claim("clicks", "a")
        working = asyncio.create_task(work())
        await store.save(header(1), [SnapshotPart("p", b"", [Seen()])])
        working.cancel()
        assert seen == sorted(set(seen))

    @pytest.mark.parametrize("broken", ["fails", "is cancelled"])
    async def test_a_save_that_ends_early_leaves_nothing(self, make_store: MakeStore, broken: str) -> None:
        """A snapshot without its last parts was taken for a complete one."""
        began = asyncio.Event()

        class Broken(Frames):
            def frames(self) -> Iterator[bytes]:
                yield b"frame"
                began.set()
                if broken == "fails":
                    raise ZeroDivisionError
                while True:
                    yield b"frame"

        store = make_store()
        await store.claim("clicks", "a")
        saving = asyncio.ensure_future(store.save(header(1), [SnapshotPart("p", b"content", [Broken()])]))
        await began.wait()
        if broken == "is cancelled":
            saving.cancel()
        with pytest.raises((asyncio.CancelledError, ZeroDivisionError)):
            await saving
        assert await ids(store) == []
        with pytest.raises(CheckpointError):
            await store.open("clicks", CheckpointId(1, "a"))
        # Nothing of the broken save disturbs the next save.
        await save_and_commit(store, 1)

    async def test_one_name_for_two_parts_is_refused(self, make_store: MakeStore) -> None:
        """One of two parts with the same name was lost."""
        store = make_store()
        await store.claim("clicks", "a")
        with pytest.raises(InternalError, match="two parts are called 'p'"):
            await store.save(header(1), [SnapshotPart("p", b"1"), SnapshotPart("p", b"2")])
        assert await ids(store) == []

    async def test_a_snapshot_is_never_replaced(self, make_store: MakeStore) -> None:
        """A number was used twice, and the snapshot of a commit changed."""
        store = make_store()
        await store.claim("clicks", "a")
        await save_and_commit(store, 1)
        with pytest.raises(InternalError, match="checkpoint 1 of run a is saved a second time"):
            await store.save(header(1), [])
        snapshot = await store.open("clicks", CheckpointId(1, "a"))
        assert await content_of(snapshot) == CONTENT
        snapshot.close()

    async def test_a_missing_snapshot_is_an_error_that_names_the_existing_ones(self, make_store: MakeStore) -> None:
        """The error for a wrong directory or number did not name the existing snapshots."""
        store = make_store()
        with pytest.raises(CheckpointError, match=r"expected checkpoint 7 of run a in .*, given none"):
            await store.open("clicks", CheckpointId(7, "a"))
        await store.claim("clicks", "a")
        await save_and_commit(store, 1, 2)
        with pytest.raises(CheckpointError, match="given 1 of run a, 2 of run a"):
            await store.open("clicks", CheckpointId(7, "a"))

    async def test_snapshots_are_listed_oldest_first(self, make_store: MakeStore) -> None:
        """Numbers with more digits were listed before smaller ones, in the order of their names."""
        store = make_store()
        await store.claim("clicks", "a")
        await save_and_commit(store, 9, 10, 10**10, 10**11)
        await store.claim("clicks", "b")
        await save(store, 10, "b")
        assert [str(each) for each in await ids(store)] == [
            "9 of run a",
            "10 of run a",
            "10 of run b",
            "10000000000 of run a",
            "100000000000 of run a",
        ]

    @pytest.mark.parametrize("flow", FLOWS)
    async def test_flows_of_any_name_are_independent(self, make_store: MakeStore, flow: str) -> None:
        """A flow whose name is a path wrote into the folder of another flow."""
        await check_independence(make_store(), flow, FLOWS)

    # ---- claims and commits

    async def test_a_new_flow_has_no_pointer_and_no_snapshots(self, make_store: MakeStore) -> None:
        """A job could not distinguish a first run from a run that had lost its state."""
        store = make_store()
        assert await store.pointer("clicks") is None
        assert await store.list() == await store.list("clicks") == []
        assert await store.claim("clicks", "a") is None
        assert await store.pointer("clicks") == CommitPointer("a", None)

    async def test_a_new_run_resumes_from_the_committed_checkpoint(self, make_store: MakeStore) -> None:
        """A run resumed from a snapshot that was only saved, and whose outputs were aborted."""
        store = make_store()
        await store.claim("clicks", "a")
        await save_and_commit(store, 1, 2)
        await save(store, 3)
        after = make_store()
        assert await after.claim("clicks", "b") == CommitPointer("a", CheckpointId(2, "a"))
        assert await after.pointer("clicks") == CommitPointer("b", CheckpointId(2, "a"))

    async def test_claiming_twice_changes_nothing(self, make_store: MakeStore) -> None:
        """A run that was interrupted while it claimed the flow could not claim it again."""
        store = make_store()
        await store.claim("clicks", "a")
        await save_and_commit(store, 1)
        assert await store.claim("clicks", "a") == CommitPointer("a", CheckpointId(1, "a"))
        await save_and_commit(store, 2)

    async def test_a_fresh_start_forgets_the_commit(self, make_store: MakeStore) -> None:
        """After a crash before the first checkpoint of a fresh start, the run resumed from the old checkpoint."""
        store = make_store()
        await store.claim("clicks", "a")
        committed = await save_and_commit(store, 1)
        assert await store.claim("clicks", "b", forget_committed=True) == CommitPointer("a", committed[0])
        assert await make_store().claim("clicks", "c") == CommitPointer("b", None)

    async def test_an_older_run_can_change_nothing(self, make_store: MakeStore) -> None:
        """A process that was taken for dead, but continued, moved the flow back to an older checkpoint."""
        old, new = make_store(), make_store()
        await old.claim("clicks", "a")
        await save_and_commit(old, 1)
        saved = await save(old, 2)
        await new.claim("clicks", "b")
        deferred = Frames()
        refused: list[tuple[Any, str]] = [
            (old.save(header(3), [SnapshotPart("p", b"", [deferred])]), "save checkpoint 3"),
            (old.commit("clicks", saved), "commit checkpoint 2"),
            (old.prune("clicks", keep=1), "remove checkpoints"),
            (old.claim("clicks", "a"), "claim the flow again"),
            (make_store().claim("clicks", "a", forget_committed=True), "claim the flow again"),
        ]
        for call, what in refused:
            with pytest.raises(
                ProducerFenced, match=f"^flow 'clicks': run a cannot {what}: run b has claimed the flow since"
            ):
                await call
        assert deferred.taken == 0  # Large state must not be written if it will be refused.
        assert await ids(new) == [CheckpointId(1, "a"), saved]
        assert await new.pointer("clicks") == CommitPointer("b", CheckpointId(1, "a"))

    async def test_a_run_that_is_fenced_while_it_saves_leaves_nothing(self, make_store: MakeStore) -> None:
        """A claim came between the first and the last frame, and the older run left a snapshot."""
        old, new = make_store(), make_store()
        await old.claim("clicks", "a")
        half, may_end = asyncio.Event(), asyncio.Event()

        class Slow(Frames):
            def frames(self) -> Iterator[bytes]:
                half.set()
                while not may_end.is_set():
                    yield b"frame"

        saving = asyncio.ensure_future(old.save(header(1), [SnapshotPart("p", b"", [Slow()])]))
        await half.wait()
        await new.claim("clicks", "b")
        may_end.set()
        with pytest.raises(ProducerFenced, match="run a cannot save checkpoint 1: run b has claimed"):
            await saving
        assert await ids(new) == []

    async def test_a_new_run_may_commit_a_snapshot_of_the_last_run(self, make_store: MakeStore) -> None:
        """The commit record of the outputs named a snapshot, but the crash came before the store had the commit."""
        old = make_store()
        await old.claim("clicks", "a")
        await save_and_commit(old, 1)
        saved = await save(old, 2)
        new = make_store()
        await new.claim("clicks", "b")
        await new.commit("clicks", saved)
        assert await new.pointer("clicks") == CommitPointer("b", saved)

    async def test_a_snapshot_that_was_not_saved_cannot_be_committed(self, make_store: MakeStore) -> None:
        """A commit named a snapshot that was not saved, so the next run could not resume."""
        store = make_store()
        await store.claim("clicks", "a")
        with pytest.raises(CheckpointError, match=r"expected checkpoint 1 of run a in .* to commit it, given none"):
            await store.commit("clicks", CheckpointId(1, "a"))
        assert await store.pointer("clicks") == CommitPointer("a", None)

    async def test_nothing_is_stored_without_a_claim(self, make_store: MakeStore) -> None:
        """An error in the engine let two runs write at the same time."""
        store = make_store()
        for call in (
            store.save(header(1), []),
            store.commit("clicks", CheckpointId(1, "a")),
            store.prune("clicks", keep=1),
        ):
            with pytest.raises(InternalError, match="was not claimed"):
                await call

    # ---- pruning

    @pytest.mark.parametrize(("keep", "kept"), [(1, [5]), (2, [4, 5]), (5, [1, 2, 3, 4, 5]), (99, [1, 2, 3, 4, 5])])
    async def test_the_committed_snapshot_and_earlier_ones_are_kept(
        self, make_store: MakeStore, keep: int, kept: list[int]
    ) -> None:
        """The committed checkpoint did not count toward ``keep``."""
        store = make_store()
        await store.claim("clicks", "a")
        await save_and_commit(store, 1, 2, 3, 4, 5)
        removed = await store.prune("clicks", keep=keep)
        assert [each.number for each in await ids(store)] == kept
        assert [each.number for each in removed] == [number for number in range(1, 6) if number not in kept]

    async def test_orphans_are_removed(self, make_store: MakeStore) -> None:
        """A run saved a snapshot without a commit, and a later run that resumed from it skipped aborted outputs."""
        store = make_store()
        await store.claim("clicks", "a")
        await save_and_commit(store, 1, 2)
        orphans = [await save(store, 3), await save(store, 4)]
        await store.claim("clicks", "b")
        await save_and_commit(store, 5, 6, run="b")
        newer = await save(store, 7, "b")
        assert await store.prune("clicks", keep=4) == [*orphans, newer]
        assert [str(each) for each in await ids(store)] == ["1 of run a", "2 of run a", "5 of run b", "6 of run b"]

    async def test_of_two_snapshots_with_one_number_the_committed_one_is_kept(self, make_store: MakeStore) -> None:
        """The run before had saved a checkpoint with the same number, which sorts first, and it was kept instead."""
        store = make_store()
        await store.claim("clicks", "z")
        await save_and_commit(store, 1, run="z")
        orphan = await save(store, 2, "z")
        await store.claim("clicks", "b")
        await save_and_commit(store, 2, 3, run="b")
        assert await store.prune("clicks", keep=3) == [orphan]

    async def test_an_uncommitted_snapshot_before_a_commit_of_its_run_may_be_kept(self, make_store: MakeStore) -> None:
        """A snapshot was removed although its run had continued after it and committed a later one."""
        store = make_store()
        await store.claim("clicks", "a")
        await save(store, 1)
        await save_and_commit(store, 2)
        assert await store.prune("clicks", keep=2) == []

    async def test_nothing_is_removed_while_nothing_is_committed(self, make_store: MakeStore) -> None:
        """A run that was started fresh by mistake could not be undone, because the older checkpoints were removed."""
        store = make_store()
        await store.claim("clicks", "a")
        committed = await save_and_commit(store, 1, 2)
        await store.claim("clicks", "b", forget_committed=True)
        assert await store.prune("clicks", keep=1) == []
        assert await ids(store) == committed
        await save_and_commit(store, 3, run="b")
        assert await store.prune("clicks", keep=9) == committed

    async def test_an_open_snapshot_can_be_read_after_it_was_removed(self, make_store: MakeStore) -> None:
        """A tool pruned the older snapshot from which a job was restoring."""
        store = make_store()
        await store.claim("clicks", "a")
        await save_and_commit(store, 1, 2)
        snapshot = await store.open("clicks", CheckpointId(1, "a"))
        assert await store.prune("clicks", keep=1) == [CheckpointId(1, "a")]
        assert await content_of(snapshot) == CONTENT
        snapshot.close()
