"""LIBSVM and dummy lines are decoded like by a plain reader, and each kind of bad line has its reason."""

import math
from typing import Any

import numpy as np
import pytest
from files.files_support import batches_of, data_file, records_of, topic_at
from hypothesis import example, given, settings
from hypothesis import strategies as st

from streamiter.errors import DecodeError
from streamiter.topics.topic import TopicBatch
from streamiter.values.records import Columns
from streamiter_files import Dummy, Libsvm
from streamiter_files.sparse_format import IrregularLines, LineTokens


def plainly_libsvm(line: bytes) -> tuple[float, list[int], list[float]]:
    """Return the label, indices and values of a line, computed as simply as possible."""
    label, *entries = line.split()
    pairs = [entry.split(b":") for entry in entries]
    return float(label), [int(index) - 1 for index, _ in pairs], [float(value) for _, value in pairs]


def plainly_dummy(line: bytes) -> tuple[float, list[int], list[float]]:
    label, *indices = line.replace(b",", b" ").split()
    return float(label), [int(index) for index in indices], [1.0] * len(indices)


def plain(record: dict[str, Any]) -> tuple[float, list[int], list[float]]:
    assert record["indices"].dtype == np.int64
    assert record["values"].dtype == np.float64
    return record["label"], record["indices"].tolist(), record["values"].tolist()


@pytest.mark.parametrize(
    ("name", "rows", "plainly"),
    [
        ("a9a/a9a_123d_train.libsvm", 32561, plainly_libsvm),
        ("a9a/a9a_123d_test.dummy", 16281, plainly_dummy),
        ("census/census_148d_train.dummy", 22792, plainly_dummy),
        ("census/census_148d_test.dummy", 9769, plainly_dummy),
    ],
)
async def test_real_data_sets_are_read_exactly(name: str, rows: int, plainly: Any) -> None:
    """A line of the data sets that measure the learners was decoded wrongly."""
    path = data_file(name)
    records = [plain(record) for record in await records_of(topic_at(path))]
    assert len(records) == rows
    assert records == [plainly(line) for line in path.read_bytes().splitlines()]


async def test_regular_lines_are_all_decoded_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Regular lines were decoded one by one, which is twenty times as slow."""

    def refuse(_self: object, line: bytes) -> None:
        raise AssertionError(f"decoded alone: {line!r}")

    monkeypatch.setattr(Libsvm, "_one_line", refuse)
    monkeypatch.setattr(Dummy, "_one_line", refuse)
    for name in ("a9a/a9a_123d_train.libsvm", "a9a/a9a_123d_test.dummy"):
        assert await records_of(topic_at(data_file(name)))
    mixed = [b"1 qid:3 1:0.25\t 2:-3e-7 # note", b"+2.5", b"-1 7:123456789012345678"]
    assert len(Libsvm().decode(TopicBatch(values=mixed))) == 3


async def test_dense_features_are_the_same_as_sparse_ones() -> None:
    """Dense features were off by one column, which only made the model worse."""
    path = data_file("a9a/a9a_123d_test.dummy")
    [batch, *_] = await batches_of(topic_at(path))
    dense = Dummy(width=123, dense=True).decode(batch)
    assert isinstance(dense, Columns)
    expected = np.zeros((len(batch), 123))
    for row, record in zip(expected, Dummy().decode(batch), strict=True):
        row[record["indices"]] = record["values"]
    assert np.array_equal(dense["features"], expected)
    assert dense["label"].tolist() == [record["label"] for record in Dummy().decode(batch)]


_number = st.one_of(
    st.floats(allow_nan=False, allow_infinity=False).map(repr),
    st.integers(-(10**20), 10**20).map(str),
    st.decimals(-1000, 1000, places=3).map(str),
    st.from_regex(r"[+-]?[0-9]{0,17}\.?[0-9]{0,6}", fullmatch=True).filter(bool),
    st.from_regex(r"[0-9.eE+_-]{1,6}|nan|inf|x", fullmatch=True),
)


def finite_or_none(text: str) -> float | None:
    if "_" in text or text.strip("+-").isalpha():
        return None
    try:
        return float(text)
    except ValueError:
        return None


@settings(max_examples=120, deadline=None)
@given(texts=st.lists(_number, min_size=1, max_size=12))
@example(
    texts=["9.548659716638049", "9.921269018413419", "9.512243180921393", "9.649702243319893"]
)  # 16 digits are one digit too many for an exact number
def test_numbers_are_parsed_exactly_as_python_parses_them(texts: list[str]) -> None:
    """A value was one bit off, so two runs differed, or a value was read only in part."""
    lines, numbers = [text.encode() for text in texts], np.arange(len(texts))
    expected = [finite_or_none(text) for text in texts]
    if any(number is None or not math.isfinite(number) for number in expected):
        with pytest.raises(IrregularLines):
            LineTokens(lines, b" ").floats(numbers)
    else:
        parsed = LineTokens(lines, b" ").floats(numbers).tolist()
        assert list(map(repr, parsed)) == [repr(number) for number in expected]
    if all(text.isdecimal() and len(text) <= 18 for text in texts):
        assert LineTokens(lines, b" ").integers(numbers).tolist() == [int(text) for text in texts]
    else:
        with pytest.raises(IrregularLines):
            LineTokens(lines, b" ").integers(numbers)


_token = st.sampled_from(["1", "-1", "+0.5", "3:1", "4:2.5", "9:1e-3", "4", ":", "3:", ":1", "0:1", "x", "2:x", "5 :1"])
_line = st.lists(_token, max_size=5).flatmap(
    lambda tokens: st.sampled_from([" ", "\t ", "  "]).map(lambda space: space.join(tokens))
)


def plainly_or_none(line: str) -> tuple[float, list[int], list[float]] | None:
    try:
        label, indices, values = plainly_libsvm(line.encode())
    except ValueError:
        return None
    good = len(set(indices)) == len(indices) and min(indices, default=0) >= 0 and ":" not in line.split()[0]
    entries = sorted(zip(indices, values, strict=True))
    return (label, [index for index, _ in entries], [value for _, value in entries]) if good else None


@settings(max_examples=200, deadline=None)
@given(lines=st.lists(_line, min_size=1, max_size=4))
def test_good_and_bad_lines_are_distinguished_as_by_a_plain_reader(lines: list[str]) -> None:
    """A bad line changed the numbers of its neighbours, because all lines of a batch are parsed together."""
    expected = [plainly_or_none(line) for line in lines]
    batch = TopicBatch(values=[line.encode() for line in lines])
    bad = {index for index, row in enumerate(expected) if row is None}
    if bad:
        with pytest.raises(DecodeError) as caught:
            Libsvm().decode(batch)
        assert set(caught.value.failures) == bad
    else:
        assert [plain(record) for record in Libsvm().decode(batch)] == expected


def test_unsorted_indices_come_out_sorted_and_extras_are_left_out() -> None:
    """The qid of ranking data, or indices in another order, made a line bad."""
    batch = TopicBatch(values=[b"2 qid:7 3:1 1:0.5 # doc 12", b"1 qid:8 2:1"])
    assert [plain(record) for record in Libsvm().decode(batch)] == [(2.0, [0, 2], [0.5, 1.0]), (1.0, [1], [1.0])]
    assert [plain(record) for record in Dummy().decode(TopicBatch(values=[b"1 5, 2"]))] == [(1.0, [2, 5], [1.0] * 2)]


def test_lines_without_features_and_no_lines_at_all() -> None:
    """A record whose features are all 0 was lost."""
    values = [b"1", b"-1 2:1", b"0", b"0"]
    assert [plain(record)[1] for record in Libsvm().decode(TopicBatch(values=values))] == [[], [1], [], []]
    dense = Libsvm(2, dense=True).decode(TopicBatch(values=values))
    assert isinstance(dense, Columns)
    assert dense["features"].tolist() == [[0, 0], [0, 1], [0, 0], [0, 0]]
    assert Libsvm().decode(TopicBatch(values=[])) == []


def test_zero_based_files_are_read_and_written_as_such() -> None:
    """Indices were off by one, so each weight belonged to its neighbour's feature."""
    zero_based = Libsvm(zero_based=True)
    [record] = zero_based.decode(TopicBatch(values=[b"1 0:0.1 7:-2"]))
    assert record["indices"].tolist() == [0, 7]
    assert zero_based.encode([record]).values == [b"1 0:0.1 7:-2"]
    assert Libsvm().encode([record]).values == [b"1 1:0.1 8:-2"]
    assert Dummy().encode([{**record, "values": [1, 1.0]}]).values == [b"1 0 7"]
