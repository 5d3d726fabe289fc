"""Values, keys and rows that are refused wherever they come from, with the texts in ``refusals.txt``.

``PYTHONPATH=tests python tests/test_refusals.py`` writes the texts as they are now.
"""

import collections
import dataclasses
import datetime
import enum
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from checkpoints.plain_values import Click, Point
from support.refusals import sections, with_errors_now, write

from streamiter.learn import KMeans
from streamiter.values.named_rows import FieldReader
from streamiter.values.plain_data import PlainData
from streamiter.values.records import Columns
from streamiter.values.sparse_rows import SparseRows
from streamiter.values.subtasks import check_keys, encode_key, key_groups

FILE = Path(__file__).with_name("refusals.txt")


class Level(enum.IntEnum):
    LOW = 1


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


PLAIN = PlainData([Click, Point])
NAMES: dict[str, Any] = {"np": np, "datetime": datetime, "nested": nested, "PLAIN": PLAIN}
NAMES |= {each.__name__: each for each in (Click, Point, PlainData, Columns)}
NAMES |= {each.__name__: each for each in (KMeans, SparseRows, FieldReader, check_keys, encode_key, key_groups)}
USERS: dict[str, Any] = {
    "Pair": collections.namedtuple("Pair", "a b"),
    "Stranger": msgspec.defstruct("Stranger", ["a"]),
    "Record": dataclasses.make_dataclass("Record", ["a"]),
    "Sub": type("SubClick", (Click,), {}),
    "Lost": msgspec.defstruct("Click", ["user"]),
    "Level": Level,
    "Row": Row,
    "Name": Name,
    "Unreadable": Unreadable,
}
for each in USERS.values():
    each.__module__ = "users"  # Whether this file is a program or a module.
NAMES |= USERS | {"sparse": SparseRows.from_rows([([0], [1.0]), ([], []), ([6], [4.0])], 8)}


async def where_written(code: str) -> object:
    return eval(code, NAMES)


@pytest.mark.parametrize("section", sections(FILE))
async def test_wrong_values_are_refused_with_their_texts(section: str) -> None:
    """Each section tells the incidents that its refusals prevent."""
    text = sections(FILE)[section]
    assert await with_errors_now(text, where_written) == text


if __name__ == "__main__":
    write(FILE, dict.fromkeys(sections(FILE), where_written))
