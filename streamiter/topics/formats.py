"""Decoders and encoders: from the bytes of a topic to records, and back.

Values are bytes (`Raw`), text (`Text`) or JSON: as Python objects (`Json`), as columns (`JsonColumns`), as typed
records (`Typed`). `WithMetadata` adds keys, time stamps, headers and origins. All of them name each bad value of a
batch, by means of `decode_each`, `decode_values` and `encode_each`.
"""

from __future__ import annotations

import functools
import struct
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain, starmap
from operator import attrgetter
from typing import Any, Final, TypeVar, final

import msgspec
import numpy as np
import numpy.typing as npt
import orjson

from streamiter.errors import ConfigurationError, DecodeError, EncodeError, TopicError
from streamiter.records import Batch, Columns, take
from streamiter.tables import rows_of_table
from streamiter.topics.topic import Decoder, OutgoingBatch, TopicBatch


@final
class Raw:
    """Values as bytes, both ways. A record without a value (a tombstone) is None, both ways.

    >>> Raw().decode(TopicBatch(values=[b"a", None]))
    [b'a', None]
    >>> Raw().encode([b"a", "b"])
    Traceback (most recent call last):
    ...
    streamiter.errors.EncodeError: record 1 of the batch: expected bytes or None, given str
    """

    def decode(self, batch: TopicBatch) -> Batch:
        """Return the values as they are."""
        return list(batch.values)

    def encode(self, batch: Batch) -> OutgoingBatch:
        """Return the records as they are; copies of a bytearray or memoryview."""
        return OutgoingBatch(encode_each(batch, _as_bytes))

    def __repr__(self) -> str:
        return "Raw()"


def _as_bytes(record: object) -> bytes | None:
    if record is None or type(record) is bytes:
        return record
    if isinstance(record, (bytes, bytearray, memoryview)):
        return bytes(record)
    raise TypeError(f"expected bytes or None, given {type(record).__name__}")


@final
class Text:
    r"""Values as text, both ways. A record without a value (a tombstone) is None, both ways.

    >>> Text().decode(TopicBatch(values=["grün".encode(), None]))
    ['grün', None]
    >>> Text("latin-1").encode(["grün"]).values
    [b'gr\xfcn']
    """

    def __init__(self, encoding: str = "utf-8") -> None:
        "".encode(encoding)  # raises for an unknown encoding at the user's own line
        self.encoding = encoding

    def decode(self, batch: TopicBatch) -> Batch:
        """Return the texts; raise ``DecodeError`` for bytes that are not of this encoding."""
        return decode_each(batch.values, self._decode_one)

    def encode(self, batch: Batch) -> OutgoingBatch:
        """Return the values; raise ``EncodeError`` for a record that is not text, or has no form in this encoding."""
        return OutgoingBatch(encode_each(batch, self._encode_one))

    def _decode_one(self, value: bytes | None) -> str | None:
        return None if value is None else value.decode(self.encoding)

    def _encode_one(self, record: object) -> bytes | None:
        if record is None:
            return None
        if not isinstance(record, str):
            raise TypeError(f"expected str or None, given {type(record).__name__}")
        return record.encode(self.encoding)

    def __repr__(self) -> str:
        return f"Text({self.encoding!r})"


@final
class WithMetadata:
    """Records as dicts: the value as another decoder reads it, with key, time stamp, headers and origin.

    >>> decoder = WithMetadata(Json())
    >>> decoder.decode(TopicBatch(partition=3, offsets=[7], keys=[b"k"], values=[b"[1]"], timestamps_ms=[9]))
    [{'key': b'k', 'value': [1], 'timestamp_ms': 9, 'partition': 3, 'offset': 7, 'headers': ()}]
    """

    def __init__(self, decoder: Decoder) -> None:
        self.decoder = decoder

    @property
    def struct_types(self) -> tuple[type[object], ...]:
        """The ``msgspec.Struct`` classes of the inner decoder."""
        return getattr(self.decoder, "struct_types", ())

    def decode(self, batch: TopicBatch) -> Batch:
        """Return the dicts; raises the ``DecodeError`` of the inner decoder."""
        partition, values = batch.partition, self.decoder.decode(batch)
        columns = (batch.keys, values, batch.timestamps_ms, batch.offsets, batch.headers)
        return [
            {
                "key": key,
                "value": value,
                "timestamp_ms": ms,
                "partition": partition,
                "offset": at,
                "headers": headers,
            }
            for key, value, ms, at, headers in zip(*columns, strict=True)
        ]

    def __repr__(self) -> str:
        return f"WithMetadata({self.decoder!r})"


@final
class Json:
    """JSON values as Python objects, both ways.

    A record without a value (a tombstone) is decoded as None. Encoding takes the types of JSON, numpy arrays and
    scalars, `Columns` (each row as an object) and ``msgspec.Struct``. None becomes ``null``. NaN and infinities,
    which JSON does not have, become ``null``, too.

    >>> Json().decode(TopicBatch(values=[b'{"x": [1, 2]}', None]))
    [{'x': [1, 2]}, None]
    >>> Json().encode([{"x": np.array([1.5, 2.5])}]).values
    [b'{"x":[1.5,2.5]}']
    >>> Json().decode(TopicBatch(values=[b"1", b"{", b"]"]))
    Traceback (most recent call last):
    ...
    streamiter.errors.DecodeError: value 1 of the batch: unexpected end of data: line 1 column 2 (char 1) \
(and 1 more)
    """

    def decode(self, batch: TopicBatch) -> Batch:
        """Return the objects; raise ``DecodeError`` for values that are not JSON."""
        try:
            return list(map(orjson.loads, batch.values))  # type: ignore[arg-type]
        except orjson.JSONDecodeError:  # one value is bad, or None: find it
            return decode_each(batch.values, _loads)

    def encode(self, batch: Batch) -> OutgoingBatch:
        """Return the values, or those of a table's rows; raise ``EncodeError`` for records without a form in JSON."""
        batch = rows_to_encode(batch)
        if isinstance(batch, Columns):
            values = encode_columns(batch)
        elif isinstance(batch, np.ndarray):
            values = encode_array(batch)
        else:
            values = None
        return OutgoingBatch(values if values is not None else _encode_records(batch))

    def __repr__(self) -> str:
        return "Json()"


def _loads(value: bytes | None) -> object:
    return None if value is None else orjson.loads(value)


def to_json_type(record: object) -> object:
    """Return a value that orjson can write, for a type that it does not know."""
    if isinstance(record, (np.ndarray, np.generic)):
        return record.tolist()
    if isinstance(record, Columns):
        return list(record)
    if isinstance(record, msgspec.Struct):
        return {name: getattr(record, name) for name in record.__struct_fields__}
    raise TypeError(f"JSON has no form for {type(record).__name__}")


_OPTIONS: Final = orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_APPEND_NEWLINE


def _dumps(record: object) -> bytes:
    # orjson writes into 1024 bytes and shrinks them in place, so each kept value occupies a KiB of the heap.
    # Measured: a page fault for each record, 1,500 ns instead of 450. A slice is a copy of the right size.
    return orjson.dumps(record, to_json_type, _OPTIONS)[:-1]


def _encode_records(batch: Batch) -> list[bytes]:
    try:
        return list(map(_dumps, batch))
    except TypeError:
        return encode_each(batch, _dumps_with_cause)


def _dumps_with_cause(record: object) -> bytes:
    try:
        return _dumps(record)
    except TypeError as error:  # orjson names the type that failed in the cause only
        raise TypeError(str(error.__cause__ or error)) from error


Array = npt.NDArray[Any]


def encode_array(array: Array) -> list[bytes] | None:
    """Return a value for each row, or None where the array's type has no direct form in JSON.

    This is several times faster than encoding record by record.

    >>> encode_array(np.array([[1.0, np.nan], [2.5, 3.0]]))
    [b'[1.0,null]', b'[2.5,3.0]']
    """
    if not _is_json_array(array):
        return None
    # A JSON value has no raw line feed (in strings it is escaped), so each line is a value.
    return msgspec.json.Encoder().encode_lines(array.tolist()).split(b"\n")[:-1]


def encode_columns(columns: Columns) -> list[bytes] | None:
    """Return an object for each row, or None where a column's type has no direct form in JSON.

    >>> encode_columns(Columns({"id": np.array([7, 8]), "a-b": np.array(["x", "y"])}))
    [b'{"id":7,"a-b":"x"}', b'{"id":8,"a-b":"y"}']
    """
    arrays = columns.arrays.values()
    if not all(map(_is_json_array, arrays)):
        return None
    make_row = _row_type(columns.names)
    return list(map(msgspec.json.Encoder().encode, map(make_row, *(array.tolist() for array in arrays))))


def _is_json_array(array: Array) -> bool:
    """Return whether ``tolist`` returns types of JSON: not for bytes, nor for floats of more than 8 bytes."""
    kind = array.dtype.kind
    return array.ndim > 0 and (kind in "biuU" or (kind == "f" and array.dtype.itemsize <= 8))


@functools.lru_cache(maxsize=64)  # making a class costs as much as encoding hundreds of rows
def _row_type(names: tuple[str, ...]) -> Callable[..., msgspec.Struct]:
    """Return a struct class with these fields: a struct is made and encoded faster than a dict."""
    attributes = [f"field_{index}" for index in range(len(names))]  # a column's name may be any text
    fields = [(attribute, Any) for attribute in attributes]
    return msgspec.defstruct("Row", fields, rename=dict(zip(attributes, names, strict=True)), gc=False)


# The kinds of arrays that a field of each kind takes. numpy's own rules would turn any number into text.
_KINDS_TAKEN: Final = {"b": "b", "i": "biu", "u": "biu", "f": "biuf", "U": "U"}


def fitting_array(name: str, array: Array, dtype: np.dtype[Any], width: int | None) -> Array:
    """Return the column as an array of the field's type, if reading it back gives the same values.

    Raises ``EncodeError``: for all records if the type or the width of the column is wrong, otherwise for the records
    whose number the type cannot hold, or JSON cannot hold (NaN and infinity).

    >>> fitting_array("x", np.array([1, 2]), np.dtype("float32"), None)
    array([1., 2.], dtype=float32)
    >>> fitting_array("n", np.array([1, 300]), np.dtype("uint8"), None)
    Traceback (most recent call last):
    ...
    streamiter.errors.EncodeError: record 1 of the batch: field 'n': expected a number that uint8 holds, given 300
    """
    shape = () if width is None else (width,)
    if array.dtype.kind not in _KINDS_TAKEN[dtype.kind] or array.shape[1:] != shape:
        given = type_name(array.dtype, array.shape[1:])
        reason = f"field {name!r}: expected {type_name(dtype, shape)}, given {given}"
        raise EncodeError(dict.fromkeys(range(len(array)), reason))
    if dtype.kind == "U":
        return array
    return _same_numbers(name, array, dtype)


def type_name(dtype: np.dtype[Any], shape: tuple[int, ...]) -> str:
    """Return a type as text: ``float64[2]`` for two numbers in each record, ``str`` for text of any width."""
    noun = "str" if dtype.kind == "U" else dtype.name
    return noun + "".join(f"[{size}]" for size in shape)


def _same_numbers(name: str, array: Array, dtype: np.dtype[Any]) -> Array:
    with np.errstate(over="ignore"):  # a number that becomes infinite is named below
        converted = array.astype(dtype, copy=False)
    if dtype.kind == "f":
        good = np.isfinite(converted)
    elif np.can_cast(array.dtype, dtype):
        return converted
    else:
        good = converted == array  # a number that does not fit has wrapped around to another one
    if good.all():
        return converted
    failures: dict[int, str] = {}
    for place in np.argwhere(~good):
        given = array[tuple(place)]
        failures.setdefault(
            int(place[0]), f"field {name!r}: expected a number that {dtype.name} holds, given {given}"
        )
    raise EncodeError(failures)


FieldType = npt.DTypeLike | tuple[npt.DTypeLike, int]

# The code of the struct module for each kind and size of numpy. Packing is the fastest way from Python numbers to an
# array (10 floats: 90 ns, np.array: 250 ns, np.fromiter: 150 ns), and refuses numbers that do not fit the type.
_PACKING_CODES: Final = {np.dtype(code).str[1:]: code for code in "?efdbhiqBHIQ"}
_JSON_TYPES: Final = {"b": bool, "i": int, "u": int, "f": float, "U": str}


@final
class JsonColumns:
    """JSON objects as `Columns`, both ways: one array for each field of the schema.

    ``fields`` maps each name to a numpy type, or to a type and a width for a list of that length, whose column has
    the shape (records, width). ``"str"`` is numpy text as wide as the longest value. Reading ignores other fields. It
    refuses a value with a field that is missing, null, of another type, out of the type's range or of another width.
    Reading takes about as long as `Json`, which does not make arrays. Writing takes `Columns` of exactly these
    fields, converts numbers to the field's type, and refuses values that could not be read back.

    >>> decoder = JsonColumns({"id": "int64", "x": ("float64", 2), "name": "str"})
    >>> values = [b'{"id": 1, "x": [0.5, 1], "name": "a"}', b'{"name": "bc", "x": [2, 3], "id": 2, "z": 0}']
    >>> columns = decoder.decode(TopicBatch(values=values))
    >>> columns, columns["x"].tolist()
    (Columns(2 records: id int64, x float64[2], name <U2), [[0.5, 1.0], [2.0, 3.0]])
    >>> decoder.decode(TopicBatch(values=[values[0], b'{"id": 1, "x": [1], "name": "a"}']))
    Traceback (most recent call last):
    ...
    streamiter.errors.DecodeError: value 1 of the batch: Expected `array` of length 2 - at `$.x`
    >>> decoder.encode(columns).values[1]
    b'{"id":2,"x":[2.0,3.0],"name":"bc"}'
    """

    def __init__(self, fields: Mapping[str, FieldType]) -> None:
        if not fields:
            raise ConfigurationError("JsonColumns: expected one or more fields, given none")
        self._fields = [_Field(name, spec, index) for index, (name, spec) in enumerate(fields.items())]
        self._decode = msgspec.json.Decoder(_column_row_type(self._fields)).decode

    def decode(self, batch: TopicBatch) -> Batch:
        """Return the columns; raise ``DecodeError`` for values that do not fit the schema."""
        try:
            return self._columns(list(map(self._decode, batch.values)))  # type: ignore[arg-type]
        except BAD_INPUT:  # one value is bad: find it
            return self._columns(decode_values(batch.values, self._decode_one))

    def encode(self, batch: Batch) -> OutgoingBatch:
        """Return the values; raise ``EncodeError`` for records that do not fit: all of them if a column is wrong."""
        batch = rows_to_encode(batch)
        if not len(batch):
            return OutgoingBatch([])
        fitting = self._fitting(batch)
        try:
            return OutgoingBatch(_json_of(fitting))
        except BAD_INPUT:  # a text with a lone surrogate: find it
            return OutgoingBatch(
                encode_each(range(len(fitting)), lambda index: _json_of(take(fitting, [index]))[0])
            )

    def _fitting(self, batch: Batch) -> Columns:
        """Return the columns with the types and in the order of the schema; raise ``EncodeError``."""
        names = [field.name for field in self._fields]
        expected = f"expected Columns of the fields {', '.join(names)}"
        if not isinstance(batch, Columns):
            raise _all_refused(batch, f"{expected}, given {_kind_of(batch)}; make them with map_batch")
        if set(batch.names) != set(names):
            raise _all_refused(batch, f"{expected}, given {', '.join(batch.names)}")
        arrays = {}
        failures: dict[int, str] = {}
        for field in self._fields:
            try:
                arrays[field.name] = fitting_array(field.name, batch[field.name], field.dtype, field.width)
            except EncodeError as error:
                failures = error.failures | failures  # keeps the first reason of each record
        if failures:
            raise EncodeError(dict(sorted(failures.items())))
        return Columns(arrays)

    def _decode_one(self, value: bytes) -> object:
        row = self._decode(value)
        self._columns([row])  # raises for a number that is too large for its type
        return row

    def _columns(self, rows: Sequence[object]) -> Columns:
        return Columns({field.name: field.column(rows) for field in self._fields})

    def __repr__(self) -> str:
        return f"JsonColumns({{{', '.join(map(repr, self._fields))}}})"


def _json_of(columns: Batch) -> list[bytes]:
    assert isinstance(columns, Columns)
    values = encode_columns(columns)
    assert values is not None, "the types of a schema all have a form in JSON"
    return values


def _all_refused(batch: Batch, reason: str) -> EncodeError:
    return EncodeError(dict.fromkeys(range(len(batch)), reason))


def _kind_of(batch: Batch) -> str:
    return "a numpy array" if isinstance(batch, np.ndarray) else f"a list of {type(batch[0]).__name__}"


class _Field:
    """One field of a schema: its type in JSON, and the conversion to a column."""

    def __init__(self, name: str, spec: FieldType, index: int) -> None:
        dtype, width = spec if isinstance(spec, tuple) else (spec, None)
        self.name = name
        self.width: int | None = width
        self.attribute = f"field_{index}"  # a field may have any text as its name, an attribute may not
        self.dtype = _supported_type(name, dtype)
        if self.width is not None and self.width < 1:
            raise ConfigurationError(
                f"JsonColumns, field {name!r}: expected a width >= 1, given {self.width}"
            )

    @property
    def json_type(self) -> object:
        """The type that the JSON decoder checks; a tuple of fixed length checks the width."""
        item = _JSON_TYPES[self.dtype.kind]
        return item if self.width is None else tuple[(item,) * self.width]  # type: ignore[misc]

    def column(self, rows: Sequence[object]) -> Array:
        """Return the field of all rows; raise ``ValueError`` for a value that does not fit the type."""
        values = list(map(attrgetter(self.attribute), rows))
        if self.dtype.kind == "U":
            return self._text_column(values)
        try:
            return self._packed_column(values)
        except (struct.error, OverflowError) as error:
            raise ValueError(f"out of range for {self.dtype.name} - at `$.{self.name}`") from error

    def _packed_column(self, values: list[Any]) -> Array:
        code = _PACKING_CODES[f"{self.dtype.kind}{self.dtype.itemsize}"]
        if self.width is None:
            packed = bytearray(struct.pack(f"={len(values)}{code}", *values))
            return np.frombuffer(packed, self.dtype)
        packed = bytearray().join(starmap(struct.Struct(f"={self.width}{code}").pack, values))
        return np.frombuffer(packed, self.dtype).reshape(len(values), self.width)

    def _text_column(self, values: list[Any]) -> Array:
        texts = values if self.width is None else list(chain.from_iterable(values))
        if "\0" in "".join(texts) and any(text.endswith("\0") for text in texts):
            raise ValueError(f"numpy text cannot end with NUL - at `$.{self.name}`")
        column = np.array(texts, dtype=self.dtype)
        return column if self.width is None else column.reshape(len(values), self.width)

    def __repr__(self) -> str:
        return f"{self.name!r}: {self.dtype.name if self.width is None else (self.dtype.name, self.width)!r}"


def _supported_type(name: str, dtype: npt.DTypeLike) -> np.dtype[Any]:
    try:
        given = np.dtype(dtype)
    except TypeError as error:
        raise ConfigurationError(f"JsonColumns, field {name!r}: {error}") from error
    if given == np.dtype(str) or f"{given.kind}{given.itemsize}" in _PACKING_CODES:
        return given.newbyteorder("=")
    raise ConfigurationError(
        f"JsonColumns, field {name!r}: expected bool, an int or float type of up to 8 bytes, or 'str', "
        f"given {given}"
    )


def _column_row_type(fields: Sequence[_Field]) -> type[msgspec.Struct]:
    return msgspec.defstruct(
        "Row",
        [(field.attribute, field.json_type) for field in fields],
        rename={field.attribute: field.name for field in fields},
        gc=False,  # rows hold numbers and text, never cycles, so the garbage collector can skip them
    )


@final
class Typed:
    """JSON as ``msgspec.Struct`` instances, both ways: checked against the class while it is parsed.

    ``struct_type`` is a ``Struct`` class, or a union of tagged classes. The class decides which fields are required,
    which have a default, and whether unknown fields are refused (``forbid_unknown_fields=True``).

    >>> class Click(msgspec.Struct):
    ...     user: str
    ...     price: float = 0.0
    >>> Typed(Click).decode(TopicBatch(values=[b'{"user": "ann", "price": 2}', b'{"user": "bob"}']))
    [Click(user='ann', price=2.0), Click(user='bob', price=0.0)]
    >>> Typed(Click).encode([Click("ann", 0.5)]).values
    [b'{"user":"ann","price":0.5}']
    >>> Typed(Click).decode(TopicBatch(values=[b'{"user": 7}', None]))
    Traceback (most recent call last):
    ...
    streamiter.errors.DecodeError: value 0 of the batch: Expected `str`, got `int` - at `$.user` (and 1 more)
    """

    def __init__(self, struct_type: Any) -> None:
        self._type = struct_type
        self._decode = msgspec.json.Decoder(struct_type).decode
        self._encode = msgspec.json.Encoder().encode

    @property
    def struct_types(self) -> tuple[type[msgspec.Struct], ...]:
        """The class, or the classes of the union, and the ``Struct`` classes of their fields."""
        return tuple(_structs_in(self._type))

    def decode(self, batch: TopicBatch) -> Batch:
        """Return the instances; raise ``DecodeError`` for values that do not fit the class, and for tombstones."""
        try:
            return list(map(self._decode, batch.values))  # type: ignore[arg-type]
        except BAD_INPUT:  # one value is bad: find it
            return decode_values(batch.values, self._decode)

    def encode(self, batch: Batch) -> OutgoingBatch:
        """Return the values; raise ``EncodeError`` for records that are not of the class."""
        return OutgoingBatch(encode_each(batch, self._encode_one))

    def _encode_one(self, record: Any) -> bytes:
        if not isinstance(record, self._type):
            raise TypeError(f"expected {_name(self._type)}, given {type(record).__name__}")
        return self._encode(record)

    def __repr__(self) -> str:
        return f"Typed({_name(self._type)})"


def _name(struct_type: object) -> str:
    return getattr(struct_type, "__name__", str(struct_type))


def _structs_in(struct_type: object) -> dict[type[msgspec.Struct], None]:
    import msgspec.inspect  # needed only when a flow is built

    found: dict[type[msgspec.Struct], None] = {}
    open_types: list[object] = [msgspec.inspect.type_info(struct_type)]
    while open_types:
        each = open_types.pop()
        if isinstance(each, msgspec.inspect.StructType):
            if each.cls in found:
                continue
            found[each.cls] = None
        if isinstance(each, tuple):
            open_types += each
        elif isinstance(each, (msgspec.inspect.Type, msgspec.inspect.Field)):
            open_types += [getattr(each, name) for name in each.__struct_fields__]
    return found


Given = TypeVar("Given")
Made = TypeVar("Made")

# The errors of JSON, text and conversion functions for bad input. Any other error is a bug and must not be taken for
# bad input.
BAD_INPUT: Final = (msgspec.MsgspecError, ValueError, TypeError, OverflowError, RecursionError)


def decode_each(values: Iterable[Given], decode: Callable[[Given], Made]) -> list[Made]:
    """Decode the values one by one; raise :class:`~streamiter.errors.DecodeError` that names each bad one.

    >>> decode_each([b"1", b"two", b"3"], int)
    Traceback (most recent call last):
    ...
    streamiter.errors.DecodeError: value 1 of the batch: invalid literal for int() with base 10: b'two'
    """
    made, failures = _each(values, decode)
    if failures:
        raise DecodeError(failures)
    return made


def decode_values(values: Iterable[bytes | None], decode: Callable[[bytes], Made]) -> list[Made]:
    """Decode as :func:`decode_each` does; a record without a value is bad, too."""

    def decode_one(value: bytes | None) -> Made:
        if value is None:
            raise ValueError("no value (tombstone)")
        return decode(value)

    return decode_each(values, decode_one)


def rows_to_encode(batch: Any) -> Batch:
    """Return the batch, and for a table its rows; raise ``TopicError`` for a table that cannot become rows."""
    rows = (
        None if isinstance(batch, (list, Columns, np.ndarray)) else rows_of_table("encode", batch, TopicError)
    )
    given: Batch = batch if rows is None else rows
    return given


def encode_each(records: Iterable[Given], encode: Callable[[Given], Made]) -> list[Made]:
    """Encode the records one by one; raise :class:`~streamiter.errors.EncodeError` that names each bad one."""
    made, failures = _each(rows_to_encode(records), encode)
    if failures:
        raise EncodeError(failures)
    return made


def _each(inputs: Iterable[Given], convert: Callable[[Given], Made]) -> tuple[list[Made], dict[int, str]]:
    made: list[Made] = []
    failures: dict[int, str] = {}
    for index, given in enumerate(inputs):
        try:
            made.append(convert(given))
        except BAD_INPUT as error:
            failures[index] = reason_of(error)
    return made, failures


def reason_of(error: Exception) -> str:
    """Return a short reason: the first line of the message."""
    text = str(error) or type(error).__name__
    return text.splitlines()[0][:200]
