"""JSON that compiled code decodes gives the same columns, to the last bit, and the same errors as without it."""

import asyncio
import math
import struct
import threading
from collections.abc import Sequence
from functools import lru_cache
from random import Random
from typing import Any

import numpy as np
import orjson
import pytest
from operators.operator_harness import Driven
from support.examples import random_examples
from support.waiting import PATIENCE_S

from streamiter import errors
from streamiter.operators import Operator
from streamiter.topics import JsonColumns, MemoryBroker, OutgoingBatch, TopicBatch, json_columns
from streamiter.topics.joined_values import JoinedValues
from streamiter.topics.json_columns import ColumnScanner
from streamiter.topics.json_scanner import nearest_float
from streamiter.topics.source_and_sink import TopicSource
from streamiter.values.helpers.compiled import is_compiling
from streamiter.values.records import Columns

FIELDS: dict[str, Any] = {
    "id": "int64",
    "x": ("float64", 2),
    "name": "str",
    "late": "bool",
    "y": "float64",
    "small": "int8",
    "f4": "float32",
    "f2": "float16",
    "u": "uint64",
    "ü x": ("int16", 3),
    "tags": ("str", 2),
    "": ("bool", 1),
    "idle": "float64",
}

NUMBERS = """
0 -0 1 -1 7 10 -12 00 01 -01 1. .5 +1 1e 1e+ 1e5 1E-3 1e22 1e23 1e-22 1e-23 1e300 1e309 -1e400 1e-400 5e-324 2e-45
0.0 -0.0 0e9 -0e9 -0.0e2 0.1 1.5 -2.50 1.0 100.0 0.000001 3.14159 127 128 -128 -129 32767 32768 65504 65519 65520
1.7976931348623157e308 2.2250738585072014e-308 0.30000000000000004 9007199254740993 9007199254740992.5
123456789012345678 999999999999999999 1234567890123456789 12345678901234567890 9223372036854775807 9223372036854775808
-9223372036854775808 18446744073709551615 18446744073709551616 3.4028235e38 3.4028236e38 1e-999999999
0.00000000000000000000000000001 1234567890.12345678901234567890 1e0001 1e00000000 NaN Infinity - --1 1-1 0x1 1_0
"""
TEXTS = r"""
"" "a" "Rom" "grün" "€uro" "😀" "\uffff" "a\n" "\u00fc" "\ud83d\ude00" "\ud800" "\u0000" "a\u0000" "\"" "\\" "\/" "\x"
"open "abcdefghijklmnopqrstuvwxyz"
"""
RAW_TEXTS = ['"a b"', '"tab\t"', '"nul\0"', '"feed\n"', '"delete\x7f"', "'a'"]
BROKEN_UTF_8 = [
    b"\xff",
    b"\x80",
    b"\xc3",
    b"\xc1\xbf",
    b"\xe2\x82",
    b"\xe2\x82\xc0",
    b"\xe0\x9f\xbf",
    b"\xed\xa0\x80",
    b"\xf0\x8f\xbf\xbf",
    b"\xf4\x90\x80\x80",
    b"\xf5\x80\x80\x80",
]
OTHERS = [
    "null",
    "true",
    "false",
    "True",
    "tru",
    "[]",
    "{}",
    "[1]",
    '{"a":{"id":[1,{"b":null}]}}',
    "[[[]]]",
    "[1,]",
    "{,}",
]
SPACES = ["", "", "", "", "", " ", "\t", "\r", "  ", "\n"]


def number(random: Random) -> str:
    """Return a number as JSON, in one of the forms that programs write."""
    kind = random.randrange(6)
    if kind == 0:
        return str(random.randint(-(10 ** random.randint(0, 20)), 10 ** random.randint(0, 20)))
    if kind == 1 and random.random() < 0.1:
        return "-9"[: random.randint(1, 2)] + "9" * random.randint(1, 400)
    if kind == 1:
        return f"{random.uniform(-1000, 1000):.{random.randint(0, 20)}f}"
    if kind == 2:
        return repr(random.gauss(0, 10.0 ** random.randint(-8, 8)))
    if kind == 3:
        return f"{random.getrandbits(63)}e{random.randint(-90, 90)}"
    if kind == 4:
        [number] = struct.unpack("<d", random.randbytes(8))
        return repr(number) if math.isfinite(number) else "1"
    return random.choice(NUMBERS.split())


def fitting(random: Random, spec: Any) -> str:
    """Return a value of the field's type."""
    if isinstance(spec, tuple):
        return "[" + ",".join(fitting(random, spec[0]) for _ in range(spec[1])) + "]"
    if spec == "str":
        return random.choice(TEXTS.split()[:7])
    if spec == "bool":
        return random.choice(("true", "false"))
    if spec.startswith("float"):
        return number(random) if spec == "float64" and random.random() < 0.5 else f"{random.gauss(0, 9):.3f}"
    return str(random.randint(0 if spec == "uint64" else -100, 100))


def odd(random: Random) -> str:
    return random.choice((random.choice(OTHERS), random.choice(TEXTS.split() + RAW_TEXTS), number(random)))


def document(random: Random, fields: dict[str, Any]) -> bytes:
    """Return an object of the fields: plain, or with other values, fields, keys and white space."""
    pairs = [(name, fitting(random, spec)) for name, spec in fields.items()]
    oddness = random.choice((0.0, 0.0, 0.05, 0.2))
    if random.random() < oddness:
        random.shuffle(pairs)
    if random.random() < oddness:
        pairs.insert(random.randint(0, len(pairs)), (random.choice(("z", "i", "idx", "ü")), odd(random)))
    if random.random() < oddness:
        pairs.insert(random.randint(0, len(pairs)), random.choice(pairs))
    if random.random() < oddness:
        del pairs[random.randrange(len(pairs))]
    if random.random() < oddness:
        at = random.randrange(max(len(pairs), 1))
        pairs[at : at + 1] = [(name, odd(random)) for name, _ in pairs[at : at + 1]]
    tokens = ["{"]
    for name, value in pairs:
        key = orjson.dumps(name).decode()
        if name and random.random() < oddness:
            key = f'"\\u{ord(name[0]):04x}{name[1:]}"'
        tokens += [key, ":", value, ","]
    tokens[-1] = "}"
    spaced = random.random() < oddness
    text = "".join(token + (random.choice(SPACES) if spaced else "") for token in tokens)
    return damaged(random, text.encode()) if random.random() < oddness else text.encode()


def damaged(random: Random, data: bytes) -> bytes:
    """Return the bytes with a piece removed, repeated or replaced."""
    start = random.randint(0, len(data))
    end = min(len(data), start + random.choice((0, 1, 1, 1, 2, 5, 1000)))
    piece = random.choice(
        (
            b"",
            data[start:end] * 2,
            random.randbytes(1),
            random.choice(BROKEN_UTF_8),
            bytes([random.choice(b'{}[]",:\\ \n\r\t0123456789.eE+-tfn')]),
        )
    )
    return data[:start] + piece + data[end:]


def batch(random: Random) -> tuple[dict[str, Any], list[Any]]:
    """Return the fields of a schema, and values."""
    names = random.sample(list(FIELDS), random.randint(1, len(FIELDS)))
    fields = {name: FIELDS[name] for name in names}
    values: list[Any] = [document(random, fields) for _ in range(random.randint(1, 6))]
    if random.random() < 0.02:
        values[0] = random.choice(
            (None, b"", b"\n", bytearray(values[0]), memoryview(values[0]), b"\xef\xbb\xbf" + values[0])
        )
    return fields, values


@pytest.fixture(autouse=True)
def scanned_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let every decoder scan its first batch, however small."""
    if not is_compiling():
        pytest.skip("JSON is scanned only where Numba is installed")
    monkeypatch.setattr(json_columns, "_LOADED_AFTER", 0)
    monkeypatch.setattr(json_columns, "_SCANNED_TOGETHER", 1)


def outcome(decoder: JsonColumns, values: Sequence[Any]) -> Any:
    """Return all that a caller can see: types and bytes of the columns, or the reasons of the error."""
    try:
        columns = decoder.decode(TopicBatch(values=values))
    except errors.DecodeError as error:
        return str(error), dict(error.failures)
    assert isinstance(columns, Columns)
    return [
        (name, array.dtype.str, array.shape, array.tobytes(), array.flags.writeable, array.flags.c_contiguous)
        for name, array in columns.arrays.items()
    ]


@lru_cache(maxsize=64)
def decoders(fields: tuple[tuple[str, Any], ...]) -> tuple[JsonColumns, JsonColumns]:
    return JsonColumns(dict(fields)), JsonColumns(dict(fields))


def check_same(fields: dict[str, Any], values: list[Any]) -> None:
    """Compare a decoder that scans the values with one that does not."""
    scanning, plain = decoders(tuple(fields.items()))
    scanning._records_before_scanning, plain._records_before_scanning = 0, math.inf
    expected = outcome(plain, values)
    assert outcome(scanning, values) == expected
    if all(value is None or isinstance(value, bytes) for value in values):
        assert outcome(scanning, joined(values)) == expected


def joined(values: list[bytes | None]) -> JoinedValues:
    """Return the values in one buffer, as a reader of Kafka gives them."""
    ends = np.cumsum([len(value or b"") + 1 for value in values]) - 1
    buffer = np.frombuffer(b"".join((value or b"") + b"\n" for value in values), np.uint8)
    return JoinedValues(buffer, ends, np.array([index for index, each in enumerate(values) if each is None], int))


@random_examples(batch)
def test_any_bytes_give_the_columns_and_the_errors_of_msgspec(example: tuple[dict[str, Any], list[Any]]) -> None:
    """A record had other numbers, or was lost, as soon as the compiled decoder was loaded."""
    check_same(*example)


@random_examples(number)
def test_every_number_has_the_bits_of_msgspec(number: str) -> None:
    """A weight differed in its last bit between two machines, of which one had Numba."""
    for kind in ("float64", "float32", "float16", "int64", "uint64", "int8"):
        check_same({"n": kind}, [b'{"n":1}', b'{"n":%s}' % number.encode()])


@random_examples(lambda random: [(random.randrange(1, 10**18), random.randint(-64, 64)) for _ in range(50)])
def test_decimal_numbers_become_the_nearest_float(numbers: list[tuple[int, int]]) -> None:
    """One number in a thousand, whose 128 bits carry into the bits of the float, was rounded wrongly."""
    for digits, power in numbers:
        assert nearest_float(digits, power) == float(f"{digits}e{power}")


def halfway(random: Random) -> tuple[int, int]:
    """Return digits and a power of ten whose product has 54 bits before its zeros, the last of them 1."""
    power = random.randint(-1, 4)
    if power < 0:
        return (random.randrange(2**53, 2**54) | 1) * 10, power
    return random.randrange(2**53, 2**54) // 5**power | 1, power


@random_examples(halfway)
def test_numbers_halfway_between_two_floats_become_the_even_one(number: tuple[int, int]) -> None:
    """Halves were rounded up."""
    digits, power = number
    assert nearest_float(digits, power) == float(f"{digits}e{power}")


CHARACTERS = ["a", "é", "\x80", "\u07ff", "\u0800", "\ud7ff", "\ue000", "\uffff", "\U00010000", "\U0010ffff"]


ESCAPES = r"\n \t \r \b \f \/ \\ \" \u00fc \u00FC \ud7ff \ue000 \uFFFF \u0001 \u0041"
BROKEN_ESCAPES = r"\ud800 \udfff \ud83d\ude00 \u0000 \x \a \N \u \u12 \u00g0 \u00:0 \u00`0 \U0041 \u00@0 \u00/0"


def some_bytes(random: Random) -> bytes:
    """Return bytes that are, or nearly are, a text of JSON."""
    good = (*CHARACTERS, *ESCAPES.split())
    pieces = [random.choice(good).encode() for _ in range(random.randint(0, 4))]
    if random.random() < 0.5:
        of_escapes = [each.encode() for each in BROKEN_ESCAPES.split()]
        broken = (*BROKEN_UTF_8, random.choice(CHARACTERS).encode()[:-1], random.randbytes(2), *of_escapes)
        pieces.insert(random.randint(0, len(pieces)), random.choice(broken))
    return b"".join(pieces)


@random_examples(lambda random: [some_bytes(random) for _ in range(random.randint(1, 3))])
def test_every_text_has_the_characters_of_msgspec(texts: list[bytes]) -> None:
    """Bytes that are not UTF-8 became a text that no other program could read."""
    check_same({"t": "str"}, [b'{"t":"%s"}' % text for text in texts])


PLAIN = {"id": "int64", "x": ("float64", 2), "name": "str", "late": "bool"}


@pytest.mark.parametrize(
    "value",
    [
        '{"id":7,"x":[0.5,1],"name":"Rom","late":true}',
        '{"id": -1234567890123456789, "x": [1e22, -2.5E-7], "name": "gr\\u00fcn € 😀 \\"", "late": false}',
        '\t{ "late" :false ,"name":"","x":[ 0.30000000000000004 , 123456.12345678901 ],"id":0 }\r ',
        '{"id":1,"":null,"x":[0.012345678901234567,5e-30],"i":[{},[],{"a":[true,-1.5e3,99999999999999999999,"\\n"]}],"name":"a","idx":"é","late":true}',
    ],
)
def test_plain_records_are_scanned(value: str) -> None:
    """Records of a usual form were left to msgspec, so the compiled decoder only added to the time."""
    scanner = ColumnScanner([(field.name, field.dtype, field.width) for field in JsonColumns(PLAIN)._fields])
    scanned = scanner.scan([value.encode()] * 2)
    assert scanned is not None
    assert not len(scanned[1])
    check_same(PLAIN, [value.encode()] * 2)


def test_a_long_text_of_a_bad_record_costs_no_memory() -> None:
    """A text of a megabyte, in a record that was refused, made room for a megabyte in each record of its batch."""
    long = b'{"name":"%s","name":"b"}' % (b"a" * 1_000_000)
    check_same({"name": "str"}, [long, *[b'{"name":"c"}'] * 200_000])


some_values = random_examples(
    lambda random: [
        random.choice((None, b"", b"\n", b"a\nb", b"{}", random.randbytes(3))) for _ in range(random.randrange(9))
    ]
)


@some_values
def test_joined_values_are_a_sequence_as_a_list_is(values: list[bytes | None]) -> None:
    """A step that cut a batch, or asked for its last value, got other values than from other topics."""
    sequence = joined(values)
    assert (len(sequence), list(sequence)) == (len(values), values)
    assert [sequence[index] for index in range(-len(values), len(values))] == values * 2
    for which in (slice(1, 4), slice(-2, None), slice(3, 1), slice(None, None, 2), slice(None, None, -1)):
        assert list(sequence[which]) == values[which]
        assert list(sequence[1:][which]) == values[1:][which]
    with pytest.raises(IndexError):
        sequence[len(values)]


def test_a_large_batch_is_scanned_ahead_of_its_decoder(monkeypatch: pytest.MonkeyPatch, scans: list[int]) -> None:
    """The event loop scanned JSON while the second core was idle. Scanning twice would be worse."""
    monkeypatch.setattr(json_columns, "_SCANNED_IN_THREAD", 10)
    values: list[bytes | None] = [b'{"n":%d}' % number for number in range(10)]
    decoder, other = JsonColumns({"n": "int64"}), JsonColumns({"n": "float64"})
    for each in (decoder, other):
        load = each.ahead(TopicBatch(values=values))
        assert load is not None  # Otherwise the event loop would wait for the compiler.
        load()
        each.decode(TopicBatch(values=values))
    assert decoder.ahead(TopicBatch(values=values)) is None
    assert decoder.ahead(TopicBatch(values=joined(values[:9]))) is None
    batch = TopicBatch(values=joined(values))
    work = decoder.ahead(batch)
    assert work is not None
    scans.clear()
    work()
    decoded = decoder.decode(batch)
    assert scans == [10]
    work()
    assert other.decode(batch)["n"].dtype == "float64"  # the columns are those of another decoder
    work()
    part = decoder.decode(batch[3:])
    assert decoded["n"].tolist() == list(range(10))
    assert part["n"].tolist() == list(range(3, 10))


@random_examples(lambda random: (random.randrange(30), random.randrange(30), random.randrange(30)))
def test_a_part_of_a_batch_has_its_part_of_the_values_that_were_scanned_ahead(example: tuple[int, int, int]) -> None:
    """A step that asked for the second half of a batch got the columns of the first, or its bad records were others."""
    start, stop, inner = example
    values = [b'{"n":%s}' % (b"null" if number % 5 == 4 else b"%d" % number) for number in range(25)]
    given, scanner = joined([*values]), ColumnScanner([("n", np.dtype("int64"), None)])
    given.decoded = json_columns._Scanned(scanner, scanner.scan(given))
    part = given[start:stop][inner:]
    assert isinstance(part, JoinedValues)
    assert isinstance(part.decoded, json_columns._Scanned)
    assert part.decoded.scanned is not None
    columns, odd = part.decoded.scanned
    expected = [*range(25)][start:stop][inner:]
    assert columns["n"].tolist() == [0 if number % 5 == 4 else number for number in expected]
    assert [expected[index] for index in odd] == [number for number in expected if number % 5 == 4]
    assert given[1:4][:0].decoded is not None
    given.decoded = json_columns._Scanned(scanner, None)
    assert given[start:stop].decoded == given.decoded


async def test_a_batch_whose_read_is_cancelled_is_read_once_more() -> None:
    """A pause in the middle of scanning dropped a batch; where the decoder then scanned no more, it came for ever."""
    topic = MemoryBroker().topic("numbers")
    await topic.create(partitions=1)
    writer = await topic.open_writer()
    await writer.write(OutgoingBatch([b"1", b"2"]))
    source, is_scanning, go = TopicSource(topic, stop="latest"), threading.Event(), threading.Event()

    def ahead(batch: TopicBatch) -> Any:
        return None if go.is_set() else scan

    def scan() -> None:
        is_scanning.set()
        go.wait(PATIENCE_S)

    source._ahead = ahead
    await source.open(Driven(Operator()).context, None)
    reading = asyncio.create_task(source.read())
    await asyncio.to_thread(is_scanning.wait, 30.0)
    reading.cancel()
    with pytest.raises(asyncio.CancelledError):
        await reading
    go.set()
    batch = await source.read()
    assert batch is not None
    assert (batch.records.values, batch.positions[0]) == ([b"1", b"2"], 2)
    assert await source.read() is None
    await source.close()


@pytest.fixture
def scans(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return the sizes of the batches that were scanned so far, without the one that a scanner compiles itself with."""
    sizes: list[int] = []
    scan = ColumnScanner.scan

    def counted(self: ColumnScanner, values: Any) -> Any:
        if len(values) > 1:
            sizes.append(len(values))
        return scan(self, values)

    monkeypatch.setattr(ColumnScanner, "scan", counted)
    return sizes


@pytest.mark.parametrize(("is_loaded", "scanned"), [(False, [40, 20]), (True, [40, 40, 40, 20])])
def test_short_streams_and_small_batches_are_not_scanned(
    monkeypatch: pytest.MonkeyPatch, scans: list[int], *, is_loaded: bool, scanned: list[int]
) -> None:
    """A job over a thousand lines needed a second to load the compiler, and single records became slower.

    Where the learner had loaded it, the first 100,000 records were decoded in four times as long.
    """
    monkeypatch.setattr(json_columns, "is_loaded", lambda: is_loaded)
    monkeypatch.setattr(json_columns, "_LOADED_AFTER", 100)
    monkeypatch.setattr(json_columns, "_SCANNED_TOGETHER", 20)
    decoder = JsonColumns({"n": "int64"})
    for size in (19, 40, 40, 19, 40, 19, 20):
        assert len(decoder.decode(TopicBatch(values=[b'{"n":1}'] * size))) == size
    assert scans == scanned


@pytest.mark.parametrize("value", [rb'{"n":"\ud83d\ude00"}', b'{"n":\n"a"}'], ids=["surrogates", "line feeds"])
def test_streams_of_unusual_records_are_seldom_scanned(value: bytes, scans: list[int]) -> None:
    """Pretty-printed JSON took a third longer, because each batch was scanned in vain."""
    decoder = JsonColumns({"n": "str"})
    for _ in range(35):
        decoder.decode(TopicBatch(values=[value] * 10))
    assert len(scans) == 3
