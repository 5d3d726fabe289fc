"""Damaged, forged or foreign bytes lead to a PlainDataError, and to no other error."""

import re
import tracemalloc

import msgpack
import msgspec
import numpy as np
import pytest
from checkpoints.plain_values import Click, Point, some_plain_value
from support.examples import random_examples

from streamiter.errors import PlainDataError
from streamiter.values.plain_data import PlainData
from streamiter.values.plain_format import unpack_dtype
from streamiter.values.records import Columns

PLAIN = PlainData([Click, Point])

RICH = {
    "weights": np.arange(40.0),
    "named": np.zeros(3, [("a", ">i4"), ("b", "U3", (2,))]),
    "times": np.array(["2024-01-01"], "M8[ms]"),
    "scalars": [np.float32(1.5), np.str_("x"), np.bytes_(b"y"), np.longlong(3), np.timedelta64(5, "s")],
    "columns": Columns({"x": [1, 2], "y": [0.5, 1.5]}),
    "click": Click("user", 2**70, (1, ("a", b"b"), {})),
    3: [None, True, -1, 1e300, "\ud800"],
}


def decode_or_refuse(data: bytes) -> None:
    """Decode bytes, which may be refused; a decoded value must be plain data."""
    try:
        value = PLAIN.decode(data)
    except PlainDataError:
        return
    PLAIN.encode(value)


def some_data(random):
    """Return random bytes, or bytes that begin like valid ones."""
    if random.random() < 0.5:
        return random.randbytes(random.randrange(60))
    return bytes(
        random.choices(b"\x00\x01\x02\x80\x81\x90\x91\x92\xa1\xc0\xc1\xc4\xc7\xc8\xcf\xd4\xd9\xdc\xde\xff", k=20)
    )


@random_examples(some_data)
def test_any_bytes_are_read_or_refused(data):
    """A checkpoint file of another program, or of zeros after a crash, caused another error."""
    decode_or_refuse(data)
    decode_or_refuse(b"\x01" + data)
    decode_or_refuse(b"\x02" + len(data).to_bytes(8, "little") + data)


ENCODED_RICH = PLAIN.encode(RICH)


def some_encoded(random):
    return ENCODED_RICH if random.random() < 0.2 else PLAIN.encode(some_plain_value(random))


def changed(random, encoded):
    """Return the bytes with one to three of them changed."""
    data = bytearray(encoded)
    for _ in range(random.randint(1, 3)):
        data[random.randrange(len(data))] = random.randrange(256)
    return bytes(data)


@random_examples(lambda random: changed(random, some_encoded(random)))
def test_changed_bytes_are_read_or_refused(data):
    """A flipped bit on a disk crashed the interpreter."""
    decode_or_refuse(data)


def test_every_changed_byte_of_a_rich_value_is_read_or_refused():
    """A changed header, length or code caused another error."""
    encoded = PLAIN.encode(RICH)
    for position in range(len(encoded)):
        for byte in (0x00, 0x7F, 0x80, 0xFF, encoded[position] ^ 1):
            decode_or_refuse(encoded[:position] + bytes([byte]) + encoded[position + 1 :])


def cut_off(random):
    encoded = some_encoded(random)
    return encoded[: random.randrange(len(encoded))]


@random_examples(cut_off)
def test_cut_off_bytes_are_refused(data):
    """The process died while it wrote, and the remaining bytes were decoded."""
    with pytest.raises(PlainDataError, match="damaged, or of something else"):
        PLAIN.decode(data)


@random_examples(lambda random: some_encoded(random) + random.randbytes(random.randint(1, 20)))
def test_bytes_behind_the_end_are_refused(data):
    """A shorter value was written over a longer one, and the rest was ignored."""
    with pytest.raises(PlainDataError, match="damaged, or of something else"):
        PLAIN.decode(data)


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"f4", "'f4' is not a dtype"),
        (b"|O8", "'|O8' is not a dtype"),
        (msgpack.packb(["char", "<f4"]), r"['char', '<f4'] does not describe a dtype"),
        (msgpack.packb([msgpack.ExtType(7, b"")]), "extension 7 within a dtype"),
    ],
)
def test_bytes_of_no_dtype_are_refused_with_the_reason(data, reason):
    """The error did not show the bytes that a damaged checkpoint has instead of a type."""
    with pytest.raises(ValueError, match=f"^{re.escape(reason)}$"):
        unpack_dtype(data)


def test_a_c_type_of_another_layout_is_read_by_its_text():
    """A long has 32 bits on the machine of the checkpoint and 64 here, and its arrays were read with 64."""
    assert unpack_dtype(msgpack.packb(["char", "<i8", "q"])).char == "q"
    assert unpack_dtype(msgpack.packb(["char", "<i4", "q"])) == np.dtype("<i4")


def framed(packed: bytes) -> bytes:
    return b"\x01" + packed


def extension(code: int, payload: bytes) -> bytes:
    return msgpack.packb(msgpack.ExtType(code, payload))


def header(dtype: bytes, *shape: int) -> bytes:
    return len(dtype).to_bytes(4, "little") + dtype + b"".join(n.to_bytes(8, "little", signed=True) for n in shape)


TUPLE = extension(1, b"")
FIELDS = ["fields", ["a"], ["|O"], [0], [None], 8, False]

FORGED = {
    "unknown extension": extension(99, b"abc"),
    "negative extension": b"\xc7\x01\xfe\x00",
    "time stamp, 32 bits": b"\x91\xd6\xff\x00\x00\x00\x01",
    "time stamp, 64 bits": b"\x81\x01\xd7\xff" + bytes(8),
    "time stamp, 96 bits": b"\x92" + TUPLE + b"\xc7\x0c\xff" + bytes(12),
    "time stamp with a long head": b"\xc9\x00\x00\x00\x0c\xff" + bytes(12),
    "opening alone": TUPLE,
    "opening as a value": b"\x81\x01" + TUPLE,
    "opening as a key": b"\x81" + TUPLE + b"\x01",
    "opening second": b"\x92\x01" + TUPLE,
    "two openings": b"\x92" + TUPLE + TUPLE,
    "opening with content": b"\x91" + extension(1, b"x"),
    "unknown struct": b"\x91" + extension(2, msgpack.packb(["Stranger"])),
    "struct without a name": b"\x91" + extension(2, msgpack.packb([])),
    "struct of no list": b"\x91" + extension(2, b"\x01"),
    "struct of no msgpack": b"\x91" + extension(2, b"\xc1"),
    "struct with too few values": b"\x91" + extension(2, msgpack.packb(["Click", "user"])),
    "struct with an unknown field": b"\x93" + extension(2, msgpack.packb(["Click", "user", "no"])) + b"\xa1u\x01",
    "struct without a needed field": b"\x92" + extension(2, msgpack.packb(["Click", "item"])) + b"\x01",
    "struct with a field twice": b"\x93" + extension(2, msgpack.packb(["Click", "item", "item"])) + b"\x01\x01",
    "columns of nothing": b"\x91" + extension(3, b""),
    "columns of no arrays": b"\x92" + extension(3, b"") + b"\x81\xa1x\x01",
    "columns without names": b"\x92" + extension(3, b"") + b"\x80",
    "columns of a list": b"\x92" + extension(3, b"") + b"\x90",
    "columns of a number": b"\x92" + extension(3, b"") + b"\x81\xa1x" + extension(5, header(b"<f4")),
    "list as a key": b"\x81\x90\x01",
    "array without content": extension(5, header(b"<f8", 3)),
    "array of negative length": extension(5, header(b"<f8", -1)),
    "array of two negative lengths": extension(5, header(b"<f8", -1, -8)),
    "array of 2 ** 62": extension(5, header(b"<f8", 2**62)),
    "array past 2 ** 64": extension(5, header(b"<f8", 2**62, 2**62)),
    "array with an axis cut off": extension(5, header(b"<f8", 0)[:-1]),
    "array of 100 axes": extension(5, header(b"<f8", *[0] * 100)),
    "array of objects": extension(5, header(b"|O8", 0)),
    "array of objects in a field": extension(5, header(msgpack.packb(FIELDS), 0)),
    "array of a list of types": extension(5, header(b"f4,O", 0)),
    "array of no type": extension(5, header(b"", 0)),
    "array of a recursive type": extension(5, header(b"\x93\xa5array" * 5000 + b"\xa3<f8" + b"\x90" * 5000, 0)),
    "dtype longer than its header": extension(5, (99).to_bytes(4, "little") + b"<f8"),
    "empty array header": extension(5, b""),
    "scalar cut off": extension(6, header(b"<f8") + bytes(7)),
    "scalar too long": extension(6, header(b"<f8") + bytes(9)),
    "scalar object": extension(6, header(b"|O8") + bytes(8)),
    "text that is no UTF-8": extension(7, b"\xff"),
    "str that is no UTF-8": b"\xa1\xff",
    "never used code": b"\xc1",
    "too deep": b"\x91" * 5000 + b"\xc0",
}


@pytest.mark.parametrize("packed", FORGED.values(), ids=FORGED.keys())
def test_forged_bytes_are_refused(packed):
    """These bytes led msgpack or numpy to another error, another type, or (objects) to a crash."""
    with pytest.raises(PlainDataError, match="damaged, or of something else"):
        PLAIN.decode(framed(packed))


def peak_bytes(data: bytes) -> int:
    tracemalloc.start()
    try:
        with pytest.raises(PlainDataError):
            PLAIN.decode(data)
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    "packed",
    [
        b"\xdd\xff\xff\xff\xff" + bytes(10_000),
        b"\xdd\x00\x00\x27\x10" * 1000 + bytes(10_000),
        b"\xdf\x7f\xff\xff\xff" + bytes(10_000),
        b"\xdb\xff\xff\xff\xff" + bytes(10_000),
        b"\xc9\xff\xff\xff\xff\x05" + bytes(10_000),
        extension(5, header(b"<f8", 2**40)) + bytes(10_000),
        extension(5, header(b"|V2147483647", 2**20)),
    ],
)
def test_a_forged_length_takes_no_memory(packed):
    """Four damaged bytes requested 32 GB, and the whole job was killed."""
    assert peak_bytes(framed(packed)) < 1_000_000


def test_arrays_cannot_share_their_content():
    """Thousands of headers over the same bytes multiplied the memory."""
    one = extension(5, header(b"<f8", 1000))
    packed = b"\xdc\x03\xe8" + one * 1000
    data = b"\x02" + len(packed).to_bytes(8, "little") + packed + bytes(8000)
    assert peak_bytes(data) < 1_000_000


def test_records_of_no_bytes_take_no_time():
    """An array of 2⁶² empty records, which takes no memory, took endless time."""
    value = PLAIN.decode(framed(extension(5, header(b"|V0", 2**62))))
    assert value.shape == (2**62,)


def test_an_error_of_a_struct_itself_is_refused_like_damage():
    """The checks of a struct may raise any error, and their error was not a PlainDataError."""

    class Strict(msgspec.Struct):
        a: int

        def __post_init__(self):
            if self.a == 13:
                raise RuntimeError("unlucky")

    plain = PlainData([Strict])
    encoded = plain.encode(Strict(12)).replace(b"\x0c", b"\x0d")
    with pytest.raises(PlainDataError, match="unlucky"):
        plain.decode(encoded)


def test_any_buffer_of_bytes_can_be_decoded():
    """Bytearrays and memoryviews, the results of reading files, were refused."""
    encoded = PLAIN.encode({"a": np.arange(3)})
    for data in (bytearray(encoded), memoryview(encoded), memoryview(bytearray(encoded))):
        assert PLAIN.decode(data)["a"].tolist() == [0, 1, 2]
