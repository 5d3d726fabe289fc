"""One call of ``PlainData.encode``: a value becomes the bytes of one frame."""

from __future__ import annotations

import gc
from collections.abc import Container
from types import NoneType
from typing import Any, Final

import msgspec
import numpy as np
import numpy.typing as npt

from streamiter.checkpoints import extensions
from streamiter.checkpoints.dtypes import dtype_refusal, pack_dtype
from streamiter.checkpoints.extensions import DEPTH_MAX, SCALAR_TYPES
from streamiter.checkpoints.packing import PACKED_UNASKED, UNICODE_ERRORS, Extension, extension, pack
from streamiter.checkpoints.structs import StructRegistry
from streamiter.deferred import Deferred
from streamiter.records import Columns

__all__ = ["NotPlain", "encode_frame", "holds_foreign"]

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
    encoder = _Encoder(structs, deferred)
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


class _Encoder:
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
