"""Values, keys and rows that are refused wherever they come from, with the texts in ``refusals.txt``.

``PYTHONPATH=tests python tests/test_refusals.py`` writes the texts as they are now.
"""

import collections
import dataclasses
import datetime
import enum
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from checkpoints.plain_values import Click, Point
from support.refusals import refusals_test, sections, write

from streamiter.errors import PlainDataError
from streamiter.learn import KMeans
from streamiter.values.named_rows import FieldReader
from streamiter.values.plain_data import PlainData
from streamiter.values.plain_format import dtype_refusal
from streamiter.values.records import Columns
from streamiter.values.sparse_rows import SparseRows
from streamiter.values.subtasks import check_keys, encode_key, key_group, key_groups, normalize_key

FILE = Path(__file__).with_name("refusals.txt")


class Level(enum.IntEnum):
    LOW = 1


class Color(enum.StrEnum):
    RED = "red"


class Row(np.ndarray):
    """An array of a class of its own."""


class Name(str):
    __slots__ = ()


class Unreadable:
    def __repr__(self) -> str:
        raise RuntimeError("no repr")


def nested(levels: int) -> object:
    """Return tuples within each other."""
    key: object = ()
    for _ in range(levels):
        key = (key,)
    return key


def deep(wrap: Callable[[object], object]) -> object:
    """Encode a value one level deeper than the limit."""
    value: object = None
    for _ in range(501):
        value = wrap(value)
    return PLAIN.encode(value)


def circle(make: Callable[[list[Any]], None]) -> object:
    """Encode a list that ``make`` puts into itself."""
    value = list[Any]()
    make(value)
    return PLAIN.encode(value)


def without_user() -> object:
    """Encode a struct of which a field is not set."""
    click = Click("u")
    del click.user
    return PLAIN.encode([click])


def without_key(error: PlainDataError) -> PlainDataError:
    """Return the error without the key, whose text depends on the version of numpy."""
    before, _, reason = str(error).partition(": expected")
    assert before.startswith("key ")
    return PlainDataError(f"key: expected{reason}")


def refused_column(keys: Any) -> None:
    with pytest.raises(PlainDataError) as caught:
        key_groups(keys)
    raise without_key(caught.value)


def refused_key(key: object) -> None:
    """Raise the error of a key, which is the same in each function that takes keys."""
    by_batch = (lambda one: check_keys(["a", one]), lambda one: key_groups([1, one]))
    errors = dict[str, PlainDataError]()
    for function in (normalize_key, encode_key, key_group, *by_batch):
        with pytest.raises(PlainDataError) as caught:
            function(key)  # type: ignore[operator]
        errors[str(caught.value)] = caught.value
    [error] = errors.values()
    raise without_key(error)


def refused_dtype(dtype: Any) -> None:
    raise PlainDataError(dtype_refusal(np.dtype(dtype)) or "it is accepted")


PLAIN = PlainData([Click, Point])
NAMES: dict[str, Any] = {"np": np, "datetime": datetime, "nested": nested, "PLAIN": PLAIN}
NAMES |= {each.__name__: each for each in (Click, Point, PlainData, Columns)}
NAMES |= {each.__name__: each for each in (deep, circle, without_user, refused_key, refused_dtype, refused_column)}
NAMES |= {each.__name__: each for each in (KMeans, SparseRows, FieldReader, check_keys, encode_key, key_groups)}
USERS: dict[str, Any] = {
    "Pair": collections.namedtuple("Pair", "a b"),
    "Stranger": msgspec.defstruct("Stranger", ["a"]),
    "Record": dataclasses.make_dataclass("Record", ["a"]),
    "Sub": type("SubClick", (Click,), {}),
    "Lost": msgspec.defstruct("Click", ["user"]),
    "Level": Level,
    "Color": Color,
    "Row": Row,
    "Name": Name,
    "Unreadable": Unreadable,
}
for each in USERS.values():
    each.__module__ = "users"  # Whether this file is a program or a module.
NAMES |= USERS | {"sparse": SparseRows.from_rows([([0], [1.0]), ([], []), ([6], [4.0])], 8)}


async def where_written(code: str) -> object:
    return eval(code, NAMES)


CALLS = dict.fromkeys(sections(FILE), where_written)

test_wrong_values_are_refused_with_their_texts = refusals_test(FILE, CALLS)


if __name__ == "__main__":
    write(FILE, CALLS)
