"""Batches on disk are in order, their space is freed, and an error changes nothing."""

import pathlib
import resource

import pytest
from support.examples import random_examples

from streamiter.engine.storage.disk_batches import DiskBatches, EncodedBatch
from streamiter.errors import LoopOverflow, PlainDataError, StorageFull
from streamiter.values.plain_data import PlainData

HEAD_BYTES = 24  # bytes before the content of each batch


def disk_batches(directory, segment_bytes=None, limit_bytes=10**9):
    return DiskBatches(
        name="train",
        directory=directory,
        limit_bytes=limit_bytes,
        plain_data=PlainData(),
        contents="batches waiting",
        explain_overflow=lambda: "; emit less",
        segment_bytes=segment_bytes,
    )


@pytest.fixture
def make_batches(tmp_path):
    made = []

    def make(**options):
        made.append(disk_batches(tmp_path, **options))
        return made[-1]

    yield make
    for batches in made:
        batches.close()


def take(batches):
    encoded = batches.first()
    batches.drop_first(encoded)
    return encoded


def encoded_and_segment_bytes(random):
    encoded = [
        EncodedBatch(random.randint(-1, 9), random.randrange(5), random.randbytes(random.choice((0, 1, 30, 60))))
        for _ in range(random.randrange(11))
    ]
    return encoded, random.randint(1, 200)


@random_examples(encoded_and_segment_bytes)
def test_any_batches_are_read_in_order_across_segments(example, tmp_path):
    """Batches without bytes, or longer than a segment, were returned in another order."""
    given, segment_bytes = example
    batches = disk_batches(tmp_path, segment_bytes=segment_bytes)
    for encoded in given:
        batches.append(encoded)
    held = batches.hold()
    assert [take(batches) for _ in given] == given
    assert list(held) == given
    assert (batches.count, batches.size_bytes) == (0, 0)
    batches.close()


@random_examples(encoded_and_segment_bytes)
def test_any_batch_is_read_by_its_number(example, tmp_path):
    """A reader changed a batch that it had read, and the next round read the changed batch."""
    given, _ = example
    batches = disk_batches(tmp_path)
    for encoded in given:
        batches.append(encoded)
    for number, encoded in reversed([*enumerate(given)]):
        read = batches.read(number)
        assert (read.epoch, read.records, bytes(read.content)) == encoded
        assert not memoryview(read.content).readonly
    batches.close()


def test_reading_and_writing_may_alternate(make_batches):
    """A file has one position, and a read changed the position of the next write."""
    batches = make_batches(segment_bytes=100)
    batches.append(EncodedBatch(0, 1, b"a" * 30))
    for number in range(50):
        encoded = EncodedBatch(1, 1, bytes([number]) * 30)
        batches.append(encoded)
        assert len(take(batches).content) == 30
        assert list(batches.hold()) == [encoded]


def test_without_batches_there_is_no_first_one(make_batches):
    """An empty queue, whose last segment may be kept, returned an old batch."""
    batches = make_batches(segment_bytes=100)
    with pytest.raises(IndexError):
        batches.first()
    batches.append(EncodedBatch(0, 1, b"a"))
    take(batches)
    with pytest.raises(IndexError, match="train: no batch"):
        batches.first()


def test_a_batch_that_does_not_fit_on_the_disk_changes_nothing(make_batches):
    """The system wrote as much as fitted before it failed, and half a batch stayed in the middle of a segment."""
    batches = make_batches()
    first, refused, second = (EncodedBatch(0, 1, letter * 1000) for letter in (b"a", b"b", b"c"))
    batches.append(first)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1500, before[1]))
    try:
        with pytest.raises(StorageFull, match=r"^train: expected room for 1024 bytes in .*, given File too large"):
            batches.append(refused)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert batches.size_bytes == HEAD_BYTES + 1000
    batches.append(second)
    assert [take(batches), take(batches)] == [first, second]


def test_a_batch_above_the_limit_is_refused(make_batches):
    """A batch that just fits the limit of the files was refused, or a larger one was written."""
    batches = make_batches(limit_bytes=HEAD_BYTES + 1000)
    batches.append(EncodedBatch(0, 1, b"a" * 1000))
    with pytest.raises(
        LoopOverflow, match=r"^train: expected at most 1024 bytes of batches waiting on disk, given 1048 .*emit less$"
    ):
        batches.append(EncodedBatch(0, 1, b""))
    assert batches.count == 1


def test_batches_behind_a_cut_are_gone(make_batches):
    """After an error, pieces of a large batch stayed."""
    batches = make_batches()
    kept, gone = EncodedBatch(0, 1, b"kept"), EncodedBatch(0, 1, b"gone" * 100)
    batches.append(kept)
    batches.append(gone)
    batches.append(gone)
    batches.cut(1)
    assert (batches.count, batches.size_bytes) == (1, HEAD_BYTES + 4)
    assert list(batches.hold()) == [kept]
    batches.append(gone)
    assert bytes(batches.read(1).content) == gone.content


def test_files_have_no_name(make_batches, tmp_path):
    """A killed process left files behind."""
    batches = make_batches()
    batches.append(EncodedBatch(0, 1, b"a" * 1000))
    assert [path for path in pathlib.Path(tmp_path).iterdir() if path.is_file()] == []


def test_a_batch_has_epoch_0_unless_another_is_given(make_batches):
    """Data replayed outside of an iteration had no epoch."""
    batches = make_batches()
    assert (batches.encode([1, 2]).epoch, batches.encode([1, 2], 3).epoch) == (0, 3)


def test_a_batch_of_another_length_than_its_head_says_is_damaged(make_batches):
    """The count of a loop's records was wrong after a damaged batch."""
    batches = make_batches()
    with pytest.raises(
        PlainDataError, match=r"^train: expected a batch of 3 records, given one of 2; its bytes are damaged$"
    ):
        batches.decode(batches.encode([1, 2])._replace(records=3))
