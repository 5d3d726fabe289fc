"""A flow reads from files and writes to files."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest
from files.files_support import data_file

from streamiter.errors import JobFailed
from streamiter.flow.flow import Flow
from streamiter.topics.urls import topic
from streamiter_files import Csv


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
