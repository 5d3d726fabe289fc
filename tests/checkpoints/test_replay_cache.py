"""The replay cache returns its batches in order, unchanged, as often as needed, within its limits."""

import contextlib
import gc
import itertools
import os
import pathlib
import subprocess
import sys
import tempfile

import msgspec
import numpy as np
import pytest
from checkpoints.deferred_support import decoded_frames, unnamed_files
from checkpoints.plain_values import same
from hypothesis import given
from hypothesis import strategies as st
from support.soak import in_soak
from support.waiting import PATIENCE_S

from streamiter.engine.storage.replay_cache import ReplayCache
from streamiter.errors import ConfigurationError, InternalError, LoopOverflow, PlainDataError, StorageFull
from streamiter.values.plain_data import PlainData
from streamiter.values.records import Columns, can_concatenate, concatenate, estimated_bytes

MIB = 1 << 20
HEAD_BYTES = 24  # bytes before the content of each batch on disk
EVENT = msgspec.defstruct("Event", ["a"])


@pytest.fixture
def make_cache(tmp_path):
    """Return a maker of caches, which are closed at the end of the test."""
    caches = []

    def make(**options):
        defaults = {"memory_limit_bytes": 0, "disk_limit_bytes": 10**9, "directory": tmp_path}
        caches.append(ReplayCache(name="points", **(defaults | options)))
        return caches[-1]

    yield make
    for cache in caches:
        cache.close()


def replayed(cache):
    return [cache.batch(index) for index in range(len(cache))]


def joined(batches):
    """Join neighbouring batches if possible, so that only the cuts between batches are lost."""
    runs = []
    for batch in batches:
        if not len(batch):
            continue
        if runs and can_concatenate(runs[-1][0], batch):
            runs[-1].append(batch)
        else:
            runs.append([batch])
    return [concatenate(run) for run in runs]


def filled(cache, batches):
    for batch in batches:
        cache.append(batch)
    return cache


def fill_until(error, cache, batches):
    """Append batches until this error is raised; fail if it is not."""
    for batch in batches:
        try:
            cache.append(batch)
        except error:
            return
    raise AssertionError


def arrays(count, records=1000):
    return [np.full(records, float(number)) for number in range(count)]


PADDED = np.dtype({"names": ["a", "b"], "formats": ["i1", ">i4"], "offsets": [4, 0], "itemsize": 8})
DTYPES = ["<f8", ">f4", "?", "q", "l", "<U2", "<U7", ">U3", "S4", "M8[s]", ">M8[ns]", "c16", "f2"]
LENGTHS = st.integers(0, 30) | st.sampled_from([600, 5000])
LISTS = st.lists(st.none() | st.integers() | st.floats() | st.text(max_size=5) | st.tuples(st.booleans()), max_size=20)


def array_of(dtype, length, width):
    values = np.arange(length * max(width, 1)) % 100
    return (values.astype(dtype)).reshape(length, width) if width else values.astype(dtype)


ARRAYS = st.builds(array_of, st.sampled_from(DTYPES), LENGTHS, st.sampled_from([0, 0, 3]))
STRUCTURED = LENGTHS.map(lambda length: np.zeros(length, [("a", ">i2"), ("b", "U3")])) | LENGTHS.map(
    lambda length: np.zeros(length, PADDED)
)
COLUMNS = st.builds(
    lambda length, dtypes: Columns({f"c{i}": array_of(dtype, length, 0) for i, dtype in enumerate(dtypes)}),
    LENGTHS,
    st.lists(st.sampled_from(["<f8", "i1", "<U2", "<U7"]), min_size=1, max_size=2),
)
BATCHES = LISTS | ARRAYS | STRUCTURED | COLUMNS


def closed_after(memory_limit_bytes, directory):
    """Return a cache to close in the test: Hypothesis calls a test many times, and fixtures close too late."""
    return contextlib.closing(
        ReplayCache(name="points", directory=directory, memory_limit_bytes=memory_limit_bytes, disk_limit_bytes=10**9)
    )


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return tmp_path_factory.mktemp("replay")


@given(batches=st.lists(BATCHES, max_size=12), memory_limit_bytes=st.sampled_from([0, 500, 5_000, 100_000, 10**9]))
def test_the_joined_batches_are_the_same_in_every_replay(directory, batches, memory_limit_bytes):
    """A record changed its type or its place between two epochs, and was trained on as another record."""
    with closed_after(memory_limit_bytes, directory) as cache:
        filled(cache, batches)
        assert cache.records == sum(map(len, batches))
        assert cache.bytes_in_memory <= memory_limit_bytes + 2 * MIB
        for _ in range(2):
            assert same(joined(replayed(cache)), joined(batches))


@given(
    batches=st.lists(BATCHES, max_size=12), memory_limit_bytes=st.sampled_from([0, 500, 5_000, 10**9]), data=st.data()
)
def test_reading_between_appends_changes_no_batch_that_was_read(directory, batches, memory_limit_bytes, data):
    """A replay that resumed at a number found another batch there."""
    with closed_after(memory_limit_bytes, directory) as cache:
        seen = {}
        for batch in batches:
            cache.append(batch)
            if len(cache):
                index = data.draw(st.integers(0, len(cache) - 1))
                seen.setdefault(index, cache.batch(index))
        assert all(same(cache.batch(index), batch) for index, batch in seen.items())
        assert same(joined(replayed(cache)), joined(batches))


@given(
    batches=st.lists(BATCHES, max_size=12),
    limit_before=st.sampled_from([0, 500, 5_000, 10**9]),
    limit_after=st.sampled_from([0, 500, 5_000, 10**9]),
)
def test_a_restored_cache_has_the_same_batches_at_the_same_numbers(directory, batches, limit_before, limit_after):
    """A replayer that resumed in the middle of an epoch by number, perhaps with other limits, found other batches."""
    with closed_after(limit_before, directory) as cache, closed_after(limit_after, directory) as restored:
        snapshot = filled(cache, batches).snapshot()
        filled(restored, [[1, 2, 3]]).restore(decoded_frames(snapshot))
        assert (len(restored), restored.records) == (len(cache), cache.records)
        assert same(replayed(restored), replayed(cache))
        more = [*batches, [1.5], np.ones(3000)]
        assert same(joined(replayed(filled(restored, more))), joined(batches + more))


KINDS = {
    "list": [[number, "a", (1.5,)] * 900 for number in range(5)],
    "array": [np.full((3000, 4), number, ">f4") for number in range(5)],
    "columns": [Columns({"x": np.arange(3000.0), "y": np.full(3000, n, "i1")}) for n in range(5)],
    "structs": [[EVENT(number)] * 2500 for number in range(5)],
    "mixed": [[1] * 3000, np.ones(3000), Columns({"x": np.ones(3000)}), [None] * 3000],
}


@pytest.mark.parametrize("kind", KINDS)
def test_below_the_limit_the_very_objects_come_back_and_no_file_is_made(make_cache, tmp_path, kind):
    """Replaying data that fits into memory, as most data does, cost more than a look-up in a list."""
    cache = filled(make_cache(memory_limit_bytes=10**9, directory=tmp_path / "not made"), KINDS[kind])
    assert len(cache) == len(KINDS[kind])
    assert all(given is kept for given, kept in zip(KINDS[kind], replayed(cache), strict=True))
    assert not (tmp_path / "not made").exists()
    assert cache.bytes_on_disk == 0


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("batches_in_memory", [0, 1.5])
def test_above_the_limit_every_kind_is_read_from_disk(make_cache, kind, batches_in_memory):
    """With some batches in memory and the rest on disk, the usual state of large data, a kind was restored wrongly."""
    memory_limit_bytes = int(batches_in_memory * estimated_bytes(KINDS[kind][0]))
    cache = make_cache(memory_limit_bytes=memory_limit_bytes, plain_data=PlainData([EVENT]))
    filled(cache, KINDS[kind])
    assert cache.bytes_on_disk > 0
    assert cache.bytes_in_memory <= memory_limit_bytes
    assert (cache.bytes_in_memory > 0) == (memory_limit_bytes > 0)
    for _ in range(2):
        assert same(replayed(cache), KINDS[kind])


def test_two_readers_may_be_at_different_places(make_cache):
    """A file has one position, and two readers moved each other."""
    cache = filled(make_cache(), arrays(20, records=3000))
    for index in range(10):
        assert cache.batch(index)[0] == index
        assert cache.batch(19 - index)[0] == 19 - index
        cache.append(np.full(3000, 20.0 + index))
    assert [batch[0] for batch in replayed(cache)] == list(range(30))


def test_changes_of_batches_from_disk_do_not_change_the_cache(make_cache):
    """A step changed an array that it had read, which is allowed, and the next epoch saw the change."""
    cache = filled(make_cache(), arrays(3, records=3000))
    first = cache.batch(1)
    first += 100
    assert cache.batch(1)[0] == 1


@pytest.mark.parametrize(
    ("small", "memory_limit_bytes"),
    [
        (lambda number: [number], 10**9),
        (lambda number: [number], 0),
        (lambda number: np.full((1, 3), number), 0),
        (lambda number: Columns({"x": np.array([number]), "text": np.array([str(number)])}), 10**9),
    ],
    ids=["list", "list on disk", "array on disk", "columns of texts of many widths"],
)
def test_batches_of_one_record_are_joined(make_cache, small, memory_limit_bytes):
    """A slow source emits one record at a time, and millions of small objects took most of the memory."""
    count = 13_000
    cache = make_cache(memory_limit_bytes=memory_limit_bytes)
    gc.collect()
    before = len(gc.get_objects())
    for number in range(count):
        cache.append(small(number))
    gc.collect()
    assert len(gc.get_objects()) - before < 3 * 4096 + 500
    assert len(cache) <= count // 2048
    last = cache.batch(len(cache) - 1)
    assert max(len(batch) for batch in replayed(cache)) <= 4096
    assert same(last[-1], concatenate([small(count - 1)])[0])
    assert same(joined(replayed(cache)), joined(map(small, range(count))))


def test_a_long_text_is_not_joined_with_all_the_short_ones(make_cache):
    """One text of 10,000 characters made an array of texts 40 kB wide for each record."""
    short, long = np.array(["a"]), np.array(["b" * 10_000])
    cache = make_cache(memory_limit_bytes=10**9)
    for _ in range(20):
        filled(cache, [short] * 100 + [long])
    assert cache.bytes_in_memory < 30 * MIB
    assert all(estimated_bytes(batch) <= MIB for batch in replayed(cache))
    assert [len(text) for batch in replayed(cache) for text in batch] == ([1] * 100 + [10_000]) * 20


def test_batches_that_cannot_be_joined_stay_apart(make_cache):
    """A join made a float of an int, or an array of a list."""
    batches = [np.ones(2), np.ones(2, int), [1.0], Columns({"x": [1.0]}), np.ones((2, 1)), np.ones(2, "f4")]
    for memory_limit_bytes in (0, 10**9):
        cache = filled(make_cache(memory_limit_bytes=memory_limit_bytes), batches)
        assert same(replayed(cache), batches)


@pytest.mark.parametrize("memory_limit_bytes", [10**9, 0])
@pytest.mark.parametrize(
    "large",
    [
        np.arange(3_000_000.0),
        np.arange(3_000_000).reshape(3, -1),
        Columns({"x": np.arange(2_000_000.0), "y": np.arange(2_000_000)}),
        ["a" * 1000] * 15_000,
    ],
    ids=["array", "array of huge rows", "columns", "list"],
)
def test_a_large_batch_is_read_in_pieces(make_cache, large, memory_limit_bytes):
    """One array of a gigabyte was read back at once."""
    cache = make_cache(memory_limit_bytes=memory_limit_bytes)
    cache.append(large)
    pieces = replayed(cache)
    assert len(pieces) > 2
    assert all(estimated_bytes(piece) <= 4 * MIB or len(piece) == 1 for piece in pieces)
    assert same(joined(pieces), [large])


def test_a_batch_goes_to_memory_or_to_disk_as_a_whole(make_cache):
    """Parts of an array are views, and a part in memory kept the whole array."""
    cache = make_cache(memory_limit_bytes=9 * MIB)
    cache.append(np.zeros(2 * MIB))
    assert cache.bytes_in_memory == 0
    assert cache.bytes_on_disk >= 16 * MIB


def test_some_columns_of_a_wide_array_do_not_keep_all_of_it(make_cache):
    """Three of a thousand columns were views, so the limit counted a 300th of the memory."""
    wide = np.ones((3000, 100))
    cache = make_cache(memory_limit_bytes=10**9)
    filled(cache, [wide[:, :3], Columns({"x": wide[:, 0], "y": np.ones(3000)}), wide[:2500]])
    kept = replayed(cache)
    assert kept[0].base is None
    assert kept[1]["x"].base is None
    assert kept[2].base is wide
    assert same(kept[:2], [wide[:, :3].copy(), Columns({"x": wide[:, 0].copy(), "y": np.ones(3000)})])


def test_empty_batches_and_other_sequences(make_cache):
    """A range or a tuple was refused, or an empty batch was stored."""
    cache = make_cache(memory_limit_bytes=10**9)
    filled(cache, [[], np.empty(0), range(3), (3, 4), Columns({"x": []})])
    assert replayed(cache) == [[0, 1, 2, 3, 4]]


@pytest.mark.parametrize("memory_limit_bytes", [0, 10_000, 100_000])
def test_memory_stays_within_the_limit(make_cache, memory_limit_bytes):
    """While small batches were collected for the disk, the memory exceeded its limit by more than 1 MiB."""
    cache = make_cache(memory_limit_bytes=memory_limit_bytes)
    for batch in itertools.chain(arrays(300, records=100), arrays(50, records=5000)):
        cache.append(batch)
        assert cache.bytes_in_memory <= memory_limit_bytes + MIB
    assert cache.bytes_in_memory <= memory_limit_bytes


@pytest.mark.parametrize("index", [-1, 3, 100])
@pytest.mark.parametrize("memory_limit_bytes", [0, 25_000, 10**9])
def test_a_missing_number_is_an_index_error(make_cache, index, memory_limit_bytes):
    """The index −1, valid for a list, returned a batch."""
    cache = filled(make_cache(memory_limit_bytes=memory_limit_bytes), arrays(3, records=3000))
    with pytest.raises(IndexError, match=f"points: there is no batch {index} among the 3 kept"):
        cache.batch(index)


@pytest.mark.parametrize("records", [1000, 3000, 3_000_000], ids=["small", "whole", "in pieces"])
def test_above_the_disk_limit_the_cache_fails_with_the_numbers_and_is_unchanged(make_cache, records):
    """The error at the disk limit did not name the step and the option, or it lost batches."""
    cache = make_cache(memory_limit_bytes=30_000, disk_limit_bytes=20_000)
    filled(cache, [*arrays(2), *arrays(2)])
    fill_until(LoopOverflow, cache, itertools.repeat(np.full(500, 7.0), 10))
    before = joined(replayed(cache))
    with pytest.raises(LoopOverflow) as raised:
        cache.append(np.ones(records))
    assert str(raised.value).startswith("points: expected at most 20000 bytes of replayed data on disk, given ")
    assert "raise a limit: IterationConfig(replay_memory_bytes=…, feedback_limits=" in str(raised.value)
    assert same(joined(replayed(cache)), before)
    assert cache.records == len(before[0])
    assert cache.bytes_on_disk <= 20_000


def test_without_room_on_disk_the_memory_limit_is_the_only_limit(make_cache):
    """On a read-only system, which has no disk to write to, an overflow with a small batch was reported late."""
    cache = make_cache(memory_limit_bytes=2000, disk_limit_bytes=0)
    cache.append(np.ones(200))
    with pytest.raises(LoopOverflow, match="at most 0 bytes"):
        cache.append(np.ones(200))
    cache.append([1])
    assert cache.records == 201


@pytest.mark.parametrize("memory_limit_bytes", [0, 6000, 30_000])
def test_a_snapshot_of_a_full_cache_fits_into_an_empty_one(make_cache, memory_limit_bytes):
    """A job that took a checkpoint at its limit could not start again."""
    limits = {"memory_limit_bytes": memory_limit_bytes, "disk_limit_bytes": 50_000}
    full = make_cache(**limits)
    fill_until(LoopOverflow, full, ([number, "abc"] * (1 + number % 50) for number in range(10_000)))
    restored = make_cache(**limits)
    restored.restore(decoded_frames(full.snapshot()))
    assert same(replayed(restored), replayed(full))


def test_a_snapshot_does_not_change_afterwards(make_cache):
    """The stream continued while the snapshot was written, and changed it."""
    cache = filled(make_cache(memory_limit_bytes=50_000), arrays(20))
    before, snapshot = list(cache.snapshot().frames()), cache.snapshot()
    filled(cache, arrays(20))
    cache.close()
    assert list(snapshot.frames()) == before


@pytest.mark.parametrize(
    "entry",
    [
        ("data", 0, 3, b"\x7b"),
        ("data", 0, 2, PlainData().encode_batch([1, 2, 3])),
        ("data", 0, 3, PlainData().encode(5), 100),
        ("data", 0, -1, b""),
        ("data", 0, 2**70, b""),
        ("data", 0, 3, b"", -1),
        ("data", 0, 3, b"", 100, 100),
        ("data", 0, 3),
        ("watermark", 1),
        5,
        None,
    ],
)
def test_invalid_entries_are_refused(make_cache, entry):
    """Damaged entries, or entries of another step, were restored."""
    with pytest.raises(PlainDataError, match=r"^points: expected"):
        make_cache(memory_limit_bytes=10**9).restore([[entry]])


@pytest.mark.parametrize("limits", [{"memory_limit_bytes": -1}, {"disk_limit_bytes": -1}])
def test_negative_limits_are_refused(make_cache, limits):
    """A limit of −1, which means 'no limit' elsewhere, was accepted although everything is bounded here."""
    with pytest.raises(ConfigurationError, match=r"^points: expected limits of 0 bytes or more, given .*-1"):
        make_cache(**limits)


@pytest.mark.parametrize(
    "refused",
    [[1, {"a": {1}}], [1, {"a": {1}}] * 2000, np.array([{1}], dtype=object)],
    ids=["small", "large", "array of objects"],
)
def test_a_value_that_is_not_plain_data_is_refused_and_later_ones_are_not(make_cache, refused):
    """A hundred batches are written together, and the error named the wrong batch."""
    cache = make_cache(memory_limit_bytes=0)
    cache.append([1, 2])
    with pytest.raises(PlainDataError, match=r"^points: (record 1 of the batch: record\[.a.\]|batch)"):
        cache.append(refused)
    filled(cache, [[3], [4]])
    assert joined(replayed(cache)) == [[1, 2, 3, 4]]


def test_a_large_batch_with_a_record_that_is_refused_leaves_no_piece(make_cache):
    """The first pieces of the refused batch stayed on disk."""
    cache = filled(make_cache(), arrays(2, records=3000))
    size_bytes = cache.bytes_on_disk
    with pytest.raises(PlainDataError):
        cache.append([*["a" * 1000] * 15_000, {1}])
    assert (len(cache), cache.records, cache.bytes_on_disk) == (2, 6000, size_bytes)
    cache.append(np.full(3000, 2.0))
    assert [batch[0] for batch in replayed(cache)] == [0, 1, 2]


def test_a_full_disk_is_reported_and_changes_nothing(make_cache, small_disk):
    """Half a written batch was read as a batch, or writing did not continue when the disk had room again."""
    disk, grow = small_disk
    cache = make_cache(directory=disk)
    given = [np.full((3000, 20), float(number)) for number in range(20)]
    fill_until(StorageFull, cache, given)
    batches, refused = given[: len(cache)], given[len(cache)]
    assert same(replayed(cache), batches)
    with pytest.raises(StorageFull, match=r"^points: expected room for \d+ bytes in .*/disk, given No space"):
        cache.append(np.ones(MIB))
    assert same(replayed(cache), batches)
    assert grow()
    cache.append(refused)
    assert same(replayed(cache), [*batches, refused])


def test_a_directory_that_cannot_be_made_is_reported(make_cache, tmp_path):
    """The error of a wrong option came hours into a run, and did not name the directory."""
    (tmp_path / "file").touch()
    cache = make_cache(directory=tmp_path / "file" / "replay")
    with pytest.raises(
        ConfigurationError, match=r"^points: expected a directory .* given .*file/replay .*; choose one"
    ):
        cache.append(np.ones(3000))
    assert len(cache) == 0


needs_proc = pytest.mark.skipif(
    not pathlib.Path("/proc/self/fd").exists(), reason="needs /proc to see files without names"
)


def only_new(before):
    [path] = [path for path in unnamed_files() if path not in before]
    return path


@needs_proc
def test_a_file_that_was_cut_is_an_error_and_not_less_data(make_cache):
    """A disk lost blocks, and training continued with fewer records."""
    before = unnamed_files()
    cache = filled(make_cache(), arrays(3, records=3000))
    os.truncate(only_new(before), 40_000)
    assert cache.batch(0)[0] == 0
    with pytest.raises(OSError, match=r"points: a temporary file of this step ends \d+ bytes early"):
        cache.batch(1)


@needs_proc
@pytest.mark.parametrize("position", [0, 1, 12, 18, 24, 36])
def test_a_file_that_was_damaged_is_an_error(make_cache, position):
    """A batch starts with zeros, as in files on failing disks, and was decoded."""
    before = unnamed_files()
    cache = filled(make_cache(), arrays(1, records=3000))
    with open(only_new(before), "r+b") as file:
        file.seek(position)
        file.write(bytes(30))
    with pytest.raises(PlainDataError, match=r"^points: expected the encoding of plain data, given "):
        cache.batch(0)


@needs_proc
def test_a_batch_of_another_length_is_an_error(make_cache):
    """The damage left a valid encoding with fewer records."""
    before = unnamed_files()
    cache = filled(make_cache(), [[1] * 3000])
    content = PlainData().encode_batch([1] * 2998 + [200])
    assert HEAD_BYTES + len(content) == cache.bytes_on_disk
    with open(only_new(before), "r+b") as file:
        file.seek(HEAD_BYTES)
        file.write(content)
    with pytest.raises(PlainDataError, match=r"^points: expected a batch of 3000 records, given one of 2999"):
        cache.batch(0)


@needs_proc
def test_closing_releases_the_file_and_leaves_nothing_in_the_directory(make_cache, tmp_path):
    """Files without names are invisible, and a leak filled the disk until the process ended."""
    before = unnamed_files()
    caches = [filled(make_cache(), arrays(3, records=3000)) for _ in range(5)]
    assert len(unnamed_files()) == len(before) + 5
    assert list(tmp_path.iterdir()) == []
    for cache in caches:
        replayed(cache)
        cache.close()
        cache.close()
        assert (len(cache), cache.records, cache.bytes_in_memory, cache.bytes_on_disk) == (0, 0, 0, 0)
    assert unnamed_files() == before


@needs_proc
def test_restoring_over_batches_releases_their_file(make_cache):
    """A restore doubled the use of the disk."""
    before = unnamed_files()
    cache = filled(make_cache(), arrays(3, records=3000))
    cache.restore(decoded_frames(cache.snapshot()))
    assert len(unnamed_files()) == len(before) + 1
    assert cache.bytes_on_disk < 3 * 25_000


def test_a_closed_cache_accepts_no_batch(make_cache):
    """A batch that was added after the end was silently lost."""
    cache = filled(make_cache(), arrays(3))
    cache.close()
    with pytest.raises(InternalError, match=r"points: .* closed"):
        cache.append([1])
    with pytest.raises(InternalError, match=r"points: .* closed"):
        cache.restore([])
    with pytest.raises(IndexError):
        cache.batch(0)


REPLAY_IN_A_PROCESS = """
import sys
import numpy as np
from streamiter.engine.storage.replay_cache import ReplayCache
from streamiter.values.records import Columns

directory, kind, limit_bytes, times = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])

def batch(number):
    if kind == "list":
        return [(float(record), number) for record in range(4000)]
    if kind == "array":
        return np.full((4000, 10), float(number))
    return Columns({"x": np.full((4000, 9), float(number)), "y": np.full(4000, number)})

cache = ReplayCache(
    name="points", directory=directory, memory_limit_bytes=limit_bytes, disk_limit_bytes=10**9
)
given = first = batch(0)
batch_bytes = 4000 * 10 * 8 if kind != "list" else 4000 * 112
count = limit_bytes * times // batch_bytes + 1
for number in range(count):
    cache.append(batch(number))
for epoch in range(2):
    assert sum(len(cache.batch(index)) for index in range(len(cache))) == count * 4000
assert cache.bytes_on_disk > 0
with open("/proc/self/status") as status:
    [peak] = [line.split()[1] for line in status if line.startswith("VmHWM:")]
print(int(peak) * 1024)
"""


@pytest.mark.skipif(not pathlib.Path("/proc/self/status").exists(), reason="needs /proc to see memory")
@pytest.mark.parametrize("kind", ["columns", "list", *in_soak("array")])
def test_ten_times_the_memory_limit_takes_no_more_memory_than_twice_the_limit(tmp_path, kind):
    """Replayed data above its limit took memory instead of disk space."""
    limit_bytes = 8 * MIB

    def peak_bytes(times):
        arguments = [str(tmp_path), kind, str(limit_bytes), str(times)]
        run = subprocess.run(
            [sys.executable, "-c", REPLAY_IN_A_PROCESS, *arguments],
            capture_output=True,
            text=True,
            check=True,
            timeout=PATIENCE_S,
        )
        return int(run.stdout)

    assert peak_bytes(10) - peak_bytes(2) < limit_bytes // 2


def test_temporary_files_are_made_only_where_needed(make_cache, monkeypatch):
    """A job whose data fits into memory needed a disk to write to."""

    def no_disk(**_):
        raise AssertionError

    monkeypatch.setattr(tempfile, "TemporaryFile", no_disk)
    cache = filled(make_cache(memory_limit_bytes=MIB), arrays(100))
    assert sum(map(len, replayed(cache))) == 100_000
