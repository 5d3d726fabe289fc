"""One call of ``PlainData.encode``: a value becomes the bytes of one frame."""

from __future__ import annotations

import gc
from collections.abc import Container, Iterator
from dataclasses import dataclass
from types import NoneType
from typing import Any, Final

import msgspec
import numpy as np
import numpy.typing as npt

from streamiter.checkpoints import extensions
from streamiter.checkpoints.data_types import (
    PACKED_UNASKED,
    UNICODE_ERRORS,
    Extension,
    StructRegistry,
    dtype_refusal,
    extension,
    pack,
    pack_dtype,
)
from streamiter.checkpoints.extensions import DEPTH_MAX, SCALAR_TYPES
from streamiter.deferred import Deferred
from streamiter.records import Columns

__all__ = [
    "PLAIN_TYPES",
    "encode_frame",
    "find_refusal",
    "hint_for",
    "holds_foreign",
    "shown",
    "type_name",
]


Array = npt.NDArray[Any]

_TUPLE_OPENING: Final = extension(extensions.TUPLE, b"")
_COLUMNS_OPENING: Final = extension(extensions.COLUMNS, b"")

_CONTAINERS: Final = frozenset({list, tuple, dict})
_LEAVES: Final = (
    frozenset({NoneType, bool, int, float, str, bytes, np.ndarray, np.str_, np.bytes_}) | SCALAR_TYPES
)


class NotPlain(Exception):
    """A value is not plain data; which one and why is found out by a second, slower look."""


def encode_frame(value: Any, structs: StructRegistry, deferred: list[Deferred] | None = None) -> bytes:
    """The frame of ``value``; raises :class:`NotPlain`, or what msgpack raises for what it cannot hold.

    What is ``Deferred`` is appended to ``deferred``, and its number written in its place; without such a list
    it is not plain.
    """
    try:
        return _encode_frame(value, structs, "strict", deferred)
    except UnicodeEncodeError:
        # From the beginning: the encoder has collected arrays by now.
        if deferred is not None:
            deferred.clear()
        return _encode_frame(value, structs, UNICODE_ERRORS, deferred)


def _encode_frame(
    value: Any, structs: StructRegistry, unicode_errors: str, deferred: list[Deferred] | None
) -> bytes:
    encoder = _PlainDataEncoder(structs, deferred)
    packed = pack(value, encoder.default, unicode_errors=unicode_errors)
    # After packing, which has made sure that the value ends somewhere.
    if holds_foreign(value, structs.openings):
        raise NotPlain
    if deferred and len(set(map(id, deferred))) < len(deferred):
        raise NotPlain
    if not encoder.buffers:
        return bytes((extensions.PLAIN,)) + packed
    head = bytes((extensions.WITH_BUFFERS,)) + extensions.OBJECT_LENGTH.pack(len(packed))
    return b"".join((head, packed, *_with_gaps(encoder.buffers, len(head) + len(packed))))


def _with_gaps(buffers: list[bytes | memoryview], position: int) -> list[bytes | memoryview]:
    """The buffers and the zeros between them, the first at ``position`` in the frame."""
    if max(map(len, buffers)) < extensions.ALIGNED_BYTES:
        return buffers
    parts: list[bytes | memoryview] = []
    for buffer in buffers:
        gap = extensions.gap_before(position, len(buffer))
        if gap:
            parts.append(bytes(gap))
        parts.append(buffer)
        position += gap + len(buffer)
    return parts


class _PlainDataEncoder:
    """Turns what msgpack asks about into what it knows, and collects the contents of arrays."""

    __slots__ = ("_deferred", "_headers", "_openings", "buffers")

    def __init__(self, structs: StructRegistry, deferred: list[Deferred] | None) -> None:
        self._openings = structs.openings
        self._deferred = deferred
        # The dtypes of one value are mostly the same few.
        self._headers: dict[tuple[np.dtype[Any], str], bytes] = {}
        self.buffers: list[bytes | memoryview] = []

    def default(self, value: Any) -> Any:
        """What to pack in place of ``value``."""
        kind = type(value)
        if kind is tuple:
            return [_TUPLE_OPENING, *value]
        if kind is np.ndarray:
            return self._array(value)
        if kind in SCALAR_TYPES:
            code = extensions.FIXED_VOID if _is_fixed_void(value) else extensions.SCALAR
            return extension(code, self._dtype_header(value.dtype) + value.tobytes())
        if kind in self._openings:
            return [self._openings[kind], *msgspec.structs.astuple(value)]
        if self._deferred is not None and isinstance(value, Deferred):
            self._deferred.append(value)
            return extension(extensions.DEFERRED, extensions.DEFERRED_NUMBER.pack(len(self._deferred) - 1))
        return _rarely_met(value, kind)

    def _array(self, array: Array) -> Extension:
        shape = extensions.shape_layout(array.ndim).pack(*array.shape)
        header = self._dtype_header(array.dtype) + shape
        self.buffers.append(_content(array))
        return extension(extensions.ARRAY, header)

    def _dtype_header(self, dtype: np.dtype[Any]) -> bytes:
        # With its character: dtypes of one layout are equal, and structured ones may differ within.
        key = dtype, dtype.char
        header = self._headers.get(key)
        if header is None or dtype.names is not None:
            header = _dtype_header(dtype)
            self._headers[key] = header
        return header


def _rarely_met(value: Any, kind: type[Any]) -> Any:
    if kind is int:
        # One bit for the sign; msgpack asks only where 64 bits are too few.
        content = value.to_bytes(value.bit_length() // 8 + 1, "big", signed=True)
        return extension(extensions.BIG_INT, content)
    if kind is Columns:
        return [_COLUMNS_OPENING, _columns(value)]
    if kind is np.str_:
        # The base class's: numpy's own methods lose NULs at the end.
        return extension(extensions.NUMPY_STR, str.encode(value, "utf-8", UNICODE_ERRORS))
    if kind is np.bytes_:
        return extension(extensions.NUMPY_BYTES, bytes(value))
    raise NotPlain


def _columns(columns: Columns) -> dict[str, Array]:
    if any(type(name) is not str for name in columns.names):
        raise NotPlain
    return columns.arrays


def _is_fixed_void(scalar: np.generic) -> bool:
    return type(scalar) is np.void and not scalar.flags.writeable


def _dtype_header(dtype: np.dtype[Any]) -> bytes:
    if dtype_refusal(dtype):
        raise NotPlain
    packed = pack_dtype(dtype)
    return extensions.DTYPE_LENGTH.pack(len(packed)) + packed


def _content(array: Array) -> bytes | memoryview:
    if array.nbytes < extensions.ALIGNED_BYTES or not array.flags.c_contiguous:
        return array.tobytes()
    # As bytes: numpy exports no buffer of datetimes.
    return array.reshape(-1).view(np.uint8).data


def holds_foreign(value: Any, structs: Container[type[Any]]) -> bool:
    """Whether a type that msgpack knows and plain data does not lies in ``value``, or too many levels.

    Looks at whole levels at once: ``gc.get_referents`` gives what lists, tuples and dicts hold several
    times faster than iterating them would. (Of a dict with only str keys it gives the values alone.)
    """
    level: list[Any] = [value]
    for _ in range(DEPTH_MAX + 1):
        kinds = set(map(type, level))
        if not PACKED_UNASKED.isdisjoint(kinds):
            return True
        level = _inside(level, kinds, structs)
        if not level:
            return False
    return True


def _inside(level: list[Any], kinds: set[type[Any]], structs: Container[type[Any]]) -> list[Any]:
    """What the containers and structs of a level hold."""
    parts: list[Any] = []
    if not kinds <= _CONTAINERS | _LEAVES:
        parts += [part for one in level if type(one) in structs for part in msgspec.structs.astuple(one)]
        # Of other objects the garbage collector would also give the class, and with it the world.
        level = [one for one in level if type(one) in _CONTAINERS]
    if not _CONTAINERS.isdisjoint(kinds):
        parts += gc.get_referents(*level)
    return parts


PLAIN_TYPES: Final = (
    "None, bool, int, float, str, bytes, tuple, list, dict, numpy arrays and scalars, Columns, "
    "registered msgspec.Structs"
)

# A path is for reading: longer ones say no more.
_KEY_CHARACTERS: Final = 40
_PATH_CHARACTERS: Final = 200

_TWICE: Final = "expected each Deferred once, given the same object again; it can be read once: make another"

_ATOMS: Final = frozenset({NoneType, bool, int, float, str, bytes, np.str_, np.bytes_})

# By name, so that nothing has to be imported for them; the first that is the class or a base of it counts.
_HINTS: Final = {
    "datetime.datetime": "convert it, for example to a number of milliseconds",
    "datetime.date": "convert it, for example to text with .isoformat()",
    "datetime.time": "convert it, for example to text with .isoformat()",
    "datetime.timedelta": "convert it, for example to a number of milliseconds",
    "decimal.Decimal": "convert it, for example to str, or to an int of the smallest unit",
    "fractions.Fraction": "convert it, for example to a tuple of two ints",
    "uuid.UUID": "convert it, for example to str",
    "pathlib.PurePath": "convert it to str",
    "pathlib._local.PurePath": "convert it to str",  # its name in Python 3.13
    "enum.Enum": "give its .value",
    "set": "convert it, for example to a sorted list",
    "frozenset": "convert it, for example to a sorted tuple",
    "bytearray": "convert it with bytes(...)",
    "memoryview": "convert it with bytes(...)",
    "complex": "convert it to numpy.complex128 or a tuple of two floats",
    "range": "convert it with list(...)",
    "msgspec.Struct": "register the class: PlainData(structs=[...]) or register(...)",
    "streamiter.deferred.Deferred": "only what an operator's snapshot() gives may hold it",
    "numpy.ma.MaskedArray": "fill it (.filled(...)) or give the mask as an array of its own",
    "numpy.ndarray": "convert it with numpy.asarray(...)",
    "dict": "convert it with dict(...)",
    "tuple": "convert it with tuple(...), or to a dict",
    "list": "convert it with list(...)",
    "str": "convert it with str.__str__(...)",
    "bytes": "convert it with bytes(...)",
    "int": "convert it with int(...)",
    "float": "convert it with float(...)",
}


@dataclass(frozen=True, slots=True)
class Refusal:
    """``path`` leads from the value to the part that is at fault, as Python would write it.

    Where a value stops being plain data, why, and what to do: the slow look that writes the error.
    """

    path: str
    problem: str


@dataclass(frozen=True, slots=True)
class _ValuePath:
    """A part of the value and how it was reached; a path is written only for the part at fault."""

    part: Any
    step: str
    outer: _ValuePath | None
    depth: int

    def inside(self, part: Any, step: str) -> _ValuePath:
        return _ValuePath(part, step, self, self.depth + 1)

    def path(self) -> str:
        steps = [self.step]
        place = self.outer
        while place is not None:
            steps.append(place.step)
            place = place.outer
        return _shortened("".join(reversed(steps)), _PATH_CHARACTERS)


def find_refusal(
    value: Any, structs: Container[type[Any]], *, may_be_deferred: bool = False
) -> Refusal | None:
    """The first part of ``value``, in its own order, that is not plain data, nor ``Deferred`` where that may be.

    >>> find_refusal([1, {"user": {2, 3}}], structs=()).path
    '[1]["user"]'
    """
    waiting = [_ValuePath(value, "", None, 0)]
    deferred: set[int] | None = set() if may_be_deferred else None
    while waiting:
        place = waiting.pop()
        if deferred is not None and isinstance(place.part, Deferred):
            if id(place.part) in deferred:
                return Refusal(place.path(), _TWICE)
            deferred.add(id(place.part))
            continue
        problem = _problem(place, structs)
        if problem is not None:
            return Refusal(place.path(), problem)
        waiting += reversed(list(_parts(place, structs)))
    return None


def _problem(place: _ValuePath, structs: Container[type[Any]]) -> str | None:
    if place.depth > DEPTH_MAX:
        return f"expected at most {DEPTH_MAX} levels of nesting, given more; does it contain itself?"
    return _part_problem(place.part, structs)


def _part_problem(part: Any, structs: Container[type[Any]]) -> str | None:
    kind = type(part)
    if kind in _ATOMS or kind in (list, tuple, dict):
        return None
    if kind in structs:
        return _field_problem(part)
    if kind is np.ndarray or kind in SCALAR_TYPES:
        return _dtype_problem(part)
    if kind is Columns:
        return _names_problem(part)
    return f"expected plain data ({PLAIN_TYPES}), given {type_name(kind)}; {hint_for(kind)}"


def _dtype_problem(value: Any) -> str | None:
    refusal = dtype_refusal(value.dtype)
    if refusal is None:
        return None
    given = f"{type_name(type(value))} of dtype {value.dtype}"
    return f"expected plain data ({PLAIN_TYPES}), given {given}, {refusal}"


def _field_problem(struct: msgspec.Struct) -> str | None:
    missing = [name for name in struct.__struct_fields__ if not hasattr(struct, name)]
    if not missing:
        return None
    return f"expected every field of {type_name(type(struct))} to be set, given none for {missing[0]}; set it"


def _names_problem(columns: Columns) -> str | None:
    strange = [name for name in columns.names if type(name) is not str]
    if not strange:
        return None
    return f"expected columns named by str, given the name {shown(strange[0])}; convert it with str(...)"


def _parts(place: _ValuePath, structs: Container[type[Any]]) -> Iterator[_ValuePath]:
    part = place.part
    kind = type(part)
    if kind is list or kind is tuple:
        yield from (place.inside(item, f"[{index}]") for index, item in enumerate(part))
    elif kind is dict:
        for key, item in part.items():
            yield place.inside(key, f".key({shown(key)})")
            yield place.inside(item, f"[{shown(key)}]")
    elif kind is Columns:
        yield from (place.inside(array, f"[{shown(name)}]") for name, array in part.arrays.items())
    elif kind in structs:
        fields = zip(part.__struct_fields__, msgspec.structs.astuple(part), strict=True)
        yield from (place.inside(item, f".{name}") for name, item in fields)


def shown(key: Any) -> str:
    """A dict key for a path: short, strings with double quotes; never raises."""
    try:
        text = repr(key)
    except Exception:  # a user's own __repr__, or an int of thousands of digits
        return f"<{type_name(type(key))}>"
    if type(key) is str and text.startswith("'") and '"' not in text:
        text = f'"{text[1:-1]}"'
    return _shortened(text, _KEY_CHARACTERS)


def _shortened(text: str, characters: int) -> str:
    """The beginning and the end, at most ``characters`` of each."""
    return text if len(text) <= 2 * characters else f"{text[:characters]}…{text[-characters:]}"


def type_name(kind: type[Any]) -> str:
    """The name of a class as a user would import it.

    >>> type_name(int), type_name(Columns)
    ('int', 'streamiter.records.Columns')
    """
    if kind is NoneType:
        return "None"
    if kind.__module__ == "builtins":
        return kind.__qualname__
    return f"{kind.__module__}.{kind.__qualname__}"


def hint_for(kind: type[Any]) -> str:
    """What to do with a value of a class that is not plain data."""
    names = {type_name(base) for base in kind.__mro__}
    return next((hint for name, hint in _HINTS.items() if name in names), "convert it to one of these types")
