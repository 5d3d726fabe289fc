"""Segment files: entries in order, space given back, errors without traces."""

import pathlib
import resource

import pytest
from support.examples import random_examples

from streamiter.checkpoints.spill import SpillFile
from streamiter.errors import StorageFull


@pytest.fixture
def make_file(tmp_path):
    files = []

    def make(segment_bytes=100):
        files.append(SpillFile(tmp_path, segment_bytes=segment_bytes, name="train"))
        return files[-1]

    yield make
    for file in files:
        file.close()


def take(file):
    entry = file.first()
    file.drop_first(entry)
    return entry


def entries_and_segment_bytes(random):
    entries = [
        (random.randbytes(random.randrange(10)), random.randbytes(random.choice((0, 1, 30, 60))))
        for _ in range(random.randrange(11))
    ]
    return entries, random.randint(1, 200)


@random_examples(entries_and_segment_bytes)
def test_any_entries_come_back_in_order_across_segments(example, tmp_path):
    """Empty ones, and ones longer than a segment, too."""
    entries, segment_bytes = example
    file = SpillFile(tmp_path, segment_bytes=segment_bytes, name="train")
    for entry in entries:
        file.append(entry)
    held = file.hold()
    assert [take(file) for _ in entries] == entries
    assert list(held) == entries
    assert (len(file), file.size_bytes) == (0, 0)
    file.close()


def test_reading_and_writing_may_alternate(make_file):
    """One file has one position; a read must not move where the next entry is written."""
    file = make_file()
    file.append((b"a", b"a" * 30))
    for number in range(50):
        file.append((b"b", bytes([number]) * 30))
        assert len(take(file)[1]) == 30
        assert list(file.hold()) == [(b"b", bytes([number]) * 30)]


def test_an_empty_file_has_no_first_entry(make_file):
    """Also after the last segment was kept for reuse."""
    file = make_file()
    with pytest.raises(IndexError):
        file.first()
    file.append((b"", b"a"))
    take(file)
    with pytest.raises(IndexError, match="train: nothing"):
        file.first()


def test_what_does_not_fit_leaves_the_file_as_it_was(make_file):
    """The system writes as much as fits before it fails: half an entry in the middle of a segment."""
    file = make_file(segment_bytes=10**6)
    file.append((b"head", b"a" * 1000))
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1500, before[1]))
    try:
        with pytest.raises(
            StorageFull, match=r"^train: expected room for 1016 bytes in .*, given File too large"
        ):
            file.append((b"head", b"b" * 1000))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert file.size_bytes == 1016
    file.append((b"head", b"c" * 1000))
    assert [take(file), take(file)] == [(b"head", b"a" * 1000), (b"head", b"c" * 1000)]


def test_files_have_no_name(make_file, tmp_path):
    """A process that is killed must leave nothing behind."""
    file = make_file()
    file.append((b"head", b"a" * 1000))
    assert [path for path in pathlib.Path(tmp_path).iterdir() if path.is_file()] == []
