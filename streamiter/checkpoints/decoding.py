"""One call of ``PlainData.decode``: the bytes of one frame become a value. Bytes are never trusted."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any, Final

import msgspec
import numpy as np
import numpy.typing as npt

from streamiter.checkpoints import extensions
from streamiter.checkpoints.data_types import UNICODE_ERRORS, StructRegistry, unpack, unpack_dtype
from streamiter.checkpoints.encoding import holds_foreign
from streamiter.records import Columns

__all__ = ["Resolve", "decode_frame"]

Array = npt.NDArray[Any]
Resolve = Callable[[int], Iterable[Any]]
"""What takes the place of the n-th deferred piece of state."""

Layout = tuple[np.dtype[Any], tuple[int, ...], int]

_AXIS_BYTES: Final = extensions.shape_layout(1).size

# msgpack's own extension −1, a point in time, is the one it reads without asking; this is its code byte.
_TIMESTAMP_CODE: Final = b"\xff"


def decode_frame(frame: bytes | memoryview, structs: StructRegistry, resolve: Resolve | None = None) -> Any:
    """The value of a frame; raises ``ValueError``, or whatever the bytes drive msgpack or numpy to.

    Large arrays stay in a memoryview, where it is writable, and keep it alive. References to deferred state
    are for ``resolve``; without it they are an error.
    """
    start, end = _object_range(frame)
    decoder = _PlainDataDecoder(frame, end, structs, resolve)
    value = unpack(memoryview(frame)[start:end], decoder.extension, decoder.array)
    decoder.check_end()
    if _TIMESTAMP_CODE in bytes(frame[start:end]) and holds_foreign(value, structs.openings):
        raise ValueError("it holds extension −1, which is none of ours, or too many levels")
    return value


def _object_range(frame: bytes | memoryview) -> tuple[int, int]:
    """Where the msgpack object lies; the contents of arrays follow it."""
    if not frame:
        raise ValueError("there are no bytes")
    if frame[0] == extensions.PLAIN:
        return 1, len(frame)
    if frame[0] != extensions.WITH_BUFFERS:
        raise ValueError(f"its first byte is {frame[0]:#04x}, which is no format of this version")
    (length,) = extensions.OBJECT_LENGTH.unpack_from(frame, 1)
    start = 1 + extensions.OBJECT_LENGTH.size
    if start + length > len(frame):
        raise ValueError(f"it ends {start + length - len(frame)} bytes early")
    return start, start + length


class _Opening:
    """Stands where an array's first item tells what the array is, until the array is complete."""

    __slots__ = ()

    def complete(self, items: list[Any]) -> Any:
        """The value, given all items of the array, this one included."""
        raise NotImplementedError


class _TupleOpening(_Opening):
    __slots__ = ()

    def complete(self, items: list[Any]) -> tuple[Any, ...]:
        del items[0]
        return tuple(items)


class _ColumnsOpening(_Opening):
    __slots__ = ()

    def complete(self, items: list[Any]) -> Columns:
        _, arrays = items
        if type(arrays) is not dict or not all(type(array) is np.ndarray for array in arrays.values()):
            raise ValueError("Columns hold what is no array")
        if not all(type(name) is str for name in arrays):
            raise ValueError("Columns have a name that is no str")
        return Columns(arrays)


class _StructOpening(_Opening):
    __slots__ = ("_fields", "_struct")

    def __init__(self, struct: type[msgspec.Struct], fields: list[str]) -> None:
        self._struct = struct
        self._fields = fields

    def complete(self, items: list[Any]) -> msgspec.Struct:
        del items[0]
        fields = dict(zip(self._fields, items, strict=True))
        try:
            return self._struct(**fields)
        except Exception as error:
            # Also what its own __post_init__ raises.
            raise ValueError(
                f"the struct {self._struct.__name__} is stored with the fields {', '.join(fields) or 'none'} "
                f"and cannot be made of them today ({error}); give added fields a default, keep removed ones"
            ) from error


_OPENING_CODES: Final = (extensions.TUPLE, extensions.STRUCT, extensions.COLUMNS)
_TUPLE_OPENING: Final = _TupleOpening()
_COLUMNS_OPENING: Final = _ColumnsOpening()


class _PlainDataDecoder:
    """Gives msgpack what its extension objects and arrays stand for.

    Each opening must begin an array and each byte of the buffers must be used, once: both are counted.
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
        "_struct_openings",
        "_structs",
    )

    def __init__(
        self,
        frame: bytes | memoryview,
        buffers_start: int,
        structs: StructRegistry,
        resolve: Resolve | None,
    ) -> None:
        self._frame = frame
        self._in_place = isinstance(frame, memoryview) and not frame.readonly
        self._position = buffers_start
        self._structs = structs
        self._resolve = resolve
        self._deferred = 0
        self._openings = 0
        # The headers of one frame are mostly the same few.
        self._dtypes: dict[bytes, np.dtype[Any]] = {}
        self._layouts: dict[bytes, Layout] = {}
        self._struct_openings: dict[bytes, _StructOpening] = {}

    def check_end(self) -> None:
        """Raises ``ValueError`` where an opening or a buffer is left over."""
        if self._openings:
            raise ValueError("a tuple, a struct or Columns begins where no list does")
        if self._position != len(self._frame):
            raise ValueError(f"{len(self._frame) - self._position} bytes at its end belong to no array")

    def array(self, items: list[Any]) -> Any:
        """What a msgpack array stands for."""
        if not items or not isinstance(items[0], _Opening):
            return items
        self._openings -= 1
        return items[0].complete(items)

    def extension(self, code: int, payload: bytes) -> Any:
        """What an extension object stands for."""
        if code == extensions.ARRAY:
            return self._array(payload)
        if code in _OPENING_CODES:
            self._openings += 1
            return self._opening(code, payload)
        if code == extensions.SCALAR:
            return self._scalar(payload)[()]
        if code == extensions.FIXED_VOID:
            return _fixed(self._scalar(payload))
        if code == extensions.DEFERRED:
            return self._deferred_state(payload)
        return _rarely_met(code, payload)

    def _deferred_state(self, payload: bytes) -> Iterable[Any]:
        (number,) = extensions.DEFERRED_NUMBER.unpack(payload)
        if self._resolve is None:
            raise ValueError("it refers to deferred state, which only the state of a checkpoint may do")
        if number != self._deferred:
            raise ValueError(f"it refers to deferred state {number} where {self._deferred} is due")
        self._deferred += 1
        return self._resolve(number)

    def _opening(self, code: int, payload: bytes) -> _Opening:
        if code == extensions.TUPLE and not payload:
            return _TUPLE_OPENING
        if code == extensions.STRUCT:
            return self._struct_opening(payload)
        if code == extensions.COLUMNS and not payload:
            return _COLUMNS_OPENING
        raise ValueError(f"it holds extension {code}, which no version begins a list with")

    def _struct_opening(self, payload: bytes) -> _StructOpening:
        opening = self._struct_openings.get(payload)
        if opening is None:
            opening = _struct_opening(payload, self._structs)
            self._struct_openings[payload] = opening
        return opening

    def _array(self, header: bytes) -> Array:
        layout = self._layouts.get(header)
        if layout is None:
            dtype, end = self._dtype(header)
            layout = _layout(dtype, header[end:])
            self._layouts[header] = layout
        dtype, shape, size_bytes = layout
        start = self._position + extensions.gap_before(self._position, size_bytes)
        if start + size_bytes > len(self._frame):
            raise ValueError(f"it ends {start + size_bytes - len(self._frame)} bytes early, within an array")
        self._position = start + size_bytes
        if not size_bytes:
            # Not copied: for a forged number of records of no bytes numpy would count through them all.
            return np.ndarray(shape, dtype, bytearray())
        array: Array = np.ndarray(shape, dtype, self._frame, start)
        if self._in_place and size_bytes >= extensions.ALIGNED_BYTES and array.flags.aligned:
            return array
        return _copied(array)

    def _scalar(self, payload: bytes) -> Array:
        """A scalar, as an array without axes."""
        dtype, end = self._dtype(payload)
        if len(payload) - end != dtype.itemsize:
            raise ValueError(f"a scalar of dtype {dtype} has {len(payload) - end} bytes")
        return _copied(np.ndarray((), dtype, payload, end))

    def _dtype(self, header: bytes) -> tuple[np.dtype[Any], int]:
        """The dtype that a header begins with, and where it ends there."""
        start = extensions.DTYPE_LENGTH.size
        (length,) = extensions.DTYPE_LENGTH.unpack_from(header)
        end = start + length
        if end > len(header):
            raise ValueError("the dtype of an array is cut off")
        packed = header[start:end]
        dtype = self._dtypes.get(packed)
        if dtype is None:
            dtype = unpack_dtype(packed)
            self._dtypes[packed] = dtype
        return dtype, end


def _struct_opening(payload: bytes, structs: StructRegistry) -> _StructOpening:
    match unpack(payload, _rarely_met):
        case [str() as name, *fields] if all(type(field) is str for field in fields):
            pass
        case _:
            raise ValueError("a struct begins with what is not its name and fields")
    struct = structs.classes.get(name)
    if struct is None:
        known = ", ".join(structs.classes) or "none"
        raise ValueError(f"it holds a struct {name!r}, which is not registered ({known}); register the class")
    return _StructOpening(struct, fields)


def _layout(dtype: np.dtype[Any], axes: bytes) -> Layout:
    if len(axes) % _AXIS_BYTES:
        raise ValueError("the shape of an array is cut off")
    shape = extensions.shape_layout(len(axes) // _AXIS_BYTES).unpack(axes)
    if any(length < 0 for length in shape):
        raise ValueError(f"an array has the shape {shape}")
    return dtype, shape, math.prod(shape) * dtype.itemsize


def _copied(array: Array) -> Array:
    """A copy to the byte: numpy's own leaves the gaps between fields to chance."""
    if array.dtype.names is None or not array.dtype.itemsize:
        return array.copy()
    copied = np.empty(array.shape, array.dtype)
    copied.reshape(-1).view(np.uint8)[:] = array.reshape(-1).view(np.uint8)
    return copied


def _fixed(scalar: Array) -> Any:
    scalar.flags.writeable = False
    return scalar[()]


def _rarely_met(code: int, payload: bytes) -> Any:
    match code:
        case extensions.BIG_INT:
            return int.from_bytes(payload, "big", signed=True)
        case extensions.NUMPY_STR:
            return np.str_(payload.decode("utf-8", UNICODE_ERRORS))
        case extensions.NUMPY_BYTES:
            return np.bytes_(payload)
    raise ValueError(f"it holds extension {code}, which is none of this version")
