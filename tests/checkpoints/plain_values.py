"""Plain data for property tests, and what it means that two values are exactly the same."""

from __future__ import annotations

import struct
from typing import Any

import hypothesis.extra.numpy as hnp
import msgspec
import numpy as np
from hypothesis import strategies as st

from streamiter.records import Columns


class Click(msgspec.Struct):
    user: str
    item: int = 0
    more: Any = None


class Point(msgspec.Struct, frozen=True, kw_only=True):
    x: float
    y: float = 0.0


TEXT = st.text(st.characters(exclude_categories=()))  # with lone surrogates
INTS = st.integers() | st.sampled_from(
    [2**63 - 1, 2**63, 2**64 - 1, 2**64, -(2**63), -(2**63) - 1, 1 << 4000]
)
ATOMS = st.none() | st.booleans() | INTS | st.floats() | TEXT | st.binary()

SCALAR_DTYPES = (
    hnp.scalar_dtypes()
    | st.sampled_from([np.dtype(char) for char in "qQgG"])
    | st.sampled_from([np.dtype("M8"), np.dtype("m8"), np.dtype("<M8[25us]"), np.dtype(">m8[3h]")])
)
PADDED = np.dtype({"names": ["a", "b"], "formats": ["i1", "<i4"], "offsets": [4, 0], "itemsize": 12})
ALIGNED = np.dtype([("a", "i1"), ("b", "f8"), ("c", "q", (2,))], align=True)
TITLED = np.dtype([(("long title", "a"), ">i2"), ("b", "U3")])
STRUCTURED_DTYPES = hnp.nested_dtypes() | st.sampled_from([PADDED, ALIGNED, TITLED, np.dtype([])])
SHAPES = hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=4)


@st.composite
def raw_arrays(draw: st.DrawFn, dtypes: st.SearchStrategy[np.dtype[Any]]) -> np.ndarray[Any, Any]:
    """An array of any bits: every NaN, every padding."""
    dtype, shape = draw(dtypes), draw(SHAPES)
    size = int(np.prod(shape)) * dtype.itemsize
    return np.ndarray(shape, dtype, draw(st.binary(min_size=size, max_size=size))).copy()


BITS = st.sampled_from(
    [np.dtype(text) for text in ("<f4", ">f8", "<i2", ">u8", "<c16", "|S3", "|V5", "<M8[ns]")]
)
ARRAYS = (
    hnp.arrays(SCALAR_DTYPES, SHAPES)
    | hnp.arrays(STRUCTURED_DTYPES.filter(lambda dtype: dtype.subdtype is None), SHAPES)
    | raw_arrays(BITS | st.sampled_from([PADDED, ALIGNED]))
)
SCALARS = ARRAYS.filter(lambda array: array.size > 0).map(lambda array: array.reshape(-1)[0])


@st.composite
def columns(draw: st.DrawFn) -> Columns:
    length = draw(st.integers(0, 4))
    shapes = st.sampled_from([(length,), (length, 2), (length, 0)])
    arrays = hnp.arrays(SCALAR_DTYPES, shapes)
    return Columns(draw(st.dictionaries(TEXT, arrays, min_size=1, max_size=3)))


def _is_hashable(value: Any) -> bool:
    try:
        hash(value)
    except TypeError:
        return False
    return True


POINTS = st.builds(Point, x=st.floats(), y=st.floats())
KEYS = st.recursive(
    ATOMS | SCALARS.filter(_is_hashable) | POINTS,
    lambda inner: st.lists(inner, max_size=3).map(tuple),
    max_leaves=4,
)


def _containers(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=4).map(tuple)
        | st.dictionaries(KEYS, inner, max_size=4)
        | st.builds(Click, user=TEXT, item=INTS, more=inner)
    )


PLAIN_VALUES = st.recursive(ATOMS | ARRAYS | SCALARS | columns() | POINTS, _containers, max_leaves=12)


def same(first: Any, second: Any) -> bool:
    """Whether two values are equal to the bit, with equal types all the way down."""
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
        return first == second  # also numpy's: through an array they would lose NULs at the end
    if isinstance(first, np.generic):
        return _same_content(first, second)
    if isinstance(first, float):
        return struct.pack("d", first) == struct.pack("d", second)
    return first == second


def _same_content(first: Any, second: Any) -> bool:
    return same_dtype(first.dtype, second.dtype) and first.tobytes() == second.tobytes()


def same_dtype(first: np.dtype[Any], second: np.dtype[Any]) -> bool:
    """Stricter than ``==``: the C types, the alignment and the titles count, too."""
    described = (first.str, first.char, first.isalignedstruct, first.names, first.shape, first.itemsize)
    if described != (
        second.str,
        second.char,
        second.isalignedstruct,
        second.names,
        second.shape,
        second.itemsize,
    ):
        return False
    if first.subdtype is not None:
        return same_dtype(first.base, second.base)
    if first.names is None:
        return True
    return all(
        first.fields[name][1:] == second.fields[name][1:]
        and same_dtype(first.fields[name][0], second.fields[name][0])
        for name in first.names
    )
