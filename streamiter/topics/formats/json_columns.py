"""JSON objects straight into columns and back, by a schema."""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from itertools import chain, starmap
from operator import attrgetter
from types import MappingProxyType
from typing import Any, Final, final

import msgspec
import numpy as np
import numpy.typing as npt

from streamiter.errors import ConfigurationError, EncodeError
from streamiter.records import Batch, Columns, take
from streamiter.topics.formats.column_checks import fitting_array
from streamiter.topics.formats.failures import BAD_INPUT, NO_VALUE, decode_each, encode_each, rows_to_encode
from streamiter.topics.formats.json_rows import encode_columns
from streamiter.topics.topic import OutgoingBatch, TopicBatch

__all__ = ["JsonColumns"]

Array = npt.NDArray[Any]
FieldType = npt.DTypeLike | tuple[npt.DTypeLike, int]

# numpy's kind and bytes → the code of the struct module. Packing is the fastest way from Python numbers to
# an array (10 floats: 90 ns, np.array: 250 ns, np.fromiter: 150 ns), and refuses what does not fit the type.
_PACKING_CODES: Final = MappingProxyType(
    {
        "b1": "?",
        **{"f2": "e", "f4": "f", "f8": "d"},
        **{"i1": "b", "i2": "h", "i4": "i", "i8": "q"},
        **{"u1": "B", "u2": "H", "u4": "I", "u8": "Q"},
    }
)
_JSON_TYPES: Final[Mapping[str, type]] = MappingProxyType(
    {"b": bool, "i": int, "u": int, "f": float, "U": str}
)


@final
class JsonColumns:
    """JSON objects as `Columns`, both ways: one array for each field of the schema.

    ``fields`` gives a numpy type for each name, or a type and a width where the value is a list of that
    length: its column has the shape (records, width). ``"str"`` gives numpy text as wide as the longest.
    Reading ignores other fields, and refuses a value where a field is missing, null, of another type, out of
    the type's range or of another width. It takes about the time of `Json` alone, without the arrays still
    to be made from its objects. Writing takes `Columns` of just these fields, converts numbers to the
    field's type, and refuses what could not be read back.

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
        self._decode = msgspec.json.Decoder(_row_type(self._fields)).decode

    def decode(self, batch: TopicBatch) -> Batch:
        """Raises ``DecodeError`` for values that do not fit the schema."""
        try:
            return self._columns(list(map(self._decode, batch.values)))  # type: ignore[arg-type]
        except BAD_INPUT:  # one of them is bad: find out which
            return self._columns(decode_each(batch.values, self._decode_one))

    def encode(self, batch: Batch) -> OutgoingBatch:
        """Raises ``EncodeError`` for records that do not fit the schema; a wrong column is in all of them."""
        batch = rows_to_encode(batch)
        if not len(batch):
            return OutgoingBatch([])
        fitting = self._fitting(batch)
        try:
            return OutgoingBatch(_json_of(fitting))
        except BAD_INPUT:  # a text with half of a character (a lone surrogate): find out which
            return OutgoingBatch(
                encode_each(range(len(fitting)), lambda index: _json_of(take(fitting, [index]))[0])
            )

    def _fitting(self, batch: Batch) -> Columns:
        """The columns as the schema has them, in its order; raises ``EncodeError``."""
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
                failures = error.failures | failures  # of each record the first reason
        if failures:
            raise EncodeError(dict(sorted(failures.items())))
        return Columns(arrays)

    def _decode_one(self, value: bytes | None) -> Any:
        if value is None:
            raise ValueError(NO_VALUE)
        row = self._decode(value)
        self._columns([row])  # a number may be too large for its type
        return row

    def _columns(self, rows: Sequence[Any]) -> Columns:
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
    """One field: its type in JSON, and how its column is made."""

    def __init__(self, name: str, spec: FieldType, index: int) -> None:
        dtype, width = spec if isinstance(spec, tuple) else (spec, None)
        self.name = name
        self.width: int | None = width
        self.attribute = f"field_{index}"  # a field's name may be any text, an attribute's may not
        self.dtype = _supported_type(name, dtype)
        if self.width is not None and self.width < 1:
            raise ConfigurationError(
                f"JsonColumns, field {name!r}: expected a width >= 1, given {self.width}"
            )

    @property
    def json_type(self) -> Any:
        """The type that the JSON decoder enforces; a tuple of fixed length enforces the width."""
        item = _JSON_TYPES[self.dtype.kind]
        return item if self.width is None else tuple[(item,) * self.width]  # type: ignore[misc]

    def column(self, rows: Sequence[Any]) -> Array:
        """The field of all rows; raises ``ValueError`` for what does not fit the type."""
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


def _row_type(fields: Sequence[_Field]) -> type[msgspec.Struct]:
    return msgspec.defstruct(
        "Row",
        [(field.attribute, field.json_type) for field in fields],
        rename={field.attribute: field.name for field in fields},
        gc=False,  # rows hold numbers and text, never cycles: the collector need not look at them
    )
