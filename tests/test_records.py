"""Batches of records, and the origins that they carry."""

import itertools
import sys
from collections.abc import Callable
from random import Random
from typing import Any

import msgspec
import numpy as np
import pytest
from support.examples import random_examples

from streamiter.topics import TopicBatch
from streamiter.values.origins import BatchOrigin, Originals
from streamiter.values.records import (
    Batch,
    CheckpointBarrier,
    Columns,
    DataBatch,
    EndOfData,
    EndOfInput,
    EpochWatermark,
    Idle,
    OutputTag,
    can_concatenate,
    concatenate,
    estimated_bytes,
    slice_batch,
    take,
)


def batches_of(length: int) -> list[Batch]:
    """Return the same records as each type of batch."""
    values = list(range(length))
    return [
        values,
        np.array(values, np.int64),
        np.array([[value, -value] for value in values], np.int64).reshape(length, 2),
        Columns({"x": np.array(values, np.int64), "y": np.array([f"r{value}" for value in values], "<U4")}),
    ]


def rows(batch: Batch) -> list[Any]:
    """Return the records as plain objects, so that two batches can be compared."""
    if isinstance(batch, Columns):
        return [{name: value.item() for name, value in row.items()} for row in batch]
    return np.asarray(batch).tolist() if isinstance(batch, np.ndarray) else list(batch)


class TestColumns:
    def test_reads_by_name_by_index_and_by_part(self) -> None:
        """A step got another record than it asked for."""
        columns = Columns({"x": [1.0, 2.0, 3.0], "label": [0, 1, 0]})
        assert columns.names == ("x", "label")
        assert columns["x"].tolist() == [1.0, 2.0, 3.0]
        assert columns[1] == columns[np.int64(1)] == {"x": 2.0, "label": 1}
        assert columns[-1] == {"x": 3.0, "label": 0}
        assert columns[1:] == Columns({"x": [2.0, 3.0], "label": [1, 0]})
        assert columns[np.array([2, 0])] == Columns({"x": [3.0, 1.0], "label": [0, 0]})
        assert columns[np.array([True, False, True])] == columns[np.array([0, 2])]
        assert "x" in columns
        assert "y" not in columns

    def test_iterates_rows_as_dicts(self) -> None:
        """A function of single records got another type than a dict."""
        columns = Columns({"x": [1, 2], "v": np.ones((2, 3))})
        assert [sorted(row) for row in columns] == [["v", "x"], ["v", "x"]]
        assert [row["v"].shape for row in columns] == [(3,), (3,)]

    @pytest.mark.parametrize(
        ("arrays", "given_lengths"),
        [
            ({}, "{}"),
            ({"x": [1, 2], "y": [1]}, "{'x': 2, 'y': 1}"),
            ({"x": 3.0}, "{'x': None}"),
            ({"x": [1], "y": np.float64(1)}, "{'x': 1, 'y': None}"),
        ],
    )
    def test_refuses_columns_of_different_lengths_or_none_at_all(
        self, arrays: dict[str, Any], given_lengths: str
    ) -> None:
        """Columns of different lengths were joined to records that never existed."""
        with pytest.raises(ValueError, match="expected one or more arrays of one length") as caught:
            Columns(arrays)
        assert str(caught.value).endswith(f"given {given_lengths}")

    def test_equality_looks_at_names_order_types_and_values(self) -> None:
        """A test of a flow took a batch of floats for an equal batch of integers."""
        columns = Columns({"x": [1, 2], "y": [3, 4]})
        assert columns == Columns({"x": [1, 2], "y": [3, 4]})
        assert columns != Columns({"y": [3, 4], "x": [1, 2]})
        assert columns != Columns({"x": [1.0, 2.0], "y": [3, 4]})
        assert columns != Columns({"x": [1, 2], "y": [3, 5]})
        assert columns != [1, 2]
        with pytest.raises(TypeError, match="unhashable"):
            hash(columns)

    def test_the_dict_of_arrays_is_a_copy_and_the_arrays_are_shared(self) -> None:
        """A consumer removed a column of a batch, and the other consumers lost it."""
        columns = Columns({"x": [1, 2], "y": [3, 4]})
        arrays = columns.arrays
        del arrays["x"]
        assert columns.names == ("x", "y")
        assert arrays["y"] is columns["y"]

    def test_shows_its_bytes_and_its_fields(self) -> None:
        """The size of Columns, which the byte limits of channels use, was wrong."""
        columns = Columns({"x": np.zeros(3), "v": np.zeros((3, 2), np.float32)})
        assert columns.nbytes == 24 + 24
        assert repr(columns) == "Columns(3 records: x float64, v float32[2])"

    def test_may_have_no_records(self) -> None:
        """A filter that kept no record lost the fields of the batch."""
        empty = Columns({"x": [1, 2]})[:0]
        assert (len(empty), list(empty), empty.names) == (0, [], ("x",))


def test_a_slice_holds_the_same_records_of_every_kind_of_batch() -> None:
    """A batch was cut, and a record was changed, lost or repeated."""
    for length in range(8):
        for batch in batches_of(length):
            whole = rows(batch)
            for start, stop in itertools.product(range(9), repeat=2):
                part = slice_batch(batch, start, stop)
                assert type(part) is type(batch)
                assert rows(part) == whole[start:stop]


def length_and_indices(random: Random) -> tuple[int, list[int]]:
    length = random.randint(1, 12)
    return length, [random.randrange(length) for _ in range(random.randrange(12))]


@random_examples(length_and_indices)
def test_taking_gives_the_chosen_records_in_their_order(example: tuple[int, list[int]]) -> None:
    """Partitioning and rejection got other records, or another order, than they asked for."""
    length, indices = example
    for batch in batches_of(length):
        for which in (indices, np.array(indices, np.int64)):
            taken = take(batch, which)
            assert type(taken) is type(batch)
            assert rows(taken) == [rows(batch)[index] for index in indices]


def test_taking_from_any_other_sequence_gives_a_list() -> None:
    """A step emitted a tuple, and the next step failed."""
    assert take((5, 6, 7), [2, 0]) == [7, 5]


def length_and_cuts(random: Random) -> tuple[int, list[int]]:
    length = random.randrange(13)
    return length, sorted(random.randint(0, length) for _ in range(random.randrange(5)))


@random_examples(length_and_cuts)
def test_joining_the_parts_of_a_batch_gives_the_batch_again(example: tuple[int, list[int]]) -> None:
    """The inbox joined small batches, and the joined batch differed from the one before the cuts."""
    length, cuts = example
    for batch in batches_of(length):
        bounds = [0, *cuts, length]
        parts = [slice_batch(batch, *bound) for bound in itertools.pairwise(bounds)]
        assert all(can_concatenate(parts[0], part) for part in parts)
        joined = concatenate(parts)
        assert type(joined) is type(batch)
        assert rows(joined) == rows(batch)


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ([1], np.array([1])),
        (np.array([1]), np.array([1.0])),
        (np.zeros((1, 2)), np.zeros((1, 3))),
        (Columns({"x": [1]}), Columns({"y": [1]})),
        (Columns({"x": [1], "y": [1]}), Columns({"y": [1], "x": [1]})),
        (Columns({"x": [1]}), Columns({"x": [1.5]})),
        (Columns({"x": [1]}), [{"x": 1}]),
        ((1,), (2,)),
        (np.zeros(1, "l"), np.zeros(1, "q")),
        (np.zeros(1, ">f4"), np.zeros(1, "<f4")),
    ],
    ids=str,
)
def test_batches_whose_records_would_change_are_not_joined(first: Batch, second: Batch) -> None:
    """Integers were joined with floats, and 2**53 + 1 became another number without an error."""
    assert not can_concatenate(first, second)
    assert not can_concatenate(second, first)


@pytest.mark.parametrize(
    "dtype",
    [
        "q",
        ">f4",
        ">U3",
        ">M8[ms]",
        [("a", ">i2"), ("b", "<U3")],
        {"names": ["a", "b"], "formats": ["i1", "<i4"], "offsets": [4, 0], "itemsize": 12},
    ],
    ids=str,
)
def test_joining_keeps_the_type_to_the_byte_order_and_the_gaps(dtype: Any) -> None:
    """A decoder of network data got native floats or others, depending on the batches that had met in a queue."""
    first, second = np.zeros(2, dtype), np.ones(3, dtype)
    for joined in (concatenate([first, second]), concatenate([Columns({"x": first}), Columns({"x": second})])["x"]):
        assert isinstance(joined, np.ndarray)
        assert (joined.dtype, joined.dtype.char) == (first.dtype, first.dtype.char)
        assert joined.tolist() == first.tolist() + second.tolist()


@pytest.mark.parametrize("kind", ["U", "S"])
def test_texts_of_any_width_may_be_joined(kind: str) -> None:
    """Text batches of different widths were not joined, because each batch is as wide as its longest text."""
    short, long = np.array(["a"], f"{kind}1"), np.array(["abc"], f"{kind}3")
    assert can_concatenate(short, long)
    assert can_concatenate(long, short)
    assert rows(concatenate([short, long])) == [*rows(short), *rows(long)]
    assert not can_concatenate(short, np.array(["a"], {"U": "S1", "S": "U1"}[kind]))


@pytest.mark.parametrize("order", "<>")
def test_texts_in_rows_are_joined_as_rows(order: str) -> None:
    """Records with two names each, in either byte order, were joined wrongly."""
    first, second = np.array([["a", "b"]], f"{order}U1"), np.array([["abc", "d"], ["", "e"]], f"{order}U3")
    joined = concatenate([first, second])
    assert isinstance(joined, np.ndarray)
    assert joined.tolist() == [["a", "b"], ["abc", "d"], ["", "e"]]


def test_texts_joined_are_as_wide_as_the_longest() -> None:
    """Joined texts were cut to the width of the first batch."""
    joined = concatenate([np.array(["a"], ">U1"), np.array(["abc"], "<U3"), np.array(["ab"], ">U2")])
    assert rows(joined) == ["a", "abc", "ab"]


def test_one_batch_is_joined_to_itself_without_a_copy() -> None:
    """A batch without a batch behind it, which is the usual case, was copied."""
    batch = np.zeros(3)
    assert concatenate([batch]) is batch


def test_joining_does_not_change_the_parts() -> None:
    """A list was joined in place, and other consumers of the list got additional records."""
    first, second = [1], [2]
    assert concatenate([first, second]) == [1, 2]
    assert (first, second) == ([1], [2])


class TestEstimatedBytes:
    def test_is_exact_for_arrays_and_columns(self) -> None:
        """The estimated size of an array was wrong, and with it the byte limit."""
        assert estimated_bytes(np.zeros((4, 8))) == 256
        assert estimated_bytes(Columns({"x": np.zeros(4), "y": np.zeros(4, np.int8)})) == 36

    def test_sees_the_values_of_records_not_only_their_containers(self) -> None:
        """A list of dicts with large texts was counted as 60 bytes a record, so the byte limit had no effect."""
        text = "x" * 10_000
        for record in ({"text": text}, (text,), [text], text, np.zeros(10_000, np.uint8)):
            assert 10_000 * 100 <= estimated_bytes([record] * 100) <= 11_000 * 100

    def test_is_exact_for_a_few_records_each_with_its_container(self) -> None:
        """The estimate was wrong for the small batches of a slow stream."""
        size = sys.getsizeof
        assert estimated_bytes([7, 10**30, "x" * 90]) == size(7) + size(10**30) + size("x" * 90)
        assert estimated_bytes([{"a": 1, "b": "x"}]) == size({"a": 1, "b": "x"}) + size(1) + size("x")
        assert estimated_bytes([(1, 2)]) == size((1, 2)) + 2 * size(1)

    def test_counts_all_parts_of_pairs(self) -> None:
        """Pairs of a key and 50 KB counted as 112 bytes, so only the limit in records bounded their channel."""
        assert 50_000 <= estimated_bytes([(7, bytes(50_000))]) <= 50_200
        assert 50_000 <= estimated_bytes([["key", [bytes(50_000)]]]) <= 50_300

    def test_counts_the_records_and_arrays_of_a_mini_batch(self) -> None:
        """A mini-batch of documents counted as 0.1 MB, so 90,000 of them waited for a learner in channels of 4 MB."""
        documents, features = [{"text": "x" * 10_000}] * 50, {"numbers": np.zeros((50, 8))[:], "readings": {}}
        size = estimated_bytes([{"position": (0, 7), "records": documents, "features": features}])
        assert 503_200 <= size <= 520_000
        columns = Columns({"x": np.zeros(1_000)})
        assert 8_000 <= estimated_bytes([{"position": (0, 7), "records": columns}]) <= 8_600
        nested: dict[str, Any] = {}
        nested["again"] = nested
        assert estimated_bytes([nested]) == 6 * sys.getsizeof(nested)

    def test_counts_lists_in_lists_down_to_a_limit(self) -> None:
        """A thousand nested lists, or a list that contains itself, exceeded the depth of the stack."""
        nested: list[Any] = []
        for _ in range(40):
            nested = [nested]
        assert estimated_bytes([nested]) == 33 * sys.getsizeof(nested)
        endless: list[Any] = []
        endless.append(endless)
        assert estimated_bytes([endless]) == 33 * sys.getsizeof(endless)

    def test_counts_no_bytes_for_empty_batches(self) -> None:
        """Empty batches were counted, and filled a channel."""
        assert estimated_bytes([]) == estimated_bytes(np.zeros((0, 5))) == 0

    def test_looks_at_a_few_records_only(self) -> None:
        """Each put looked at all records of the batch, which cost more than the rest of its way."""
        looked_at = []

        class Watched(list[Any]):
            def __getitem__(self, index: Any) -> Any:
                looked_at.append(index)
                return super().__getitem__(index)

        estimated_bytes(Watched(range(10_000)))
        assert len(looked_at) <= 8

    def test_of_equal_records_is_their_size_times_their_number(self) -> None:
        """The size of the sample was scaled wrongly to the length of the batch."""
        for length in range(1, 301):
            assert estimated_bytes([7] * length) == sys.getsizeof(7) * length


def test_tags_of_one_name_are_one_side_output() -> None:
    """An operator and its reader each made a tag of one name, and the records were not delivered."""
    assert OutputTag("late") == OutputTag("late") != OutputTag("early")
    assert len({OutputTag("late"), OutputTag("late")}) == 1
    assert OutputTag("late") != "late"
    assert repr(OutputTag("late")) == "OutputTag('late')"


@pytest.mark.parametrize(
    ("make", "shown", "fields"),
    [
        (lambda: EpochWatermark(3), "EpochWatermark(3)", {"epoch": 3}),
        (lambda: CheckpointBarrier(7), "CheckpointBarrier(7)", {"checkpoint": 7, "suspend": False}),
        (
            lambda: CheckpointBarrier(7, suspend=True),
            "CheckpointBarrier(7, suspend)",
            {"checkpoint": 7, "suspend": True},
        ),
        (EndOfData, "EndOfData(0)", {"epoch": 0}),
        (lambda: EndOfData(2), "EndOfData(2)", {"epoch": 2}),
        (Idle, "Idle()", {}),
        (EndOfInput, "EndOfInput()", {"epoch": None}),
        (lambda: EndOfInput(4), "EndOfInput(4)", {"epoch": 4}),
        (lambda: DataBatch([1]), "DataBatch(1 records, epoch 0)", {"records": [1], "epoch": 0, "origin": None}),
        (
            lambda: DataBatch([1, 2], 3, BatchOrigin("memory://clicks", 0, 5, 6)),
            "DataBatch(2 records, epoch 3)",
            {"records": [1, 2], "epoch": 3, "origin": BatchOrigin("memory://clicks", 0, 5, 6)},
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_record_of_a_channel_keeps_and_shows_its_fields(
    make: Callable[[], Any], shown: str, fields: dict[str, Any]
) -> None:
    """The message of a stuck loop did not show the waiting records, or a log printed a whole batch."""
    record = make()
    assert repr(record) == shown
    assert {name: getattr(record, name) for name in fields} == fields


def two_origins(random: Random) -> tuple[BatchOrigin, BatchOrigin]:
    first, second = (
        BatchOrigin(random.choice("ab"), *(random.choice([None, 0, 1, 2]) for _ in range(3))) for _ in range(2)
    )
    return first, second


@random_examples(two_origins)
def test_the_origin_of_two_batches_is_the_part_of_a_topic_that_both_were_read_from(
    example: tuple[BatchOrigin, BatchOrigin],
) -> None:
    """A dead letter named wrong offsets, and the engineer looked at the wrong records."""
    first, second = example
    offsets = [first.first_offset, first.last_offset, second.first_offset, second.last_offset]
    if first.topic != second.topic:
        expected = None
    elif first.partition != second.partition or None in offsets:
        expected = BatchOrigin(first.topic)
    else:
        known = [offset for offset in offsets if offset is not None]
        expected = BatchOrigin(first.topic, first.partition, min(known[0], known[2]), max(known[1], known[3]))
    assert first.joined(second) == expected
    assert first.joined(None) is None


Read = list[tuple[str, int, int, bytes | None] | None]
"""What is known of each record: topic, partition, offset and key."""


def told(originals: Originals) -> Read:
    found = [originals.of(row) for row in range(len(originals))]
    return [each and (each[0], each[1].partition, each[1].offsets[each[2]], each[1].keys[each[2]]) for each in found]


def some_read(random: Random) -> tuple[Originals, Read]:
    topic, partition, count = random.choice("ab"), random.randrange(3), random.randrange(1, 6)
    offsets = [random.randrange(100) for _ in range(count)]
    keys = [random.choice([None, b"%d" % offset]) for offset in offsets]
    batch = TopicBatch(partition=partition, values=[b""] * count, offsets=offsets, keys=keys)
    expected: Read = [(topic, partition, offset, key) for offset, key in zip(offsets, keys, strict=True)]
    return Originals.read(topic, batch, count), expected


def changed(random: Random, originals: Originals, expected: Read) -> tuple[Originals, Read]:
    """Return what a step or a channel makes of a batch."""
    kind, count = random.choice(["slice", "rows", "join", "send", "objects"]), len(expected)
    if kind == "slice":
        start = random.randrange(count)
        rows: Any = range(start, random.randint(start + 1, count))
    elif kind == "rows":
        rows = [random.randrange(count) for _ in range(random.randint(1, 6))]
        rows = random.choice([rows, np.array(rows)])
    elif kind == "join":
        other, of_other = some_read(random)
        return Originals.joined([originals, other]), [*expected, *of_other]
    elif kind == "send":
        sent = BatchOrigin("a", 1, 2, 3, originals).plain()
        arrived = BatchOrigin.from_plain(*msgspec.msgpack.decode(msgspec.msgpack.encode(sent))).originals
        assert arrived is not None
        return arrived, expected
    else:
        of = [object() for _ in expected]
        rows = random.sample(range(count), random.randint(1, count))
        made = originals.same_objects(
            [*(of[row] for row in rows), *([object()] if count > 1 else [])], of, by_place=True
        )
        assert made is not None
        return made, [*(expected[row] for row in rows), *([None] if count > 1 else [])]
    return originals.taken(rows), [expected[row] for row in rows]


def batches(random: Random) -> list[tuple[Originals, Read]]:
    """Return a batch as it was read, and what steps, channels and links make of it."""
    made = [some_read(random)]
    for _ in range(random.randrange(6)):
        made.append(changed(random, *made[-1]))
    return made


@random_examples(batches)
def test_each_record_keeps_its_original(made: list[tuple[Originals, Read]]) -> None:
    """A letter had the key of a row that was another one before the batch was cut or joined."""
    for originals, expected in made:
        assert told(originals) == expected


@pytest.mark.parametrize(
    ("made", "rows"),
    [
        (["a", "b", "c"], [0, 1, 2]),  # as many others
        (["a", "b"], None),
        ([7, 7, 8], [0, 1, 2]),
        ([8, 7, 7], [2, 0, 1]),
        ([7, 8], [None, 2]),  # which of two?
        ([8, 8, 8], [2, 2, 2]),  # emitted three times
        ([7, "a", 8], [None, None, 2]),
    ],
)
def test_a_record_of_an_operator_that_says_nothing_is_found_or_unknown(made: list[Any], rows: list[int] | None) -> None:
    """A letter had the key of another row with the same small number."""
    read = Originals.read("a", TopicBatch(values=[b""] * 3, offsets=[0, 1, 2]), 3)
    found = read.same_objects(made, [7, 7, 8], by_place=True)
    assert found is not None
    assert [each and each[2] for each in told(found)] == (rows or [None] * len(made))
    assert read.same_objects(np.arange(3), np.arange(3), by_place=True) is read
    assert read.same_objects(np.arange(2), np.arange(3), by_place=True) is None
