"""Batches, control records and messages come out of a frame as they went in: values, exact types, memory."""

import enum
from collections import OrderedDict
from dataclasses import replace
from random import Random
from typing import Any

import numpy as np
import pytest
from checkpoints.plain_values import Click, Point, many, same, some_atom, some_batch, some_plain_value, some_text
from support.examples import random_examples

from streamiter.engine.processes import frames
from streamiter.engine.processes.frames import FrameEncoding, Taken
from streamiter.errors import PlainDataError
from streamiter.operators import DeadLetter
from streamiter.operators.output import Origin
from streamiter.topics.dead_letters import DeadLetterEncoder
from streamiter.topics.topic import OutgoingBatch
from streamiter.values.origins import BatchOrigin
from streamiter.values.plain_data import PlainData
from streamiter.values.records import CheckpointBarrier, Columns, DataBatch, EndOfData, EndOfInput, EpochWatermark, Idle
from streamiter.values.sparse_rows import SparseRows

ENCODING = FrameEncoding(PlainData([Click, Point]))


def through_a_frame(batch: DataBatch, *, writable: bool = True) -> DataBatch:
    parts = ENCODING.encode_batch(batch, 1 << 40)
    room = np.frombuffer(b"".join(parts), np.uint8).copy().data
    decoded, size_bytes = ENCODING.decode_batch(room if writable else room.toreadonly())
    assert size_bytes == 1 << 40
    return decoded


def some_json(random: Random, levels: int = 3) -> Any:
    kind = random.randrange(8) if levels else 0
    if kind < 4:
        return some_atom(random)
    if kind < 6:
        return many(random, lambda random: some_json(random, levels - 1))
    return {random.choice((some_text, some_atom))(random): some_json(random, levels - 1) for _ in range(kind - 5)}


def some_data_batch(random: Random) -> DataBatch:
    records = many(random, some_json, 5) if random.random() < 0.5 else some_batch(random)
    origin = random.choice((None, BatchOrigin("kafka://clicks"), BatchOrigin("memory://clicks", 3, 10, 1 << 40)))
    return DataBatch(records, random.choice((0, 1, 300, 1 << 40)), origin)


@random_examples(some_data_batch)
def test_any_batch_keeps_its_values_and_exact_types(batch: DataBatch) -> None:
    """A tuple became a list, or True became 1, on the way to another process, and its model differed."""
    for writable in (True, False):
        decoded = through_a_frame(batch, writable=writable)
        assert same(decoded.records, batch.records)
        assert decoded.epoch == batch.epoch
        assert same(decoded.origin, batch.origin)


def test_encoded_records_for_a_sink_keep_their_keys_headers_and_partition() -> None:
    """A header became a list on the way to process 0, and the broker refused the record."""
    batch = OutgoingBatch((b"1", None), [None, b"k"], [(), (("h", b"1"),)], [3, 4], partition=2)
    expected = replace(batch, values=[b"1", None])
    assert through_a_frame(DataBatch(batch, 3)).records == expected
    assert through_a_frame(DataBatch(OutgoingBatch([b"1"]))).records == OutgoingBatch([b"1"])
    with pytest.raises(PlainDataError, match="expected an encoder that returns bytes"):
        ENCODING.encode_batch(DataBatch(OutgoingBatch([object()])), 1)


@random_examples(some_plain_value)
def test_any_message_keeps_its_value_and_exact_types(message: Any) -> None:
    """A coordinator received a list where its process had sent a tuple, and did not know the key."""
    body = memoryview(b"".join(ENCODING.encode_message(message)))
    assert same(ENCODING.decode_message(body), message)


class Colour(enum.IntEnum):
    RED = 1


class Name(str):
    __slots__ = ()


@pytest.mark.parametrize(
    "record",
    [
        Colour.RED,
        Name("x"),
        OrderedDict(a=1),
        {Name("x"): 1},
        {"a": {Colour.RED: 1}},
        {1, 2},
        pytest.param(object(), id="object"),
        bytearray(b"x"),
    ],
    ids=repr,
)
def test_a_subclass_or_an_object_is_refused_with_the_index_of_its_record(record: Any) -> None:
    """An enum crossed as a number, and the step behind found no member."""
    with pytest.raises(PlainDataError, match=r"record 1 of the batch: record.*: expected plain data"):
        ENCODING.encode_batch(DataBatch([{"a": 1}, record]), 0)


def test_a_value_that_contains_itself_is_refused() -> None:
    """The encoder followed a list into itself until the process was killed."""
    endless: list[Any] = []
    endless += [endless] * 100
    with pytest.raises(PlainDataError, match="levels of nesting"):
        ENCODING.encode_batch(DataBatch([endless]), 0)


def test_arrays_of_objects_are_refused() -> None:
    """Pointers of one process were sent to another one."""
    with pytest.raises(PlainDataError, match="arbitrary objects"):
        ENCODING.encode_batch(DataBatch(np.array([object()])), 0)


def test_large_arrays_are_not_copied_and_are_writable_and_aligned_behind_the_link() -> None:
    """Each gradient was copied three times, and a step that changed its own array failed behind a link only."""
    array = np.arange(10_000.0)
    records = Columns({"x": array, "y": array[::-1], "z": array.astype(np.float32)})
    parts = ENCODING.encode_batch(DataBatch(records), 0)
    assert any(isinstance(part, memoryview) and np.shares_memory(np.frombuffer(part), array) for part in parts)
    room = np.frombuffer(b"".join(parts), np.uint8).copy()
    decoded, _ = ENCODING.decode_batch(room.data)
    assert decoded.records == records
    for column in decoded.records.arrays.values():
        assert column.flags.writeable
        assert column.flags.aligned
        assert np.shares_memory(column, room)
    copied, _ = ENCODING.decode_batch(room.data.toreadonly())
    assert all(not np.shares_memory(column, room) for column in copied.records.arrays.values())
    assert all(column.flags.writeable for column in copied.records.arrays.values())


def test_common_arrays_need_no_search_for_types() -> None:
    """A message of some rows took 15 µs of each process, and 64 processes exchange many of them."""
    aligned = Columns({"flag": np.ones(5001, bool), "x": np.ones((5001, 2)), "empty": np.ones((5001, 0))})
    sparse: Any = SparseRows.from_rows([([7, 2], [1.0, 3.0])], width=8)
    for records in (aligned, sparse, np.arange(3), np.ones((2, 3), np.float32)):
        head = ENCODING.encode_batch(DataBatch(records), 0)[0]
        assert frames._BATCH_HEAD.unpack(head)[4] == frames._ARRAYS
    room = np.frombuffer(b"".join(ENCODING.encode_batch(DataBatch(aligned), 0)), np.uint8).copy().data
    decoded, _ = ENCODING.decode_batch(room)
    assert decoded.records == aligned
    assert decoded.records["x"].flags.aligned


def test_dead_letters_cross_with_any_record() -> None:
    """A step refused records, and the job ended because its dead letters are written in another process."""
    origins = (None, Origin("kafka://a", 3, 7), BatchOrigin("kafka://a", 3, 7, 9), BatchOrigin("kafka://a"))
    for record in (b"x", None, {"a": (1, None)}, {1, 2}, 3 + 4j, bytearray(b"y")):
        letters = [DeadLetter(record, "parse", "too late", origin, key) for origin in origins for key in (None, b"k")]
        arrived = through_a_frame(DataBatch(letters)).records
        encoder = DeadLetterEncoder()
        assert encoder.encode(arrived) == encoder.encode(letters)
        assert [letter.origin for letter in arrived] == [letter.origin for letter in letters]
    assert arrived[0].record == b"y"


def test_sparse_rows_are_a_batch() -> None:
    """Rows of hashed features were refused between processes, although a step in one process passed them on."""
    rows: Any = SparseRows.from_rows([([7, 2], [1.0, 3.0]), ([], []), ([5], [2.0])], width=8)
    decoded: Any = through_a_frame(DataBatch(rows)).records
    assert (decoded.width, len(decoded)) == (8, 3)
    for name in ("indptr", "indices", "values"):
        assert same(getattr(decoded, name), getattr(rows, name))


@pytest.mark.parametrize(
    "control",
    [
        EpochWatermark(3),
        CheckpointBarrier(7),
        CheckpointBarrier(8, suspend=True),
        Idle(),
        EndOfData(2),
        EndOfInput(),
        EndOfInput(5),
    ],
    ids=repr,
)
def test_every_control_record_crosses(control: Any) -> None:
    """A barrier that suspends the job was a plain barrier in the other process, which ran on."""
    assert repr(ENCODING.decode_control(memoryview(ENCODING.encode_control(control)))) == repr(control)


def test_a_report_crosses() -> None:
    taken = Taken(1, 1 << 40, 3, 4, makes_way=True, shuts_intakes=False)
    assert same(Taken.decode(memoryview(taken.encode())), taken)


def some_damage(random: Random) -> tuple[bytes, bool]:
    batch = some_data_batch(random)
    data = bytearray(b"".join(ENCODING.encode_batch(batch, 0)))
    if random.random() < 0.5:
        return bytes(data[: random.randrange(len(data))]), True
    data[random.randrange(len(data))] = random.randrange(256)
    return bytes(data), False


@random_examples(some_damage)
def test_a_damaged_batch_raises_an_error_or_is_a_batch(example: tuple[bytes, bool]) -> None:
    """Damaged bytes ended the process without a message."""
    data, _ = example
    try:
        batch, _ = ENCODING.decode_batch(memoryview(data))
    except Exception:
        return
    assert len(batch.records) >= 0
