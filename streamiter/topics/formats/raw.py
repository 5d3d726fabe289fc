"""The formats bytes, text, and values with metadata; and what all formats share to name each bad value of a batch."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Final, TypeVar, final

import msgspec
import numpy as np

from streamiter.errors import DecodeError, EncodeError, TopicError
from streamiter.records import Batch, Columns
from streamiter.tables import rows_of_table
from streamiter.topics.topic import Decoder, OutgoingBatch, TopicBatch

Given = TypeVar("Given")
Made = TypeVar("Made")

NO_VALUE: Final = "no value (tombstone)"

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


def _as_bytes(record: Any) -> bytes | None:
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

    def _encode_one(self, record: Any) -> bytes | None:
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

    >>> from streamiter.topics import Json
    >>> decoder = WithMetadata(Json())
    >>> decoder.decode(TopicBatch(partition=3, offsets=[7], keys=[b"k"], values=[b"[1]"], timestamps_ms=[9]))
    [{'key': b'k', 'value': [1], 'timestamp_ms': 9, 'partition': 3, 'offset': 7, 'headers': ()}]
    """

    def __init__(self, decoder: Decoder) -> None:
        self.decoder = decoder

    @property
    def struct_types(self) -> tuple[type[Any], ...]:
        """The ``msgspec.Struct`` classes of the inner decoder."""
        return getattr(self.decoder, "struct_types", ())

    def decode(self, batch: TopicBatch) -> Batch:
        """Return the dicts; raises the ``DecodeError`` of the inner decoder."""
        columns = zip(
            batch.keys,
            self.decoder.decode(batch),
            batch.timestamps_ms,
            batch.offsets,
            batch.headers,
            strict=True,
        )
        return [
            {
                "key": key,
                "value": value,
                "timestamp_ms": timestamp_ms,
                "partition": batch.partition,
                "offset": offset,
                "headers": headers,
            }
            for key, value, timestamp_ms, offset, headers in columns
        ]

    def __repr__(self) -> str:
        return f"WithMetadata({self.decoder!r})"
