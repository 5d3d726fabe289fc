"""Files are read in any pieces, and tasks that wait for blocking calls may be cancelled."""

import asyncio
import gzip
import os
import tempfile
import threading
from datetime import UTC, datetime, timedelta
from itertools import pairwise
from pathlib import Path
from random import Random

import pytest
from files.files_support import append, batches_of, rest_of, topic_at, values_of
from hypothesis import given
from hypothesis import strategies as st
from support.examples import random_examples

from streamiter.errors import ConfigurationError, OffsetOutOfRange, RecordTooLarge, TopicError
from streamiter.topics.joined_values import JoinedValues
from streamiter.topics.topic import ReadRequest
from streamiter_files import chunks
from streamiter_files.chunks import OneAtATime


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b"", []),
        (b"\n\n", []),
        (b"a\nb\n", [b"a", b"b"]),
        (b"a\r\nb\r\n", [b"a", b"b"]),
        (b"a\nb", [b"a", b"b"]),
        (b"a\r\nb\r", [b"a", b"b"]),
        (b"a\n\n \t\r\nb\n", [b"a", b"b"]),
        (b"\xef\xbb\xbfa\nb\n", [b"a", b"b"]),
        (b"\xef\xbb\xbf", []),
        (b"\xef", [b"\xef"]),
        (b"a", [b"a"]),
        (b" a \n", [b" a "]),
        (b"a\rb\n", [b"a\rb"]),
    ],
)
@pytest.mark.parametrize("chunk_bytes", [1, 2, 3, 1000])
@pytest.mark.parametrize("suffix", ["txt", "txt.gz"])
async def test_lines_with_any_ends_are_records(
    tmp_path: Path, content: bytes, expected: list[bytes], chunk_bytes: int, suffix: str
) -> None:
    """A file from Windows, with a byte order mark or without a last line end, was read with wrong records."""
    path = tmp_path / f"a.{suffix}"
    path.write_bytes(gzip.compress(content) if suffix.endswith("gz") else content)
    assert await values_of(topic_at(path, chunk_bytes=chunk_bytes)) == expected


_lines = st.lists(
    st.tuples(
        st.binary(max_size=8).map(lambda line: line.replace(b"\n", b"").rstrip(b"\r")),
        st.sampled_from([b"\n", b"\r\n"]),
    ),
    max_size=30,
)


@given(lines=_lines, chunk_bytes=st.integers(1, 20), max_records=st.integers(1, 7), packed=st.booleans())
def test_any_file_reads_the_same_in_any_chunks(
    lines: list[tuple[bytes, bytes]], chunk_bytes: int, max_records: int, packed: bool
) -> None:
    """A line that a chunk had cut was lost, or became two records."""
    content = b"".join(line + end for line, end in lines)
    expected = [line for line, _ in lines if line.strip()]
    if content.startswith(b"\xef\xbb\xbf"):
        return

    async def read() -> None:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / ("a.txt.gz" if packed else "a.txt")
            path.write_bytes(gzip.compress(content) if packed else content)
            request = ReadRequest(max_records=max_records)
            batches = await batches_of(topic_at(path, chunk_bytes=chunk_bytes), request)
        assert [value for batch in batches for value in batch.values] == expected
        assert [offset for batch in batches for offset in batch.offsets] == list(range(len(expected)))
        assert all(1 <= len(batch) <= max_records for batch in batches)

    asyncio.run(read())


def _some_chunks(random: Random) -> list[bytes]:
    plain, others = [b"{}", b"ab", b"7 "], [b"", b" a", b"\t", b"b\r", b"\r", b'"q']
    kinds = plain if random.random() < 0.6 else plain + others
    content = b"\n".join(random.choice(kinds) for _ in range(random.randint(0, 12)))
    cuts = sorted(random.randint(0, len(content)) for _ in range(random.randint(0, 3)))
    return [content[start:stop] for start, stop in pairwise([0, *cuts, len(content)])]


@random_examples(_some_chunks)
def test_lines_of_one_buffer_are_the_lines_of_a_list(parts: list[bytes]) -> None:
    """Blank lines became records where lines were not made objects one by one."""
    found = []
    for joined in (False, True):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(chunks, "is_loaded", lambda joined=joined: joined)
            patch.setattr(chunks, "_JOINED_FROM", 1)
            splitter = chunks.JsonSplitter(Path("a.jsonl"))
            blocks = [*map(splitter.feed, filter(None, parts)), splitter.end()]
        found.append([line for block in blocks for line in block])
    assert found[0] == found[1]


@pytest.mark.parametrize("max_records", [3, 5_000])
async def test_a_large_file_is_read_without_an_object_for_each_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, max_records: int
) -> None:
    """Reading a file into columns took a third longer, for objects that were joined again."""
    monkeypatch.setattr(chunks, "is_loaded", lambda: True)
    lines = [b'{"n": %d}' % number for number in range(5_000)]
    (tmp_path / "a.jsonl").write_bytes(b"\n".join(lines))
    request = ReadRequest(positions={0: 17}, max_records=max_records)
    batches = await batches_of(topic_at(tmp_path / "a.jsonl"), request)
    assert isinstance(batches[0].values, JoinedValues)
    assert [value for batch in batches for value in batch.values] == lines[17:]
    assert [offset for batch in batches for offset in batch.offsets] == list(range(17, 5_000))


async def test_comments_are_no_records_where_the_format_has_them(tmp_path: Path) -> None:
    """The note at the beginning of a LIBSVM file was a bad record, or a text file lost its lines with '#'."""
    for name in ("a.libsvm", "a.txt"):
        (tmp_path / name).write_bytes(b"# note\n1 1:1\n")
    assert await values_of(topic_at(tmp_path / "a.libsvm")) == [b"1 1:1"]
    assert await values_of(topic_at(tmp_path / "a.txt")) == [b"# note", b"1 1:1"]


@pytest.mark.parametrize("name", ["a.txt", "a.txt.gz", "a.csv"])
async def test_reading_continues_exactly_at_a_position(tmp_path: Path, name: str) -> None:
    """A restored job was one line off, and lost a record or counted it twice."""
    content = b"head\r\n\n" + b"".join(b"%d\n%s" % (number, b"\n" * (number % 3)) for number in range(40))
    path = tmp_path / name
    path.write_bytes(gzip.compress(content) if name.endswith("gz") else content)
    topic = topic_at(path, chunk_bytes=16)
    everything = await values_of(topic)
    assert len(everything) == (40 if name == "a.csv" else 41)
    for position in range(len(everything) + 1):
        batches = await batches_of(topic, ReadRequest(positions={0: position}))
        assert [value for batch in batches for value in batch.values] == everything[position:]
        assert not batches or batches[0].offsets[0] == position


async def test_a_position_behind_the_end_is_an_error_each_time(tmp_path: Path) -> None:
    """A file that was cut after the checkpoint looked like a file that had been read to its end."""
    (tmp_path / "a.txt").write_bytes(b"a\nb\n")
    reader = await topic_at(tmp_path / "a.txt").open_reader(ReadRequest(positions={0: 3}))
    for _ in range(2):
        with pytest.raises(OffsetOutOfRange, match=r"a.txt', partition 0: expected at least 3 records.*found 2"):
            await reader.read()
    await reader.close()


async def test_positions_of_deleted_files_are_an_error(tmp_path: Path) -> None:
    """One of three files was deleted, and the other two were read at each other's positions."""
    (tmp_path / "a.txt").write_bytes(b"a\n")
    with pytest.raises(OffsetOutOfRange, match="position for partition 1"):
        await batches_of(topic_at(tmp_path / "*.txt"), ReadRequest(positions={0: 0, 1: 0}))
    with pytest.raises(OffsetOutOfRange, match="given -1"):
        await batches_of(topic_at(tmp_path / "*.txt"), ReadRequest(positions={0: -1}))


@pytest.mark.parametrize("name", ["a.txt", "a.txt.gz"])
async def test_positions_stay_good_while_a_file_is_appended_to_touched_or_copied(tmp_path: Path, name: str) -> None:
    """A file counted as replaced after it was copied from a backup, or after a writer had cut off its torn end."""
    topic = topic_at(tmp_path / name)
    (tmp_path / name).touch()
    assert (await topic.describe()).identities == {}
    for turn in range(4):
        await append(topic, [b"%d of %d" % (line, turn) for line in range(5)])
        identities = (await topic.describe()).identities
        with (tmp_path / name).open("ab") as torn:
            torn.write(b"\x1f\x8b\x08" if name.endswith("gz") else b"torn")
        await append(topic, [b"x" * 2000])  # cuts the torn end off
        (tmp_path / "copy").write_bytes((tmp_path / name).read_bytes())
        (tmp_path / "copy").rename(tmp_path / name)
        request = ReadRequest(positions={0: 6 * turn + 5}, identities=identities)
        assert await values_of(topic, request) == [b"x" * 2000]


@pytest.mark.parametrize("name", ["1.txt", "1.txt.gz"])
async def test_positions_of_a_replaced_file_are_an_error(tmp_path: Path, name: str) -> None:
    """The log was rotated, or a new file came before it in the order of names, and the first lines were skipped."""
    topic = topic_at(tmp_path / "*")
    await append(topic_at(tmp_path / name), [b"old"] * 5)
    reader = await topic.open_reader(ReadRequest())
    identities = reader.identities()
    await reader.close()
    request = ReadRequest(positions={0: 3}, identities=identities)
    assert await values_of(topic, request) == [b"old"] * 2
    content = (tmp_path / name).read_bytes()
    (tmp_path / name).unlink()
    await append(topic_at(tmp_path / name), [b"new"] * 500)
    with pytest.raises(OffsetOutOfRange, match=rf"{name}', partition 0: offset 3 belongs to a file that began"):
        await batches_of(topic, request)
    (tmp_path / name).write_bytes(content)
    await append(topic_at(tmp_path / name.replace("1", "0")), [b"before it"] * 500)
    with pytest.raises(OffsetOutOfRange, match=r"0\.txt.*', partition 0: offset 3 .* files were added"):
        await batches_of(topic, request)


async def test_a_file_that_is_written_again_while_it_is_read_is_an_error(tmp_path: Path) -> None:
    """A file was overwritten while it was read, and half of the records came from each version."""
    path = tmp_path / "a.txt"
    topic = topic_at(path, chunk_bytes=16)
    for in_place in (False, True):
        path.write_bytes(b"old line\n" * 100)
        reader = await topic.open_reader(ReadRequest())
        first = await reader.read()
        assert first is not None
        if not in_place:
            path.unlink()
        path.write_bytes(b"new line\n" * 1000)
        if in_place:
            with pytest.raises(OffsetOutOfRange, match=r"a.txt', partition 0: .*replaced while its records"):
                await rest_of(reader)
        else:
            lines = [value for batch in [first, *await rest_of(reader)] for value in batch.values]
            assert lines == [b"old line"] * 100
        await reader.close()


async def test_reading_ends_where_the_file_ended_when_it_was_opened(tmp_path: Path) -> None:
    """A flow that appends to the file that it reads never ended."""
    topic = topic_at(tmp_path / "a.txt", chunk_bytes=2)
    await append(topic, [b"a", b"b", b"c"])
    reader = await topic.open_reader(ReadRequest(stop=None, max_records=1))
    first = await reader.read()
    await append(topic, [b"d"])
    rest = await rest_of(reader)
    await reader.close()
    assert first is not None
    assert [*first.values, *(value for batch in rest for value in batch.values)] == [b"a", b"b", b"c"]
    assert await values_of(topic) == [b"a", b"b", b"c", b"d"]


async def test_start_and_stop_positions_are_kept(tmp_path: Path) -> None:
    """A start or stop position gave other records than with the topics of other connectors."""
    (tmp_path / "a.txt").write_bytes(b"a\nb\nc\nd\n")
    topic = topic_at(tmp_path / "a.txt", chunk_bytes=3)
    assert await values_of(topic, ReadRequest(start="latest")) == []
    assert await values_of(topic, ReadRequest(start={0: 1}, stop={0: 3})) == [b"b", b"c"]
    assert await values_of(topic, ReadRequest(start={0: 1}, stop={0: 1})) == []
    assert await values_of(topic, ReadRequest(stop={0: 9})) == [b"a", b"b", b"c", b"d"]
    assert await values_of(topic, ReadRequest(stop="latest")) == [b"a", b"b", b"c", b"d"]


async def test_a_start_time_leaves_out_files_that_were_last_changed_before(tmp_path: Path) -> None:
    """A start time did not exclude the files of earlier days, whose records have the times of the files."""
    day = datetime(2024, 5, 1, tzinfo=UTC)
    for number in range(3):
        path = tmp_path / f"day-{number}.txt"
        path.write_bytes(b"%d\n" % number)
        changed_s = (day + timedelta(days=number)).timestamp()
        os.utime(path, (changed_s, changed_s))
    topic = topic_at(tmp_path)
    batches = await batches_of(topic, ReadRequest(start=day + timedelta(days=1)))
    assert [batch.values for batch in batches] == [[b"1"], [b"2"]]
    assert batches[0].timestamps_ms == [int((day + timedelta(days=1)).timestamp() * 1000)]
    with pytest.raises(ConfigurationError, match="aware datetime"):
        await batches_of(topic, ReadRequest(start=datetime(2024, 5, 1)))


async def test_file_i_is_partition_i_in_the_order_of_names_and_numbers(tmp_path: Path) -> None:
    """Names were sorted as texts, so part-10 came before part-2, and a tenth file moved all positions."""
    names = ["part-0.txt", "part-1.txt", "part-2.txt", "part-10.txt"]
    for name in reversed(names):
        (tmp_path / name).write_bytes(name.encode() + b"\n")
    (tmp_path / ".hidden.txt").write_bytes(b"no\n")
    (tmp_path / "_SUCCESS").write_bytes(b"no\n")
    for where in (tmp_path, tmp_path / "part-*.txt", tmp_path / "**" / "*.txt"):
        batches = await batches_of(topic_at(where))
        assert {batch.partition: batch.values for batch in batches} == {
            number: [name.encode()] for number, name in enumerate(names)
        }


async def test_subtasks_share_the_files(tmp_path: Path) -> None:
    """A file was read by two subtasks, or by none."""
    for number in range(5):
        (tmp_path / f"{number}.txt").write_bytes(b"%d\n" % number)
    shares = [await values_of(topic_at(tmp_path), ReadRequest(subtask=i, subtasks=2)) for i in range(2)]
    assert shares == [[b"0", b"2", b"4"], [b"1", b"3"]]
    assert await values_of(topic_at(tmp_path), ReadRequest(subtask=6, subtasks=7)) == []


@pytest.mark.parametrize(("files_at_once", "expected"), [(1, "000111222"), (2, "010101222"), (8, "012012012")])
async def test_files_take_turns_within_the_limit_of_open_files(
    tmp_path: Path, files_at_once: int, expected: str
) -> None:
    """A large first file held back all others, or a folder of thousands of files was opened at once."""
    for number in range(3):
        (tmp_path / f"{number}.txt").write_bytes(b"%d\n" % number * 3)
    topic = topic_at(tmp_path, files_at_once=files_at_once)
    batches = await batches_of(topic, ReadRequest(max_records=1))
    assert "".join(str(batch.partition) for batch in batches) == expected


async def test_a_cancelled_read_loses_nothing(tmp_path: Path) -> None:
    """A task that waits for several things cancelled a read, and its records were lost."""
    values = [b"%d" % number for number in range(500)]
    (tmp_path / "a.txt").write_bytes(b"\n".join(values))
    reader = await topic_at(tmp_path / "a.txt", chunk_bytes=64).open_reader(ReadRequest(max_records=7))
    seen: list[bytes | None] = []
    while True:
        cancelled = asyncio.ensure_future(reader.read())
        await asyncio.sleep(0)
        cancelled.cancel()
        batch = await reader.read() if cancelled.cancelled() or not cancelled.done() else cancelled.result()
        if batch is None:
            break
        seen.extend(batch.values)
    await reader.close()
    assert seen == values


async def test_a_reader_may_be_closed_within_a_read_and_twice(tmp_path: Path) -> None:
    """A job was aborted, and a thread continued to read a closed file."""
    (tmp_path / "a.txt").write_bytes(b"a\n" * 1000)
    reader = await topic_at(tmp_path / "a.txt", chunk_bytes=10).open_reader(ReadRequest())
    reading = asyncio.ensure_future(reader.read())
    await asyncio.sleep(0)
    reading.cancel()
    await asyncio.wait([reading])
    await reader.close()
    await reader.close()
    with pytest.raises(TopicError, match="given one that is closed"):
        await reader.read()


async def test_the_lag_is_estimated_and_exact_at_the_end(tmp_path: Path) -> None:
    """A dashboard showed a lag that did not fall, or was not zero at the end."""
    (tmp_path / "a.txt").write_bytes(b"12345\n" * 1000)
    reader = await topic_at(tmp_path / "a.txt", chunk_bytes=600).open_reader(ReadRequest(max_records=50))
    lags = [reader.lag()]
    while await reader.read() is not None:
        lags.append(reader.lag())
    await reader.close()
    assert lags[0] == {}
    assert lags[1] == {0: 950}
    assert lags[-1] == {0: 0}
    assert all(later[0] < earlier[0] for earlier, later in pairwise(lags[1:]))


async def test_describe_counts_the_records_of_each_file(tmp_path: Path) -> None:
    """Tools showed a wrong number of records, because CSV headers and blank lines were counted."""
    (tmp_path / "0.csv").write_bytes(b'a\n1\n\n"2\n3"\n')
    (tmp_path / "1.csv.gz").write_bytes(gzip.compress(b"a\n1"))
    described = await topic_at(tmp_path).describe()
    assert described.offsets == {0: (0, 2), 1: (0, 1)}
    assert described.settings == {"format": "csv", "compression": "gzip, none"}


async def test_a_file_without_lines_is_refused_before_it_fills_the_memory(tmp_path: Path) -> None:
    """A disk image was given by mistake, and was collected in memory as one record."""
    path = tmp_path / "a.txt"
    path.touch()
    os.truncate(path, 200 << 20)  # a hole takes no room on the disk
    with pytest.raises(RecordTooLarge, match="Is this a file of lines"):
        await values_of(topic_at(path, chunk_bytes=32 << 20))


async def test_a_call_waits_for_the_one_whose_waiter_was_cancelled() -> None:
    """Two appends ran at once and mixed their lines, because the cancelling of a task does not stop its thread."""
    calls = OneAtATime()
    may_end, order = threading.Event(), []
    began = asyncio.Event()
    loop = asyncio.get_running_loop()

    def slow() -> None:
        loop.call_soon_threadsafe(began.set)
        may_end.wait()
        order.append("slow")

    waiting = asyncio.ensure_future(calls.run(slow))
    await began.wait()
    waiting.cancel()
    await asyncio.wait([waiting])
    second = asyncio.ensure_future(calls.run(lambda: order.append("second")))
    for _ in range(10):
        await asyncio.sleep(0)
    may_end.set()
    await second
    assert waiting.cancelled()
    assert order == ["slow", "second"]


async def test_the_error_of_an_abandoned_call_is_raised_by_the_next_once() -> None:
    """An append failed after its flush was cancelled, and its records counted as stored."""
    calls = OneAtATime()
    may_end = threading.Event()

    def failing() -> None:
        may_end.wait()
        raise OSError("disk")

    waiting = asyncio.ensure_future(calls.run(failing))
    await asyncio.sleep(0)
    waiting.cancel()
    await asyncio.wait([waiting])
    may_end.set()
    with pytest.raises(OSError, match="disk"):
        await calls.run(int)
    assert await calls.run(int) == 0
