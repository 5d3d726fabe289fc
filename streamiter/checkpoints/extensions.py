"""What msgpack has no type for: the extension codes of the plain-data encoding, and its frame.

Tuples, structs and ``Columns`` are msgpack arrays that begin with an extension object, the *opening*,
which says what the array is; so their parts lie in the same bytes and are packed and read without a copy.

====  ===========  ==========================================  ==================================
code  name         payload                                     what it is
====  ===========  ==========================================  ==================================
1     TUPLE        empty                                       opening; the items follow
2     STRUCT       msgpack list: class name, field names       opening; the field values follow
3     COLUMNS      empty                                       opening; one map follows, name: array
4     BIG_INT      two's complement, big-endian                an int outside −2⁶³ … 2⁶⁴−1
5     ARRAY        u32 length of dtype, dtype, i64 per axis    a numpy array; its content is a buffer
6     SCALAR       u32 length of dtype, dtype, content         a numpy scalar
7     NUMPY_STR    UTF-8, lone surrogates allowed              a ``numpy.str_``
8     NUMPY_BYTES  the bytes                                   a ``numpy.bytes_``
9     FIXED_VOID   as SCALAR                                   a read-only, so hashable ``numpy.void``
10    DEFERRED     u32 number, from 0 in order                 state that is kept beside the frame
====  ===========  ==========================================  ==================================

The frame is one byte that tells the format, then

- ``PLAIN``: the msgpack object, up to the end;
- ``WITH_BUFFERS``: u64 length of the msgpack object, the object, and the contents of its arrays one after
  another in C order, in the order of their ARRAY objects. So a large array is copied once, not once for
  each layer it lies in. A content of 4096 bytes or more begins at a multiple of 16 from the start of the
  frame, after as many zeros as that takes: so it may also be used where it lies.

Numbers of the frame and the payloads are little-endian. dtypes are as in
:mod:`streamiter.checkpoints.data_types`. The table only ever grows: checkpoints outlive versions.
"""

from __future__ import annotations

from struct import Struct
from typing import Any, Final

import numpy as np

__all__ = [
    "ALIGNED_BYTES",
    "ARRAY",
    "BIG_INT",
    "COLUMNS",
    "DEFERRED",
    "DEFERRED_NUMBER",
    "DEPTH_MAX",
    "DTYPE_LENGTH",
    "FIXED_VOID",
    "NUMPY_BYTES",
    "NUMPY_STR",
    "OBJECT_LENGTH",
    "PLAIN",
    "SCALAR",
    "SCALAR_TYPES",
    "STRUCT",
    "TUPLE",
    "WITH_BUFFERS",
    "gap_before",
    "shape_layout",
]

TUPLE: Final = 1
STRUCT: Final = 2
COLUMNS: Final = 3
BIG_INT: Final = 4
ARRAY: Final = 5
SCALAR: Final = 6
NUMPY_STR: Final = 7
NUMPY_BYTES: Final = 8
FIXED_VOID: Final = 9
DEFERRED: Final = 10

PLAIN: Final = 1
WITH_BUFFERS: Final = 2

DTYPE_LENGTH: Final = Struct("<I")
OBJECT_LENGTH: Final = Struct("<Q")
DEFERRED_NUMBER: Final = Struct("<I")

DEPTH_MAX: Final = 500
"""Levels of nesting: what msgpack packs in every version (511), less the two that ``Columns`` take."""

SCALAR_TYPES: Final[frozenset[type[Any]]] = frozenset(np.dtype(c).type for c in "?bBhHiIlLqQefdgFDGmMV")
"""The classes of numpy scalars that SCALAR holds: all but ``numpy.str_`` and ``numpy.bytes_``."""


ALIGNED_BYTES: Final = 4096
"""The size from which a copy of an array costs more than the objects needed to avoid it."""

# What the largest of numpy's scalars (complex long double) asks for.
_ALIGNMENT: Final = 16


def gap_before(position: int, size_bytes: int) -> int:
    """Zeros in a frame before the content of an array that would begin at ``position``."""
    return -position % _ALIGNMENT if size_bytes >= ALIGNED_BYTES else 0


def shape_layout(dimensions: int) -> Struct:
    """How the shape of an array lies in its header."""
    return Struct(f"<{dimensions}q")
