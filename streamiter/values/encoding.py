"""The encoding and the decoding of one frame of plain data.

:func:`encode_frame` packs a value with msgpack; :class:`_PlainDataEncoder` replaces the types that msgpack does not
know by extension objects and collects the contents of arrays. :func:`decode_frame` is the reverse. It never trusts its
bytes: every length is checked before memory is allocated, and damaged bytes raise an error. The format of a frame is in
:mod:`~streamiter.values.plain_format`. Users of the encoding call
:class:`~streamiter.values.plain_data.PlainData`.
"""

from __future__ import annotations

import gc
import math
from collections.abc import Callable, Container, Iterable, Sequence
from dataclasses import dataclass
from types import NoneType
from typing import Final

import msgspec
import numpy as np

from streamiter.values import plain_format
from streamiter.values.deferred import Deferred, PlainValue
from streamiter.values.numbers import Array
from streamiter.values.plain_format import (
    DEPTH_MAX,
    PACKED_UNASKED,
    SCALAR_TYPES,
    UNICODE_ERRORS,
    Dtype,
    Extension,
    StructRegistry,
    dtype_refusal,
    extension,
    joined,
    pack,
    pack_dtype,
    pack_each,
    unpack,
    unpack_dtype,
)
from streamiter.values.records import ORDER_COLUMNS, Columns, TimedBatch

_TUPLE_OPENING: Final = extension(plain_format.TUPLE, b"")
_COLUMNS_OPENING: Final = extension(plain_format.RECORD_COLUMNS, b"")
_TIMED_OPENING: Final = extension(plain_format.TIMED, b"")

_CONTAINERS: Final = frozenset({list, tuple, dict})
_LEAVES: Final = frozenset({NoneType, bool, int, float, str, bytes, np.ndarray, np.str_, np.bytes_}) | SCALAR_TYPES


class NotPlain(Exception):
    """A value is not plain data; ``find_refusal`` of ``plain_data`` then finds the part at fault and the reason."""


Parts = list[bytes | memoryview]
"""A frame in pieces. A piece of a large array is the array's own memory, which must not change while it is in use."""


def encode_frame(value: PlainValue, structs: StructRegistry, deferred: list[Deferred] | None = None) -> bytes:
    """Return the frame of ``value``, as :func:`encode_parts` does in pieces."""
    return b"".join(encode_parts(value, structs, deferred))


def encode_parts(value: PlainValue, structs: StructRegistry, deferred: list[Deferred] | None = None) -> Parts:
    """Return the frame of ``value`` in pieces. Raises :class:`NotPlain`, or an error of msgpack, for a value that is
    not plain data.

    Each ``Deferred`` in the value is appended to ``deferred``, and its number is written in its place; without that
    list, a ``Deferred`` is not plain data.
    """
    try:
        return _encode_parts(value, structs, "strict", deferred)
    except UnicodeEncodeError:
        # Start again with a new encoder: this one has already collected arrays.
        if deferred is not None:
            deferred.clear()
        return _encode_parts(value, structs, UNICODE_ERRORS, deferred)


def _encode_parts(
    value: PlainValue, structs: StructRegistry, unicode_errors: str, deferred: list[Deferred] | None
) -> Parts:
    encoder = _PlainDataEncoder(structs, deferred)
    packed = pack(value, encoder.default, unicode_errors=unicode_errors)
    # After packing, which has refused a value that contains itself.
    if holds_foreign(value, structs.openings):
        raise NotPlain
    if deferred and len(set(map(id, deferred))) < len(deferred):
        raise NotPlain
    if not encoder.buffers:
        return [bytes((plain_format.PLAIN,)), packed]
    head = bytes((plain_format.WITH_BUFFERS,)) + plain_format.OBJECT_LENGTH.pack(len(packed))
    return [head, packed, *_with_gaps(encoder.buffers, len(head) + len(packed))]


_PLAIN_BYTE: Final = bytes((plain_format.PLAIN,))


def encode_frames(values: list[PlainValue], structs: StructRegistry) -> list[bytes]:
    """Return the frame of each value; with many small values several times faster than one by one.

    Raises as :func:`encode_parts` does, and also :class:`NotPlain` for values with arrays.
    """
    encoder = _PlainDataEncoder(structs, None)
    packed = list(pack_each(values, encoder.default))
    if encoder.buffers or holds_foreign(values, structs.openings):
        raise NotPlain
    return [_PLAIN_BYTE + each for each in packed]


def decode_frames(frames: Sequence[bytes], structs: StructRegistry) -> list[PlainValue]:
    """Return the value of each frame; the reverse of :func:`encode_frames`, and as fast. Raises ``ValueError``, or an
    error of msgpack, also for frames with arrays.
    """
    if any(frame[0] != plain_format.PLAIN for frame in frames):
        raise ValueError("some have arrays")
    values = decode_frame(_PLAIN_BYTE + joined([frame[1:] for frame in frames]), structs)
    if type(values) is not list or len(values) != len(frames):
        raise ValueError("they are not one value each")
    return values


def _with_gaps(buffers: Parts, position: int) -> Parts:
    """Return the buffers with the zero bytes between them; the first buffer is at ``position`` in the frame."""
    if max(map(len, buffers)) < plain_format.ALIGNED_BYTES:
        return buffers
    parts: Parts = []
    for buffer in buffers:
        gap = plain_format.gap_before(position, len(buffer))
        if gap:
            parts.append(bytes(gap))
        parts.append(buffer)
        position += gap + len(buffer)
    return parts


class _PlainDataEncoder:
    """Replaces values that msgpack does not know, and collects the contents of arrays."""

    __slots__ = ("_deferred", "_headers", "_openings", "buffers")

    def __init__(self, structs: StructRegistry, deferred: list[Deferred] | None) -> None:
        self._openings = structs.openings
        self._deferred = deferred
        # The arrays of one value mostly have the same few dtypes.
        self._headers: dict[tuple[Dtype, str], bytes] = {}
        self.buffers: Parts = []

    def default(self, value: PlainValue) -> PlainValue:
        """Return the value that is packed in place of ``value``."""
        kind = type(value)
        if kind is tuple:
            return [_TUPLE_OPENING, *value]
        if kind is np.ndarray:
            return self._array(value)
        if kind in SCALAR_TYPES:
            is_fixed_void = kind is np.void and not value.flags.writeable
            code = plain_format.FIXED_VOID if is_fixed_void else plain_format.SCALAR
            return extension(code, self._dtype_header(value.dtype) + value.tobytes())
        if kind in self._openings:
            return [self._openings[kind], *msgspec.structs.astuple(value)]
        if self._deferred is not None and isinstance(value, Deferred):
            self._deferred.append(value)
            return extension(plain_format.DEFERRED, plain_format.DEFERRED_NUMBER.pack(len(self._deferred) - 1))
        return _encode_rare_type(value, kind)

    def _array(self, array: Array) -> Extension:
        shape = plain_format.shape_layout(array.ndim).pack(*array.shape)
        header = self._dtype_header(array.dtype) + shape
        self.buffers.append(content(array))
        return extension(plain_format.ARRAY, header)

    def _dtype_header(self, dtype: Dtype) -> bytes:
        # With its character: different C types of one layout are equal. Structured dtypes may differ in their fields.
        key = dtype, dtype.char
        header = self._headers.get(key)
        if header is None or dtype.names is not None:
            header = _dtype_header(dtype)
            self._headers[key] = header
        return header


def _encode_rare_type(value: PlainValue, kind: type[object]) -> PlainValue:
    if kind is int:
        # One bit for the sign. msgpack packs ints of up to 64 bits itself.
        content = value.to_bytes(value.bit_length() // 8 + 1, "big", signed=True)
        return extension(plain_format.BIG_INT, content)
    if kind is Columns:
        return [_COLUMNS_OPENING, _columns(value)]
    if kind is TimedBatch:
        return [_TIMED_OPENING, value.records, value.times, value.order]
    if kind is np.str_:
        # The method of str: numpy's own loses NULs at the end.
        return extension(plain_format.NUMPY_STR, str.encode(value, "utf-8", UNICODE_ERRORS))
    if kind is np.bytes_:
        return extension(plain_format.NUMPY_BYTES, bytes(value))
    raise NotPlain


def _columns(columns: Columns) -> dict[str, Array]:
    if any(type(name) is not str for name in columns.names):
        raise NotPlain
    return columns.arrays


def _dtype_header(dtype: Dtype) -> bytes:
    if dtype_refusal(dtype):
        raise NotPlain
    packed = pack_dtype(dtype)
    return plain_format.DTYPE_LENGTH.pack(len(packed)) + packed


def content(array: Array) -> bytes | memoryview:
    """Return the bytes of an array in C order: its own memory if the array is large and contiguous."""
    if array.nbytes < plain_format.ALIGNED_BYTES or not array.flags.c_contiguous:
        return array.tobytes()
    # As bytes, because numpy exports no buffer of datetimes.
    return array.reshape(-1).view(np.uint8).data


def holds_foreign(value: PlainValue, structs: Container[type[object]]) -> bool:
    """Return whether ``value`` contains a type that msgpack packs but plain data excludes, or too many levels.

    The value is searched a level at a time: ``gc.get_referents`` returns the items of lists, tuples and dicts several
    times faster than iterating over them. (For a dict with only str keys it returns the values alone.)
    """
    level: list[PlainValue] = [value]
    for _ in range(DEPTH_MAX + 1):
        kinds = set(map(type, level))
        if not PACKED_UNASKED.isdisjoint(kinds):
            return True
        level = _inside(level, kinds, structs)
        if not level:
            return False
    return True


def _inside(level: list[PlainValue], kinds: set[type[object]], structs: Container[type[object]]) -> list[PlainValue]:
    """Return the items of the containers and structs of a level."""
    parts: list[PlainValue] = []
    if not kinds <= _CONTAINERS | _LEAVES:
        parts += [part for one in level if type(one) in structs for part in msgspec.structs.astuple(one)]
        parts += [one.records for one in level if type(one) is TimedBatch]
        # For other objects, gc.get_referents would also return the class, and with it all modules.
        level = [one for one in level if type(one) in _CONTAINERS]
    if not _CONTAINERS.isdisjoint(kinds):
        parts += gc.get_referents(*level)
    return parts


# ---- decoding

Resolve = Callable[[int], Iterable[PlainValue]]
"""A function that returns the decoded frames of the n-th deferred piece of state."""

Layout = tuple[Dtype, tuple[int, ...], int]

_AXIS_BYTES: Final = plain_format.shape_layout(1).size

# msgpack reads its own extension −1, a point in time, without calling a hook; this is its code byte.
_TIMESTAMP_CODE: Final = b"\xff"


def decode_frame(frame: bytes | memoryview, structs: StructRegistry, resolve: Resolve | None = None) -> PlainValue:
    """Return the value of a frame. Raises ``ValueError``, or an error of msgpack or numpy, if it is damaged.

    If the frame is a writable memoryview, large arrays stay in it and keep it in use. ``resolve`` is called for each
    reference to deferred state; without it, such a reference is an error.
    """
    start, end = _object_range(frame)
    decoder = _PlainDataDecoder(frame, end, structs, resolve)
    value = unpack(memoryview(frame)[start:end], decoder.extension, decoder.array)
    decoder.check_end()
    if _TIMESTAMP_CODE in bytes(frame[start:end]) and holds_foreign(value, structs.openings):
        raise ValueError("it holds extension −1, which is none of ours, or too many levels")
    return value


def _object_range(frame: bytes | memoryview) -> tuple[int, int]:
    """Return the start and the end of the msgpack object; the contents of arrays follow it."""
    if not frame:
        raise ValueError("there are no bytes")
    if frame[0] == plain_format.PLAIN:
        return 1, len(frame)
    if frame[0] != plain_format.WITH_BUFFERS:
        raise ValueError(f"its first byte is {frame[0]:#04x}, which is no format of this version")
    (length,) = plain_format.OBJECT_LENGTH.unpack_from(frame, 1)
    start = 1 + plain_format.OBJECT_LENGTH.size
    if start + length > len(frame):
        raise ValueError(f"it ends {start + length - len(frame)} bytes early")
    return start, start + length


@dataclass(frozen=True, slots=True)
class _Builder:
    """Stands for the opening, the first item of a msgpack array; builds the value when the array is complete.

    ``complete`` returns the value, given all items of the array including this one.
    """

    complete: Callable[[list[PlainValue]], PlainValue]


def _complete_tuple(items: list[PlainValue]) -> tuple[PlainValue, ...]:
    del items[0]
    return tuple(items)


def _complete_columns(items: list[PlainValue]) -> Columns:
    _, arrays = items
    if type(arrays) is not dict or not all(type(array) is np.ndarray for array in arrays.values()):
        raise ValueError("Columns hold what is no array")
    if not all(type(name) is str for name in arrays):
        raise ValueError("Columns have a name that is no str")
    return Columns(arrays)


def _complete_timed(items: list[PlainValue]) -> TimedBatch:
    _, records, times, order = items
    if type(records) not in (list, Columns, np.ndarray) or type(times) is not np.ndarray or times.dtype != np.int64:
        raise ValueError("a timed batch holds what is no batch, or no timestamps")
    if times.shape != (len(records),):
        raise ValueError("a timed batch has another number of timestamps")
    if order is not None and (order.dtype != np.int64 or order.shape != (len(records), ORDER_COLUMNS)):
        raise ValueError("a timed batch has an order of other records")
    return TimedBatch(records, times, order)


def _builder_of(struct: type[msgspec.Struct], names: list[str]) -> _Builder:
    def complete(items: list[PlainValue]) -> msgspec.Struct:
        del items[0]
        fields = dict(zip(names, items, strict=True))
        try:
            return struct(**fields)
        except Exception as error:
            # Including errors of its own __post_init__.
            raise ValueError(
                f"the struct {struct.__name__} is stored with the fields {', '.join(fields) or 'none'} "
                f"and cannot be made of them today ({error}); give added fields a default, keep removed ones"
            ) from error

    return _Builder(complete)


_BUILDERS: Final = {
    plain_format.TUPLE: _Builder(_complete_tuple),
    plain_format.RECORD_COLUMNS: _Builder(_complete_columns),
    plain_format.TIMED: _Builder(_complete_timed),
}
"""By code, for the openings without a payload."""


class _PlainDataDecoder:
    """Returns the values of msgpack's extension objects and arrays.

    Each opening must begin an array, and each byte of the buffers must be used once: both are counted.
    """

    __slots__ = (
        "_deferred",
        "_dtypes",
        "_frame",
        "_in_place",
        "_layouts",
        "_openings",
        "_position",
        "_resolve",
        "_struct_builders",
        "_structs",
    )

    def __init__(
        self, frame: bytes | memoryview, buffers_start: int, structs: StructRegistry, resolve: Resolve | None
    ) -> None:
        self._frame = frame
        self._in_place = isinstance(frame, memoryview) and not frame.readonly
        self._position = buffers_start
        self._structs = structs
        self._resolve = resolve
        self._deferred = 0
        self._openings = 0
        # The arrays of one frame mostly have the same few headers.
        self._dtypes: dict[bytes, Dtype] = {}
        self._layouts: dict[bytes, Layout] = {}
        self._struct_builders: dict[bytes, _Builder] = {}

    def check_end(self) -> None:
        """Raise ``ValueError`` if an opening or a buffer is left over."""
        if self._openings:
            raise ValueError("a tuple, a struct or Columns begins where no list does")
        if self._position != len(self._frame):
            raise ValueError(f"{len(self._frame) - self._position} bytes at its end belong to no array")

    def array(self, items: list[PlainValue]) -> PlainValue:
        """Return the value of a msgpack array."""
        if not items or not isinstance(items[0], _Builder):
            return items
        self._openings -= 1
        return items[0].complete(items)

    def extension(self, code: int, payload: bytes) -> PlainValue:
        """Return the value of an extension object."""
        if code == plain_format.ARRAY:
            return self._array(payload)
        if code == plain_format.STRUCT or code in _BUILDERS:
            self._openings += 1
            return self._opening(code, payload)
        if code == plain_format.SCALAR:
            return self._scalar(payload)[()]
        if code == plain_format.FIXED_VOID:
            return _fixed(self._scalar(payload))
        if code == plain_format.DEFERRED:
            return self._deferred_state(payload)
        return _decode_rare_type(code, payload)

    def _deferred_state(self, payload: bytes) -> Iterable[PlainValue]:
        (number,) = plain_format.DEFERRED_NUMBER.unpack(payload)
        if self._resolve is None:
            raise ValueError("it refers to deferred state, which only the state of a checkpoint may do")
        if number != self._deferred:
            raise ValueError(f"it refers to deferred state {number} where {self._deferred} is due")
        self._deferred += 1
        return self._resolve(number)

    def _opening(self, code: int, payload: bytes) -> _Builder:
        if code != plain_format.STRUCT:
            if payload:
                raise ValueError(f"it holds extension {code}, which no version begins a list with")
            return _BUILDERS[code]
        builder = self._struct_builders.get(payload)
        if builder is None:
            builder = self._struct_builders[payload] = _struct_builder(payload, self._structs)
        return builder

    def _array(self, header: bytes) -> Array:
        layout = self._layouts.get(header)
        if layout is None:
            dtype, end = self._dtype(header)
            layout = _layout(dtype, header[end:])
            self._layouts[header] = layout
        dtype, shape, size_bytes = layout
        start = self._position + plain_format.gap_before(self._position, size_bytes)
        if start + size_bytes > len(self._frame):
            raise ValueError(f"it ends {start + size_bytes - len(self._frame)} bytes early, within an array")
        self._position = start + size_bytes
        if not size_bytes:
            # Not copied: for a forged number of records of no bytes numpy would count through them all.
            return np.ndarray(shape, dtype, bytearray())
        array: Array = np.ndarray(shape, dtype, self._frame, start)
        if self._in_place and size_bytes >= plain_format.ALIGNED_BYTES and array.flags.aligned:
            return array
        return _copied(array)

    def _scalar(self, payload: bytes) -> Array:
        """Return a scalar as an array without axes."""
        dtype, end = self._dtype(payload)
        if len(payload) - end != dtype.itemsize:
            raise ValueError(f"a scalar of dtype {dtype} has {len(payload) - end} bytes")
        return _copied(np.ndarray((), dtype, payload, end))

    def _dtype(self, header: bytes) -> tuple[Dtype, int]:
        """Return the dtype at the start of a header, and its end in the header."""
        start = plain_format.DTYPE_LENGTH.size
        (length,) = plain_format.DTYPE_LENGTH.unpack_from(header)
        end = start + length
        if end > len(header):
            raise ValueError("the dtype of an array is cut off")
        packed = header[start:end]
        dtype = self._dtypes.get(packed)
        if dtype is None:
            dtype = unpack_dtype(packed)
            self._dtypes[packed] = dtype
        return dtype, end


def _struct_builder(payload: bytes, structs: StructRegistry) -> _Builder:
    match unpack(payload, _decode_rare_type):
        case [str() as name, *fields] if all(type(field) is str for field in fields):
            pass
        case _:
            raise ValueError("a struct begins with what is not its name and fields")
    struct = structs.classes.get(name)
    if struct is None:
        known = ", ".join(structs.classes) or "none"
        raise ValueError(f"it holds a struct {name!r}, which is not registered ({known}); register the class")
    return _builder_of(struct, fields)


def _layout(dtype: Dtype, axes: bytes) -> Layout:
    if len(axes) % _AXIS_BYTES:
        raise ValueError("the shape of an array is cut off")
    shape = plain_format.shape_layout(len(axes) // _AXIS_BYTES).unpack(axes)
    if any(length < 0 for length in shape):
        raise ValueError(f"an array has the shape {shape}")
    return dtype, shape, math.prod(shape) * dtype.itemsize


def _copied(array: Array) -> Array:
    """Return a copy, exact to the byte: in a copy by numpy, the gaps between fields have random bytes."""
    if array.dtype.names is None or not array.dtype.itemsize:
        return array.copy()
    copied = np.empty(array.shape, array.dtype)
    copied.reshape(-1).view(np.uint8)[:] = array.reshape(-1).view(np.uint8)
    return copied


def _fixed(scalar: Array) -> PlainValue:
    scalar.flags.writeable = False
    return scalar[()]


def _decode_rare_type(code: int, payload: bytes) -> PlainValue:
    match code:
        case plain_format.BIG_INT:
            return int.from_bytes(payload, "big", signed=True)
        case plain_format.NUMPY_STR:
            return np.str_(payload.decode("utf-8", UNICODE_ERRORS))
        case plain_format.NUMPY_BYTES:
            return np.bytes_(payload)
    raise ValueError(f"it holds extension {code}, which is none of this version")
