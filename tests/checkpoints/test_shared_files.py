"""Files that several checkpoints share: which of them pruning removes, and how stores keep them."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from random import Random
from typing import NamedTuple

import pytest
from checkpoints.snapshots import header
from checkpoints.store_contract import MakeStore
from support.examples import random_examples

from streamiter.engine.storage.flow_record import FlowRecord, StoredName, removable_shared, shared_of
from streamiter.engine.storage.snapshot import CheckpointId, SharedFile, SnapshotPart
from streamiter.engine.storage.store import CheckpointStore, MemoryStore, store_at
from streamiter.errors import CheckpointError
from streamiter.values.deferred import DeferredFiles, LocalFile

# ---- the rule of pruning, as pure data


class Event(NamedTuple):
    """One thing that happens to a flow: ``kind`` says what, ``choice`` decides the details."""

    kind: str
    choice: int


KINDS = ["save", "save", "save", "commit", "commit", "abandon", "prune", "slow prune", "new run", "compact"]


def make_events(random: Random) -> list[Event]:
    return [Event(random.choice(KINDS), random.randrange(1000)) for _ in range(random.randrange(1, 40))]


class Model:
    """A store, and the databases of two processes; it checks that a kept snapshot has all its files."""

    def __init__(self) -> None:
        self.record = FlowRecord("clicks").claimed_by("0")
        self.names: set[str] = set()
        self.snapshots: dict[CheckpointId, set[str]] = {}
        self.live: list[set[str]] = [set(), set()]
        """The files of each process's database that the run knows to be stored."""
        self.number = 0
        self.slow: tuple[list[str], FlowRecord, list[CheckpointId]] | None = None
        """What a pruning of an older run has read, which deletes later."""

    @property
    def run(self) -> str:
        return self.record.runs[-1].run

    def save(self, choice: int) -> None:
        self.number += 1
        checkpoint = CheckpointId(self.number, self.run)
        for process, live in enumerate(self.live):
            new = {str(StoredName(checkpoint, process, count)) for count in range(choice % 3)}
            self.names |= new
            live |= new
        # Of each second snapshot that is saved, no manifest is published: its checkpoint was given up.
        if choice % 2:
            self.snapshots[checkpoint] = set().union(*self.live)

    def compact(self, choice: int) -> None:
        """A database replaces files; it never has them again."""
        for live in self.live:
            live -= {name for at, name in enumerate(sorted(live)) if (choice >> at % 8) & 1}

    def commit(self) -> None:
        own = [each for each in self.snapshots if each.run == self.run]
        if own and (self.record.committed is None or max(own).number > self.record.committed.number):
            self.record = self.record.with_commit(max(own))

    def new_run(self, choice: int) -> None:
        self.record = self.record.claimed_by(str(int(self.run) + 1))
        chosen = self.record.committed
        self.live = [set(), set()] if chosen is None else [set(self.snapshots[chosen]), set()]
        self.number = max((each.number for each in self.snapshots), default=0)

    def read_for_pruning(self) -> tuple[list[str], FlowRecord, list[CheckpointId]]:
        return sorted(self.names), self.record, sorted(self.snapshots)

    def prune(self, names: Sequence[str], record: FlowRecord, found: Sequence[CheckpointId]) -> None:
        removed = record.removable(found, keep=2, newer=True)
        kept = [each for each in found if each not in removed and each in self.snapshots]
        for checkpoint in removed:
            self.snapshots.pop(checkpoint, None)
        if record.committed in kept:
            needed = set().union(*(self.snapshots[each] for each in kept))
            self.names -= set(removable_shared(names, needed, record.committed))

    def happens(self, event: Event) -> None:
        if event.kind == "save":
            self.save(event.choice)
        elif event.kind == "compact":
            self.compact(event.choice)
        elif event.kind == "commit":
            self.commit()
        elif event.kind == "abandon":  # Published, and not committed.
            self.save(event.choice | 1)
        elif event.kind == "new run":
            self.slow = self.read_for_pruning()
            self.new_run(event.choice)
        elif event.kind == "prune":
            self.prune(*self.read_for_pruning())
        elif self.slow is not None:
            slow, self.slow = self.slow, None
            self.prune(*slow)

    def check(self) -> None:
        committed = self.record.committed
        if committed is not None:
            assert committed in self.snapshots
        for checkpoint, files in self.snapshots.items():
            led = committed is not None and checkpoint.number <= committed.number
            if led or checkpoint.run == self.run:
                assert files <= self.names, f"{checkpoint} lacks {sorted(files - self.names)}"


@random_examples(make_events)
def test_pruning_never_removes_a_file_of_a_kept_checkpoint(events: list[Event]) -> None:
    """A file that an older checkpoint stored was removed with it, and the newer one could not be resumed from."""
    model = Model()
    for event in events:
        model.happens(event)
        model.check()


@random_examples(make_events)
def test_after_the_next_commit_and_pruning_only_needed_files_are_left(events: list[Event]) -> None:
    """Files of checkpoints that were given up stayed in the store for ever."""
    model = Model()
    for event in events:
        model.happens(event)
    model.number = max([model.number, *(shared_of(name).number for name in model.names)])  # type: ignore[union-attr]
    model.save(1)
    model.commit()
    model.prune(*model.read_for_pruning())
    assert model.names == set().union(*model.snapshots.values())


def test_names_of_shared_files_are_those_of_no_other_file() -> None:
    """A run with a dot in its name was taken for another run."""
    for run in ("a", "a.1-2", "Ä/.shared", "a.checkpoint"):
        name = str(StoredName(CheckpointId(12, run), 3, 4))
        assert shared_of(name) == CheckpointId(12, run)
    for other in ("record.json", "0000000017-a.checkpoint", "0000000017-a.1.parts", "7-a.0-0.shared", "x.shared"):
        assert shared_of(other) is None


# ---- stores


class Files(DeferredFiles):
    """Deferred state of files with these names, in a folder; their content is their name."""

    def __init__(self, folder: Path, names: Sequence[str], stored: dict[str, object]) -> None:
        folder.mkdir(exist_ok=True)
        self._local = [LocalFile(name, folder / name) for name in names]
        self.stored = stored
        for each in self._local:
            each.path.write_bytes(content_of_file(each.name))

    def wait(self) -> None:
        pass

    def files(self) -> Sequence[LocalFile]:
        return self._local

    def rest(self) -> bytes:
        return b"rest"

    def frames(self) -> Iterator[bytes]:
        raise AssertionError("stores keep files as files")

    def release(self) -> None:
        pass


def content_of_file(name: str) -> bytes:
    return name.encode() * 1000


class SharedFilesContract:
    """Inherit from this class and define a fixture ``make_store``."""

    async def save(self, store: CheckpointStore, folder: Path, number: int, names: Sequence[str]) -> int:
        piece = Files(folder / f"local-{number}", names, self.stored)
        size_bytes = await store.save(header(number), [SnapshotPart("counts/0", b"counts", (piece,))])
        await store.commit("clicks", header(number).id)
        await store.prune("clicks", keep=2)
        return size_bytes

    async def test_only_new_files_are_stored_and_needless_ones_removed(
        self, make_store: MakeStore, tmp_path: Path
    ) -> None:
        """Each checkpoint of a large state stored all of it; or a file went with the checkpoint that stored it."""
        self.stored: dict[str, object] = {}
        store = make_store()
        await store.claim("clicks", "a")
        first = await self.save(store, tmp_path, 1, ["old", "lasting"])
        second = await self.save(store, tmp_path, 2, ["lasting", "new"])
        assert first > len(content_of_file("old")) + len(content_of_file("lasting"))
        assert len(content_of_file("new")) < second < len(content_of_file("new")) + len(content_of_file("lasting"))
        await self.save(store, tmp_path, 3, ["lasting"])
        await self.save(store, tmp_path, 4, ["lasting", "last"])
        assert self.names(store) == {"lasting", "last"}
        snapshot = await make_store().open("clicks", CheckpointId(4, "a"))
        snapshot.verify()
        files = snapshot.files("counts/0", 0)
        assert files is not None
        assert [file.name for file in files] == ["lasting", "last"]
        assert list(snapshot.frames("counts/0", 0)) == [b"rest"]
        for file in files:
            snapshot.fetch(file, tmp_path / f"fetched {file.name}")
            assert (tmp_path / f"fetched {file.name}").read_bytes() == content_of_file(file.name)
        assert snapshot.size_bytes > sum(file.bytes for file in files)
        snapshot.close()
        await store.close()

    def names(self, store: CheckpointStore) -> set[str]:
        """Return the names of the shared files in the store, as their owner gave them."""
        blobs = store._blobs
        by_blob = {file.blob: file.name for file in self.stored.values() if isinstance(file, SharedFile)}
        return {by_blob[name] for name in blobs.names("clicks") if name in by_blob}


class TestInMemory(SharedFilesContract):
    """The checks for the store in memory."""

    @pytest.fixture
    def make_store(self) -> MakeStore:
        return MemoryStore().another


class TestInFolder(SharedFilesContract):
    """The checks for a folder, where files are linked."""

    async def test_a_damaged_or_missing_file_is_named(self, make_store: MakeStore, tmp_path: Path) -> None:
        """The restart failed with an error of the database, which did not name the file in the store."""
        self.stored = {}
        store = make_store()
        await store.claim("clicks", "a")
        await self.save(store, tmp_path, 1, ["one"])
        snapshot = await store.open("clicks", CheckpointId(1, "a"))
        [file] = snapshot.files("counts/0", 0) or ()
        path = tmp_path / "made" / "here" / "clicks" / file.blob
        path.write_bytes(path.read_bytes()[:-1] + b"?")
        with pytest.raises(CheckpointError, match=rf"{file.blob}: the checkpoint is damaged: a file of 3000 bytes"):
            snapshot.verify()
        with pytest.raises(CheckpointError, match=rf"{file.blob}: the checkpoint is damaged: a file of 3000 bytes"):
            snapshot.fetch(file, tmp_path / "fetched with its size")
        path.write_bytes(b"short")
        with pytest.raises(CheckpointError, match=r"expected the 3000 bytes that checkpoint 1 of run a names, given 5"):
            snapshot.fetch(file, tmp_path / "fetched")
        path.unlink()
        with pytest.raises(CheckpointError, match=rf"{file.blob}: expected a checkpoint that can be read, given none"):
            snapshot.fetch(file, tmp_path / "fetched again")
        snapshot.close()
        await store.close()


class TestInObjectStore(SharedFilesContract):
    """The checks for S3, where files are uploaded."""

    @pytest.fixture
    def make_store(self, s3_url: str) -> MakeStore:
        return lambda: store_at(s3_url)


async def test_a_kept_checkpoint_that_cannot_be_read_keeps_all_files(make_store: MakeStore, tmp_path: Path) -> None:
    """Pruning removed the files of a damaged checkpoint, so a backup of its manifest was useless."""
    contract = SharedFilesContract()
    contract.stored = {}
    store = make_store()
    await store.claim("clicks", "a")
    await contract.save(store, tmp_path, 1, ["one"])
    damaged = next((tmp_path / "made" / "here" / "clicks").glob("*1-a.checkpoint"))
    damaged.write_bytes(b"damaged")
    await contract.save(store, tmp_path, 2, ["two"])
    assert contract.names(store) == {"one", "two"}
    await contract.save(store, tmp_path, 3, ["two"])
    assert contract.names(store) == {"two"}
    await store.close()
