"""Snapshots of a large table of features are base and changes, in files that they share."""

import asyncio
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import numpy as np
import pytest
from learn.feature_histories import Settings, history, learn, state_bytes, touch
from support.waiting import until

from streamiter import Checkpoints, Flow, Operator
from streamiter.engine.storage.snapshot import SharedFile
from streamiter.errors import ConfigurationError, InternalError, OtherModel
from streamiter.operators import Context, Output, Positions, Source, SourceBatch
from streamiter.parameter_server.storage import feature_files
from streamiter.parameter_server.storage.feature_files import FeatureFiles, FrozenFeatures
from streamiter.parameter_server.storage.feature_table import FeatureTable
from streamiter.values.deferred import PlainValue
from streamiter.values.plain_data import PlainData

PLAIN = PlainData()


class Named(NamedTuple):
    """What a store tells of a file."""

    name: str


class Stored:
    """A snapshot in a folder, as a store keeps it."""

    def __init__(self, folder: Path, piece: FrozenFeatures) -> None:
        folder.mkdir()
        self._folder = folder
        self.rest = piece.rest()
        piece.wait()
        self.new_bytes = 0
        for file in piece.files():
            shutil.copy(file.path, folder)
            if file.name not in piece.stored:
                piece.stored[file.name] = Named(file.name)
                self.new_bytes += file.path.stat().st_size
        self.files = [Named(file.name) for file in piece.files()]
        piece.release()

    def fetch(self, folder: Path) -> None:
        for file in self.files:
            shutil.copy(self._folder / file.name, folder)

    def __iter__(self) -> Iterator[PlainValue]:
        yield PLAIN.decode(self.rest)
        for file in self.files:
            yield PLAIN.decode((self._folder / file.name).read_bytes())


@pytest.fixture
def files_of(tmp_path: Path) -> Iterator[Callable[..., FeatureFiles]]:
    """Return a function that makes the files of a table; they are closed at the end."""
    with ExitStack() as made:

        def make(table: FeatureTable, features_of_file: int = 2) -> FeatureFiles:
            files = FeatureFiles(table, name="owner", place=tmp_path / "runs", features_of_file=features_of_file)
            made.callback(files.close)
            return files

        yield make


FilesOf = Callable[..., FeatureFiles]


def frozen_by(files: FeatureFiles) -> FrozenFeatures:
    piece = files.snapshot()
    assert isinstance(piece, FrozenFeatures)
    return piece


@pytest.mark.parametrize("seed", range(30))
def test_a_table_goes_on_from_any_snapshot_with_the_same_bits(
    tmp_path: Path, files_of: FilesOf, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    """A feature that had been evicted came back out of an old file, or the oldest features were in another order."""
    random = Random(seed)
    given = history(random)
    features_of_file, files_min, keeps_running = random.randint(1, 3), random.randint(1, 20), random.random() < 0.5
    monkeypatch.setattr(feature_files, "_FILES_MIN", files_min)
    whole, table = given.settings.table(), given.settings.table()
    files, first = files_of(table, features_of_file), 0
    cuts = sorted(random.randint(0, len(given.keys)) for _ in range(random.randint(0, 25)))
    for number, stop in enumerate([*cuts, len(given.keys)]):
        learn(whole, given, first, stop)
        learn(table, given, first, stop)
        first, piece = stop, files.snapshot()
        if isinstance(piece, FrozenFeatures):
            frames = [PLAIN.decode(frame) for frame in piece.frames()]
            check_files(frames, table.counts().features, features_of_file, files_min)
            stored: Any = Stored(tmp_path / str(number), piece)
        else:
            frames, stored = [piece], piece
        in_memory = given.settings.table()
        files_of(in_memory).restore(frames if len(frames) > 1 else frames[0])
        assert state_bytes(in_memory) == state_bytes(whole)
        if not keeps_running:
            files.close()
            table = given.settings.table()
            files = files_of(table, features_of_file)
            files.restore(stored)
        assert state_bytes(table) == state_bytes(whole)


def check_files(frames: list[Any], features: int, features_of_file: int, files_min: int) -> None:
    """Check that there are few files, each with features that count, and at most twice as many features in all."""
    keys = [part["keys"].tolist() for part in frames[1:]]
    assert len(keys) <= files_min + 2 * (features // features_of_file)
    assert sum(map(len, keys)) <= 2 * features + features_of_file
    counted: set[int] = set()
    for each in keys:
        if len(counted) < features:
            new = [key for key in reversed(each) if key not in counted]
            assert new
            counted.update(new[: features - len(counted)])
        else:
            assert len(keys) == 1


def large_table(features: int, capacity: int = 30_000) -> FeatureTable:
    table = Settings(1, 0, capacity, capacity).table()
    table.touch(range(features), [0] * features, 0.25)
    return table


@pytest.mark.parametrize("files_min", [16, 1_000])
def test_a_snapshot_writes_what_has_changed_and_little_else(
    tmp_path: Path, files_of: FilesOf, monkeypatch: pytest.MonkeyPatch, files_min: int
) -> None:
    """Each checkpoint of ten million features wrote gigabytes; or the files of a year were never left out."""
    monkeypatch.setattr(feature_files, "_FILES_MIN", files_min)
    features, changed, random = 20_000, 400, np.random.default_rng(1)
    table = large_table(features)
    files = files_of(table, features_of_file=1_000)
    whole_bytes = Stored(tmp_path / "first", frozen_by(files)).new_bytes
    written = []
    for number in range(60):
        keys = random.integers(0, features, changed) if number % 2 else random.integers(0, 500, changed)
        table.touch(keys, [number] * changed, 0.25)
        stored = Stored(tmp_path / str(number), frozen_by(files))
        written.append(stored.new_bytes)
        total = sum((tmp_path / str(number) / file.name).stat().st_size for file in stored.files)
        assert total < 2.2 * whole_bytes
        assert len(stored.files) <= files_min + 2 * features // 1_000
    assert np.median(written) < 3 * changed / features * whole_bytes
    assert np.mean(written) < 6 * changed / features * whole_bytes
    assert max(written) < 0.3 * whole_bytes
    other = large_table(1)
    files_of(other).restore(stored)
    assert state_bytes(other) == state_bytes(table)
    assert len(list(tmp_path.glob("runs/run-*/*.frame"))) == 2 * len(stored.files)


def test_files_are_few_after_most_features_have_expired(tmp_path: Path, files_of: FilesOf) -> None:
    """Free entries counted as features, so a table kept files as if it had as many features as on its best day."""
    features, left = 20_000, 1_000
    table = Settings(1, 1_000, 2 * features, 2 * features).table()
    files = files_of(table, features_of_file=1_000)
    table.touch(range(features), [0] * features, 0.25)
    Stored(tmp_path / "first", frozen_by(files))
    for number in range(40):
        keys = range(number, left)
        for _ in range(1 + features // left):  # Two features leave with each.
            table.touch(keys, [2_000 + number] * len(keys), 0.25)
        piece = frozen_by(files)
        frames: list[Any] = [PLAIN.decode(frame) for frame in piece.frames()]
        piece.release()
        assert table.counts().features == left
        assert sum(len(part["keys"]) for part in frames[1:]) <= 2 * left + 1_000


def test_a_snapshot_that_is_being_written_keeps_its_files(tmp_path: Path, files_of: FilesOf) -> None:
    """Features changed while a slow store wrote a snapshot, whose files were deleted under it."""
    table = large_table(10)
    files = files_of(table)
    before, piece = state_bytes(table), frozen_by(files)
    for now_ms in range(5):
        table.touch(range(10), [now_ms] * 10, 0.25)
        frozen_by(files).release()
    stored, other = Stored(tmp_path / "stored", piece), large_table(1)
    files_of(other).restore(stored)
    assert state_bytes(other) == before
    with pytest.raises(InternalError, match="owner: its state was released before all of it was read"):
        list(piece.frames())
    files.close()
    assert len(list(tmp_path.glob("runs/run-*"))) == 1  # The folder of the other table.


def test_the_files_of_another_model_are_refused(tmp_path: Path, files_of: FilesOf) -> None:
    """Rows of 8 factors were cut to 4."""
    stored = Stored(tmp_path / "stored", frozen_by(files_of(large_table(10))))
    with pytest.raises(OtherModel, match="expected the state of a table with as many weights"):
        files_of(FeatureTable(3, weights=1, admit=1, capacity=10)).restore(stored)


def test_a_checkpoint_is_given_up_where_files_cannot_be_written(tmp_path: Path, files_of: FilesOf) -> None:
    """A full disk ended the job, although its table was in memory; the next checkpoint has all that has changed."""
    table, other = large_table(10), large_table(1)
    (tmp_path / "runs").write_text("no folder")
    files = files_of(table)
    piece = frozen_by(files)
    for call in (piece.wait, lambda: list(piece.frames())):
        with pytest.raises(ConfigurationError, match=r"^owner, whose files are in the folder .* \(TMPDIR\): expected"):
            call()
    piece.release()
    (tmp_path / "runs").unlink()
    files_of(other).restore(Stored(tmp_path / "stored", frozen_by(files)))
    assert state_bytes(other) == state_bytes(table)


# ---- in a job


class Keys(Source):
    """Numbers from 0 to 999 in random order, 50 at once, up to a limit; then it waits."""

    bounded = False
    limit = 0
    is_waiting = False

    def open(self, context: Context, positions: Positions | None) -> None:
        self._at = (positions or {}).get("at", 0)

    async def read(self) -> SourceBatch | None:
        if self._at == self.limit:
            type(self).is_waiting = True
            await asyncio.Event().wait()
        self._at += 50
        return SourceBatch(np.random.default_rng(self._at).integers(0, 1_000, 50).tolist(), {"at": self._at})


class Counter(Operator):
    """Has a table of features, whose snapshots are files of up to 100 features."""

    tables: list[FeatureTable] = []  # noqa: RUF012
    is_restored_from_files = False

    def open(self, context: Context) -> None:
        self._table = FeatureTable(2, weights=1, admit=2, capacity=800)
        self.tables.append(self._table)
        self._files = FeatureFiles(self._table, name=context.name, features_of_file=100)

    def process(self, key: int, out: Output) -> None:
        touch(self._table, key, 0)

    def snapshot(self) -> dict[str, Any]:
        return {"table": self._files.snapshot()}

    def restore(self, state: Mapping[str, Any]) -> None:
        files = getattr(state["table"], "files", ())
        type(self).is_restored_from_files = bool(files) and isinstance(files[0], SharedFile)
        self._files.restore(state["table"])


async def run(folder: Path, limit: int) -> bytes:
    """Run the job on the keys up to a limit, from its last checkpoint on; return the state of its table."""
    Keys.limit, Keys.is_waiting = limit, False
    flow = Flow("features")
    flow.from_source(Keys, name="keys").process(Counter, name="counts").collect(name="nothing")
    job = await flow.start(checkpoints=Checkpoints(folder, interval_s=3600))
    await until(lambda: Keys.is_waiting, patience_s=20)
    await job.stop("suspend")
    return state_bytes(Counter.tables[-1])


async def test_a_job_shares_the_files_of_its_table_between_checkpoints(tmp_path: Path) -> None:
    """The state of an operator that was files came back as a database of RocksDB."""
    expected = await run(tmp_path / "at once", 3_000)
    await run(tmp_path / "twice", 2_950)
    blobs = set((tmp_path / "twice").rglob("*.shared"))
    assert len(blobs) > 5
    again = await run(tmp_path / "twice", 3_000)
    assert again == expected
    assert Counter.is_restored_from_files
    kept = set((tmp_path / "twice").rglob("*.shared"))
    assert len(blobs & kept) >= 4
    assert len(kept - blobs) <= 3
