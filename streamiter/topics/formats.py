"""Decoders and encoders: from the bytes of a topic to records, and back.

Values are bytes (`Raw`), text (`Text`) or JSON: as Python objects (`Json`), as typed records (`Typed`), and in
:mod:`streamiter.topics.json_columns` as columns. `WithMetadata` adds keys, time stamps, headers and origins. All of
them name each bad value of a batch, by means of `decode_each`, `decode_values` and `encode_each`.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import repeat
from operator import is_
from types import UnionType
from typing import Any, Final, Generic, Literal, TypeVar, final, overload

import msgspec
import numpy as np
import orjson

from streamiter.errors import DecodeError, EncodeError, TopicError
from streamiter.topics.joined_values import lengths_of
from streamiter.topics.topic import Decoder, OutgoingBatch, TopicBatch
from streamiter.topics.topic import longest as longest_of
from streamiter.values.helpers.clock import Clock
from streamiter.values.numbers import Array, one_of
from streamiter.values.records import WIDE_TEXTS_BYTES, Batch, Columns, rows_of_table

Given = TypeVar("Given")
Made = TypeVar("Made")


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

    async def before_decoding(self, batch: TopicBatch, clock: Clock) -> None:
        """Let the inner decoder prepare itself, if it has such a method."""
        prepare = getattr(self.decoder, "before_decoding", None)
        if prepare is not None:
            await prepare(batch, clock)

    def parts(self, batch: TopicBatch) -> Iterable[TopicBatch]:
        """Return the parts of the batch that the inner decoder decodes one by one."""
        parts = getattr(self.decoder, "parts", None)
        return [batch] if parts is None else parts(batch)

    def decode(self, batch: TopicBatch) -> Batch:
        """Return the dicts; raises the ``DecodeError`` of the inner decoder."""
        partition, values = batch.partition, self.decoder.decode(batch)
        columns = (batch.keys, values, batch.timestamps_ms, batch.offsets, batch.headers)
        return [
            {"key": key, "value": value, "timestamp_ms": ms, "partition": partition, "offset": at, "headers": headers}
            for key, value, ms, at, headers in zip(*columns, strict=True)
        ]

    def __repr__(self) -> str:
        return f"WithMetadata({self.decoder!r})"


@final
class Json:
    """JSON values as Python objects, both ways.

    A record without a value (a tombstone) is decoded as None. Encoding takes the types of JSON, numpy arrays and
    scalars, `Columns` (each row as an object) and ``msgspec.Struct``. None becomes ``null``. NaN and infinities,
    which JSON does not have, become ``null``, too. Whole numbers of any size are exact, both ways;
    ``big_integers="refuse"`` refuses values with one that does not fit 64 bits. The text ``null`` is decoded as None,
    too, which a sink writes as a tombstone; ``nulls="refuse"`` refuses it, and keeps tombstones.

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

    def __init__(
        self, *, big_integers: Literal["keep", "refuse"] = "keep", nulls: Literal["keep", "refuse"] = "keep"
    ) -> None:
        self._options = {"big_integers": big_integers, "nulls": nulls}
        for name, given in self._options.items():
            one_of(f"Json({name}=)", given, "keep", "refuse")
        self._loads = loads_exactly if big_integers == "keep" else _loads_64_bits
        self._refuses_nulls = nulls == "refuse"

    def decode(self, batch: TopicBatch) -> Batch:
        """Return the objects; raise ``DecodeError`` for values that are not JSON."""
        values = list(batch.values)
        try:
            if not has_big_integer(b" ".join(values)):  # type: ignore[arg-type]
                records = list(map(orjson.loads, values))  # type: ignore[arg-type]
                if not self._refuses_nulls or not any(map(is_, records, repeat(None))):
                    return records
        except (orjson.JSONDecodeError, TypeError):  # one value is bad, or None: find it
            pass
        return decode_each(values, self._loads_no_null if self._refuses_nulls else self._loads)

    def _loads_no_null(self, value: bytes | None) -> object:
        record = self._loads(value)
        if record is None and value is not None:
            raise ValueError('the text null, which a sink would write as a tombstone; nulls="keep" takes it for None')
        return record

    def encode(self, batch: Batch) -> OutgoingBatch:
        """Return the values of records or of a table; raise ``EncodeError`` for records without a form in JSON."""
        batch = rows_to_encode(batch)
        if isinstance(batch, Columns):
            values = encode_columns(batch)
        elif isinstance(batch, np.ndarray):
            values = encode_array(batch)
        else:
            values = None
        return OutgoingBatch(values if values is not None else _encode_records(batch))

    def __repr__(self) -> str:
        return f"Json({', '.join(f'{name}={given!r}' for name, given in self._options.items() if given != 'keep')})"


# A whole number that does not fit 64 bits has at least this many digits: -9,223,372,036,854,775,809 has 19.
_BIG_INTEGER_DIGITS: Final = 19
_LONG: Final = b"0" * _BIG_INTEGER_DIGITS
# Each digit becomes a 0, since a search for one text takes a tenth of the time of a search for a pattern.
_DIGITS_AS_ZEROS: Final = bytes.maketrans(b"123456789", b"0" * 9)
_LONG_NUMBER: Final = re.compile(rb"-?[0-9]{%d,}" % _BIG_INTEGER_DIGITS)


# Arrays take a seventh of the time of a translated text for 300 KB, and longer than it for fewer than 6,000 bytes.
_SAMPLED_FROM: Final = 8_000


def _has_digits_in_samples(text: bytes) -> bool:
    """Return whether four digits follow each other at each fourth byte, as they do in 19 digits; rare in times."""
    is_digit = np.frombuffer(text, np.uint8)[::4] - np.uint8(ord("0")) < 10
    is_pair = is_digit[1:] & is_digit[:-1]
    return bool((is_pair[2:] & is_pair[:-2]).any())


def has_big_integer(text: bytes) -> bool:
    """Return whether a number, or a text, has digits in a row that do not fit 64 bits as a whole number."""
    if len(text) > _SAMPLED_FROM and not _has_digits_in_samples(text):
        return False
    if _LONG not in text.translate(_DIGITS_AS_ZEROS):
        return False
    numbers = _LONG_NUMBER.findall(text)
    return any(len(number) > len(_LONG) + 1 or not -(2**63) <= int(number) < 2**64 for number in numbers)


def loads_exactly(value: bytes | None) -> object:
    """Return the object of a JSON text, None for None. orjson makes floats of whole numbers beyond 64 bits."""
    if value is None:
        return None
    found: object = orjson.loads(value)
    return json.loads(value) if has_big_integer(value) else found


def _loads_64_bits(value: bytes | None) -> object:
    """Return the object of a JSON text, None for None; refuse a whole number beyond 64 bits."""
    found = loads_exactly(value)
    if value is not None and has_big_integer(value) and (big := next(_big_integers_in(found), None)) is not None:
        raise ValueError(
            f"expected whole numbers of at most 64 bits, given {big}; leave big_integers= out to keep them, or write "
            "such numbers as texts"
        )
    return found


def _big_integers_in(found: object) -> Iterator[int]:
    if isinstance(found, dict):
        for item in found.values():
            yield from _big_integers_in(item)
    elif isinstance(found, (list, tuple)):
        for item in found:
            yield from _big_integers_in(item)
    elif type(found) is int and not -(2**63) <= found < 2**64:
        yield found


def to_json_type(record: object) -> object:
    """Return a value that orjson can write, for a type that it does not know."""
    if isinstance(record, (np.ndarray, np.generic)):
        return record.tolist()
    if isinstance(record, Columns):
        return list(record)
    if isinstance(record, msgspec.Struct):
        return {name: getattr(record, name) for name in record.__struct_fields__}
    raise TypeError(
        f"JSON has no form for {type(record).__name__}; make numbers, texts, lists or dicts of it, for instance with "
        "value="
    )


_OPTIONS: Final = orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_APPEND_NEWLINE


def _dumps(record: object) -> bytes:
    # orjson writes into 1024 bytes and shrinks them in place, so each kept value occupies a KiB of the heap.
    # Measured: a page fault for each record, 1,500 ns instead of 450. A slice is a copy of the right size.
    try:
        return orjson.dumps(record, to_json_type, _OPTIONS)[:-1]
    except TypeError:
        if next(_big_integers_in(record), None) is None:
            raise
        return orjson.dumps(_with_fragments(record), to_json_type, _OPTIONS)[:-1]


def _with_fragments(record: Any) -> Any:
    """Return a record whose whole numbers beyond 64 bits are JSON already: orjson refuses them."""
    if isinstance(record, dict):
        return {name: _with_fragments(item) for name, item in record.items()}
    if isinstance(record, (list, tuple)):
        return [_with_fragments(item) for item in record]
    is_big = type(record) is int and not -(2**63) <= record < 2**64
    return orjson.Fragment(str(record)) if is_big else record


def _encode_records(batch: Batch) -> list[bytes]:
    try:
        return list(map(_dumps, batch))
    except TypeError:
        return encode_each(batch, json_bytes)


def json_bytes(record: object) -> bytes:
    """Return a record as JSON; raise ``TypeError`` that names a type without a form in JSON."""
    try:
        return _dumps(record)
    except TypeError as error:  # orjson names the type that failed in the cause only
        raise TypeError(str(error.__cause__ or error)) from error


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


@final
class Typed(Generic[Made]):
    """JSON as ``msgspec.Struct`` instances, both ways: checked against the class while it is parsed.

    ``struct_type`` is a ``Struct`` class, or a union of tagged classes. The class decides which fields are required,
    which have a default, and whether unknown fields are refused (``forbid_unknown_fields=True``). A record without a
    value (a tombstone) is refused; with ``tombstones="keep"`` it is None, both ways.

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

    @overload
    def __init__(self, struct_type: type[Made], *, tombstones: Literal["refuse"] = "refuse") -> None: ...

    @overload
    def __init__(self: Typed[Made | None], struct_type: type[Made], *, tombstones: Literal["keep"]) -> None: ...

    @overload
    def __init__(self: Typed[Any], struct_type: UnionType, *, tombstones: Literal["refuse", "keep"] = ...) -> None: ...

    def __init__(self, struct_type: Any, *, tombstones: Literal["refuse", "keep"] = "refuse") -> None:
        one_of("Typed(tombstones=)", tombstones, "refuse", "keep")
        self._type: Any = struct_type
        self._tombstones = tombstones
        self._decode = msgspec.json.Decoder(struct_type).decode
        self._encode = msgspec.json.Encoder().encode

    def __reduce__(self) -> tuple[Callable[..., Typed[Any]], tuple[Any]]:
        # Ray sends flows to other processes; decoders of msgspec cannot be sent.
        return functools.partial(Typed, tombstones=self._tombstones), (self._type,)

    @property
    def struct_types(self) -> tuple[type[msgspec.Struct], ...]:
        """The class, or the classes of the union, and the ``Struct`` classes of their fields."""
        return tuple(_structs_in(self._type))

    def decode(self, batch: TopicBatch) -> Batch:
        """Return the instances; raise ``DecodeError`` for values that do not fit the class, and for tombstones."""
        try:
            return list(map(self._decode, batch.values))  # type: ignore[arg-type]
        except BAD_INPUT:  # one value is bad, or None: find it
            if self._tombstones == "keep":
                return decode_each(batch.values, lambda value: None if value is None else self._decode(value))
            return decode_values(batch.values, self._decode)

    def encode(self, batch: Batch) -> OutgoingBatch:
        """Return the values; raise ``EncodeError`` for records that are not of the class."""
        return OutgoingBatch(encode_each(batch, self._encode_one))

    def _encode_one(self, record: Any) -> bytes | None:
        if record is None and self._tombstones == "keep":
            return None
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


def even_parts(batch: TopicBatch, text_bytes: int) -> Sequence[TopicBatch]:
    """Return the parts of a batch whose arrays of texts do not take gigabytes because one text among them is long.

    ``text_bytes``: what a character of each value takes in such an array; 0: the records are in no such array.
    """
    if not text_bytes:
        return [batch]
    values, most_characters = batch.values, WIDE_TEXTS_BYTES // text_bytes
    longest = longest_of(values) if isinstance(values, list) else int(lengths_of(values).max(initial=0))
    if len(values) * longest <= most_characters:
        return [batch]
    parts, start, longest = [], 0, 0
    for place, length in enumerate(lengths_of(values).tolist()):
        longest = max(longest, length)
        if place > start and (place + 1 - start) * longest > most_characters:
            parts.append(batch[start:place])
            start, longest = place, length
    return [*parts, batch[start:]]


def rows_to_encode(batch: Any) -> Batch:
    """Return the batch, and for a table its rows; raise ``TopicError`` for a table that cannot become rows."""
    rows = None if isinstance(batch, (list, Columns, np.ndarray)) else rows_of_table("encode", batch, TopicError)
    return batch if rows is None else rows


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
