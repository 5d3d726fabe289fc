"""Decoders and encoders give the right results, and name each bad value."""

from __future__ import annotations

import math
import pickle
from random import Random
from typing import Any

import msgspec
import numpy as np
import orjson
import pandas
import polars
import pyarrow
import pytest
from checkpoints.plain_values import EDGES, many, some_float, some_text
from support.examples import random_examples
from topics.test_json_scanner import joined

from streamiter import Flow, errors
from streamiter.topics import (
    Decoder,
    Encoder,
    Json,
    JsonColumns,
    MemoryBroker,
    OutgoingBatch,
    Raw,
    Text,
    TopicBatch,
    Typed,
    WithMetadata,
    json_columns,
)
from streamiter.topics.connecting import check_outgoing
from streamiter.values.helpers.compiled import is_compiling
from streamiter.values.records import Columns
from streamiter_files import Csv


class Click(msgspec.Struct):
    id: int
    x: list[float]
    name: str = ""


POINTS = JsonColumns({"id": "int64", "x": ("float64", 2), "name": "str"})
GOOD = b'{"id": 1, "x": [1, 2.5], "name": "n"}'

# These values are bad for each decoder below, in any batch.
BAD = [
    b"",
    b"{",
    b"}",
    b'{"id": 1, "x": [1, 2], "name": "n"',
    b'{"id": 1, "x": [1, 2], "name": "n"} trailing',
    b'{"id": 1, "x": [1, 2], "name": "n"}{"id": 1, "x": [1, 2], "name": "n"}',
    b'{"id": 1, "x": [1, 2], "name": "n\n"}',
    b'{"id": 1, "x": [1, 2], "name": "\xff"}',
    b"\x00",
]
# Only the types of these values are bad, so Json accepts them.
WRONG = [
    b"null",
    b"[]",
    b"{}",
    b'{"id": "1", "x": [1, 2], "name": "n"}',
    b'{"id": 1.5, "x": [1, 2], "name": "n"}',
    b'{"id": true, "x": [1, 2], "name": "n"}',
    b'{"id": null, "x": [1, 2], "name": "n"}',
    b'{"id": 1, "x": ["1", 2], "name": "n"}',
    b'{"id": 1, "x": [null, 2], "name": "n"}',
    b'{"id": 1, "x": 1, "name": "n"}',
    b'{"id": 1, "x": [1, 2], "name": 7}',
]
# These values are bad only for columns.
UNFIT = [
    b'{"id": 1, "x": [1], "name": "n"}',
    b'{"id": 1, "x": [1, 2, 3], "name": "n"}',
    b'{"id": 9223372036854775808, "x": [1, 2], "name": "n"}',
    b'{"id": 1, "x": [1, 2], "name": "ends with NUL \\u0000"}',
    b'{"id": 1, "x": [1, 2]}',
]

DECODERS = [(Json(), BAD), (Typed(Click), BAD + WRONG + [None]), (POINTS, BAD + WRONG + UNFIT + [None])]


@pytest.fixture(autouse=True)
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let ``JsonColumns`` decode with msgspec, or with compiled code from the first record on."""
    if getattr(request, "param", "msgspec") == "compiled":
        if not is_compiling():
            pytest.skip("JSON is scanned only where Numba is installed")
        monkeypatch.setattr(json_columns, "_LOADED_AFTER", 0)
        monkeypatch.setattr(json_columns, "_SCANNED_TOGETHER", 1)
        monkeypatch.setattr(POINTS, "_records_before_scanning", 0)


in_both_ways = pytest.mark.parametrize("way", ["msgspec", "compiled"], indirect=True)


def decode(decoder: Decoder, *values: bytes | None) -> Any:
    return decoder.decode(TopicBatch(values=list(values)))


def encode(encoder: Encoder, records: Any) -> list[bytes | None]:
    return list(encoder.encode(records).values)


@in_both_ways
@pytest.mark.parametrize(("decoder", "bad"), DECODERS, ids=["json", "typed", "columns"])
@random_examples(lambda random: [random.randrange(100) for _ in range(random.randint(1, 12))])
def test_exactly_the_bad_values_of_a_batch_are_named(
    numbers: list[int], decoder: Decoder, bad: list[bytes | None]
) -> None:
    """One bad record removed the good records of its batch, or counted as good."""
    values = [[GOOD, GOOD, *bad][number % (2 + len(bad))] for number in numbers]
    bad_indices = [index for index, value in enumerate(values) if value != GOOD]
    if not bad_indices:
        assert len(decode(decoder, *values)) == len(values)
        return
    with pytest.raises(errors.DecodeError) as caught:
        decode(decoder, *values)
    assert list(caught.value.failures) == bad_indices
    assert all(0 < len(reason) <= 200 for reason in caught.value.failures.values())


@in_both_ways
@pytest.mark.parametrize(("decoder", "bad"), DECODERS, ids=["json", "typed", "columns"])
def test_each_bad_value_is_bad_on_its_own(decoder: Decoder, bad: list[bytes | None]) -> None:
    """A value in the lists above was not bad, so the test of bad values tested nothing."""
    for value in bad:
        with pytest.raises(errors.DecodeError):
            decode(decoder, value)


@in_both_ways
@pytest.mark.parametrize("given", [Json(), Typed(Click), POINTS, Text(), Raw()], ids=repr)
def test_formats_can_be_sent_by_ray(given: Any) -> None:
    """A flow with decode=Typed(…) was refused on Ray, because a decoder of msgspec cannot be pickled."""
    sent = pickle.loads(pickle.dumps(given))
    records = sent.decode(TopicBatch(values=[GOOD]))
    assert str(records) == str(given.decode(TopicBatch(values=[GOOD])))
    assert sent.encode(records).values == given.encode(records).values


def test_a_text_null_is_told_from_a_tombstone_if_asked_to() -> None:
    """The copy of a text `null` was a tombstone, which deleted its key in a compacted topic."""
    assert Json().decode(TopicBatch(values=[b"null", None, b"1"])) == [None, None, 1]
    refusing = pickle.loads(pickle.dumps(Json(nulls="refuse")))
    assert refusing.decode(TopicBatch(values=[None, b"[null]"])) == [None, [None]]
    for values in ([b"1", b" null\n"], [None, b"null"], [b"18446744073709551616", b"null"]):
        with pytest.raises(errors.DecodeError, match="value 1 of the batch: the text null") as caught:
            refusing.decode(TopicBatch(values=values))
        assert caught.value.failures.keys() == {1}
    assert repr(refusing) == "Json(nulls='refuse')"


def test_typed_records_keep_tombstones_if_asked_to() -> None:
    """A compacted topic of typed records could not be copied: its tombstones were bad records."""
    keeping = pickle.loads(pickle.dumps(Typed(Click, tombstones="keep")))
    values = [b'{"id":1,"x":[],"name":"n"}', None]
    assert keeping.encode(keeping.decode(TopicBatch(values=values))).values == values


@pytest.mark.parametrize("decoder", [Json(), Typed(Click), POINTS], ids=["json", "typed", "columns"])
def test_an_empty_batch_decodes_to_an_empty_batch(decoder: Decoder) -> None:
    """A filter left no value of a batch, and the decoder failed."""
    assert len(decode(decoder)) == 0


INTEGERS = [number for number in EDGES if -(2**63) <= number < 2**64]


def finite(random: Random) -> float:
    while not math.isfinite(number := some_float(random)):
        pass
    return number


def text(random: Random) -> str:
    """Return a text without lone surrogates, which UTF-8 cannot contain."""
    return some_text(random).encode(errors="ignore").decode()


def json_value(random: Random, levels: int = 3) -> Any:
    kind = random.randrange(8 if levels else 6)
    if kind < 6:
        constant = random.choice((None, True, False, *INTEGERS))
        return random.choice((constant, finite(random), text(random)))
    if kind == 6:
        return many(random, lambda random: json_value(random, levels - 1))
    return {text(random): json_value(random, levels - 1) for _ in range(random.randrange(5))}


@random_examples(lambda random: many(random, json_value, 6))
def test_json_survives_the_round_trip(records: list[Any]) -> None:
    """A source could not read the output of a sink."""
    assert decode(Json(), *encode(Json(), records)) == records


def rows(random: Random) -> list[dict[str, Any]]:
    return [
        {
            "id": random.choice((random.randint(-9, 9), random.randrange(-(2**63), 2**63), 2**63 - 1, -(2**63))),
            "x": [finite(random), finite(random)],
            "name": text(random).replace("\0", ""),
        }
        for _ in range(random.randint(1, 8))
    ]


@in_both_ways
@random_examples(rows)
def test_columns_have_the_values_of_the_json(records: list[dict[str, Any]]) -> None:
    """A number in a column differed by a bit from the number in the JSON."""
    columns = decode(POINTS, *map(orjson.dumps, records))
    assert columns["id"].tolist() == [record["id"] for record in records]
    assert columns["x"].tolist() == [record["x"] for record in records]
    assert columns["name"].tolist() == [record["name"] for record in records]
    assert columns["x"].shape == (len(records), 2)


@in_both_ways
@random_examples(rows)
def test_columns_survive_the_round_trip_through_their_schema(records: list[dict[str, Any]]) -> None:
    """A topic that one flow had written could not be read with the same schema by the next flow.

    The fast path for columns without a schema must give the same text.
    """
    columns = decode(POINTS, *map(orjson.dumps, records))
    shuffled = Columns({name: columns[name] for name in ("name", "id", "x")})
    assert decode(POINTS, *encode(POINTS, shuffled)) == columns
    assert encode(POINTS, shuffled) == encode(Json(), columns)


@in_both_ways
@pytest.mark.parametrize(
    ("field", "array", "read_back"),
    [
        ("float64", np.array([1, 2]), [1.0, 2.0]),
        ("float32", np.array([0.1, -2.5]), [float(np.float32(0.1)), -2.5]),
        ("float16", np.array([True, False]), [1.0, 0.0]),
        ("uint8", np.array([0, 255]), [0, 255]),
        ("int64", np.array([0, 2**63 - 1], dtype=np.uint64), [0, 2**63 - 1]),
        ("uint64", np.array([0, 2**63 - 1]), [0, 2**63 - 1]),
        ("int8", np.array([True, False]), [1, 0]),
        ("bool", np.array([True, False]), [True, False]),
        ("str", np.array(["a", "bü"]), ["a", "bü"]),
        (("int16", 2), np.array([[1, 2], [3, 4]]), [[1, 2], [3, 4]]),
        (("str", 1), np.array([["a"], [""]]), [["a"], [""]]),
        (("float64", 2), np.asfortranarray([[1, 2], [3, 4]]), [[1.0, 2.0], [3.0, 4.0]]),
        ("int32", np.array([1, 2], dtype=">i4"), [1, 2]),
    ],
)
def test_columns_are_written_as_the_type_of_the_schema(
    field: Any, array: np.ndarray[Any, Any], read_back: list[Any]
) -> None:
    """A step made integers for a float field, and the reader of the topic failed."""
    schema = JsonColumns({"a": field})
    values = encode(schema, Columns({"a": array}))
    columns = decode(schema, *values)
    assert columns["a"].tolist() == read_back
    assert encode(schema, columns) == values


def test_each_bad_record_is_named_once_whichever_of_its_fields_is_bad() -> None:
    """A record with two bad fields was counted as two bad records by the step's policy."""
    schema = JsonColumns({"a": "float64", "b": "uint8"})
    with pytest.raises(errors.EncodeError) as caught:
        encode(schema, Columns({"a": [1.0, np.nan, np.nan], "b": [-1, -1, 0]}))
    assert {index: reason[6:9] for index, reason in caught.value.failures.items()} == {0: "'b'", 1: "'a'", 2: "'a'"}


def test_an_empty_batch_is_encoded_as_no_values() -> None:
    """An empty batch after a filter was a list, and the encoder refused it."""
    assert encode(POINTS, []) == encode(POINTS, decode(POINTS)) == []


@in_both_ways
@pytest.mark.parametrize(
    ("dtype", "smallest", "largest"),
    [
        (f"{sign}int{bits}", low, high)
        for bits in (8, 16, 32, 64)
        for sign, low, high in (("", -(2 ** (bits - 1)), 2 ** (bits - 1) - 1), ("u", 0, 2**bits - 1))
    ],
)
def test_integers_are_taken_up_to_the_limits_of_their_type(dtype: str, smallest: int, largest: int) -> None:
    """An id exceeded its type, and became another id."""
    decoder = JsonColumns({"n": dtype})
    columns = decode(decoder, b'{"n": %d}' % smallest, b'{"n": %d}' % largest)
    assert columns["n"].dtype == np.dtype(dtype)
    assert columns["n"].tolist() == [smallest, largest]
    with pytest.raises(errors.DecodeError, match=r"out of range for .* at `\$\.n`") as caught:
        decode(decoder, b'{"n": %d}' % (smallest - 1), b'{"n": 0}', b'{"n": %d}' % (largest + 1))
    assert list(caught.value.failures) == [0, 2]


@in_both_ways
def test_columns_of_every_supported_type() -> None:
    """Columns of one type were packed wrongly, because each type has its own code."""
    decoder = JsonColumns({"b": "bool", "f": np.float32, "h": "float16", "t": ("str", 2), "w": ("int8", 3)})
    value = b'{"b": true, "f": 0.5, "h": 2, "t": ["a", "bcd"], "w": [1, 2, 3]}'
    columns = decode(decoder, value, value)
    assert {name: (array.dtype.str[1:], array.shape) for name, array in columns.arrays.items()} == {
        "b": ("b1", (2,)),
        "f": ("f4", (2,)),
        "h": ("f2", (2,)),
        "t": ("U3", (2, 2)),
        "w": ("i1", (2, 3)),
    }
    assert columns[1]["t"].tolist() == ["a", "bcd"]
    with pytest.raises(errors.DecodeError, match="float32"):
        decode(decoder, value.replace(b"0.5", b"1e300"))


# With these, an array of all names would take 2.4 GB.
LONG_NAMES = ["é" * {50: 100_000, 150: 2_000_000}.get(number, number % 4) for number in range(300)]
LONG_VALUES = [orjson.dumps({"id": number, "x": [0, 1], "name": name}) for number, name in enumerate(LONG_NAMES)]


@in_both_ways
async def test_one_long_text_does_not_make_all_texts_of_its_batch_as_wide() -> None:
    """One value of a megabyte among thousands became an array of gigabytes, and the process of the flow was killed."""
    topic, sizes = MemoryBroker().topic("points"), list[int]()
    await topic.create(partitions=1)
    writer = await topic.open_writer()
    await writer.write(OutgoingBatch(LONG_VALUES))
    await writer.close()

    def noted(points: Columns) -> Columns:
        sizes.append(points["name"].nbytes)
        return points

    flow = Flow("points")
    # The batches meet again in the inbox of the second step, and in the last one.
    points = flow.source(topic, decode=POINTS, stop="latest").map_batch(noted).rebalance().map_batch(noted)
    together = points.batch(len(LONG_NAMES)).collect()
    await (await flow.start()).wait()
    [batch] = together.items
    assert [point["name"] for point in batch] == LONG_NAMES
    assert sum(sizes) < 2 * 100_000_000


@in_both_ways
@pytest.mark.parametrize("decoder", [POINTS, WithMetadata(POINTS)], ids=["alone", "with metadata"])
def test_values_in_one_buffer_are_divided_as_others_are(decoder: Any) -> None:
    """Values of Kafka, or those with keys, were decoded in another way: one long text made an array of gigabytes."""
    batch = TopicBatch(values=joined([*LONG_VALUES]))
    parts = decoder.parts(batch)
    assert [each.offsets[0] for each in parts] == [0, 83, 150, 154]
    assert POINTS.ahead(batch) is None
    assert [value for part in parts for value in part.values] == LONG_VALUES
    assert len(decoder.parts(batch[:50])) == 1


@in_both_ways
def test_column_names_may_be_any_text() -> None:
    """The fields of another program's JSON were refused, because they are no Python identifiers."""
    columns = decode(
        JsonColumns({"a-b": "int64", "class": "str", "ü x": "bool"}), b'{"a-b":1,"class":"c","\xc3\xbc x":true}'
    )
    assert columns.names == ("a-b", "class", "ü x")
    assert encode(Json(), columns) == ['{"a-b":1,"class":"c","ü x":true}'.encode()]


@in_both_ways
def test_pretty_printed_json_is_json() -> None:
    """Values of another producer, with line feeds inside, were refused."""
    pretty = orjson.dumps({"id": 1, "x": [1.0, 2.0], "name": "n"}, option=orjson.OPT_INDENT_2)
    assert decode(POINTS, pretty, pretty)["x"].tolist() == [[1.0, 2.0]] * 2
    assert decode(Typed(Click), pretty) == [Click(1, [1.0, 2.0], "n")]


@in_both_ways
def test_decoded_columns_can_be_written_to() -> None:
    """A library took a decoded array without a copy, and failed because the array was read-only."""
    columns = decode(POINTS, GOOD)
    assert all(array.flags.writeable and array.flags.c_contiguous for array in columns.arrays.values())


@pytest.mark.parametrize("kind", ["int32", "uint64", "float32", "float64", "bool", "str", "datetime64[s]", "object"])
def test_arrays_are_written_as_their_rows(kind: str) -> None:
    """Arrays of unusual types were written as another text than the fast path writes."""
    array = np.array([[1, 0], [1, 1]]).astype(kind)
    expected = [orjson.loads(orjson.dumps(row.tolist())) for row in array]
    assert decode(Json(), *encode(Json(), array)) == expected
    assert decode(Json(), *encode(Json(), array[:, 0])) == [row[0] for row in expected]
    columns = Columns({"a": array, "b": array[:, 1]})
    assert decode(Json(), *encode(Json(), columns)) == [{"a": row, "b": row[1]} for row in expected]


def test_json_writes_the_values_of_models() -> None:
    """A model with numpy scalars, structs or NaN could not be written as JSON."""
    record = {"x": np.arange(2), "s": np.float32(0.5), "c": Click(1, [2.0]), "nan": math.nan, "none": None}
    assert decode(Json(), *encode(Json(), [record, None])) == [
        {"x": [0, 1], "s": 0.5, "c": {"id": 1, "x": [2.0], "name": ""}, "nan": None, "none": None},
        None,
    ]
    not_contiguous = np.arange(6).reshape(3, 2).T
    assert encode(Json(), [{"x": not_contiguous}]) == [b'{"x":[[0,2,4],[1,3,5]]}']


@pytest.mark.parametrize(
    ("encoder", "records", "bad"),
    [
        (Json(), [1, {"a": {1, 2}}, "x", b"bytes", {1: 2}], [1, 3, 4]),
        (Typed(Click), [Click(1, []), {"id": 1}, None, Click(2, [])], [1, 2]),
        (Text("ascii"), ["a", "ü", 1, None], [1, 2]),
        (Raw(), [b"a", "a", None, 1], [1, 3]),
    ],
    ids=["json", "typed", "text", "raw"],
)
def test_exactly_the_records_that_cannot_be_written_are_named(
    encoder: Encoder, records: list[Any], bad: list[int]
) -> None:
    """The step's policy was applied to good records, too."""
    with pytest.raises(errors.EncodeError) as caught:
        encoder.encode(records)
    assert list(caught.value.failures) == bad


def test_a_union_of_tagged_structs_is_read_and_written() -> None:
    """A topic with several kinds of events could not be read."""

    class Start(msgspec.Struct, tag=True):
        at: int

    class Stop(msgspec.Struct, tag=True):
        at: int

    events = [Start(1), Stop(2)]
    assert decode(Typed(Start | Stop), *encode(Typed(Start | Stop), events)) == events


def test_text_names_bytes_of_another_encoding() -> None:
    """Bytes of another encoding were silently replaced by other characters."""
    with pytest.raises(errors.DecodeError) as caught:
        decode(Text(), b"ok", b"\xff", None)
    assert list(caught.value.failures) == [1]


@in_both_ways
def test_metadata_goes_with_columns_too() -> None:
    """Metadata could not be combined with a decoder of columns."""
    batch = TopicBatch(partition=2, offsets=[5], keys=[None], values=[GOOD], headers=[(("h", b"1"),)])
    [record] = WithMetadata(POINTS).decode(batch)
    assert (record["partition"], record["offset"], record["headers"]) == (2, 5, (("h", b"1"),))
    assert record["value"]["id"] == 1


@pytest.mark.parametrize("table", [pandas.DataFrame, polars.DataFrame, pyarrow.table])
@pytest.mark.parametrize("encoder", [Json(), JsonColumns({"id": "int64", "name": "str"}), Csv()])
def test_the_records_of_a_table_are_its_rows(encoder: Any, table: Any) -> None:
    """The names of the columns were written as records, without an error."""
    given = Columns({"id": [1, 2], "name": ["a", "b"]})
    assert encoder.encode(table({"id": [1, 2], "name": ["a", "b"]})) == encoder.encode(given)


@pytest.mark.parametrize("table", [pandas.DataFrame, polars.DataFrame, pyarrow.table])
def test_a_table_that_is_written_without_an_encoder_is_refused(table: Any) -> None:
    """The error was a KeyError: 0, and columns whose names are bytes would have been written."""
    batch = OutgoingBatch(table({"id": [1, 2], "name": ["a", "b"]}))
    with pytest.raises(
        errors.TopicError,
        match=r"topic 't': expected a list of bytes as values, given a \w+; encode its rows first: Json\(\)\.encode",
    ):
        check_outgoing(batch, topic="t", partitions=1)


BIG = [2**64, 2**64 + 1, -(2**63) - 1, 100_000_000_000_000_000_000_001, -(10**40), 10**300]
NEAR = [2**64 - 1, -(2**63), 2**63, 9_999_999_999_999_999_999]


@in_both_ways
@random_examples(lambda random: [random.choice(BIG + NEAR + [1, 0.1]) for _ in range(random.randint(1, 5))])
def test_whole_numbers_of_any_size_are_exact_both_ways(numbers: list[Any]) -> None:
    """Two ids above 64 bits became one float, without a word."""
    texts = [f'{{"id": {number}, "in": [[{number}]], "text": "{BIG[0]}"}}'.encode() for number in numbers]
    records = decode(Json(), *texts)
    assert [(record["id"], record["in"], record["text"]) for record in records] == [
        (number, [[number]], str(BIG[0])) for number in numbers
    ]
    assert {type(record["id"]) for record in records} <= {int, float}
    assert decode(Json(), *encode(Json(), records)) == records
    refused = [index for index, number in enumerate(numbers) if number in BIG]
    if not refused:
        assert decode(Json(big_integers="refuse"), *texts) == records
        return
    with pytest.raises(errors.DecodeError, match="expected whole numbers of at most 64 bits, given") as caught:
        decode(Json(big_integers="refuse"), *texts)
    assert list(caught.value.failures) == refused


def test_a_big_number_is_exact_wherever_it_is_in_a_long_batch() -> None:
    """Only a part of the bytes of a long batch is looked at first."""
    small, big = b'{"at": "2013-01-01T10:15Z"}', -(2**63) - 1
    found = [decode(Json(), *[small] * 400, b" " * place + str(big).encode())[-1] for place in range(8)]
    assert found == [big] * 8


def test_what_looks_like_a_big_number_stays_as_it_is() -> None:
    texts = [b'{"t": "123456789012345678901234567890", "f": 0.12345678901234567890123}', b"null", b'[1e30, "\xc3\xa4"]']
    assert decode(Json(big_integers="refuse"), *texts, None) == [*map(orjson.loads, texts), None]
