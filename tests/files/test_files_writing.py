"""Sinks write files, flows read and write them, and their URLs, options and formats are accepted or refused."""

import asyncio
import gzip
import json
import os
import zlib
from pathlib import Path
from typing import Any

import pytest
from files.files_support import append, batches_of, data_file, records_of, topic_at, values_of
from topics.topic_case import created

from streamiter.errors import ConfigurationError, JobFailed, TopicError, TopicNotFound
from streamiter.flow.flow import Flow
from streamiter.topics.formats import Json, Text
from streamiter.topics.topic import OutgoingBatch
from streamiter.topics.urls import topic
from streamiter_files import Csv, Dummy, FilesConnector, FilesTopic, Libsvm


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz"])
async def test_flushed_records_are_read_by_the_next_reader(tmp_path: Path, name: str) -> None:
    """Flushed records could not be read while the writer was still open."""
    topic = topic_at(tmp_path / name)
    writer = await topic.open_writer()
    records: list[Any] = [{"x": number, "text": "ü\n\r\u2028"} for number in range(3000)]
    for half in (records[:1000], records[1000:]):
        await writer.write(Json().encode(half))
        await writer.flush()
        decoded = [record for batch in await batches_of(topic) for record in Json().decode(batch)]
        assert decoded == records[: records.index(half[-1]) + 1]
    await writer.close()
    await writer.close()
    with pytest.raises(TopicError, match="expected an open writer"):
        await writer.write(OutgoingBatch([b"1"]))


async def test_a_gzip_sink_is_a_file_that_gzip_reads(tmp_path: Path) -> None:
    """Other tools read only the first append of a gzip file, because each append is a gzip member."""
    topic = topic_at(tmp_path / "a.txt.gz")
    for value in (b"a", b"b"):
        await append(topic, [value] * 2)
    assert gzip.decompress((tmp_path / "a.txt.gz").read_bytes()) == b"a\na\nb\nb\n"


async def test_records_with_keys_times_and_empty_headers_are_lines(tmp_path: Path) -> None:
    """A sink with a key was refused, although files may leave keys out."""
    topic = topic_at(tmp_path / "a.jsonl")
    await append(topic, [b"2"], headers=[()], keys=[b"k"], timestamps_ms=[5])
    assert await values_of(topic) == [b"2"]


async def test_subtasks_that_write_one_file_keep_their_lines_whole(tmp_path: Path) -> None:
    """A sink of parallelism 4 opened four writers on one file, and they tore each other's lines."""
    topic = topic_at(tmp_path / "a.txt")

    async def write(subtask: int) -> None:
        writer = await topic.open_writer()
        for number in range(40):
            await writer.write(OutgoingBatch([b"%d-%d-" % (subtask, number) + b"x" * 20_000] * 3))
            if number % 7 == 0:
                await writer.flush()
        await writer.close()

    await asyncio.gather(*(write(subtask) for subtask in range(4)))
    values = await values_of(topic)
    assert {len(value) for value in values} <= {20_000 + extra for extra in (4, 5)}
    for subtask in range(4):
        numbers = [int(value.split(b"-")[1]) for value in values if value.startswith(b"%d-" % subtask)]
        assert numbers == [number for number in range(40) for _ in range(3)]


async def test_a_writer_may_be_opened_while_another_writes(tmp_path: Path) -> None:
    """A new writer took another writer's unfinished append for a torn line, and cut it off."""
    topic = topic_at(tmp_path / "a.txt")
    line = b"x" * 2_000_000

    async def write() -> None:
        for _ in range(12):
            await append(topic, [line, line])

    await asyncio.gather(*(write() for _ in range(3)))
    assert await values_of(topic) == [line] * 72
    assert os.listdir(tmp_path) == ["a.txt"]


async def test_a_key_always_goes_to_the_same_file(tmp_path: Path) -> None:
    """The records of a key were in several partitions, and lost their order."""
    topic = await created(topic_at(tmp_path / "part-*.txt"), partitions=3)
    keys = [b"k%d" % number for number in range(20)]
    for _ in range(2):
        await append(topic, keys, keys=keys)
    assert {batch.partition: batch.values for batch in await batches_of(topic)} == {
        partition: [key for key in keys if zlib.crc32(key) % 3 == partition] * 2 for partition in range(3)
    }


async def test_records_without_key_are_spread_and_explicit_partitions_kept(tmp_path: Path) -> None:
    """All batches were written to the first file, and the readers of the other files were idle."""
    topic = await created(topic_at(tmp_path / "part-*.txt"), partitions=2)
    writer = await topic.open_writer()
    for value in (b"a", b"b", b"c"):
        await writer.write(OutgoingBatch([value]))
    await writer.write(OutgoingBatch([b"d"], partition=1))
    with pytest.raises(TopicError, match="expected a partition of 0 to 1, given 2"):
        await writer.write(OutgoingBatch([b"e"], partition=2))
    await writer.close()
    assert {batch.partition: batch.values for batch in await batches_of(topic)} == {0: [b"a", b"c"], 1: [b"b", b"d"]}


async def test_partitions_are_created_once_and_added_behind(tmp_path: Path) -> None:
    """The second creation of a topic emptied it, or moved its partitions."""
    topic = await created(topic_at(tmp_path / "new" / "part-*.jsonl.gz"), partitions=2)
    await append(topic, [b"1"], partition=1)
    for partitions in (2, 1, 12):
        await topic.create(partitions=partitions)
    assert (await topic.describe()).offsets == {number: (0, int(number == 1)) for number in range(12)}
    await topic.delete()
    with pytest.raises(TopicNotFound):
        await topic.describe()


async def test_a_folder_gets_numbered_files_and_is_deleted_with_them(tmp_path: Path) -> None:
    """A sink could not write to a new folder, because a folder has no names of files."""
    topic = await created(topic_at(f"{tmp_path}/out/", format="csv", header=False), partitions=2)
    assert sorted(os.listdir(tmp_path / "out")) == ["part-0.csv", "part-1.csv"]
    await topic_at(f"{tmp_path}/out").create(partitions=3)
    await topic.delete()
    assert not (tmp_path / "out").exists()
    with pytest.raises(ConfigurationError, match="expected the option format="):
        await topic_at(f"{tmp_path}/out/").create()


async def test_a_sink_creates_its_file_but_no_folder(tmp_path: Path) -> None:
    """A misspelt folder was created and filled."""
    await append(topic_at(tmp_path / "a.jsonl"), [b"1"])
    await append(topic_at(tmp_path / "b-*.jsonl"), [b"1"])
    await append(topic_at(f"{tmp_path}/", format="jsonl"), [b"2"], partition=0)
    assert sorted(os.listdir(tmp_path)) == ["a.jsonl", "b-0.jsonl"]
    with pytest.raises(TopicNotFound, match=r"there is no folder '.*/typo'"):
        await topic_at(tmp_path / "typo" / "a.jsonl").open_writer()


async def test_a_file_that_is_deleted_under_the_writer_is_reported_at_the_flush(tmp_path: Path) -> None:
    """A file was deleted, and the sink wrote to a file without a name: all records were lost without an error."""
    path = tmp_path / "a.jsonl"
    writer = await topic_at(path).open_writer()
    await writer.write(OutgoingBatch([b"1"]))
    await writer.flush()
    path.rename(tmp_path / "a.jsonl.1")
    await writer.write(OutgoingBatch([b"2"]))
    with pytest.raises(TopicNotFound, match="deleted or replaced while it was written"):
        await writer.flush()
    with pytest.raises(TopicNotFound):
        await writer.close()


async def test_a_file_that_is_cut_by_log_rotation_is_appended_to(tmp_path: Path) -> None:
    """A rotation copied and cut the log, and the writer continued at the old length of the file."""
    for name in ("a.txt", "a.txt.gz"):
        topic = topic_at(tmp_path / name)
        writer = await topic.open_writer()
        await writer.write(OutgoingBatch([b"before"] * 100))
        await writer.flush()
        os.truncate(tmp_path / name, 0)
        await writer.write(OutgoingBatch([b"after"]))
        await writer.close()
        assert await values_of(topic) == [b"after"]


async def test_a_cancelled_write_or_flush_writes_its_records_once(tmp_path: Path) -> None:
    """A cancelled flush continued in its thread, and the next flush wrote the same records again."""
    topic = topic_at(tmp_path / "a.txt")
    writer = await topic.open_writer()
    values = [b"%06d" % number + b"x" * 1000 for number in range(6000)]
    for begin in range(0, len(values), 500):
        await writer.write(OutgoingBatch(values[begin : begin + 500]))
        flushing = asyncio.ensure_future(writer.flush())
        await asyncio.sleep(0)
        flushing.cancel()
    await writer.close()
    assert await values_of(topic) == values


def test_a_flow_over_a_file_ends_by_itself_and_writes_all_of_it(tmp_path: Path) -> None:
    """A flow over a file never ended without a stop position."""
    path = data_file("a9a/a9a_123d_test.dummy")
    flow = Flow("count")
    examples = flow.source(topic(f"file://{path}"))
    counts = examples.map(lambda example: {"label": example["label"], "ones": len(example["indices"])})
    counts.sink(topic(f"file:{tmp_path}/counts.jsonl.gz"), parallelism=2)
    flow.run()
    lines = gzip.decompress((tmp_path / "counts.jsonl.gz").read_bytes()).splitlines()
    expected = [(float(line.split()[0]), len(line.split()) - 1) for line in path.read_text().splitlines()]
    assert sorted((record["label"], record["ones"]) for record in map(json.loads, lines)) == sorted(expected)


def test_a_bad_line_is_reported_with_file_and_offset_or_skipped(tmp_path: Path) -> None:
    """One of a million lines was broken, and the error did not name it, or no policy could skip it."""
    (tmp_path / "a.csv").write_text("a,b\n1,2\n\n3,x\n5,6\n")
    url = f"file:{tmp_path}/a.csv"
    decode = Csv({"b": int})
    failing = Flow("failing")
    failing.source(topic(url), decode=decode).collect()
    with pytest.raises(JobFailed) as caught:
        failing.run()
    printed = f"{caught.value} {caught.value.__cause__}"
    assert url in printed
    assert "offset 1" in printed
    assert "column 'b': expected int64, given 'x'" in printed
    skipping = Flow("skipping")
    collected = skipping.source(topic(url), decode=decode, on_error="skip").collect()
    skipping.run()
    assert collected.items == [{"a": "1", "b": 2}, {"a": "5", "b": 6}]


async def test_absolute_and_relative_urls_name_the_same_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The process changed its folder, and a relative URL meant another file."""
    (tmp_path / "a.txt").write_bytes(b"x\n")
    monkeypatch.chdir(tmp_path)
    topics = [
        FilesConnector().topic(url, {})
        for url in (f"file://{tmp_path}/a.txt", f"file:{tmp_path}/a.txt", "file:a.txt", "file:./a.txt")
    ]
    monkeypatch.chdir("/")
    assert [await values_of(topic) for topic in topics] == [[b"x"]] * 4


async def test_both_forms_of_url_are_found_by_their_scheme(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`topic("file:data/clicks.jsonl")` was refused, because the look-up asked for two slashes."""
    (tmp_path / "a.txt").write_bytes(b"x\n")
    monkeypatch.chdir(tmp_path)
    for url in ("file:a.txt", f"file://{tmp_path}/a.txt", f"FILE:{tmp_path}/a.txt"):
        found = topic(url)
        assert isinstance(found, FilesTopic)
        assert await values_of(found) == [b"x"]


async def test_names_with_reserved_characters_are_written_in_percent_codes(tmp_path: Path) -> None:
    """A '?' in a file's name began the options, and the file was never found."""
    (tmp_path / "what? 100%#.txt").write_bytes(b"x\n")
    topic = FilesConnector().topic(f"file://{tmp_path}/what%3F%20100%25%23.txt", {})
    assert await values_of(topic) == [b"x"]


async def test_an_existing_file_is_never_taken_for_a_pattern(tmp_path: Path) -> None:
    """The copy `a[1].txt` was taken for a pattern, and a1.txt was read instead."""
    (tmp_path / "a[1].txt").write_bytes(b"copy\n")
    (tmp_path / "a1.txt").write_bytes(b"other\n")
    assert await values_of(topic_at(tmp_path / "a[1].txt")) == [b"copy"]


@pytest.mark.parametrize(
    ("name", "decoder"),
    [
        ("a.jsonl", Json),
        ("a.ndjson", Json),
        ("a.json.gz", Json),
        ("a.csv", Csv),
        ("a.tsv.gz", Csv),
        ("a.libsvm", Libsvm),
        ("a.dummy.gz", Dummy),
        ("a.txt", Text),
    ],
)
def test_the_suffix_decides_the_default_decoder(tmp_path: Path, name: str, decoder: type) -> None:
    """A LIBSVM file was read as JSON, and failed at its first line."""
    assert type(topic_at(tmp_path / name).default_decoder()) is decoder


async def test_the_option_format_overrides_the_suffix(tmp_path: Path) -> None:
    """A data set with its own suffix, such as .data, could not be read."""
    (tmp_path / "a9a.data").write_bytes(b"1 3:1\n")
    [record] = await records_of(topic_at(tmp_path / "a9a.data", format="libsvm"))
    assert record["indices"].tolist() == [2]


async def test_options_may_be_in_the_url(tmp_path: Path) -> None:
    """A service could not set options, because its configuration file has only the URL."""
    (tmp_path / "a.data").write_bytes(b"1;2\n")
    topic = topic_at(f"{tmp_path}/a.data?format=csv&delimiter=;&header=false&columns=a,b")
    assert await records_of(topic) == [{"a": "1", "b": "2"}]


async def test_topics_of_a_folder_are_its_files_of_known_formats(tmp_path: Path) -> None:
    """Hidden files and notes were in the list of topics from which users choose."""
    for name in ("part-10.csv", "part-9.csv", ".part-9.csv.torn", "_SUCCESS", "readme.md", "b.jsonl.gz"):
        (tmp_path / name).touch()
    connector = FilesConnector()
    expected = ["b.jsonl.gz", "part-9.csv", "part-10.csv"]
    assert await connector.list_topics(f"file://{tmp_path}", {}) == expected
    assert await connector.list_topics(f"file://{tmp_path}/part-9.csv", {}) == expected


def test_a_file_topic_says_that_it_is_bounded(tmp_path: Path) -> None:
    """A flow waited for ever at the end of a file, because it did not know that a file is bounded."""
    topic = topic_at(tmp_path / "a.jsonl")
    assert topic.bounded is True
    assert topic.commit_domain != topic_at(tmp_path / "b.jsonl").commit_domain
