"""File topics survive torn ends, kill -9, full disks, bad gzip data and missing rights."""

import gzip
import logging
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from files.files_support import append, rest_of, topic_at, values_of
from support.processes import process
from support.waiting import PATIENCE_S

from streamiter.errors import TopicDenied, TopicError
from streamiter.topics.topic import OutgoingBatch, ReadRequest

# A program that appends numbered lines for ever, and prints the last number after each flush.
ENDLESS_WRITER = """
import asyncio, itertools, sys
from streamiter_files import FilesConnector
from streamiter.topics.topic import OutgoingBatch

async def main(path, first, lines, line_bytes):
    writer = await FilesConnector().topic("file:" + path, {}).open_writer()
    for begin in itertools.count(first, lines):
        numbers = range(begin, begin + lines)
        await writer.write(OutgoingBatch([b'{"n":%d,"x":"%s"}' % (n, b"x" * line_bytes) for n in numbers]))
        await writer.flush()
        print(begin + lines, flush=True)

asyncio.run(main(sys.argv[1], *map(int, sys.argv[2:])))
"""


def killed_after_flushes(path: Path, first: int, flushes: int, lines: int, line_bytes: int) -> int:
    """Kill the endless writer during a write after some flushes; return the first number that it did not confirm."""
    command = [sys.executable, "-c", ENDLESS_WRITER, str(path), str(first), str(lines), str(line_bytes)]
    with process(command, is_forked=True, stdout=subprocess.PIPE) as writer:
        assert writer.stdout is not None
        confirmed = [int(writer.stdout.readline()) for _ in range(flushes)]
        size_bytes = path.stat().st_size
        while path.stat().st_size == size_bytes:  # a growing file shows that the next write has begun
            assert writer.poll() is None
        writer.kill()
        confirmed += [int(line) for line in writer.stdout]
    return confirmed[-1]


@pytest.mark.parametrize(("name", "lines", "line_bytes"), [("a.jsonl", 4000, 4000), ("a.jsonl.gz", 3000, 30)])
async def test_a_killed_writer_loses_nothing_that_was_flushed(
    tmp_path: Path, name: str, lines: int, line_bytes: int
) -> None:
    """A kill -9 during a write left half a line, and confirmed records were lost or out of order."""
    topic = topic_at(tmp_path / name)
    first = 0
    for flushes in (1, 2, 1):
        confirmed = killed_after_flushes(tmp_path / name, first, flushes, lines, line_bytes)
        await (await topic.open_writer()).close()
        values = await values_of(topic)
        assert values == [b'{"n":%d,"x":"%s"}' % (n, b"x" * line_bytes) for n in range(len(values))]
        assert len(values) >= confirmed > first
        first = len(values)


@pytest.mark.parametrize(
    ("name", "content", "after"),
    [
        ("a.jsonl", b'{"a":1}\n{"a":', b'{"a":1}\n'),
        ("a.jsonl", b'{"a":1}\n12', b'{"a":1}\n'),
        ("a.jsonl", b'{"a":1}\n{"a":2}', b'{"a":1}\n{"a":2}\n'),
        ("a.jsonl", b'{"a":', b""),
        ("a.csv", b"a,b\n1,2\n3,4", b"a,b\n1,2\n"),
        ("a.libsvm", b"1 1:0.25\n1 1:0.2", b"1 1:0.25\n"),
        ("a.txt", b"a\n" + b"b" * 200_000, b"a\n"),
        ("a.txt", b"a\n\0\0\0\0", b"a\n"),
        ("a.txt", b"a\n", b"a\n"),
    ],
)
async def test_a_torn_last_line_is_cut_off_and_kept_next_to_the_file(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, name: str, content: bytes, after: bytes
) -> None:
    """The next record was appended to a torn line, and both were lost as one bad record."""
    path = tmp_path / name
    path.write_bytes(content)
    with caplog.at_level(logging.WARNING):
        await append(topic_at(path), [b"[7]"])
    assert path.read_bytes() == after + b"[7]\n"
    torn = content.removeprefix(after) if not after.startswith(content) else b""
    assert [name for name in os.listdir(tmp_path) if name[0] == "."] == ([f".{name}.torn"] if torn else [])
    if torn:
        assert (tmp_path / f".{name}.torn").read_bytes() == torn + b"\n"
        assert f"its last line ({len(torn)} bytes" in caplog.text
        assert f".{name}.torn" in caplog.text
    else:
        assert not caplog.records


async def test_a_torn_line_of_another_writer_is_removed_before_the_next_append(tmp_path: Path) -> None:
    """One of two processes died, and the other one appended its next record to the torn line."""
    path = tmp_path / "a.txt"
    writer = await topic_at(path).open_writer()
    with path.open("ab") as other:
        other.write(b"whole\ntor")
    await append(topic_at(path), [b"a"])
    with path.open("ab") as other:
        other.write(b"tor")
    await writer.write(OutgoingBatch([b"b"]))
    await writer.close()
    assert path.read_bytes() == b"whole\na\nb\n"
    assert (tmp_path / ".a.txt.torn").read_bytes() == b"tor\ntor\n"


async def test_a_cut_gzip_file_is_repaired_to_its_complete_members(tmp_path: Path) -> None:
    """A gzip member that was cut in its header, data or checksum made the file unreadable."""
    path = tmp_path / "a.txt.gz"
    for value in (b"a", b"b", b"c"):
        await append(topic_at(path), [value])
    content = path.read_bytes()
    member_bytes = len(content) // 3
    for size_bytes in range(len(content) + 1):
        path.write_bytes(content[:size_bytes])
        await append(topic_at(path), [b"z"])
        whole = [b"a", b"b", b"c"][: size_bytes // member_bytes]
        assert await values_of(topic_at(path)) == [*whole, b"z"]


async def test_a_gzip_file_whose_last_line_has_no_end_is_completed(tmp_path: Path) -> None:
    """The next line was appended to a complete last line that had no line end."""
    path = tmp_path / "a.txt.gz"
    path.write_bytes(gzip.compress(b"a\nb"))
    await append(topic_at(path), [b"c"])
    assert await values_of(topic_at(path)) == [b"a", b"b", b"c"]


async def test_a_damaged_gzip_file_is_not_appended_to(tmp_path: Path) -> None:
    """Confirmed data behind a damaged member was cut off together with it."""
    path = tmp_path / "a.txt.gz"
    content = bytearray(gzip.compress(b"a" * 100) + gzip.compress(b"b\n"))
    content[14] ^= 0xFF
    path.write_bytes(content)
    with pytest.raises(TopicError, match="expected gzip data"):
        await topic_at(path).open_writer()
    assert path.read_bytes() == content


async def test_a_file_without_lines_is_not_cut(tmp_path: Path) -> None:
    """A sink with the path of a disk image moved the image away as one torn line."""
    path = tmp_path / "a.txt"
    path.touch()
    os.truncate(path, 65 << 20)
    with pytest.raises(TopicError, match=r"expected lines to append to.*the file was not changed"):
        await topic_at(path).open_writer()
    assert path.stat().st_size == 65 << 20


@pytest.mark.parametrize(
    ("content", "records", "expected"),
    [
        (
            gzip.compress(b"a\nb\n", mtime=0) + gzip.compress(b"c\n" * 50, mtime=0)[:-4],
            52,
            "the end of the file within compressed data",
        ),
        (
            gzip.compress(b"a\nb\n", mtime=0) + gzip.compress(b"c\n" * 50, mtime=0)[:5],
            2,
            "the end of the file within compressed data",
        ),
        (gzip.compress(b"a\nb\n", mtime=0) + b"garbage", 2, "incorrect header check"),
        (gzip.compress(b"a\n", mtime=0)[:-6] + b"\1\2\3\4\5\6", 0, "incorrect data check"),
        (b"a\nb\n", 0, "incorrect header check"),
    ],
)
async def test_bad_gzip_data_is_reported_with_file_and_position(
    tmp_path: Path, content: bytes, records: int, expected: str
) -> None:
    """A download that broke off looked like a complete file."""
    path = tmp_path / "a.txt.gz"
    path.write_bytes(content)
    reader = await topic_at(path).open_reader(ReadRequest(max_records=1))
    for _ in range(records):
        assert await reader.read() is not None
    for _ in range(2):
        with pytest.raises(TopicError, match=r"a.txt.gz'.*member that begins at byte \d+") as caught:
            await reader.read()
        assert expected in str(caught.value) or _ == 1
    await reader.close()


async def test_padding_between_and_behind_gzip_members_is_left_out(tmp_path: Path) -> None:
    """A file with zeros between its gzip members was refused, although tapes write them and gzip skips them."""
    path = tmp_path / "a.txt.gz"
    path.write_bytes(gzip.compress(b"a\n") + bytes(700) + gzip.compress(b"b\n") + bytes(99))
    for chunk_bytes in (1, 100, 10_000):
        assert await values_of(topic_at(path, chunk_bytes=chunk_bytes)) == [b"a", b"b"]


async def test_a_file_that_is_cut_while_it_is_read_is_an_error(tmp_path: Path) -> None:
    """A file was cut during the reading, and its new end was taken for the end of the data."""
    path = tmp_path / "a.txt"
    path.write_bytes(b"a\n" * 100)
    reader = await topic_at(path, chunk_bytes=10).open_reader(ReadRequest())
    assert await reader.read() is not None
    os.truncate(path, 50)
    with pytest.raises(TopicError, match="expected 200 bytes as when it was opened, found 50: it was cut"):
        await rest_of(reader)
    await reader.close()


@pytest.fixture
def folder_without_rights() -> Iterator[Path]:
    """Return a folder that others may enter, and run the test as a user without rights to its files."""
    if os.geteuid() != 0:
        pytest.skip("only root can become a user without rights")
    folder = Path(tempfile.mkdtemp())
    folder.chmod(0o755)
    (folder / "a.txt").write_bytes(b"a\n")
    (folder / "a.txt").chmod(0o600)
    os.seteuid(65534)
    try:
        yield folder
    finally:
        os.seteuid(0)
        shutil.rmtree(folder)


async def test_files_without_the_right_to_them_are_denied(folder_without_rights: Path) -> None:
    """The error did not name the missing right, nor the user who needs it."""
    with pytest.raises(TopicDenied, match=r"a.txt': Permission denied; the process runs as user 65534"):
        await values_of(topic_at(folder_without_rights / "a.txt"))
    with pytest.raises(TopicDenied):
        await topic_at(folder_without_rights / "a.txt").open_writer()
    with pytest.raises(TopicDenied):
        await topic_at(folder_without_rights / "new.txt").open_writer()
    with pytest.raises(TopicDenied):
        await topic_at(folder_without_rights / "new.txt").create()


async def test_a_file_that_is_not_regular_is_refused(tmp_path: Path) -> None:
    """The opening of a pipe waited for ever, and a pipe has no offsets for a restart."""
    os.mkfifo(tmp_path / "a.txt")
    with pytest.raises(TopicError, match="expected a regular file"):
        await values_of(topic_at(tmp_path / "a.txt"))
    with pytest.raises(TopicError, match="expected a regular file"):
        await topic_at(tmp_path / "a.txt").open_writer()


# A program whose disk is full at 100,000 bytes, and later has room: RLIMIT_FSIZE is a full disk for one process.
FULL_DISK = """
import asyncio, resource, sys
from streamiter_files import FilesConnector
from streamiter.errors import StorageFull
from streamiter.topics.topic import OutgoingBatch

async def main(path):
    writer = await FilesConnector().topic("file:" + path, {}).open_writer()
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, resource.RLIM_INFINITY))
    await writer.write(OutgoingBatch([b"first %d" % n for n in range(10)]))
    await writer.flush()
    await writer.write(OutgoingBatch([b"second %d " % n + b"x" * 1000 for n in range(200)]))
    for _ in range(2):
        try:
            await writer.flush()
        except StorageFull as error:
            print(error)
        print(open(path, "rb").read().count(b"\\n"))
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    await writer.close()

asyncio.run(main(sys.argv[1]))
"""


def output_of(program: str, path: Path) -> str:
    command = [sys.executable, "-c", program, str(path)]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=PATIENCE_S).stdout


async def test_a_full_disk_is_reported_and_writing_continues_when_there_is_room(tmp_path: Path) -> None:
    """A full disk kept half a batch, and the records were lost or doubled once the disk had room again."""
    path = tmp_path / "a.txt"
    lines = output_of(FULL_DISK, path).splitlines()
    assert [line for line in lines if line.isdigit()] == ["10", "10"]
    assert all("Make room, then run again" in line for line in lines if not line.isdigit())
    values = await values_of(topic_at(path))
    assert values[:10] == [b"first %d" % number for number in range(10)]
    assert [value.split()[1] for value in values[10:]] == [b"%d" % number for number in range(200)]
