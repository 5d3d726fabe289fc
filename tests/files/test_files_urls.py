"""URLs, options and formats of files are accepted, or refused with a clear error."""

from __future__ import annotations

from pathlib import Path

import pytest
from files.files_support import records_of, topic_at, values_of

from streamiter.topics.formats import Json, Text
from streamiter.topics.urls import topic
from streamiter_files import Csv, Dummy, FilesConnector, FilesTopic, Libsvm


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
