"""A value that is not plain data is refused, and the error names its place."""

import collections
import dataclasses
import datetime
import decimal
import enum
import pathlib
import types
import uuid

import msgpack
import msgspec
import numpy as np
import pytest
from checkpoints.plain_values import Click, Point, some_plain_value
from support.examples import random_examples

from streamiter.errors import PlainDataError
from streamiter.values.plain_data import PlainData
from streamiter.values.records import Columns

PLAIN = PlainData([Click, Point])


class Level(enum.IntEnum):
    LOW = 1


class Color(enum.StrEnum):
    RED = "red"


class Name(str):
    __slots__ = ()


class Row(np.ndarray):
    pass


class Unreadable:
    def __repr__(self):
        raise RuntimeError("no repr")


Pair = collections.namedtuple("Pair", "a b")
Stranger = msgspec.defstruct("Stranger", ["a"])
Record = dataclasses.make_dataclass("Record", ["a"])

REFUSED = [
    datetime.datetime(2024, 1, 1),
    datetime.date(2024, 1, 1),
    datetime.timedelta(1),
    decimal.Decimal(1),
    uuid.UUID(int=1),
    pathlib.Path("a"),
    Level.LOW,
    Color.RED,
    Name("a"),
    Pair(1, 2),
    collections.OrderedDict(a=1),
    collections.defaultdict(int),
    collections.Counter("a"),
    collections.deque(),
    types.MappingProxyType({}),
    Record(1),
    Stranger(1),
    {1},
    frozenset(),
    1j,
    range(3),
    bytearray(b"a"),
    memoryview(b"a"),
    memoryview(bytearray(b"a")),
    msgpack.ExtType(1, b""),
    msgpack.Timestamp(1),
    object(),
    Unreadable(),
    print,
    int,
    ...,
    np.array([None]),
    np.array([(1, "a")], [("a", int), ("b", object)]),
    np.zeros(2).view(Row),
    np.ma.array([1, 2], mask=[0, 1]),
    np.rec.array([(1,)], dtype=[("a", int)]),
    np.rec.array([(1,)], dtype=[("a", int)])[0],
    np.dtype("f4"),
    Columns({"x": np.array([None])}),
    Columns({1: [1]}),  # type: ignore[dict-item]
]


@pytest.mark.parametrize("value", REFUSED, ids=lambda value: type(value).__name__)
@pytest.mark.parametrize("wrap", [lambda v: v, lambda v: [1, v], lambda v: {"a": (v,)}, lambda v: Click("u", 1, v)])
def test_any_other_value_is_refused_at_any_place(value, wrap):
    """A bytearray was silently restored as bytes, or an enum as its number."""
    with pytest.raises(PlainDataError, match=r"^record.*: expected .*, given .*"):
        PLAIN.encode(wrap(value))


FOREIGN = [{1}, bytearray(b"a"), msgpack.Timestamp(1)]


@random_examples(lambda random: (some_plain_value(random), random.choice(FOREIGN)))
def test_a_foreign_value_is_found_next_to_any_plain_one(example):
    """The search for values that msgpack silently accepts, level by level, missed one of them."""
    value, foreign = example
    with pytest.raises(PlainDataError, match="given"):
        PLAIN.encode((value, {"a": [value, Click("u", more=(value, foreign))]}))


def test_a_struct_registered_later_is_known_from_then_on():
    """Steps register structs while the graph is built, after the encoding is made, and these were refused."""
    plain = PlainData()
    with pytest.raises(PlainDataError, match="register the class"):
        plain.encode(Click("u"))
    plain.register(Click)
    assert plain.decode(plain.encode(Click("u"))) == Click("u")
