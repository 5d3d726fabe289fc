"""The format of plain data in bytes: a frame with a msgpack object, and the types that msgpack does not know.

msgpack knows None, bool, int, float, str, bytes, lists and dicts. Other types are written as *extension objects*: a
code and a payload. Tuples, structs and ``Columns`` are msgpack arrays whose first item is an extension object, the
*opening*, which names the type; so their items are packed and read in place, without a copy.

====  ===========  ==========================================  ==================================
code  name         payload                                     meaning
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
10    DEFERRED     u32 number, from 0 in order                 a deferred piece of state, stored apart
11    TIMED        empty                                       opening; a batch and its timestamps follow
====  ===========  ==========================================  ==================================

The first byte of a frame is its format. After it follows

- ``PLAIN``: the msgpack object, up to the end;
- ``WITH_BUFFERS``: u64 length of the msgpack object, the object, and the contents of its arrays one after another
  in C order, in the order of their ARRAY objects. So a large array is copied once, not once for each container around
  it. A content of 4096 bytes or more begins at a multiple of 16 from the start of the frame, after as many zero bytes
  as that takes; so an array can also be used where it is, without a copy.

Numbers of the frame and the payloads are little-endian. The table only ever grows: checkpoints outlive versions.

The second half of this module are the parts that encoding and decoding share: msgpack with exact types and checked
lengths, the registered structs, and the text of numpy dtypes.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from struct import Struct
from typing import Any, Final, TypeAlias

import msgpack  # type: ignore[import-untyped]
import msgspec
import numpy as np

from streamiter.errors import ConfigurationError
from streamiter.values.deferred import PlainValue

TUPLE: Final = 1
STRUCT: Final = 2
RECORD_COLUMNS: Final = 3
BIG_INT: Final = 4
ARRAY: Final = 5
SCALAR: Final = 6
NUMPY_STR: Final = 7
NUMPY_BYTES: Final = 8
FIXED_VOID: Final = 9
DEFERRED: Final = 10
TIMED: Final = 11

PLAIN: Final = 1
WITH_BUFFERS: Final = 2

DTYPE_LENGTH: Final = Struct("<I")
OBJECT_LENGTH: Final = Struct("<Q")
DEFERRED_NUMBER: Final = Struct("<I")

DEPTH_MAX: Final = 500
"""Levels of nesting: what msgpack packs in every version (511), less the two that ``Columns`` take."""

SCALAR_TYPES: Final[frozenset[type[object]]] = frozenset(np.dtype(c).type for c in "?bBhHiIlLqQefdgFDGmMV")
"""The classes of numpy scalars that are written as SCALAR: all but ``numpy.str_`` and ``numpy.bytes_``."""

ALIGNED_BYTES: Final = 4096
"""From this size on, copying an array costs more than the objects that avoid the copy."""

# The alignment of the largest numpy scalar (complex long double).
_ALIGNMENT: Final = 16


def gap_before(position: int, size_bytes: int) -> int:
    """Return the number of zero bytes before the content of an array that would begin at ``position``."""
    return -position % _ALIGNMENT if size_bytes >= ALIGNED_BYTES else 0


def shape_layout(dimensions: int) -> Struct:
    """Return the layout of an array's shape in its header."""
    return Struct(f"<{dimensions}q")


# ---- msgpack

Extension: TypeAlias = Any
"""A msgpack extension object: a code from 0 to 127 and a payload."""

PACKED_UNASKED: Final[frozenset[type[object]]] = frozenset({bytearray, memoryview, msgpack.ExtType, msgpack.Timestamp})
"""Types that msgpack packs as another type, even when strict, or reads without a hook."""

UNICODE_ERRORS: Final = "surrogatepass"
"""UTF-8 plus lone surrogates, which Python strings may hold (file names, JSON escapes)."""

# By default, a packer allocates 256 KiB, and the system pays for each page. Most encodings are of one record; for a
# large one, the buffer is doubled, which costs little.
_FIRST_BUFFER_BYTES: Final = 4096


Replace: TypeAlias = Callable[[PlainValue], PlainValue]
"""A function that returns a replacement for a value that msgpack does not know."""


def extension(code: int, payload: bytes) -> Extension:
    # ExtType is a named tuple; its own constructor checks the arguments in Python, which takes long.
    return tuple.__new__(msgpack.ExtType, (code, payload))


def pack(value: PlainValue, default: Replace | None = None, *, unicode_errors: str = UNICODE_ERRORS) -> bytes:
    """Return the msgpack object of ``value``.

    With ``unicode_errors="strict"`` strings take two thirds of the time, and a lone surrogate raises
    ``UnicodeEncodeError``.
    """
    packed: bytes = _packer(default, unicode_errors).pack(value)
    return packed


def pack_each(values: Iterable[PlainValue], default: Replace | None = None) -> Iterator[bytes]:
    """Give the msgpack object of each value; faster than :func:`pack` for many small ones."""
    return map(_packer(default, UNICODE_ERRORS).pack, values)


def joined(packed: Sequence[bytes]) -> bytes:
    """Return the msgpack object of the list of these values, each the msgpack object of one.

    >>> unpack(joined([pack(1), pack("a")]), lambda code, payload: None)
    [1, 'a']
    """
    return b"".join((_LIST_HEAD.pack(_LIST, len(packed)), *packed))


# msgpack's "array 32": its code, then the number of items.
_LIST_HEAD: Final = Struct(">BI")
_LIST: Final = 0xDD


def _packer(default: Replace | None, unicode_errors: str) -> msgpack.Packer:
    return msgpack.Packer(
        strict_types=True, default=default, unicode_errors=unicode_errors, buf_size=_FIRST_BUFFER_BYTES
    )


def unpack(
    packed: bytes | memoryview,
    ext_hook: Callable[[int, bytes], PlainValue],
    list_hook: Callable[[list[PlainValue]], PlainValue] | None = None,
) -> PlainValue:
    """Return the value of one msgpack object. Raises ``ValueError``, or an error of the hooks, if it is damaged."""
    _check_lengths(packed)
    return msgpack.unpackb(
        packed, ext_hook=ext_hook, list_hook=list_hook, strict_map_key=False, unicode_errors=UNICODE_ERRORS
    )


def _check_lengths(packed: bytes | memoryview) -> None:
    """Raise ``ValueError`` unless every part is there, so that a forged length allocates no memory.

    ``unpackb`` itself accepts an array's length up to the number of all bytes, once for each level.
    """
    unpacker = msgpack.Unpacker(max_buffer_size=max(1, len(packed)), read_size=1)
    unpacker.feed(packed)
    try:
        unpacker.skip()
    except msgpack.OutOfData:
        raise ValueError("it ends early") from None
    if unpacker.tell() != len(packed):
        raise ValueError(f"{len(packed) - unpacker.tell()} bytes follow its end")


# ---- structs


class StructRegistry:
    """The ``msgspec.Struct`` classes that an encoding knows."""

    def __init__(self) -> None:
        self.classes: dict[str, type[msgspec.Struct]] = {}
        """The classes by name."""
        self.openings: dict[type[object], Extension] = {}
        """The opening of each class: the first item of its encodings."""

    def register(self, struct: type[msgspec.Struct]) -> None:
        """Add a class; no effect if it is known. Raises ``ConfigurationError`` for another class of a known name."""
        if not (isinstance(struct, type) and issubclass(struct, msgspec.Struct)):
            raise ConfigurationError(
                f"structs of plain data: expected subclasses of msgspec.Struct, given {struct!r}; "
                "other classes cannot be stored: make it a Struct, or convert its instances to dicts"
            )
        known = self.classes.setdefault(struct.__name__, struct)
        if known is not struct:
            raise ConfigurationError(
                f"structs of plain data: expected one class of each name, given {_full_name(known)} and "
                f"{_full_name(struct)}; stored data names a struct by its class name alone: rename one"
            )
        self.openings[struct] = _opening(struct)

    def forget_after(self, count: int) -> None:
        """Remove all but the first ``count`` classes."""
        while len(self.classes) > count:
            _, struct = self.classes.popitem()
            del self.openings[struct]


def _opening(struct: type[msgspec.Struct]) -> Extension:
    return extension(STRUCT, pack([struct.__name__, *struct.__struct_fields__]))


def _full_name(struct: type[msgspec.Struct]) -> str:
    return f"{struct.__module__}.{struct.__qualname__}"


# ---- dtypes

Dtype = np.dtype[Any]

# When bytes are read, np.dtype() is called only with text of this form: it would also accept comma lists, field
# specifications and "O", and an object array over foreign bytes crashes the interpreter.
_TEXT: Final = re.compile(r"[<>|](?:[biufcSUV]\d{1,10}|[mM]8(?:\[\d{0,10}[A-Za-zμ]{1,7}(?:/\d{1,10})?\])?)")

# C types that share their text with another one: on 64-bit Linux "q" (long long) and "l" (long) are both <i8,
# yet their scalars are of different classes.
_AMBIGUOUS: Final = frozenset(char for char in "bBhHiIlLqQefdgFDG" if np.dtype(np.dtype(char).str).char != char)

# numpy's own types end at NPY_HALF = 23; higher numbers are types of other packages, and strings of variable width.
_LAST_BUILTIN: Final = 23


def dtype_refusal(dtype: Dtype) -> str | None:
    """Return why arrays of this dtype are not plain data, and what to do instead; None if they are."""
    if dtype.kind == "O":
        return "which holds arbitrary objects; give the array a numeric or text dtype, or make it a list"
    if dtype.num > _LAST_BUILTIN:
        return "which is no fixed-size type of numpy's own; convert it, for example with .astype('U')"
    if dtype.subdtype is not None:
        return dtype_refusal(dtype.subdtype[0])
    if dtype.names is None:
        return None
    if dtype.type is not np.void:
        return f"whose records are {dtype.type.__name__}s; use a plain structured dtype: .astype(dtype.descr)"
    if not all(title is None or type(title) is str for title in _titles(dtype)):
        return "with a field title that is not a str; name fields by str alone"
    refusals = (dtype_refusal(_field(dtype, name)[0]) for name in dtype.names)
    return next((refusal for refusal in refusals if refusal), None)


def pack_dtype(dtype: Dtype) -> bytes:
    """Return the bytes of a dtype that :func:`dtype_refusal` does not refuse.

    They are exact, need no pickle, and are safe to read when damaged. For most dtypes they are its text (``<f8``,
    ``>i4``, ``<U5``, ``<M8[25s]``). For the others they are a list:

    =======================================================  ===============================================
    ``["char", text, char]``                                 two C types of one layout (``long``, ``long long``)
    ``["array", element, shape]``                            a field that is an array itself
    ``["fields", names, formats, offsets, titles, itemsize,  a structured dtype, with gaps, overlaps and
    aligned]``                                               alignment as they are
    =======================================================  ===============================================

    A dtype's ``metadata`` is not kept: numpy itself does not count it as part of the type.

    >>> pack_dtype(np.dtype(">f4")), unpack_dtype(b">f4")
    (b'>f4', dtype('>f4'))
    """
    plain = _to_plain(dtype)
    if isinstance(plain, str):
        return plain.encode("ascii")
    return pack(plain)


def unpack_dtype(data: bytes) -> Dtype:
    """Return the dtype of these bytes. Raises ``ValueError``, or an error of numpy, if they are damaged."""
    # Text is ASCII; a msgpack list begins with a byte from 0x90 up.
    is_text = data[:1] < b"\x80"
    dtype = _from_plain(data.decode("ascii") if is_text else unpack(data, _no_extension))
    # The texts are checked too; but objects made of foreign bytes would crash the interpreter.
    if dtype.hasobject or dtype_refusal(dtype):
        raise ValueError(f"{dtype} is not a dtype of plain data")
    return dtype


def _to_plain(dtype: Dtype) -> str | list[object]:
    if dtype.subdtype is not None:
        element, shape = dtype.subdtype
        return ["array", _to_plain(element), list(shape)]
    if dtype.names is not None:
        return _fields_to_plain(dtype, dtype.names)
    if dtype.char in _AMBIGUOUS:
        return ["char", dtype.str, dtype.char]
    return dtype.str


def _fields_to_plain(dtype: Dtype, names: tuple[str, ...]) -> list[Any]:
    formats = [_to_plain(_field(dtype, name)[0]) for name in names]
    offsets = [_field(dtype, name)[1] for name in names]
    return ["fields", list(names), formats, offsets, _titles(dtype), dtype.itemsize, dtype.isalignedstruct]


def _field(dtype: Dtype, name: str) -> tuple[Any, ...]:
    assert dtype.fields is not None
    return dtype.fields[name]


def _titles(dtype: Dtype) -> list[object]:
    fields = [_field(dtype, name) for name in dtype.names or ()]
    return [field[2] if len(field) > 2 else None for field in fields]


def _from_plain(plain: object) -> Dtype:
    match plain:
        case str():
            return _from_text(plain)
        case ["char", str() as text, str() as char]:
            return _from_char(_from_text(text), char)
        case ["array", element, [*shape]]:
            return np.dtype((_from_plain(element), tuple(shape)))
        case ["fields", [*names], [*formats], [*offsets], [*titles], int() as itemsize, bool() as aligned]:
            layout = {"names": names, "formats": [_from_plain(one) for one in formats], "offsets": offsets}
            if any(title is not None for title in titles):
                layout["titles"] = titles
            return np.dtype(layout | {"itemsize": itemsize}, align=aligned)  # type: ignore[call-overload,no-any-return]
    raise ValueError(f"{plain!r} does not describe a dtype")


def _from_text(text: str) -> Dtype:
    if not _TEXT.fullmatch(text):
        raise ValueError(f"{text!r} is not a dtype")
    return np.dtype(text)


def _from_char(dtype: Dtype, char: str) -> Dtype:
    """Return the dtype of the C type ``char`` if it has this layout, which may differ on another platform."""
    if char not in _AMBIGUOUS:
        return dtype
    exact = np.dtype(char).newbyteorder(dtype.byteorder)
    return exact if exact.str == dtype.str else dtype


def _no_extension(code: int, _data: bytes) -> object:
    raise ValueError(f"extension {code} within a dtype")
