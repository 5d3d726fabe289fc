"""Values survive the encoding with their exact types."""

import math

import msgspec
import numpy as np
import pytest
from checkpoints.plain_values import (
    Click,
    Point,
    same,
    same_dtype,
    some_array,
    some_batch,
    some_plain_value,
    some_scalar,
    some_structured_dtype,
)
from support.examples import random_examples

from streamiter.values.plain_data import PlainData
from streamiter.values.plain_format import pack_dtype, unpack_dtype
from streamiter.values.records import Columns

PLAIN = PlainData([Click, Point])


@random_examples(some_plain_value)
def test_any_plain_value_survives_with_its_exact_types(value):
    """A restored state with one different type trained differently, without an error."""
    encoded = PLAIN.encode(value)
    decoded = PLAIN.decode(encoded)
    assert same(decoded, value)
    assert PLAIN.encode(decoded) == encoded


@random_examples(some_array)
def test_any_array_survives_writable_and_with_memory_of_its_own(array):
    """A restored weight vector was read-only, and failed at the first update."""
    encoded = PLAIN.encode(array)
    decoded = PLAIN.decode(encoded)
    assert same(decoded, array)
    assert decoded.flags.writeable
    assert decoded.flags.owndata or not decoded.nbytes


@random_examples(some_scalar)
def test_any_numpy_scalar_survives_with_its_class(scalar):
    """Sums of float32 were restored as Python floats, and were other sums from then on."""
    assert same(PLAIN.decode(PLAIN.encode(scalar)), scalar)


@random_examples(some_structured_dtype)
def test_any_structured_dtype_survives_with_gaps_and_titles(dtype):
    """A dtype stored as its ``descr`` lost offsets, alignment or titles."""
    assert same_dtype(unpack_dtype(pack_dtype(dtype)), dtype)


@random_examples(some_batch)
def test_any_batch_keeps_its_kind(batch):
    """A spilled array batch was restored as a list, and broke the operator that calls ``batch.sum()``."""
    assert same(PLAIN.decode_batch(PLAIN.encode_batch(batch)), batch)


def in_own_memory(encoded):
    room = np.frombuffer(encoded, np.uint8).copy()
    return room, room.data


@random_examples(some_batch)
def test_a_batch_that_is_decoded_in_place_is_the_same(batch):
    """Two ways to decode the same batch had different results."""
    _, room = in_own_memory(PLAIN.encode_batch(batch))
    assert same(PLAIN.decode_batch_in(room), batch)


@pytest.mark.parametrize("name_length", range(1, 17, 3))
def test_large_arrays_stay_in_place_aligned_and_writable(name_length):
    """The bytes before an array shifted it; on unaligned numbers numpy is slow, and other programs fail."""
    columns = Columns(
        {
            "x" * name_length: np.zeros(4095, "i1"),
            "a": np.arange(4095.0),
            "b": np.ones((4095, 3), "i1"),
            "c": np.ones(4095, np.clongdouble),
        }
    )
    memory, room = in_own_memory(PLAIN.encode_batch(columns))
    decoded = PLAIN.decode_batch_in(room)
    assert same(decoded, columns)
    for name in "abc":
        assert np.shares_memory(decoded[name], memory)
        assert decoded[name].flags.aligned
        assert decoded[name].flags.writeable


def test_unaligned_or_read_only_arrays_are_copied():
    """Unaligned or read-only memory, made by another program, was used in place."""
    array = np.arange(4095.0)
    encoded = PLAIN.encode_batch(array)
    shifted, _ = in_own_memory(b"-" + encoded)
    for room in (shifted.data[1:], memoryview(encoded)):
        decoded = PLAIN.decode_batch_in(room)
        assert same(decoded, array)
        assert decoded.flags.writeable
        assert decoded.flags.owndata


@pytest.mark.parametrize("value", [math.nan, -0.0, math.inf, -math.inf, np.float32("nan"), np.float64(-0.0)])
def test_special_floats_keep_every_bit(value):
    """An optimizer slot at −0.0 or NaN changed by a checkpoint."""
    assert same(PLAIN.decode(PLAIN.encode([value])), [value])


@pytest.mark.parametrize(
    "array", [np.arange(6).reshape(2, 3).T, np.arange(10)[::-2], np.zeros((3, 1)).repeat(2, 1)[:, ::2]]
)
def test_strides_are_no_part_of_an_array(array):
    """A view, common in batches, was written in the order of its memory, and was restored permuted."""
    decoded = PLAIN.decode(PLAIN.encode(array))
    assert np.array_equal(decoded, array)
    assert decoded.flags.c_contiguous


def test_large_arrays_of_types_without_a_buffer_survive():
    """Large arrays are not copied, but numpy exports no buffer of datetimes, so their encoding failed."""
    times = np.arange(5000).astype(">M8[ms]").reshape(50, 100)
    words = np.array(["ab", "c\0d", "é"] * 2000)
    padded = np.zeros(1000, np.dtype([("a", "i1"), ("b", "f8")], align=True))
    value = [times, words, padded, times[:, ::2]]
    assert same(PLAIN.decode(PLAIN.encode(value)), [*value[:3], times[:, ::2].copy()])


def test_text_and_bytes_of_numpy_keep_nulls_at_the_end():
    """NULs at the end were lost, as in most of numpy's own methods."""
    value = [np.str_("a\0"), np.bytes_(b"a\0"), np.array(["a\0b"]), np.str_("\ud800\0")]
    assert same(PLAIN.decode(PLAIN.encode(value)), value)


def test_order_of_dicts_survives():
    """Iteration over restored state had another order, so the run differed."""
    value = dict.fromkeys(("b", "a", 3, None, (1, "x"), b"k", 2.5, True))
    assert list(PLAIN.decode(PLAIN.encode(value))) == list(value)


def test_read_only_void_scalars_stay_hashable():
    """A void scalar, the only numpy scalar that can be changed in place, was restored as a changeable key."""
    row = np.zeros(1, [("a", "i4")])
    row.flags.writeable = False
    value = {row[0]: 1}
    assert PLAIN.decode(PLAIN.encode(value)) == value
    assert PLAIN.decode(PLAIN.encode(np.zeros(1, [("a", "i4")])[0])).flags.writeable


def test_the_order_of_several_arrays_in_one_value_survives():
    """Contents are stored apart from their value; they were exchanged, and weights became optimizer state."""
    value = {"w": np.arange(1000.0), "tags": (np.arange(3), [np.float32(1), np.ones(2)]), "z": np.zeros((0, 7))}
    assert same(PLAIN.decode(PLAIN.encode(value)), value)


def test_arrays_before_a_lone_surrogate_are_stored_once():
    """Packing starts again at a lone surrogate, and earlier arrays were stored twice."""
    value = [np.arange(1000.0), Columns({"x": [1, 2]}), "\ud800", np.ones(3)]
    encoded = PLAIN.encode(value)
    assert same(PLAIN.decode(encoded), value)
    assert len(encoded) == len(PLAIN.encode([*value[:2], "abc", value[3]]))


def test_columns_keep_the_order_of_their_names():
    """Columns, and so features, were restored in another order."""
    value = Columns({"b": [1, 2], "a": [1.0, 2.0]})
    assert PLAIN.decode(PLAIN.encode({"batch": value}))["batch"].names == ("b", "a")


def test_nesting_survives_up_to_the_limit():
    """A value was written but could not be read, because msgpack's two limits differ between its versions."""
    nested: tuple = ()
    for _ in range(499):
        nested = (nested,)
    assert PLAIN.decode(PLAIN.encode(nested)) == nested


def test_any_sequence_is_a_batch_and_is_decoded_as_a_list():
    """Ranges and tuples from sources were refused as batches."""
    assert PLAIN.decode_batch(PLAIN.encode_batch(range(3))) == [0, 1, 2]
    assert PLAIN.decode_batch(PLAIN.encode_batch(((1, 2), "a"))) == [(1, 2), "a"]


def test_the_encoding_of_version_one_can_be_read_for_ever():
    """A checkpoint could not be read by a later version."""
    stored = bytes.fromhex(
        "02 8c00000000000000"  # with buffers; 140 bytes of msgpack
        "8a a16e c0"  # "n": None
        "a174 93 c70001 01 a161"  # "t": (1, "a")
        "a162 c40178"  # "b": b"x"
        "a169 c70904 010000000000000000"  # "i": 2**64
        "a161 c70f05 03000000 3c6634 0200000000000000"  # "a": two <f4
        "a173 c70b06 03000000 3c6634 0000803f"  # "s": float32(1)
        "a175 d40775"  # "u": numpy.str_("u")
        "a176 d40876"  # "v": numpy.bytes_(b"v")
        "a163 92 c70003 81 a178 c70f05 03000000 7c7531 0200000000000000"  # "c": Columns x
        "a170 93 c70b02 93 a5506f696e74 a178 a179"  # "p": Point, with its fields
        "cb3ff0000000000000 cb4000000000000000"
        "0000803f 00000040"  # the two floats
        "0506"  # the column
    )
    expected = {
        "n": None,
        "t": (1, "a"),
        "b": b"x",
        "i": 2**64,
        "a": np.array([1, 2], "<f4"),
        "s": np.float32(1),
        "u": np.str_("u"),
        "v": np.bytes_(b"v"),
        "c": Columns({"x": np.array([5, 6], "u1")}),
        "p": Point(x=1.0, y=2.0),
    }
    assert PLAIN.encode(expected).hex(" ") == stored.hex(" ")
    assert same(PLAIN.decode(stored), expected)


def test_several_threads_may_use_one_encoding():
    """Operators with ``runs_in_thread`` and the event loop encoded at the same time, and a shared packer mixed them
    up.
    """
    from concurrent.futures import ThreadPoolExecutor

    values = [{"n": number, "t": (number,) * 50, "a": np.full(50, number)} for number in range(40)]
    with ThreadPoolExecutor(4) as pool:
        encoded = list(pool.map(PLAIN.encode, values * 5))
    assert encoded == [PLAIN.encode(value) for value in values] * 5


def test_registered_structs_may_hold_each_other():
    """Records made of records were refused."""
    value = Click("a", 1, [Click("b", 2, Point(x=1.0)), (Click("c"),)])
    assert same(PLAIN.decode(PLAIN.encode(value)), value)


def test_a_field_added_with_a_default_reads_older_data():
    """A record type received a new field, and the job could not resume from its last checkpoint."""
    old = msgspec.defstruct("Event", ["a"])
    new = msgspec.defstruct("Event", ["a", ("b", int, 5)])
    assert PlainData([new]).decode(PlainData([old]).encode(old(1))) == new(1, 5)
