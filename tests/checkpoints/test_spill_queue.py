"""The spill queue is first in, first out, within its limits, with any part of it on disk."""

import collections
import dataclasses
import os
import pathlib
import tempfile
from contextlib import closing

import msgspec
import numpy as np
import pytest
from checkpoints.deferred_support import decoded_frames
from checkpoints.plain_values import same
from support.examples import random_examples

from streamiter.engine.storage.disk_queue import SpillQueue
from streamiter.errors import ConfigurationError, InternalError, LoopOverflow, PlainDataError, StorageFull
from streamiter.values.plain_data import PlainData
from streamiter.values.records import (
    CheckpointBarrier,
    Columns,
    DataBatch,
    EndOfData,
    EndOfInput,
    EpochWatermark,
    estimated_bytes,
)

MEMORY_LIMIT_BYTES = 2_000
BATCH_BYTES = 128  # the size that a queue counts for a batch in addition to its records


def some_batch(random):
    kind = random.random()
    if kind < 0.4:
        return [random.choice((0, -(2**70), "", "text", (True,))) for _ in range(random.randrange(21))]
    if kind < 0.7:
        return np.arange(random.randrange(301))
    length = random.randrange(51)
    return Columns({"x": np.ones(length), "y": np.arange(length)})


def some_item(random):
    if random.random() < 0.7:
        return DataBatch(some_batch(random), random.randint(-1, 5))
    return random.choice(
        (
            EpochWatermark(random.randrange(10)),
            CheckpointBarrier(random.randrange(10), suspend=random.random() < 0.5),
            EndOfData(),
            EndOfInput(),
        )
    )


def same_item(first, second):
    if isinstance(first, DataBatch) and isinstance(second, DataBatch):
        return first.epoch == second.epoch and same(first.records, second.records)
    return type(first) is type(second) and repr(first) == repr(second)


def same_items(first, second):
    return len(first) == len(second) and all(map(same_item, first, second))


def size_bytes(item):
    return BATCH_BYTES + estimated_bytes(item.records) if isinstance(item, DataBatch) else 0


def drained(queue):
    return [queue.take() for _ in range(len(queue))]


class QueueBesideADeque:
    """Compares a spill queue with a plain deque; a small limit makes the queue use the disk often."""

    def __init__(self, directory, memory_limit_bytes, disk_limit_bytes):
        self.directory = directory
        self.memory_limit_bytes = memory_limit_bytes
        self.disk_limit_bytes = disk_limit_bytes
        self.queue = self.new_queue()
        self.expected = collections.deque()
        self.records = 0
        self.largest = 0
        self.snapshots = []

    def new_queue(self):
        return SpillQueue(
            name="machine",
            directory=self.directory,
            memory_limit_bytes=self.memory_limit_bytes,
            disk_limit_bytes=self.disk_limit_bytes,
        )

    def put(self, item):
        try:
            self.queue.put(item)
        except LoopOverflow:
            assert isinstance(item, DataBatch)
        else:
            self.expected.append(item)
            if isinstance(item, DataBatch):
                self.records += len(item.records)
                self.largest = max(self.largest, size_bytes(item))

    def take(self, count):
        if not self.expected:
            with pytest.raises(IndexError, match="machine: the spill queue is empty"):
                self.queue.take()
        for _ in range(min(count, len(self.expected))):
            expected = self.expected.popleft()
            assert same_item(self.queue.take(), expected)
            if isinstance(expected, DataBatch):
                self.records -= len(expected.records)
        if not self.expected:
            self.largest = 0

    def peek(self, _):
        if self.expected:
            assert same_item(self.queue.peek(), self.expected[0])

    def resume_from_a_snapshot(self, _):
        restored = self.new_queue()
        restored.refill(decoded_frames(self.queue.snapshot()))
        self.queue.close()
        self.queue = restored

    def take_a_snapshot_for_later(self, _):
        self.snapshots.append((self.queue.snapshot(), list(self.expected)))

    def read_a_snapshot_of_earlier(self, _):
        if self.snapshots:
            snapshot, expected = self.snapshots.pop(0)
            with closing(self.new_queue()) as restored:
                restored.refill(decoded_frames(snapshot))
                assert same_items(expected, drained(restored))

    def release_a_snapshot(self, _):
        if self.snapshots:
            self.snapshots.pop()[0].release()

    def check(self):
        """Check the counts and the limits of the queue."""
        statistics = self.queue.statistics()
        assert len(self.queue) == len(self.expected)
        assert statistics.records == self.records
        assert self.queue.bytes_in_memory <= max(self.memory_limit_bytes, self.largest)
        assert self.queue.bytes_on_disk <= self.disk_limit_bytes
        assert (self.queue.bytes_on_disk == 0) == (statistics.batches_on_disk == 0)
        if not self.expected:
            assert self.queue.bytes_in_memory == 0

    def close(self):
        self.queue.close()
        for snapshot, _ in self.snapshots:
            snapshot.release()


COMMON = (QueueBesideADeque.put,) * 12 + (QueueBesideADeque.take,) * 4 + (QueueBesideADeque.peek,)
RARE = (
    QueueBesideADeque.resume_from_a_snapshot,
    QueueBesideADeque.take_a_snapshot_for_later,
    QueueBesideADeque.read_a_snapshot_of_earlier,
    QueueBesideADeque.release_a_snapshot,
)


def some_call(random):
    """Return a method of the queue, and its argument."""
    call = random.choice(COMMON if random.random() < 0.85 else RARE)
    if call is QueueBesideADeque.put:
        return call, some_item(random)
    return call, random.choice((1, 2, 5, 100))


def limits_and_calls(random):
    limits = random.choice((0, 500, MEMORY_LIMIT_BYTES)), random.choice((4_000, 10**9))
    return limits, [some_call(random) for _ in range(random.randrange(25))]


@random_examples(limits_and_calls)
def test_any_sequence_of_calls_has_the_results_of_a_deque(example, tmp_path):
    """Once in a thousand runs a batch came twice, never or after a barrier, or a limit was exceeded."""
    limits, calls = example
    run = QueueBesideADeque(tmp_path, *limits)
    for call, argument in calls:
        call(run, argument)
        run.check()
    run.close()
    assert not any(tmp_path.iterdir())


@pytest.fixture
def make_queue(tmp_path):
    """Return a maker of queues, which are closed at the end of the test."""
    queues = []

    def make(**options):
        defaults = {"memory_limit_bytes": MEMORY_LIMIT_BYTES, "disk_limit_bytes": 10**8, "directory": tmp_path}
        queues.append(SpillQueue(name="train", **(defaults | options)))
        return queues[-1]

    yield make
    for queue in queues:
        queue.close()


def batches(count, records=100):
    return [DataBatch(np.full(records, float(number)), number) for number in range(count)]


def test_ten_times_the_memory_limit_stays_below_it(make_queue):
    """Feedback faster than its reader took memory instead of disk space."""
    queue = make_queue(memory_limit_bytes=100_000)
    fed = batches(1250)  # 928 bytes each
    for batch in fed:
        queue.put(batch)
        assert queue.bytes_in_memory <= 100_000
    assert sum(map(size_bytes, fed)) > 10 * 100_000
    taken = []
    while len(queue):
        taken.append(queue.take())
        assert queue.bytes_in_memory <= 100_000
    assert same_items(fed, taken)
    assert queue.statistics().bytes_in_memory_peak <= 100_000


def test_below_the_memory_limit_the_very_objects_come_back_and_no_file_is_made(make_queue, tmp_path):
    """An almost empty queue, the usual case, wrote to disk."""
    queue = make_queue(directory=tmp_path / "not made")
    fed = [*batches(2), EpochWatermark(0)]
    for item in fed:
        queue.put(item)
    assert all(given is taken for given, taken in zip(fed, drained(queue), strict=True))
    assert not (tmp_path / "not made").exists()
    assert queue.statistics().batches_spilled == 0


def test_batches_that_just_fill_the_memory_limit_stay_in_memory(make_queue):
    """Batches of exactly the allowed size were spilled."""
    first, second = batches(2)
    queue = make_queue(memory_limit_bytes=size_bytes(first) + size_bytes(second))
    queue.put(first)
    queue.put(second)
    assert queue.statistics().batches_spilled == 0


def test_the_statistics_of_a_new_queue_are_zero(make_queue):
    """A new queue had a peak of one."""
    assert set(dataclasses.astuple(make_queue().statistics())) == {0}


def test_a_batch_above_the_limit_passes_an_empty_queue_in_memory(make_queue):
    """A batch above the limit went to disk, and was at once read back whole."""
    queue = make_queue(memory_limit_bytes=0)
    [batch] = batches(1)
    queue.put(EpochWatermark(0))
    queue.put(batch)
    queue.take()
    assert queue.take() is batch


def test_control_records_keep_their_place_among_batches_on_disk(make_queue):
    """A barrier passed a batch and lost it from the snapshot, or a watermark did and ended its epoch early."""
    queue = make_queue(memory_limit_bytes=0)
    fed = []
    for number, batch in enumerate(batches(5)):
        fed += [batch, EpochWatermark(number), CheckpointBarrier(number)]
    fed = [EndOfData(), *fed, EndOfInput()]
    for item in fed:
        queue.put(item)
    assert queue.statistics().batches_on_disk == 4
    assert same_items(fed, drained(queue))


def test_control_records_take_no_disk(make_queue):
    """An idle loop, which sends only watermarks, filled the disk."""
    queue = make_queue(memory_limit_bytes=0)
    for batch in batches(2):
        queue.put(batch)
    before = queue.bytes_on_disk
    for epoch in range(1000):
        queue.put(EpochWatermark(epoch))
    assert queue.bytes_on_disk == before
    assert queue.bytes_in_memory == size_bytes(batches(1)[0])
    assert len(queue) == 1002


def test_batches_that_come_while_others_are_on_disk_wait_behind_them(make_queue):
    """Memory had room again, and later batches passed the older ones on disk."""
    queue = make_queue()
    fed = batches(6)
    for batch in fed[:4]:
        queue.put(batch)
    assert queue.take().epoch == 0
    for batch in fed[4:]:
        queue.put(batch)
    assert [batch.epoch for batch in drained(queue)] == [1, 2, 3, 4, 5]


def test_disk_use_stays_bounded_for_a_queue_that_is_never_empty(make_queue):
    """A loop with a constant lag ran for weeks, and the space of read batches was never freed."""
    queue = make_queue(memory_limit_bytes=0, disk_limit_bytes=160_000)
    for batch in batches(20):
        queue.put(batch)
    peak = queue.bytes_on_disk + 160_000 // 16 + 1_000
    for batch in batches(2000):
        queue.put(batch)
        queue.take()
        assert queue.bytes_on_disk <= peak
    assert queue.statistics().batches_spilled * 80_000 > 10 * 160_000
    assert len(queue) == 20


def open_file_bytes():
    """Return the sizes of the deleted files that this process has open."""
    sizes = []
    for name in os.listdir("/proc/self/fd"):
        path = f"/proc/self/fd/{name}"
        try:
            if "streamiter-spill-" in os.readlink(path) or "(deleted)" in os.readlink(path):
                sizes.append(os.stat(path).st_size)
        except OSError:
            continue  # the listing's own
    return sizes


@pytest.mark.skipif(not pathlib.Path("/proc/self/fd").exists(), reason="needs /proc to see files without names")
def test_space_is_freed_when_the_queue_has_been_read_and_when_it_is_closed(make_queue, tmp_path):
    """Files without names are invisible, and a leak filled the disk until the process ended."""
    before = open_file_bytes()
    queue = make_queue(memory_limit_bytes=0, disk_limit_bytes=160_000)
    for batch in batches(50):
        queue.put(batch)
    assert sum(open_file_bytes()) - sum(before) == queue.bytes_on_disk > 40_000
    drained(queue)
    assert sum(open_file_bytes()) == sum(before)
    assert queue.bytes_on_disk == 0
    for batch in batches(50):
        queue.put(batch)
    queue.close()
    assert open_file_bytes() == before
    assert list(tmp_path.iterdir()) == []


def test_a_queue_works_after_it_has_been_empty(make_queue):
    """A queue that had been empty stayed in its state of spilling, although nothing was on disk."""
    queue = make_queue(memory_limit_bytes=0)
    for _ in range(3):
        for batch in batches(5):
            queue.put(batch)
        assert [batch.epoch for batch in drained(queue)] == [0, 1, 2, 3, 4]
    before = queue.statistics().batches_spilled
    [batch] = batches(1)
    queue.put(batch)
    assert queue.take() is batch
    assert queue.statistics().batches_spilled == before


def test_above_the_disk_limit_the_queue_fails_with_the_numbers_and_keeps_its_batches(make_queue):
    """The job failed without the name of the step, or the queue lost its batches before the last snapshot."""
    queue = make_queue(memory_limit_bytes=1000, disk_limit_bytes=2000)
    for batch in batches(3):
        queue.put(batch)
    with pytest.raises(LoopOverflow) as raised:
        queue.put(batches(1)[0])
    assert str(raised.value) == (
        "train: expected at most 2000 bytes of batches waiting on disk, given 2553 with the next batch (2 batches "
        "there, 928 of 1000 bytes in memory); the consumer of the queue is slower than its producer: emit less, "
        "make the consumer faster, or raise the disk limit (of a loop: "
        "IterationConfig(feedback_limits=FeedbackLimits(disk_bytes=…)))"
    )
    queue.put(EpochWatermark(3))
    assert [item.epoch for item in drained(queue)] == [0, 1, 2, 3]


@pytest.mark.skipif(not pathlib.Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_full_disk_is_reported_and_changes_nothing(make_queue, monkeypatch):
    """Half a written batch was read as a batch."""
    queue = make_queue(memory_limit_bytes=0, disk_limit_bytes=16_000)
    fed = batches(4)
    queue.put(fed[0])
    queue.put(fed[1])
    with open("/dev/full", "r+b", buffering=0) as full_disk, monkeypatch.context() as full:
        full.setattr(tempfile, "TemporaryFile", lambda **_: full_disk)
        queue.put(fed[2])  # This batch fills the first segment.
        with pytest.raises(StorageFull, match=r"^train: expected room for \d+ bytes in .*, given No space left.* free"):
            queue.put(fed[3])
    statistics = queue.statistics()
    assert (len(queue), statistics.records, statistics.batches_on_disk) == (3, 300, 2)
    assert same_items(fed[:3], drained(queue))


def test_a_directory_that_cannot_be_made_is_reported(make_queue, tmp_path):
    """The error of a wrong option came hours into a run, and did not name the directory."""
    (tmp_path / "file").touch()
    queue = make_queue(memory_limit_bytes=0, directory=tmp_path / "file" / "spill")
    queue.put(batches(1)[0])
    with pytest.raises(ConfigurationError, match=r"^train: expected a directory .* given .*file/spill .*; choose one"):
        queue.put(batches(1)[0])
    assert len(queue) == 1


def test_a_batch_that_is_not_plain_data_is_refused_when_it_must_be_written(make_queue):
    """The error did not name the step, the record and the path, or the queue could not be used afterwards."""
    queue = make_queue(memory_limit_bytes=0)
    queue.put(DataBatch([{1}]))
    with pytest.raises(PlainDataError, match=r'^train: record 1 of the batch: record\["a"\]: expected .* given set;'):
        queue.put(DataBatch([1, {"a": {1}}]))
    queue.put(DataBatch([2]))
    assert [batch.records for batch in drained(queue)] == [[{1}], [2]]


def test_structs_are_read_back_with_the_encoding_that_is_given(make_queue):
    """Structs, which records often are, could not be read back from disk."""
    event = msgspec.defstruct("Event", ["a"])
    queue = make_queue(memory_limit_bytes=0, plain_data=PlainData([event]))
    for number in range(3):
        queue.put(DataBatch([event(number)]))
    assert [batch.records for batch in drained(queue)] == [[event(0)], [event(1)], [event(2)]]


def test_a_snapshot_of_a_full_queue_fits_into_an_empty_one(make_queue):
    """A job that took a checkpoint at its limit could not start again."""
    options = {"memory_limit_bytes": 500, "disk_limit_bytes": 3 * 851}
    full = make_queue(**options)
    for batch in batches(4):
        full.put(batch)
    full.take()
    assert full.peek().epoch == 1  # The batch is above the memory limit, and is read back from disk.
    restored = make_queue(**options)
    restored.refill(decoded_frames(full.snapshot()))
    assert [batch.epoch for batch in drained(restored)] == [1, 2, 3]


def test_a_snapshot_changes_nothing(make_queue):
    """The loop continued after a snapshot with other batches."""
    queue = make_queue()
    for item in [*batches(5), EpochWatermark(4)]:
        queue.put(item)
    before = queue.statistics()
    [entries] = decoded_frames(queue.snapshot())
    assert len(entries) == 6
    assert queue.statistics() == before
    assert [item.epoch for item in drained(queue)] == [0, 1, 2, 3, 4, 4]


@pytest.mark.parametrize(
    "entry",
    [
        ("data", 1, 2, b"\x7b"),
        ("data", 1, 2),
        ("data", 2**70, 2, PlainData().encode_batch([1, 2])),
        ("data", 1, 2**70, PlainData().encode_batch([1, 2])),
        ("newer", 1),
        ("data",),
        5,
        None,
        ("watermark", "1"),
    ],
)
def test_invalid_entries_are_refused(make_queue, entry):
    """State of another step, or of a newer version, was restored."""
    queue = make_queue()
    with pytest.raises(PlainDataError, match=r"^train: expected"):
        queue.refill([[entry]])


@pytest.mark.parametrize("limits", [{"memory_limit_bytes": -1}, {"disk_limit_bytes": -1}])
def test_negative_limits_are_refused(make_queue, limits):
    """A limit of −1, which means 'no limit' elsewhere, was accepted although everything is bounded here."""
    with pytest.raises(ConfigurationError, match=r"^train: expected limits of 0 bytes or more, given .*-1"):
        make_queue(**limits)


def test_without_room_on_disk_the_memory_limit_is_the_only_limit(make_queue):
    """On a read-only system, a queue above its memory limit had no error."""
    queue = make_queue(disk_limit_bytes=0)
    queue.put(batches(1)[0])
    queue.put(batches(1)[0])
    with pytest.raises(LoopOverflow, match="at most 0 bytes"):
        queue.put(batches(1)[0])


def test_a_closed_queue_is_empty_and_accepts_no_batch(make_queue):
    """A batch that was put after the end was silently lost."""
    queue = make_queue(memory_limit_bytes=0)
    for batch in batches(3):
        queue.put(batch)
    queue.close()
    queue.close()
    assert len(queue) == 0
    assert queue.bytes_in_memory == 0
    with pytest.raises(InternalError, match=r"train: DataBatch.* closed"):
        queue.put(batches(1)[0])
    with pytest.raises(IndexError):
        queue.peek()


def test_batches_of_no_bytes_count_as_well(make_queue):
    """Empty batches, put without end, filled the memory that the limit guards."""
    queue = make_queue()
    for _ in range(100):
        queue.put(DataBatch([]))
    assert queue.statistics().batches_spilled > 80
    assert [batch.records for batch in drained(queue)] == [[]] * 100


def test_statistics_report_peaks_and_totals(make_queue):
    """A dashboard, which shows the peaks after the lag has ended, showed zeros."""
    queue = make_queue()
    for item in [*batches(5), EpochWatermark(4)]:
        queue.put(item)
    drained(queue)
    statistics = queue.statistics()
    assert (len(queue), statistics.records) == (0, 0)
    assert (statistics.batches_spilled, statistics.batches_on_disk) == (3, 0)
    assert statistics.bytes_on_disk_peak > 3 * 800
    assert statistics.bytes_in_memory_peak == 2 * 928
