"""Flows with states on disk: restarts with other settings, stores of any kind, files, and errors."""

import asyncio
import contextlib
import errno
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from operators.operator_harness import ManualClock
from support.processes import forked_run
from support.soak import in_soak
from support.waiting import PATIENCE_S

from streamiter import Checkpoints, Flow, Operator, RocksState, Stream, tumbling
from streamiter.engine.graph import output
from streamiter.engine.job.job import Job
from streamiter.engine.plan.job_settings import ChannelLimits
from streamiter.engine.states import rocks_state
from streamiter.engine.states.database import Database, DatabaseHome
from streamiter.engine.states.stored import KeyShare, StoredDatabase
from streamiter.engine.storage.disk_queue import SpillQueue
from streamiter.engine.storage.flow_checkpoints import flows_in
from streamiter.engine.storage.folder_blobs import FolderBlobs
from streamiter.engine.storage.snapshot import CheckpointId, SnapshotHeader, SnapshotPart
from streamiter.engine.storage.store import CheckpointStore, MemoryStore
from streamiter.engine.tasks import instance
from streamiter.errors import CheckpointError, ConfigurationError, GraphError, StorageFull
from streamiter.operators import Context, KeyedState, Output, Positions, Source, SourceBatch
from streamiter.operators.keyed_state import KeyedStates
from streamiter.operators.timed.kinds import Hopping
from streamiter.operators.timed.several_aggregates import Aggregates
from streamiter.operators.timed.windowing import OpenWindows, make_windows
from streamiter.values.plain_data import PlainData
from streamiter.values.records import DataBatch
from streamiter.values.subtasks import key_group

PLAIN = PlainData()

SmallDisk = tuple[Path, Callable[[], bool]]

RECORDS, BATCH, KEYS = 1_800, 100, 400


class Paced(Source):
    """Numbers in batches; it waits at ``limit``, until that is raised."""

    limit = RECORDS

    def open(self, context: Context, positions: Positions | None) -> None:
        self._at = (positions or {}).get("at", 0)

    async def read(self) -> SourceBatch | None:
        if self._at == RECORDS:
            return None
        while self._at >= self.limit:
            await asyncio.sleep(0.001)
        self._at += BATCH
        return SourceBatch([number * 7919 % KEYS for number in range(self._at - BATCH, self._at)], {"at": self._at})


class Seen(Operator):
    """Counts the records of a key in a dict, and their batches in a list that is changed in place."""

    def open(self, context: Context) -> None:
        self._context = context

    def process(self, record: int, out: Output) -> None:
        state = self._context.state
        state["n"] = state.get("n", 0) + 1
        state.setdefault("last", []).append(record)
        del state["last"][:-2]
        out.emit((record, state["n"], len(state["last"])))


class Run(NamedTuple):
    """A run up to a checkpoint after this many records."""

    parallelism: int
    on_disk: bool
    records: int = RECORDS


def built(run: Run, folder: Path, limit: int) -> tuple[Flow, list[Any]]:
    flow = Flow("restarts", state=RocksState(folder / "state", memory_bytes=16 << 20) if run.on_disk else None)
    source = type("Limited", (Paced,), {"limit": limit, "bounded": True})
    read = flow.from_source(source, name="numbers")
    numbers = read.key_by(lambda number: number)
    # No number is late, and no record leaves before the end.
    times = read.event_time(lambda n: n, unit="ms", check_unit=False, out_of_orderness_s=1.0, name="times")
    timed, few = (each.key_by(lambda number: number % 40) for each in (times, times.filter(lambda number: number < 80)))
    options: Any = {"parallelism": run.parallelism}
    streams: list[Stream] = [
        numbers.stateful_map(lambda n, x: (n + 1, (x, n + 1)), 0, name="map", **options),
        numbers.reduce(lambda a, b: a + b, name="reduce", **options),
        numbers.process(Seen, name="seen", time_to_live_s=1000.0, **options),
        timed.interval_join(few, lower_s=-0.04, upper_s=0.0, name="join", **options),
    ]
    return flow, [stream.collect(name=f"results {at}") for at, stream in enumerate(streams)]


async def resumed(run: Run, folder: Path, store: Any) -> list[list[Any]]:
    """Resume from the last checkpoint, up to so many records; take a checkpoint there, and lose all after it."""
    is_last = run.records == RECORDS
    flow, results = built(run, folder, RECORDS if is_last else run.records + BATCH)
    job = await flow.start(checkpoints=Checkpoints(store, interval_s=3600))
    if is_last:
        await job.wait()
    else:
        await counted(job, run.records)
        await job.checkpoint()
        await job.stop("abort")
    return [sorted(collected.items) for collected in results]


def read_by(job: Job) -> list[Positions]:
    return [task.positions for task in job._tasks if task.feeder is not None]


async def counted(job: Job, records: int) -> None:
    """Wait until the job, which resumed anywhere before, has read this many records in all."""
    while sum(positions.get("at", 0) for positions in read_by(job)) < records:
        await asyncio.sleep(0.001)


SEQUENCES = {
    "empty": [Run(2, True, 0), Run(1, True, 0), Run(3, True)],
    "more": [Run(1, True, 400), Run(3, True)],
    "fewer and fewer": [Run(3, True, 400), Run(2, True, 800), Run(3, True, 1200), Run(1, True)],
    "from memory": [Run(2, False, 400), Run(1, True)],
    "to memory": [Run(1, True, 400), Run(2, False)],
}
MORE_SEQUENCES = {
    "same": [Run(2, True, 400), Run(2, True, 1200), Run(2, True)],
    "fewer": [Run(3, True, 800), Run(2, True)],
}


@pytest.mark.parametrize(
    "runs", [*SEQUENCES.values(), *in_soak(*MORE_SEQUENCES.values())], ids=[*SEQUENCES, *MORE_SEQUENCES]
)
async def test_restarts_give_the_results_of_a_run_in_memory(runs: list[Run], tmp_path: Path) -> None:
    """A key was lost or counted twice when its key group moved to another database."""
    expected = await resumed(Run(1, False), tmp_path, tmp_path / "memory")
    for run in runs:
        results = await resumed(run, tmp_path, tmp_path / "checkpoints")
    assert results == expected
    assert runs_in(tmp_path / "state") == []


def runs_in(folder: Path) -> list[Path]:
    """Return the folders of runs that are alive, or were left behind."""
    return sorted(folder.glob("*/run-*"))


async def test_states_on_disk_in_an_object_store(s3_url: str, tmp_path: Path) -> None:
    """Files were linked from a folder in tests, and the download did not work."""
    expected = await resumed(Run(1, False), tmp_path, tmp_path / "memory")
    for run in (Run(2, True, 400), Run(2, True, 1200), Run(3, True)):
        results = await resumed(run, tmp_path, s3_url)
    assert results == expected


async def test_states_on_disk_in_a_store_in_memory(tmp_path: Path) -> None:
    """Simulations have a store in memory."""
    expected = await resumed(Run(1, False), tmp_path, tmp_path / "memory")
    store = MemoryStore()
    for run in (Run(2, True, 400), Run(2, True)):
        results = await resumed(run, tmp_path, store.another())
    assert results == expected


# ---- what is written while a checkpoint is made


def home_in(folder: Path) -> DatabaseHome:
    return DatabaseHome(folder, 16 << 20, flow="tests")


def test_rows_that_are_written_while_a_checkpoint_is_made_are_not_in_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A checkpoint had records that came after its barrier, and a restart counted them twice."""
    import threading

    from rocksdict import Checkpoint

    from streamiter.engine.states import database as module

    go_on = threading.Event()

    class Slow:
        def __init__(self, rows: Any) -> None:
            self._checkpoint = Checkpoint(rows)

        def create_checkpoint(self, path: str) -> None:
            assert go_on.wait(PATIENCE_S)
            self._checkpoint.create_checkpoint(path)

    monkeypatch.setattr(module, "Checkpoint", Slow)
    home = home_in(tmp_path)
    with contextlib.closing(home):
        database = Database(home, 0, owner="step 'count'")
        database.write([(b"\0a", b"1"), (b"\0b", b"1")])
        folder, made = database.checkpoint()
        database.write([(b"\0a", b"2"), (b"\0b", None), (b"\0c", b"2")])
        assert database.read([b"\0a", b"\0b", b"\0c", b"\0d"]) == [b"2", None, b"2", None]
        assert database.is_making_checkpoint
        assert list(database.rows(b"", b"\x80")) == [(b"\0a", b"2"), (b"\0c", b"2")]
        assert database.is_making_checkpoint
        go_on.set()
        made.result()
        assert list(database.rows(b"", b"\x80")) == [(b"\0a", b"2"), (b"\0c", b"2")]
        with module.opened(folder, owner="test") as frozen:
            assert list(module.rows_in(frozen, b"", b"\x80")) == [(b"\0a", b"1"), (b"\0b", b"1")]
        monkeypatch.setattr(module, "_WAITING_BYTES_MAX", 0)
        go_on.clear()
        threading.Timer(0.05, go_on.set).start()
        _, made = database.checkpoint()
        database.write([(b"\0a", b"3")])
        assert made.done()  # The writer has waited, since too much would have waited in memory.
        assert database.read([b"\0a"]) == [b"3"]
        database.close()


def test_ranges_of_rows_begin_and_end_where_they_should(tmp_path: Path) -> None:
    """A range began at the first row: a restart copied old rows of other subtasks, and a sweep read the same rows."""
    home = home_in(tmp_path)
    database = Database(home, 0, owner="step 'count'")
    keys = [b"\x00a", b"\x05a", b"\x05b", b"\x40", b"\x7fz"]
    database.write([(key, b"1") for key in keys])
    for begin, end in (
        (b"", b"\x80"),
        (b"\x05", b"\x40"),
        (b"\x05b", b"\x7f"),
        (b"\x05a\x00", b"\x06"),
        (b"\x7fzz", b"\x80"),
    ):
        assert [key for key, _ in database.rows(begin, end)] == [key for key in keys if begin <= key < end]
    database.delete_range(b"\x05b", b"\x7f")
    assert [key for key, _ in database.rows(b"", b"\x80")] == [b"\x00a", b"\x05a", b"\x7fz"]
    database.close()
    home.close()


def test_large_states_are_loaded_a_few_at_a_time(tmp_path: Path) -> None:
    """The states of one batch, a megabyte each, did not fit into memory."""
    job = RocksState(tmp_path, memory_bytes=16 << 20)._of_job("tests", PLAIN)
    states = job.of_subtask("count", clock=ManualClock())
    assert states.keys_at_once == rocks_state._KEYS_AT_ONCE
    for key in range(4):
        states.set(key, bytes(1 << 20))
    states.store()
    states.prefetch(range(4))
    assert states.keys_at_once == 7
    job.close()


# ---- times of last use in files

TTL_S = 10.0


@pytest.fixture
def make_states(tmp_path: Path) -> Iterator[Callable[..., KeyedStates]]:
    """Return a maker of the states of one subtask."""
    job = RocksState(tmp_path / "state", memory_bytes=16 << 20)._of_job("tests", PLAIN)
    yield lambda clock, time_to_live_s=None: job.of_subtask("count", clock=clock, time_to_live_s=time_to_live_s)
    job.close()


async def stored_databases(store: CheckpointStore, number: int, *states: KeyedStates) -> list[StoredDatabase]:
    """Store snapshots of these states, as a checkpoint does."""
    header = SnapshotHeader("clicks", CheckpointId(number, "a"), 0, {})
    pieces = [SnapshotPart(f"count/{at}", b"", (each.snapshot(),)) for at, each in enumerate(states)]
    await store.save(header, pieces)
    stored = await store.open("clicks", header.id)
    return [StoredDatabase(stored, part.name, 0, stored.files(part.name, 0) or (), PLAIN) for part in pieces]


def key_of(first: bool) -> int:
    """Return a key of the first or of the second of two subtasks."""
    return next(key for key in range(100) if (key_group(key) < 64) == first)


async def restored(make: Callable[..., KeyedStates], state: Any, now_s: float, ttl_s: float | None) -> Any:
    clock = ManualClock()
    clock.now_s = now_s
    states = make(clock, ttl_s)
    restoring = states.restore(state)
    assert restoring is not None
    await restoring
    return states, clock


async def test_the_time_to_live_goes_on_where_it_was_in_the_checkpoint(make_states: Callable[..., KeyedStates]) -> None:
    """The clock of another machine showed less, so states lived for ever; or they died while the job was down."""
    early, late = key_of(first=True), key_of(first=False)
    clocks, olds = [ManualClock(), ManualClock()], []
    for clock, key, start_s in zip(clocks, (early, late), (50.0, 9_000.0), strict=True):
        clock.now_s = start_s
        old = make_states(clock, TTL_S)
        old.set(key, "state")
        old.store()
        clock.now_s += 4 if key == early else 7  # This is how long it is idle at the barrier.
        olds.append(old)
    store = MemoryStore()
    await store.claim("clicks", "a")
    databases = await stored_databases(store, 1, *olds)
    for share in (databases[0], KeyShare(databases[:1], range(128)), KeyShare(databases, range(128))):
        states, clock = await restored(make_states, share, 7.0, TTL_S)
        clock.now_s += 5.5
        assert states.get(early) == "state"
    assert states.get(late) == {}
    for seconds, expected in ((2.5, "state"), (3.5, {})):
        states, clock = await restored(make_states, KeyShare(databases, range(128)), 1e6, TTL_S)
        clock.now_s += seconds
        assert states.get(late) == expected
    # Without a time to live nothing expires; when it is there again, it begins then.
    without, clock = await restored(make_states, KeyShare(databases, range(128)), 0.0, None)
    clock.now_s += 100
    again, clock = await restored(make_states, (await stored_databases(store, 2, without))[0], 3.0, TTL_S)
    clock.now_s += 9
    assert (again.get(early), again.get(late)) == ("state", "state")
    clock.now_s += 11
    again.store()
    again.drop_expired()
    assert list(again.snapshot().frames()) == []
    in_memory = KeyedState(ManualClock(), TTL_S, name="count", encode=PLAIN.encode)
    in_memory.restore(KeyShare(databases, range(128)))
    [keys, _, idle_s] = PLAIN.decode(next(iter(in_memory.snapshot().frames())))
    assert dict(zip(keys, idle_s, strict=True)) == {early: pytest.approx(4), late: pytest.approx(7)}


# ---- due items in files


def counted_windows(lateness_ms: int = 0) -> OpenWindows:
    return make_windows(Hopping(10, 10), Aggregates.of(["count"], {}), lateness_ms=lateness_ms)


@pytest.mark.parametrize(
    ("share", "lateness_ms", "recounts"),
    [(False, 0, False), (False, 5, True), (True, 0, True)],
    ids=["the same", "other settings", "other subtasks"],
)
async def test_due_items_are_in_the_files(
    share: bool, lateness_ms: int, recounts: bool, make_states: Callable[..., KeyedStates]
) -> None:
    """Each restart read all states, and its time grew with them; or a window went at the time of the old settings."""
    old, windows = make_states(ManualClock()), counted_windows()
    windows.keep_in(old)
    for key in (1, 2, 3):
        old.load([key])
        windows.add(key, 10 * key, [None])
    old.summary = windows.summary()
    store = MemoryStore()
    await store.claim("clicks", "a")
    databases = await stored_databases(store, 1, old)
    states, _ = await restored(make_states, KeyShare(databases, range(128)) if share else databases[0], 0.0, None)
    again, counted = counted_windows(lateness_ms), list[int]()
    note = again._note
    again._note = lambda key, state: (counted.append(key), note(key, state))[1]  # type: ignore[method-assign]
    again.keep_in(states)
    assert (sorted(counted), again.kept, again.numbered) == ([1, 2, 3] if recounts else [], 3, 3)
    assert again.advance(31)
    states.store()
    assert [(result.key, result.value) for result in again.take_results()] == [(1, 1), (2, 1)]
    assert again.next_due() == (35 if lateness_ms else 40)


# ---- folders and errors


def test_a_start_deletes_the_folders_of_dead_runs_only(tmp_path: Path) -> None:
    """After each crash, the states of the dead run stayed on the disk; or a start deleted those of another process."""
    flow = tmp_path / "clicks"
    kill = "import os, signal; os.kill(os.getpid(), signal.SIGKILL)"
    program = f"""
from pathlib import Path
from streamiter.engine.states.database import Database, DatabaseHome
from streamiter.engine.states.stored import KeyShare, StoredDatabase
home = DatabaseHome(Path({str(flow)!r}), 16 << 20, flow="clicks")
Database(home, 0, owner="x").write([(b"a", b"b")])
{kill}
"""
    forked_run([sys.executable, "-c", program])
    [dead] = flow.glob("run-*")
    alive, other = home_in(flow), home_in(flow)
    assert alive.folder.exists()
    assert not dead.exists()
    assert other.folder.exists()
    assert alive.folder.exists()
    alive.close()
    other.close()
    assert list(flow.glob("run-*")) == []


def test_a_full_disk_is_named_with_the_step_and_what_to_do(small_disk: SmallDisk) -> None:
    """The error of the database had neither the step nor the folder."""
    disk, _ = small_disk
    home = home_in(disk / "state")
    database = Database(home, 0, owner="step 'count'")

    def fill() -> None:
        for number in range(10_000):
            database.write([(number.to_bytes(4, "big") + bytes(row), bytes(5_000)) for row in range(200)])
            _, made = database.checkpoint()
            made.result()

    with pytest.raises(StorageFull, match=r"^step 'count': expected room for its state in .*No space left.*start the"):
        fill()
    with contextlib.suppress(Exception):
        database.close()
    home.close()


def test_too_few_open_files_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process had no file descriptors left, and was told to choose a folder that it may write to."""

    def none_left(**_: object) -> str:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    monkeypatch.setattr(tempfile, "mkdtemp", none_left)
    with pytest.raises(
        CheckpointError, match=r"given Too many open files; raise the limit .* \(ulimit -n\), and start"
    ):
        home_in(tmp_path).folder  # noqa: B018 it is made when it is asked for
    monkeypatch.setattr(tempfile, "TemporaryFile", none_left)
    queue = SpillQueue(
        name="loop", plain_data=PlainData(), memory_limit_bytes=0, disk_limit_bytes=1 << 20, directory=str(tmp_path)
    )
    queue.put(DataBatch([1]))
    with pytest.raises(ConfigurationError, match=r"\(Too many open files\); raise the limit"):
        queue.put(DataBatch([1]))


def test_settings_that_cannot_be_used_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An empty variable chose the current folder."""
    with pytest.raises(ConfigurationError, match=r"^RocksState: expected a folder, given ''; write"):
        RocksState("")
    with pytest.raises(ConfigurationError, match=r"^RocksState: memory_bytes: expected"):
        RocksState("state", memory_bytes=1)
    with pytest.raises(GraphError, match=r"^flow 'f': expected state= to be None \(in memory\) or a RocksState, given"):
        Flow("f", state="folder")  # type: ignore[arg-type]
    (tmp_path / "file").write_text("no folder")
    flow = Flow("f", state=RocksState(tmp_path / "file"))
    flow.from_items([1]).key_by(lambda x: x).reduce(max).collect()
    with pytest.raises(Exception, match=r"expected a folder for its state that this process may write to"):
        flow.run()
    monkeypatch.setitem(sys.modules, "rocksdict", None)
    said = r"^flow 'f', RocksState: expected the package rocksdict, found none; .*'streamiter\[rocks\]'$"
    with pytest.raises(ConfigurationError, match=said):
        flow.run()


async def test_a_damaged_database_ends_the_start_with_the_step(tmp_path: Path) -> None:
    """A file with a damaged block was found by nobody, and states of some keys were lost."""
    run = Run(1, True, 400)
    await resumed(run, tmp_path, tmp_path / "checkpoints")
    for path in (tmp_path / "checkpoints").glob("*/*.shared"):
        path.write_bytes(bytes(path.stat().st_size))
    with pytest.raises(
        Exception, match=r"step '(map|reduce|seen|join)'.*\.shared: the checkpoint is damaged: a file of \d+ bytes"
    ):
        await resumed(Run(1, True), tmp_path, tmp_path / "checkpoints")
    [flow] = flows_in(FolderBlobs(tmp_path / "checkpoints"))
    snapshot = flow.open(flow.snapshots()[-1])
    with contextlib.closing(snapshot), pytest.raises(CheckpointError, match="is damaged: a file of"):
        snapshot.verify()


# ---- event time


class Latest(Operator):
    """Keeps the records of a key until an event timer, and changes the state also in the timer."""

    def open(self, context: Context) -> None:
        self._context = context

    def process(self, record: tuple[int, int], out: Output) -> None:
        self._context.state.setdefault("kept", []).append(record)
        self._context.set_event_timer(record[1] + 20, record[1])

    def on_event_timer(self, payload: int, out: Output) -> None:
        state = self._context.state
        state["fired"] = state.get("fired", 0) + 1
        out.emit((self._context.key, state["fired"], [record for record in state["kept"] if record[1] <= payload]))
        state["kept"] = [record for record in state["kept"] if record[1] > payload]


def test_states_on_disk_change_in_event_timers(tmp_path: Path) -> None:
    """Timers read states that the records of the same batch had changed, without the changes."""

    def results(state: RocksState | None) -> list[Any]:
        flow = Flow("timers", state=state)
        records = flow.from_items([(number * 7 % 5, number) for number in range(200)])
        timed = records.event_time(lambda record: record[1], unit="ms", check_unit=False)
        return run(flow, timed.key_by(lambda record: record[0]).process(Latest, name="latest"))

    def run(flow: Flow, stream: Stream) -> list[Any]:
        collected = stream.collect()
        flow.run()
        return list(collected.items)

    expected = results(None)
    assert len(expected) > 5
    assert results(RocksState(tmp_path, memory_bytes=16 << 20)) == expected


# ---- windows and timers that are due at once


class Alarm(Operator):
    def open(self, context: Context) -> None:
        self._context = context

    def process(self, number: int, out: Output) -> None:
        self._context.set_event_timer(1000, [number])

    def on_event_timer(self, payload: list[int], out: Output) -> None:
        out.emit((self._context.key, *payload))


def windows_of(keyed: Any, **options: Any) -> Stream:
    windows = keyed.window(tumbling(1), **options).aggregate("collect")
    return windows.map(lambda result: (result.key, *result.value), **{**options, "name": "rows"})


@pytest.mark.parametrize("parallelism", [1, 2])
@pytest.mark.parametrize("due", [windows_of, lambda keyed, **options: keyed.process(Alarm, **options)])
def test_what_is_due_at_once_leaves_in_turns(
    due: Any, parallelism: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All windows of the day ended at midnight, and their results did not fit into memory."""
    monkeypatch.setattr(output, "LANE_LIMIT_BYTES", 10_000)
    monkeypatch.setattr(rocks_state, "_KEYS_AT_ONCE", 50)
    monkeypatch.setattr(rocks_state.RocksStates, "keys_at_once", 50)
    monkeypatch.setattr(instance, "BATCH_RECORDS", 50)
    flow = Flow("due at once", state=RocksState(tmp_path))
    numbers = flow.from_items(range(600)).event_time(lambda number: 5, unit="ms", check_unit=False)
    rows = due(numbers.key_by(lambda number: number), name="due", parallelism=parallelism)
    values = rows.rebalance().map(lambda row: row, name="values", parallelism=3 - parallelism).collect()
    flow.run(channel_limits=ChannelLimits(records=10))
    assert sorted(values.items) == [(number, number) for number in range(600)]
