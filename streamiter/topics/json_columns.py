"""JSON objects as columns: one array for each field of a schema, both ways.

Values are decoded with msgspec into objects, and then become arrays. Where Numba is installed, compiled code puts the
values of long streams straight into the arrays (:mod:`streamiter.topics.json_scanner`). It leaves unusual records to
msgspec, so both ways give the same columns and the same errors.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Mapping, Sequence
from itertools import chain, starmap
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Final, NamedTuple, final

import msgspec
import numpy as np
import numpy.typing as npt

from streamiter.errors import ConfigurationError, EncodeError
from streamiter.topics.formats import BAD_INPUT, decode_values, encode_columns, encode_each, even_parts, rows_to_encode
from streamiter.topics.joined_values import JoinedValues, lengths_of
from streamiter.topics.topic import OutgoingBatch, TopicBatch
from streamiter.values.helpers.compiled import is_compiling, is_loaded, saying_that_it_compiles
from streamiter.values.numbers import Array, Indices, whole_number
from streamiter.values.records import Batch, Columns, take

if TYPE_CHECKING:
    from streamiter.topics.json_scanner import Fields

# Compiled code decodes several times as fast, but takes a quarter of a second to load, as long as 300,000 records take
# without it.
# Short streams are decoded without it, unless another step has loaded it already, as the ready-made learner does.
_LOADED_AFTER: Final = 100_000
# Measured for a schema of one field: with fewer values than this, compiled code is slower.
_SCANNED_TOGETHER: Final = 24
# A batch that compiled code leaves to msgspec takes a third longer. So few trials cost less than two percent.
_BATCHES_BETWEEN_TRIALS: Final = 16

# A thread for a batch costs a tenth of a millisecond, in which this many values are scanned in the event loop.
_SCANNED_IN_THREAD: Final = 1_000

_ALL_FIELDS: Final = np.zeros(0, np.int64)

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
        given = dtype_name(array.dtype, array.shape[1:])
        reason = f"field {name!r}: expected {dtype_name(dtype, shape)}, given {given}"
        raise EncodeError(dict.fromkeys(range(len(array)), reason))
    if dtype.kind == "U":
        return array
    return _same_numbers(name, array, dtype)


def dtype_name(dtype: np.dtype[Any], shape: tuple[int, ...]) -> str:
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
        failures.setdefault(int(place[0]), f"field {name!r}: expected a number that {dtype.name} holds, given {given}")
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
    the shape (records, width). ``"str"`` is numpy text as wide as the longest value of the batch; a source divides a
    batch in which one value is so long that it would take much memory. Reading ignores other fields. It refuses a value
    with a field that is missing, null, of another type, out of the type's range or of another width. Writing takes
    `Columns` of exactly these fields, converts numbers to the field's type, and refuses values that could not be read
    back.

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
        self._given = dict(fields)
        self._fields = [_Field(name, spec, index) for index, (name, spec) in enumerate(fields.items())]
        self._decode = msgspec.json.Decoder(_column_row_type(self._fields)).decode
        self._scanner: ColumnScanner | None = None
        self._records_before_scanning: float = _LOADED_AFTER if is_compiling() else math.inf
        # Of one character of each text of a record.
        self._text_bytes = max((4 * (field.width or 1) for field in self._fields if field.dtype.kind == "U"), default=0)

    def __reduce__(self) -> tuple[type[JsonColumns], tuple[object]]:
        # Ray sends flows to other processes; decoders of msgspec cannot be sent.
        return JsonColumns, (self._given,)

    def ahead(self, batch: TopicBatch) -> Callable[[], object] | None:
        """Return the part of ``decode`` that runs in a thread, while other steps run; None if there is none.

        Compiling, which takes seconds unless the code is stored, is such a part, too.
        """
        values, scanner = batch.values, self._scanner
        if len(values) < _SCANNED_TOGETHER or self._waits_for() > len(values):
            return None
        is_joined = isinstance(values, JoinedValues) and len(values) >= _SCANNED_IN_THREAD
        if (scanner is not None and not is_joined) or len(self.parts(batch)) > 1:
            return None
        if scanner is None:
            return lambda: self._loaded_scanner().scan(values)
        assert isinstance(values, JoinedValues)

        def scan() -> None:
            values.decoded = _Scanned(scanner, scanner.scan(values))

        return scan

    def parts(self, batch: TopicBatch) -> Sequence[TopicBatch]:
        """Return the parts of the batch to decode one by one: one long text makes all of its array as wide."""
        return even_parts(batch, self._text_bytes)

    def decode(self, batch: TopicBatch) -> Batch:
        """Return the columns; raise ``DecodeError`` for values that do not fit the schema."""
        scanned = self._scanned(batch.values)
        try:
            if scanned is not None:
                return self._completed(*scanned, batch.values)
            return self._columns(list(map(self._decode, batch.values)))  # type: ignore[arg-type]
        except BAD_INPUT:  # one value is bad: find it
            return self._columns(decode_values(batch.values, self._decode_one))

    def _scanned(self, values: Sequence[bytes | None]) -> tuple[dict[str, Array], Indices] | None:
        """Return the columns and the indices of odd records, or None if compiled code cannot decode most values."""
        if len(values) < _SCANNED_TOGETHER:
            return None
        self._records_before_scanning = self._waits_for() - len(values)
        if self._records_before_scanning > 0:
            return None
        scanner = self._loaded_scanner()
        ahead = values.decoded if isinstance(values, JoinedValues) else None
        scanned = ahead.scanned if isinstance(ahead, _Scanned) and ahead.by is scanner else scanner.scan(values)
        if scanned is None or 2 * len(scanned[1]) > len(values):
            self._records_before_scanning = _BATCHES_BETWEEN_TRIALS * len(values)
            return None
        return scanned

    def _waits_for(self) -> float:
        """Return after how many more records compiled code is used."""
        is_at_hand = self._scanner is None and is_loaded() and self._records_before_scanning < math.inf
        return 0 if is_at_hand else self._records_before_scanning

    def _loaded_scanner(self) -> ColumnScanner:
        if self._scanner is None:
            self._scanner = ColumnScanner([(field.name, field.dtype, field.width) for field in self._fields])
        return self._scanner

    def _completed(self, arrays: dict[str, Array], odd: Indices, values: Sequence[bytes | None]) -> Columns:
        """Return the columns with the entries of the odd records, as msgspec decodes them."""
        if not len(odd):
            return Columns(arrays)
        others = self._columns([self._decode(values[index]) for index in odd])
        return Columns({name: _replaced(array, odd, others[name]) for name, array in arrays.items()})

    def encode(self, batch: Batch) -> OutgoingBatch:
        """Return the values; raise ``EncodeError`` for records that do not fit: all of them if a column is wrong."""
        batch = rows_to_encode(batch)
        if not len(batch):
            return OutgoingBatch([])
        fitting = self._fitting(batch)
        try:
            return OutgoingBatch(_json_of(fitting))
        except BAD_INPUT:  # a text with a lone surrogate: find it
            return OutgoingBatch(encode_each(range(len(fitting)), lambda index: _json_of(take(fitting, [index]))[0]))

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


class ColumnScanner:
    """Turns JSON objects into columns with compiled code.

    >>> scanner = ColumnScanner([("town", np.dtype(str), None), ("km", np.dtype(int), None)])
    >>> scanner.scan([b'{"town": "Rom", "id": [7], "km": 12}', b'{"town": "Rom", "km": null}'])
    ({'town': array(['Rom', ''], dtype='<U3'), 'km': array([12,  0])}, array([1]))
    """

    def __init__(self, fields: Fields, absent: Sequence[str] = ()) -> None:
        """``absent``: further fields, with which a record is odd."""
        from streamiter.topics import json_scanner  # imports Numba

        self._compiled = json_scanner
        self._fields = [(name, dtype, width, width or 1) for name, dtype, width in fields]
        self._keys, self._schema = json_scanner.schema_of([*fields, *((name, np.dtype(int), None) for name in absent)])
        # No number is within these bounds.
        self._schema[len(fields) : -1, [json_scanner.LOWEST, json_scanner.HIGHEST]] = 1, 0
        self._slots = sum((2 if dtype.kind == "U" else 1) * items for _name, dtype, _width, items in self._fields)
        self._slots += len(absent)
        with saying_that_it_compiles("the decoder of JsonColumns"):
            self.scan([b"{}"])

    def scan(
        self, values: Sequence[bytes | None], has: npt.NDArray[np.int64] = _ALL_FIELDS
    ) -> tuple[dict[str, Array], Indices] | None:
        """Return the columns and the indices of the odd records, whose entries are zeros and empty texts.

        Returns None for values that cannot be scanned together: one contains a line feed, is not bytes, or has a number
        that is too large for the type of its field. With ``has``, zeros for all records, a record need not have all
        fields: the bits become the fields that it has, and the other entries are zeros and empty texts.
        """
        records = len(values)
        data = joined_bytes(values)
        if data is None:
            return None
        schema = self._schema.copy()
        schema[:, self._compiled.FIRST_SLOT] *= records
        slots = (np.zeros if len(has) else np.empty)(records * self._slots, np.int64)
        is_odd = np.zeros(records, np.bool_)
        floats = slots.view(np.float64)
        end = self._compiled.scan_records(data, self._keys, schema.reshape(-1), slots, floats, is_odd, has)
        if end < len(data):
            return None
        odd = is_odd.nonzero()[0]
        columns, start = {}, 0
        for name, dtype, width, items in self._fields:
            is_text = dtype.kind == "U"
            stop = start + records * items * (2 if is_text else 1)
            own, start = slots[start:stop], stop
            if len(odd):
                own.reshape(records, -1)[odd] = 0
            column = self._texts(data, own) if is_text else _numbers(own, dtype)
            if column is None:
                return None
            columns[name] = column if width is None else column.reshape(records, width)
        return columns, odd

    def _texts(self, data: npt.NDArray[np.uint8], places: npt.NDArray[np.int64]) -> Array:
        """Return an array of the texts at these places."""
        width = max(int(places[1::2].max()), 1)
        characters = np.zeros((len(places) // 2, width), np.uint32)
        self._compiled.write_texts(data, places, characters)
        return characters.view(f"U{width}")[:, 0]

    def texts_of(self, values: JoinedValues) -> Array:
        """Return the texts of the records as an array of bytes; none ends with NULs."""
        width = max(int(lengths_of(values).max()), 1)
        texts = np.zeros((len(values), width), np.uint8)
        self._compiled.write_records(values.buffer, values.ends, texts)
        return texts.view(f"S{width}")[:, 0]


class _Scanned(NamedTuple):
    """The columns and the indices of the odd records of a batch, as a scanner returned them."""

    by: ColumnScanner
    scanned: tuple[dict[str, Array], Indices] | None

    def part(self, start: int, stop: int) -> _Scanned:
        if self.scanned is None:
            return self
        columns, odd = self.scanned
        inside = odd[(odd >= start) & (odd < stop)] - start
        return _Scanned(self.by, ({name: column[start:stop].copy() for name, column in columns.items()}, inside))


def joined_bytes(values: Sequence[bytes | None]) -> npt.NDArray[np.uint8] | None:
    """Return the bytes of all values, each followed by a line feed; None if a value is not bytes."""
    if isinstance(values, JoinedValues):
        return None if len(values.nulls) else values.buffer
    try:
        return np.frombuffer(b"\n".join([*values, b""]), np.uint8)  # type: ignore[list-item]
    except TypeError:
        return None


def _numbers(slots: npt.NDArray[np.int64], dtype: np.dtype[Any]) -> Array | None:
    """Return the slots as an array of this type; None where a float is too large for it."""
    if dtype.kind != "f":
        return slots.astype(dtype)
    if dtype.itemsize == 8:
        return slots.view(dtype).copy()
    with np.errstate(over="ignore"):
        column = slots.view(np.float64).astype(dtype)
    return column if np.isfinite(column).all() else None


def _replaced(array: Array, indices: Indices, entries: Array) -> Array:
    """Return the array with other entries, as wide as the longest text."""
    array = array.astype(np.result_type(array, entries), copy=False)
    array[indices] = entries
    return array


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
        if width is not None:
            whole_number(f"JsonColumns, width of field {name!r}", width, 1)

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
        f"JsonColumns, field {name!r}: expected bool, an int or float type of up to 8 bytes, or 'str', given {given}"
    )


def _column_row_type(fields: Sequence[_Field]) -> type[msgspec.Struct]:
    return msgspec.defstruct(
        "Row",
        [(field.attribute, field.json_type) for field in fields],
        rename={field.attribute: field.name for field in fields},
        gc=False,  # rows hold numbers and text, never cycles, so the garbage collector can skip them
    )
