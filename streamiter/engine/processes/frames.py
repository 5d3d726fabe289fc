"""The bytes of the frames of a link.

A frame is a header (u32 length of the body, u32 number of the channel, u8 kind, filled with zeros to 16 bytes) and a
body:

====  =======  ==================================================================================================
kind  name     body
====  =======  ==================================================================================================
1     BATCH    i64 epoch, u64 estimated size, u64 records, u32 length of the origin, u8 encoding, u8 0, u16 length
               of the layout; the records; the origin in msgpack, if there is one
2     CONTROL  a control record as plain data, in msgpack
3     TAKEN    the numbers of :class:`Taken`
4     MESSAGE  u8 encoding; a value; with ARRAYS u32 length of the layout; with both that and PLAIN the value is at
               the next multiple of 16
5     CLOSE    empty
6     SEGMENT  where the sender's shared memory is (see :mod:`~streamiter.engine.processes.shared_memory`)
7     SHARED   the place of the body in the sender's shared memory
8     FREE     the places of bodies in the receiver's shared memory that are not used any more
====  =======  ==================================================================================================

If 128 is added to the encoding, the timestamps of the records (i64 each) follow the records. If 64 is added, too, their
order (five i64 each) follows the timestamps.

Records have one of six encodings. MSGPACK is one call of msgspec, for types that msgpack keeps exactly. TUPLES is the
same for tuples of such types; msgpack has them as arrays, which are read as tuples. ARRAYS is for
arrays, ``Columns`` and ``SparseRows`` of the common dtypes: their layout in msgpack, then each array, all filled to a
multiple of 16 bytes; the layout of a message is the message itself, with an extension object (the character of the
dtype; the shape) in the place of each array. OUTGOING is the columns of an ``OutgoingBatch`` in msgpack, for a sink in
another process. PLAIN is the encoding of :class:`~streamiter.values.plain_data.PlainData`, for all other plain
data. LETTERS is the same for dead letters; in place of a refused record that is not plain data, the letter has the
value that its topic gets. There is no pickle, because a link crosses machines.

All numbers are little-endian. A body begins at a multiple of 16 in memory, so arrays can be used where they are.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from struct import Struct
from types import NoneType
from typing import Any, Final, NamedTuple, TypeGuard, final

import msgspec
import numpy as np

from streamiter.errors import PlainDataError
from streamiter.operators.output import DeadLetter, Origin
from streamiter.topics.dead_letters import dead_letter_value
from streamiter.topics.topic import OutgoingBatch
from streamiter.values.deferred import PlainValue
from streamiter.values.encoding import Parts, content
from streamiter.values.numbers import Array
from streamiter.values.origins import BatchOrigin
from streamiter.values.plain_data import PlainData
from streamiter.values.plain_format import ALIGNED_BYTES
from streamiter.values.records import (
    ORDER_COLUMNS,
    Columns,
    Control,
    DataBatch,
    TimedBatch,
    control_from_plain,
    control_to_plain,
)
from streamiter.values.sparse_rows import SparseRows

HEADER: Final = Struct("<IIB7x")

BATCH: Final = 1
CONTROL: Final = 2
TAKEN: Final = 3
MESSAGE: Final = 4
CLOSE: Final = 5
SEGMENT: Final = 6
SHARED: Final = 7
FREE: Final = 8

BODY_BYTES_MAX: Final = 1 << 30
"""The longest body: as much as one call of an operator may emit into a full channel."""

_BATCH_HEAD: Final = Struct("<qQQIBxH")
_TAKEN: Final = Struct("<QQQQ??")

_MSGPACK: Final = 0
_PLAIN: Final = 1
_ARRAYS: Final = 2
_LETTERS: Final = 3
_OUTGOING: Final = 4
_TUPLES: Final = 5
_TIMED: Final = 128
"""Added to the encoding of records with timestamps."""
_ORDERED: Final = 64
"""Added to the encoding of such records that have an order, too."""

_MESSAGE_HEAD: Final = Struct("<BI11x")
_PLAIN_MESSAGE: Final = _MESSAGE_HEAD.pack(_PLAIN, 0)

# The common dtypes in this machine's byte order. Their characters mean the same on all 64-bit machines but Windows.
_DTYPES: Final = {char: np.dtype(char) for char in "?bBhHiIlLqQefdFD"}


class Taken(NamedTuple):
    """The report of the consumer's half of a channel. Its totals are since the start, so no report can be missed."""

    records: int
    """Records that the consumer has taken in all."""
    size_bytes: int
    """The estimated size of these records."""
    aside_records: int
    """Records that the consumer has set aside now."""
    aside_bytes: int
    """The estimated size of the records set aside."""
    makes_way: bool
    """Whether the channel admits batches as if nothing were set aside."""
    shuts_intakes: bool
    """Whether the sources before the channel must not read, on behalf of channels further downstream.

    The producer's half of feedback sets only this field: data must be throttled, because feedback waits on its disk.
    """

    def encode(self) -> bytes:
        """Return the body of its frame."""
        return _TAKEN.pack(*self)

    @classmethod
    def decode(cls, body: memoryview) -> Taken:
        """Return the report of a body. Raises ``struct.error`` for a body of another length."""
        return cls(*_TAKEN.unpack(body))


@final
class FrameEncoding:
    """Encodes and decodes the bodies of frames; ``plain_data`` knows the registered structs of the flow.

    >>> encoding = FrameEncoding(PlainData())
    >>> parts = encoding.encode_batch(DataBatch([{"user": 7}], epoch=3), size_bytes=100)
    >>> batch, size_bytes = encoding.decode_batch(memoryview(b"".join(parts)))
    >>> batch, batch.records, size_bytes
    (DataBatch(1 records, epoch 3), [{'user': 7}], 100)
    """

    def __init__(self, plain_data: PlainData) -> None:
        self._plain_data = plain_data
        self._pack = msgspec.msgpack.Encoder().encode
        self._pack_message = msgspec.msgpack.Encoder(enc_hook=self._extension).encode
        self._arrays: list[Array] = []
        """The arrays of the message that is packed."""
        self._unpack = msgspec.msgpack.Decoder().decode
        self._unpack_tuples = msgspec.msgpack.Decoder(list[tuple[Any, ...]]).decode

    def encode_batch(self, batch: DataBatch, size_bytes: int) -> Parts:
        """Return the body of a batch in pieces. Pieces of large arrays are their own memory.

        Raises ``PlainDataError`` for records that are not plain data, with the index of the record.
        """
        encoding, layout, parts = self._encode_records(batch.records)
        origin = b"" if batch.origin is None else self._pack(batch.origin.plain())
        head = _BATCH_HEAD.pack(batch.epoch, size_bytes, len(batch.records), len(origin), encoding, layout)
        return [head, *parts, origin] if origin else [head, *parts]

    def _encode_records(self, records: Any) -> tuple[int, int, Parts]:
        """Return the encoding, the length of the layout, and the records in pieces."""
        if type(records) is list:
            # Mostly, all records are of one type.
            kind = type(records[0]) if records else NoneType
            if kind in _SURVIVORS and (packed := self._packed(records, self._pack, _SURVIVORS)) is not None:
                return _MSGPACK, 0, [packed]
            if kind is tuple and (packed := self._packed_tuples(records)) is not None:
                return _TUPLES, 0, [packed]
            if kind is DeadLetter:
                return _LETTERS, 0, self._plain_data.batch_parts([self._plain_letter(letter) for letter in records])
        elif type(records) is OutgoingBatch:
            return _OUTGOING, 0, [self._encode_outgoing(records)]
        elif (described := _arrays_of(records)) is not None:
            layout = self._pack(described[:-1])
            if len(layout) < 1 << 16:
                return _ARRAYS, len(layout), _filled(layout, described[-1])
        elif type(records) is TimedBatch:
            encoding, layout_bytes, parts = self._encode_records(records.records)
            parts = [*parts, content(records.times)]
            if records.order is None:
                return encoding | _TIMED, layout_bytes, parts
            return encoding | _TIMED | _ORDERED, layout_bytes, [*parts, content(records.order)]
        return _PLAIN, 0, self._plain_data.batch_parts(records)

    def decode_batch(self, body: memoryview) -> tuple[DataBatch, int]:
        """Return a batch and its estimated size. Large arrays stay in ``body`` if it is writable memory.

        Raises ``PlainDataError``, ``struct.error`` or ``msgspec.DecodeError`` for a body that is damaged.
        """
        epoch, size_bytes, count, origin_bytes, encoding, layout = _BATCH_HEAD.unpack_from(body)
        end = len(body) - origin_bytes
        given = body[_BATCH_HEAD.size : end]
        times = order = None
        if encoding & _ORDERED:
            end -= 8 * count * ORDER_COLUMNS
            order = np.frombuffer(body[end:][: 8 * count * ORDER_COLUMNS], np.int64).reshape(-1, ORDER_COLUMNS).copy()
        if encoding & _TIMED:
            end -= 8 * count
            times = np.frombuffer(body[end : end + 8 * count], np.int64).copy()
            encoding, given = encoding & ~(_TIMED | _ORDERED), body[_BATCH_HEAD.size : end]
        records: Any
        if encoding == _MSGPACK:
            records = self._unpack(given)
        elif encoding == _TUPLES:
            records = self._unpack_tuples(given)
        elif encoding == _ARRAYS:
            records = _arrays_in(given, layout, *self._unpack(given[:layout]))
        elif encoding == _OUTGOING:
            values, keys, headers, *rest = self._unpack(given)
            headers = headers and [tuple(map(tuple, of_record)) for of_record in headers]
            records = OutgoingBatch(values, keys, headers, *rest)
        else:
            records = self._plain_data.decode_batch_in(given)
        if encoding == _LETTERS:
            records = [_letter(*fields) for fields in records]
        if len(records) != count:
            raise PlainDataError(f"expected a batch of {count} records, given the bytes of {len(records)}")
        origin = BatchOrigin.from_plain(*self._unpack(body[len(body) - origin_bytes :])) if origin_bytes else None
        return DataBatch(records if times is None else TimedBatch(records, times, order), epoch, origin), size_bytes

    def _encode_outgoing(self, batch: OutgoingBatch) -> bytes:
        try:
            return self._pack(batch.plain())
        except (TypeError, ValueError, OverflowError) as error:
            raise PlainDataError(
                f"expected an encoder that returns bytes, given {error}; return what OutgoingBatch describes"
            ) from error

    def _plain_letter(self, letter: DeadLetter) -> tuple[PlainValue, ...]:
        record, origin = letter.record, letter.origin
        try:
            self._plain_data.encode(record)
        except PlainDataError:
            record = dead_letter_value(record)
        if isinstance(origin, Origin):
            place: tuple[PlainValue, ...] | None = (origin.topic, origin.partition, origin.offset)
        else:
            place = None if origin is None else origin.plain()
        return record, letter.step, letter.error, place, letter.key, letter.headers, letter.timestamp_ms

    def encode_control(self, control: Control) -> bytes:
        """Return the body of a control record."""
        return self._pack(control_to_plain(control))

    def decode_control(self, body: memoryview) -> Control:
        """Return the control record of a body. Raises ``PlainDataError`` or ``msgspec.DecodeError``."""
        return control_from_plain(self._unpack(body))

    def encode_message(self, message: PlainValue) -> Parts:
        """Return the body of a message in pieces. Raises ``PlainDataError`` for a value that is not plain data."""
        packed = self._packed(message, self._pack_message, _SURVIVORS_IN_MESSAGES)
        arrays, self._arrays = self._arrays, []
        if packed is not None:
            if arrays:
                return [_MESSAGE_HEAD.pack(_ARRAYS, len(packed)), *_filled(packed, arrays)]
            return [bytes((_MSGPACK,)), packed]
        return [_PLAIN_MESSAGE, *self._plain_data.parts(message, name="message")]

    def _extension(self, value: object) -> msgspec.msgpack.Ext:
        """Return what takes the place of an array in a message."""
        if not _is_common_array(value):
            raise TypeError
        self._arrays.append(value)
        return msgspec.msgpack.Ext(ord(value.dtype.char), self._pack(value.shape))

    def decode_message(self, body: memoryview) -> PlainValue:
        """Return the value of a message. Raises ``PlainDataError`` or ``msgspec.DecodeError``.

        Large arrays stay in ``body`` if it is writable memory.
        """
        if body[0] == _MSGPACK:
            return self._unpack(body[1:])
        encoding, end = _MESSAGE_HEAD.unpack_from(body)
        room = body[_MESSAGE_HEAD.size :]
        if encoding == _PLAIN:
            return self._plain_data.decode_in(room)
        layout = room[:end]

        def array(code: int, shape: memoryview) -> Array:
            nonlocal end
            found, end = _array_in(room, end, chr(code), self._unpack(shape))
            return found

        return msgspec.msgpack.Decoder(ext_hook=array).decode(layout)

    def _packed_tuples(self, records: list[Any]) -> bytes | None:
        """Return the msgpack of records; None if not all are tuples of survivors."""
        if set(map(type, records)) != {tuple}:
            return None
        return self._packed(records, self._pack, _SURVIVORS, within=gc.get_referents(*records))

    def _packed(
        self,
        value: PlainValue,
        pack: Callable[[PlainValue], bytes],
        survivors: frozenset[type[object]],
        *,
        within: list[PlainValue] | None = None,
    ) -> bytes | None:
        """Return the msgpack of a value; None if the objects in it, or else ``within``, are not all survivors."""
        try:
            packed = pack(value)
        except MemoryError:
            raise
        except Exception:  # Too large an int, a lone surrogate, an unknown type, or too many levels.
            return None
        # After packing, which has refused a value that contains itself, and arrays without an extension.
        return packed if _survives(value if within is None else within, survivors) else None


_CONTAINERS: Final = frozenset({list, dict})
_SURVIVORS: Final = frozenset({NoneType, bool, int, float, str, bytes}) | _CONTAINERS
_SURVIVORS_IN_MESSAGES: Final = _SURVIVORS | {np.ndarray}

# Deeper values are rare. A value of shared lists has twice as many parts at each level.
_LEVELS: Final = 16


def _survives(value: PlainValue, survivors: frozenset[type[object]]) -> bool:
    """Return whether msgpack keeps all types in ``value``, which msgspec has packed: all are survivors.

    The value is searched a level at a time, because ``gc.get_referents`` is several times faster than iterating. It
    returns the values of a dict, and its keys as well if they are not all ``str``.
    """
    level: list[PlainValue] = value if type(value) is list else [value]
    for _ in range(_LEVELS):
        kinds = set(map(type, level))
        if not kinds <= survivors:
            return False
        if kinds.isdisjoint(_CONTAINERS):
            return True
        level = gc.get_referents(*level)
    return False


def _letter(record: Any, step: str, error: str, place: tuple[Any, ...] | None, *original: Any) -> DeadLetter:
    origin = None if place is None else Origin(*place) if len(place) == 3 else BatchOrigin(*place)
    return DeadLetter(record, step, error, origin, *original)


def _arrays_of(records: Any) -> tuple[list[str] | int | None, list[str], list[tuple[int, ...]], list[Any]] | None:
    """Return a batch of arrays as the names of columns or the width of sparse rows, dtypes, shapes, and the arrays.

    None if it is another batch.
    """
    form: list[str] | int | None = None
    if type(records) is Columns:
        named = records.arrays
        form, arrays = list(named), list(named.values())
    elif type(records) is SparseRows:
        form, arrays = records.width, [records.indptr, records.indices, records.values]
    else:
        arrays = [records]
    for array in arrays:
        if not _is_common_array(array) or not array.ndim:
            return None
    if type(form) is list and not all(type(name) is str and name.isascii() for name in form):
        return None
    return form, [array.dtype.char for array in arrays], [array.shape for array in arrays], arrays


def _is_common_array(value: Any) -> TypeGuard[Array]:
    return type(value) is np.ndarray and _DTYPES.get(value.dtype.char) is value.dtype


def _filled(layout: bytes, arrays: list[Array]) -> Parts:
    """Return a layout and its arrays in pieces, all filled to a multiple of 16 bytes."""
    parts: Parts = [layout, bytes(-len(layout) % 16)]
    for array in arrays:
        parts += (content(array), bytes(-array.nbytes % 16))
    return parts


def _array_in(room: memoryview, start: int, char: str, shape: list[int]) -> tuple[Array, int]:
    """Return the array behind ``start``, and its end; a large one stays in the room if that is writable."""
    dtype, start = _DTYPES[char], start + -start % 16
    array: Array = np.ndarray(shape, dtype, room, start)
    end = start + array.nbytes
    if room.readonly or array.nbytes < ALIGNED_BYTES:
        array = array.copy() if array.nbytes else np.empty(shape, dtype)
    return array, end


def _arrays_in(room: memoryview, start: int, form: Any, dtypes: list[str], shapes: list[list[int]]) -> Any:
    arrays = []
    for char, shape in zip(dtypes, shapes, strict=True):
        array, start = _array_in(room, start, char, shape)
        arrays.append(array)
    if type(form) is list:
        return Columns(dict(zip(form, arrays, strict=True)))
    if form is None:
        return arrays[0]
    indptr, indices, values = arrays
    return SparseRows(indptr, indices, values, form)
