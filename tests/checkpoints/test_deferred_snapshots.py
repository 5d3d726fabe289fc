"""A snapshot of a cache or queue, read later while the job continues, has its original content."""

import gc
import pathlib
import subprocess
import sys
import tracemalloc

import numpy as np
import pytest
from checkpoints.deferred_support import decoded_frames, unnamed_files
from checkpoints.plain_values import same
from support.waiting import PATIENCE_S

from streamiter.engine.storage.disk_queue import SpillQueue
from streamiter.engine.storage.replay_cache import ReplayCache
from streamiter.errors import InternalError, PlainDataError
from streamiter.values.records import DataBatch, EndOfInput, EpochWatermark, Idle

MIB = 1 << 20

pytestmark = pytest.mark.skipif(
    not pathlib.Path("/proc/self/fd").exists(), reason="needs /proc to see files without names"
)


@pytest.fixture
def make_cache(tmp_path):
    """Return a maker of caches, which are closed at the end of the test."""
    caches = []

    def make(memory_limit_bytes=0):
        limits = {"memory_limit_bytes": memory_limit_bytes, "disk_limit_bytes": 10**9}
        caches.append(ReplayCache(name="points", directory=tmp_path, **limits))
        return caches[-1]

    yield make
    for cache in caches:
        cache.close()


@pytest.fixture
def make_queue(tmp_path):
    """Return a maker of queues of several segments, which are closed at the end of the test."""
    queues = []

    def make(memory_limit_bytes=0, disk_limit_bytes=16 * 6 * MIB):
        limits = {"memory_limit_bytes": memory_limit_bytes, "disk_limit_bytes": disk_limit_bytes}
        queues.append(SpillQueue(name="train", directory=tmp_path, **limits))
        return queues[-1]

    yield make
    for queue in queues:
        queue.close()


def blocks(count, records=3000):
    """Return arrays of 24 kB, each with its own number."""
    return [np.full(records, float(number)) for number in range(count)]


def filled(kept, given):
    for each in given:
        if isinstance(kept, SpillQueue):
            kept.put(DataBatch(each, int(each[0])))
        else:
            kept.append(each)
    return kept


def replayed(cache):
    return [cache.batch(index) for index in range(len(cache))]


def records_of(queue):
    return [queue.take().records for _ in range(len(queue))]


@pytest.mark.parametrize("memory_limit_bytes", [0, 100_000, 10**9])
@pytest.mark.parametrize("then", ["append", "append and close", "restore", "restore and append"])
def test_a_cache_is_restored_as_it_was_at_the_snapshot(make_cache, memory_limit_bytes, then):
    """Records from after the barrier were used twice, or a missing file lost the model."""
    given = [*blocks(20), np.ones(10), np.ones(10)]
    cache = filled(make_cache(memory_limit_bytes), given)
    expected = replayed(cache)
    snapshot = cache.snapshot()
    if "restore" in then:
        cache.restore([])
    if "append" in then:
        filled(cache, blocks(30))
    if "close" in then:
        cache.close()
    restored = make_cache(memory_limit_bytes)
    restored.restore(decoded_frames(snapshot))
    assert same(replayed(restored), expected)


def test_removed_pieces_of_a_file_do_not_change_a_snapshot(make_cache):
    """The removal of a refused batch's first pieces changed an earlier snapshot."""
    cache = filled(make_cache(), blocks(5))
    snapshot = cache.snapshot()
    with pytest.raises(PlainDataError):
        cache.append([*["a" * 1000] * 15_000, {1}])
    filled(cache, [np.zeros(3000)])
    restored = make_cache()
    restored.restore(decoded_frames(snapshot))
    assert same(replayed(restored), blocks(5))


@pytest.mark.parametrize("taken", [0, 3, 17, 20])
@pytest.mark.parametrize("closed", [False, True])
def test_a_queue_is_refilled_as_it_was_at_the_snapshot(make_queue, taken, closed):
    """The loop made many rounds while a checkpoint was written, and overwrote its files."""
    queue = filled(make_queue(memory_limit_bytes=50_000, disk_limit_bytes=1_600_000), blocks(taken + 20))
    for _ in range(taken):
        queue.take()
    snapshot = queue.snapshot()
    for _ in range(3):
        records_of(queue)
        filled(queue, blocks(25))
    if closed:
        queue.close()
    restored = make_queue()
    restored.refill(decoded_frames(snapshot))
    assert same(records_of(restored), blocks(taken + 20)[taken:])


def test_a_file_that_is_read_to_its_end_is_not_overwritten_while_a_snapshot_needs_it(make_queue):
    """Later batches were written over the batches of the snapshot."""
    queue = filled(make_queue(), blocks(3))
    snapshot = queue.snapshot()
    records_of(queue)
    filled(queue, [block + 100 for block in blocks(3)])
    restored = make_queue()
    restored.refill(decoded_frames(snapshot))
    assert same(records_of(restored), blocks(3))
    assert same(records_of(queue), [block + 100 for block in blocks(3)])


def test_every_kind_of_control_record_keeps_its_place(make_queue):
    """The end of an iteration was restored without its epoch, and ended the job in another epoch."""
    queue = make_queue()
    controls = [EpochWatermark(3), Idle(), EndOfInput(), EndOfInput(7)]
    for control, block in zip(controls, blocks(4), strict=True):
        queue.put(control)
        filled(queue, [block])
    restored = make_queue()
    restored.refill(decoded_frames(queue.snapshot()))
    items = [restored.take() for _ in range(len(restored))]
    assert [repr(item) for item in items[::2]] == [repr(control) for control in controls]
    assert [item.epoch for item in items[1::2]] == [0, 1, 2, 3]


@pytest.fixture(params=["cache", "queue"])
def make(request, make_cache, make_queue):
    return make_cache if request.param == "cache" else make_queue


def test_files_are_deleted_when_both_the_owner_and_the_snapshot_are_closed(make, tmp_path):
    """Files without names are invisible, and a leak filled the disk until the process ended."""
    before = unnamed_files()
    kept = filled(make(), blocks(20))
    held = unnamed_files()
    assert len(held) > len(before)
    snapshot, other = kept.snapshot(), kept.snapshot()
    assert len(unnamed_files()) == len(held)
    kept.close()
    snapshot.release()
    snapshot.release()
    assert len(unnamed_files()) == len(held)
    other.release()
    assert unnamed_files() == before
    assert list(tmp_path.iterdir()) == []


def test_a_released_snapshot_does_not_change_its_owner(make):
    """A failed checkpoint deleted the training data."""
    kept = filled(make(), blocks(20))
    kept.snapshot().release()
    deferred = kept.snapshot()
    assert sum(1 for _ in deferred.frames())
    found = records_of(kept) if isinstance(kept, SpillQueue) else replayed(kept)
    assert same(found, blocks(20))


def test_a_snapshot_that_has_been_read_releases_its_files(make):
    """The writer of a snapshot took long to commit, and the disk space was held all the time."""
    before = unnamed_files()
    kept = filled(make(), blocks(20))
    snapshot = kept.snapshot()
    kept.close()
    assert unnamed_files() != before
    assert sum(1 for _ in snapshot.frames())
    assert unnamed_files() == before


def test_the_segments_of_a_queue_are_deleted_as_they_are_read(make_queue):
    """A snapshot of a large queue held twice the disk space until its last byte was written."""
    before = unnamed_files()
    queue = filled(make_queue(disk_limit_bytes=16 * 4 * MIB), blocks(60, records=MIB // 8))
    snapshot = queue.snapshot()
    queue.close()
    counts = [len(unnamed_files()) - len(before) for _ in snapshot.frames()]
    assert counts == sorted(counts, reverse=True)
    assert counts[0] == 15
    assert len(set(counts)) >= 15


def test_a_snapshot_that_is_never_released_leaves_no_file_and_no_warning(make):
    """A checkpoint that failed at an unexpected point left a file open; pytest reports such a file as a warning."""
    before = unnamed_files()
    kept = filled(make(), blocks(20))
    begun, snapshot = kept.snapshot(), kept.snapshot()
    frames = begun.frames()
    next(frames)
    kept.close()
    circle = [snapshot]
    circle.append(circle)
    del begun, frames, snapshot, circle
    gc.collect()
    assert unnamed_files() == before


def test_a_snapshot_released_while_it_is_read_is_an_error(make):
    """An abandoned checkpoint was stored with only the frames that had been read."""
    before = unnamed_files()
    kept = filled(make(), blocks(20, records=MIB // 8))
    snapshot = kept.snapshot()
    kept.close()
    frames = snapshot.frames()
    next(frames)
    snapshot.release()
    assert unnamed_files() == before
    with pytest.raises(InternalError, match=r"^(points|train): deferred state is read that was read before"):
        list(frames)
    with pytest.raises(InternalError, match="was released"):
        snapshot.frames()


@pytest.mark.parametrize("memory_limit_bytes", [0, 10**9])
def test_a_snapshot_is_read_once(make, memory_limit_bytes):
    """The second reading found no frames, as in a cache without data."""
    snapshot = filled(make(memory_limit_bytes), blocks(2)).snapshot()
    assert list(snapshot.frames())
    with pytest.raises(InternalError, match="read that was read before, or was released"):
        snapshot.frames()


def test_a_value_that_is_not_plain_data_is_refused_with_the_step(make_cache, make_queue):
    """A value in memory, which was not checked before, failed without the name of the step."""
    cache, queue = make_cache(10**9), make_queue(10**9)
    cache.append([1, {"a": {1}}])
    queue.put(DataBatch([1, {"a": {1}}]))
    assert (cache.snapshot().name, queue.snapshot().name) == ("points", "train")
    for kept, name in ((cache, "points"), (queue, "train")):
        with pytest.raises(PlainDataError, match=rf'^{name}: record 1 of the batch: record\["a"\]: expected'):
            list(kept.snapshot().frames())


def test_small_entries_share_a_frame_and_large_ones_have_their_own(make_queue):
    """Each frame costs a checksum and a turn of the loop: small frames were many, and large ones blocked records."""
    queue = filled(make_queue(10**9), blocks(2000, records=1))
    frames = list(queue.snapshot().frames())
    assert len(frames) == -(-2000 // 256)
    queue = filled(make_queue(10**9), blocks(6, records=MIB // 8 - 100))
    sizes = [len(frame) for frame in queue.snapshot().frames()]
    assert len(sizes) == 6
    assert max(sizes) <= MIB + 1000


def test_a_snapshot_and_its_frames_take_memory_for_a_few_batches_only(make_cache, make_queue):
    """State that was encoded completely at the barrier took as much memory as the data, and stopped all records."""
    for kept in (make_cache(10**9), make_queue(10**9), make_cache(), make_queue(disk_limit_bytes=10**9)):
        filled(kept, blocks(40, records=MIB // 8))
        gc.collect()
        tracemalloc.start()
        snapshot = kept.snapshot()
        assert sum(map(len, snapshot.frames())) > 40 * MIB
        _, peak_bytes = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert peak_bytes < 6 * MIB


THROUGH_A_SNAPSHOT = """
import os, sys
import numpy as np
from streamiter.values.plain_data import PlainData
from streamiter.engine.storage.replay_cache import ReplayCache
from streamiter.engine.storage.disk_queue import SpillQueue
from streamiter.values.records import DataBatch

kind, directory, megabytes = sys.argv[1], sys.argv[2], int(sys.argv[3])
MIB = 1 << 20
plain = PlainData()
limits = {"memory_limit_bytes": 8 * MIB, "disk_limit_bytes": 10**10}

def made():
    if kind == "cache":
        return ReplayCache(name="points", directory=directory, **limits)
    return SpillQueue(name="points", directory=directory, **limits)

def peak_bytes():
    with open("/proc/self/status") as status:
        [peak] = [line.split()[1] for line in status if line.startswith("VmHWM:")]
    return int(peak) * 1024

kept = made()
for number in range(megabytes):
    block = np.full(MIB // 8, float(number))
    kept.append(block) if kind == "cache" else kept.put(DataBatch(block, number))
before = peak_bytes()
snapshot = kept.snapshot()
kept.close()
path = os.path.join(directory, "frames")
lengths = []
with open(path, "wb") as file:
    for frame in snapshot.frames():
        file.write(frame)
        lengths.append(len(frame))
snapshot.release()
restored = made()
with open(path, "rb") as file:
    frames = (plain.decode(file.read(length)) for length in lengths)
    restored.restore(frames) if kind == "cache" else restored.refill(frames)
assert len(restored) == megabytes
total = 0.0
for number in range(megabytes):
    total += (restored.batch(number) if kind == "cache" else restored.take().records)[0]
assert total == megabytes * (megabytes - 1) / 2
print(peak_bytes() - before)
"""


@pytest.mark.parametrize("kind", ["cache", "queue"])
def test_300_mib_on_disk_go_through_a_snapshot_in_little_memory(tmp_path, kind):
    """An iteration with data larger than memory could run, but its state could be neither stored nor restored."""
    run = subprocess.run(
        [sys.executable, "-c", THROUGH_A_SNAPSHOT, kind, str(tmp_path), "300"],
        capture_output=True,
        text=True,
        check=True,
        timeout=PATIENCE_S,
    )
    assert int(run.stdout) < 60 * MIB


def test_restoring_uses_the_disk_above_the_limit_and_reads_frames_one_by_one(make):
    """A snapshot larger than memory could not be restored."""
    kept = filled(make(), blocks(40, records=MIB // 8))
    restored = make(2 * MIB)
    gc.collect()
    tracemalloc.start()
    frames = decoded_frames(kept.snapshot())
    restored.refill(frames) if isinstance(restored, SpillQueue) else restored.restore(frames)
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert restored.bytes_in_memory <= 2 * MIB
    assert peak_bytes < 12 * MIB
