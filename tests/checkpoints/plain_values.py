"""Plain data for property tests, and the exact equality of two values."""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Sequence
from random import Random
from typing import Any

import msgspec
import numpy as np

from streamiter.values.records import Columns


class Click(msgspec.Struct):
    user: str
    item: int = 0
    more: Any = None


class Point(msgspec.Struct, frozen=True, kw_only=True):
    x: float
    y: float = 0.0


CHARACTERS = 'abcxyzABZ019 _-./\\%~:\0\n\x7f"\u00e9\u00df\u0130\u01c5\u212a\u0441\ud800\udfff\uffff\U0001f600'
"""Letters that some file systems do not distinguish, characters of paths, lone surrogates."""

EDGES = [
    0,
    *(sign * (1 << bits) + more for bits in (7, 8, 15, 16, 31, 32, 63, 64) for sign in (-1, 1) for more in (-1, 0, 1)),
    1 << 4000,
]
"""Integers at which the encoding changes."""

FLOATS = [0.0, -0.0, 1.5, -1e300, 5e-324, 0.1, 2.0**53, math.inf, -math.inf, math.nan, -math.nan]

# fmt: off
SCALAR_DTYPES = [
    np.dtype(text) for text in (
        *"?bBhHiIlLqQefdgFDG",
        ">i2", ">u4", ">i8", ">f2", ">f4", ">f8", ">c8", "U1", "U5", ">U3", "S1", "S7",
        "M8", "m8", "M8[ns]", ">M8[D]", "<M8[25us]", "m8[s]", ">m8[3h]",
    )
]
# fmt: on
PADDED = np.dtype({"names": ["a", "b"], "formats": ["i1", "<i4"], "offsets": [4, 0], "itemsize": 12})
ALIGNED = np.dtype([("a", "i1"), ("b", "f8"), ("c", "q", (2,))], align=True)
TITLED = np.dtype([(("long title", "a"), ">i2"), ("b", "U3")])
BITS = [np.dtype(text) for text in ("<f4", ">f8", "<i2", ">u8", "<c16", "|S3", "|V5", "<M8[ns]")]


def many(random: Random, make: Callable[[Random], Any], most: int = 4) -> list[Any]:
    """Return up to this many values of ``make``."""
    return [make(random) for _ in range(random.randint(0, most))]


def some_text(random: Random) -> str:
    """Return a text with lone surrogates, sometimes too long for the shortest header of an encoding."""
    length = random.choice((0, 1, 2, 3, 5, 31, 32)) if random.random() < 0.95 else 300
    return "".join(random.choices(CHARACTERS, k=length))


def some_bytes(random: Random) -> bytes:
    return random.randbytes(random.choice((0, 1, 2, 5, 300) if random.random() < 0.1 else (0, 1, 3)))


def some_int(random: Random) -> int:
    """Return a small integer, an integer at a limit, or one of any size."""
    kind = random.random()
    if kind < 0.3:
        return random.randint(-9, 9)
    return random.choice(EDGES) if kind < 0.7 else random.getrandbits(random.choice((8, 33, 64, 70))) - 99


def some_float(random: Random) -> float:
    """Return a float of random bits, or a special one."""
    return random.choice(FLOATS) if random.random() < 0.5 else struct.unpack("d", random.randbytes(8))[0]


def some_atom(random: Random) -> Any:
    return random.choice((_none, _bool, some_int, some_float, some_text, some_bytes))(random)


def _none(_: Random) -> None:
    return None


def _bool(random: Random) -> bool:
    return random.random() < 0.5


def some_structured_dtype(random: Random, levels: int = 2) -> np.dtype[Any]:
    """Return a dtype with fields in fields and of arrays, with gaps, alignment and titles."""
    if random.random() < 0.2:
        return random.choice((PADDED, ALIGNED, TITLED, np.dtype([])))
    fields: list[tuple[Any, ...]] = []
    for number in range(random.randint(1, 3)):
        inner = levels > 0 and random.random() < 0.2
        dtype = some_structured_dtype(random, levels - 1) if inner else random.choice(SCALAR_DTYPES)
        name = random.choice("abc\u00e9") + str(number)
        titled = (f"title of {name}", name) if random.random() < 0.2 else name
        fields.append(
            (titled, dtype, random.choice(((2,), (1, 3), (0,)))) if random.random() < 0.2 else (titled, dtype)
        )
    return np.dtype(fields, align=random.random() < 0.3)


def some_shape(random: Random) -> tuple[int, ...]:
    return tuple(many(random, lambda random: random.randint(0, 4), 3))


def some_array(random: Random) -> np.ndarray[Any, Any]:
    """Return an array of random bits if the type allows it: every NaN, every padding."""
    kind, shape = random.random(), some_shape(random)
    dtype = random.choice(SCALAR_DTYPES) if kind < 0.4 else random.choice((*BITS, PADDED, ALIGNED))
    if kind > 0.8:
        dtype = some_structured_dtype(random)
    array = np.zeros(shape, dtype)
    if dtype in BITS or dtype in (PADDED, ALIGNED) or dtype.kind in "iufcMm":
        array = np.ndarray(shape, dtype, random.randbytes(array.nbytes)).copy()
    elif dtype.kind in "US" and array.size:
        array.reshape(-1)[0] = random.choice(("x", "a\0b", "\x01"))
    return array


def some_scalar(random: Random) -> np.generic:
    while not (array := some_array(random)).size:
        pass
    scalar = array.reshape(-1)[0]
    return scalar if isinstance(scalar, np.generic) else np.float32(1.5)


def some_columns(random: Random) -> Columns:
    length = random.randint(0, 4)
    arrays = {}
    for _ in range(random.randint(1, 3)):
        shape = random.choice(((length,), (length, 2), (length, 0)))
        arrays[some_text(random)] = np.ones(shape, random.choice(SCALAR_DTYPES))
    return Columns(arrays)


def some_point(random: Random) -> Point:
    return Point(x=some_float(random), y=some_float(random))


def some_key(random: Random) -> Any:
    """Return a value that can be a key of a dict."""
    kind = random.random()
    if kind < 0.7:
        return some_atom(random)
    if kind < 0.8:
        return some_point(random)
    if kind < 0.9:
        return tuple(many(random, some_key, 2))
    return scalar if _is_hashable(scalar := some_scalar(random)) else 0


def _is_hashable(value: Any) -> bool:
    try:
        hash(value)
    except (TypeError, ValueError):  # A time span without a unit raises a ValueError.
        return False
    return True


LEAVES = (*(some_atom,) * 6, some_array, some_scalar, some_columns, some_point)


def some_plain_value(random: Random, levels: int = 3, leaves: Sequence[Callable[[Random], Any]] = LEAVES) -> Any:
    """Return a random value that the encoding accepts."""
    kind = random.randrange(8) if levels else 0
    if kind < 4:
        return random.choice(leaves)(random)

    def inner(random: Random) -> Any:
        return some_plain_value(random, levels - 1, leaves)

    if kind == 4:
        return many(random, inner)
    if kind == 5:
        return tuple(many(random, inner))
    if kind == 6:
        return {some_key(random): inner(random) for _ in range(random.randint(0, 4))}
    return Click(user=some_text(random), item=some_int(random), more=inner(random))


def some_batch(random: Random) -> Any:
    """Return a list of any plain values, columns, or an array."""
    kind = random.random()
    if kind < 0.4:
        return many(random, some_plain_value, 5)
    if kind < 0.7:
        return some_columns(random)
    return np.ones((random.randint(0, 4), *some_shape(random)), random.choice(SCALAR_DTYPES))


def same(first: Any, second: Any) -> bool:
    """Return whether two values are equal to the bit, with equal types at all levels."""
    if type(first) is not type(second):
        return False
    if isinstance(first, (list, tuple)):
        return len(first) == len(second) and all(map(same, first, second))
    if isinstance(first, dict):
        return same(list(first.items()), list(second.items()))
    if isinstance(first, Columns):
        return same(first.arrays, second.arrays)
    if isinstance(first, msgspec.Struct):
        return same(msgspec.structs.astuple(first), msgspec.structs.astuple(second))
    if isinstance(first, np.ndarray):
        return first.shape == second.shape and _same_content(first, second)
    if isinstance(first, (str, bytes)):
        return first == second  # This is for numpy's texts, too: as arrays they would lose NULs at the end.
    if isinstance(first, np.generic):
        return _same_content(first, second)
    if isinstance(first, float):
        return struct.pack("d", first) == struct.pack("d", second)
    return first == second


def _same_content(first: Any, second: Any) -> bool:
    return same_dtype(first.dtype, second.dtype) and first.tobytes() == second.tobytes()


def same_dtype(first: np.dtype[Any], second: np.dtype[Any]) -> bool:
    """Return whether the types are equal with their C types, alignment and titles, which ``==`` ignores."""
    described = (first.str, first.char, first.isalignedstruct, first.names, first.shape, first.itemsize)
    if described != (second.str, second.char, second.isalignedstruct, second.names, second.shape, second.itemsize):
        return False
    if first.subdtype is not None:
        return same_dtype(first.base, second.base)
    if first.names is None:
        return True
    return all(
        first.fields[name][1:] == second.fields[name][1:] and same_dtype(first.fields[name][0], second.fields[name][0])
        for name in first.names
    )
