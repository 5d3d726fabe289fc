"""The functions of a sink, which return the key, value, headers and time stamp of each record in the topic."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from itertools import repeat
from operator import is_
from typing import Any, TypeVar, cast

import numpy as np

from streamiter.errors import EncodeError, shortened
from streamiter.operators.functions import FunctionResultError, RefusedRecords, apply_to_each
from streamiter.topics.connecting import timestamp_of
from streamiter.topics.topic import Encoder, Headers, OutgoingBatch
from streamiter.values.records import Batch, take

T = TypeVar("T")

KeyFunction = Callable[[T], bytes | str | None]
HeadersFunction = Callable[[T], Mapping[str, bytes | str | None] | Iterable[tuple[str, bytes | str | None]]]
TimestampFunction = Callable[[T], int | datetime | np.datetime64]


class RecordFunctions:
    """The functions that a user gives a sink; None for each one that is not given.

    ``value`` returns what is encoded in place of the record; None makes a record without a value (a tombstone).
    """

    def __init__(
        self,
        key: KeyFunction[Any] | None = None,
        value: Callable[[Any], Any] | None = None,
        headers: HeadersFunction[Any] | None = None,
        timestamp: TimestampFunction[Any] | None = None,
    ) -> None:
        made: dict[str, Callable[[Any], Any] | None] = {
            "keys": None if key is None else _checked(key, _key_of),
            "values": value,
            "headers": None if headers is None else _checked(headers, _headers_of),
            "timestamps_ms": None if timestamp is None else _checked(timestamp, _timestamp_ms_of),
        }
        self._by_column = {column: function for column, function in made.items() if function is not None}

    def apply(self, batch: Batch, out: RefusedRecords) -> tuple[Batch, RecordColumns]:
        """Return the records that no function refuses, and the results of the functions for these records."""
        functions = tuple(self._by_column.values())
        if not functions:
            return batch, RecordColumns({})
        if len(functions) == 1:
            batch, results = apply_to_each(functions[0], batch, out)
            return batch, RecordColumns(dict.fromkeys(self._by_column, results))
        batch, rows = apply_to_each(lambda record: [function(record) for function in functions], batch, out)
        columns = zip(*rows, strict=True) if rows else [[]] * len(functions)
        return batch, RecordColumns(dict(zip(self._by_column, columns, strict=True)))


class RecordColumns:
    """The results of a sink's functions for the records of a batch, by column of an `OutgoingBatch`."""

    def __init__(self, columns: Mapping[str, Sequence[Any]]) -> None:
        self._columns = columns

    def take(self, indices: Sequence[int]) -> RecordColumns:
        """Return the columns of these records."""
        return RecordColumns({name: [column[each] for each in indices] for name, column in self._columns.items()})

    def encode(self, batch: Batch, encoder: Encoder, *, with_tombstones: bool) -> OutgoingBatch:
        """Return the records as the topic takes them; raise the ``EncodeError`` of the encoder.

        ``with_tombstones``: records that are None have no value. For ``value`` functions, this is always so.
        """
        columns = dict(self._columns)
        values = columns.pop("values", None)
        if values is None and with_tombstones and isinstance(batch, list) and any(map(is_, batch, repeat(None))):
            values = batch
        outgoing = encoder.encode(batch) if values is None else _encoded(values, encoder)
        return replace(outgoing, **cast(Any, columns)) if columns else outgoing


def _encoded(values: Sequence[Any], encoder: Encoder) -> OutgoingBatch:
    there = [index for index, value in enumerate(values) if value is not None]
    if len(there) == len(values):
        return encoder.encode(values)
    if not there:
        return OutgoingBatch([None] * len(values))
    try:
        outgoing = encoder.encode(take(values, there))
    except EncodeError as error:
        raise EncodeError({there[index]: reason for index, reason in error.failures.items()}) from None
    with_tombstones: list[bytes | None] = [None] * len(values)
    for index, value in zip(there, outgoing.values, strict=True):
        with_tombstones[index] = value
    return replace(outgoing, values=with_tombstones)


def _checked(function: Callable[[Any], Any], convert: Callable[[Any], Any]) -> Callable[[Any], Any]:
    return lambda record: convert(function(record))


def _key_of(given: Any) -> bytes | None:
    try:
        return _bytes_of(given)
    except TypeError:
        raise _wrong("key", "bytes, str or None", given, "return str(…) or its bytes") from None


def _headers_of(given: Any) -> Headers:
    pairs = given.items() if isinstance(given, Mapping) else given
    try:
        return tuple((_name_of(name), _bytes_of(value)) for name, value in pairs)
    except (TypeError, ValueError):
        expected = "a dict or pairs of names (str) and values (bytes, str or None)"
        raise _wrong("headers", expected, given, "return {'name': str(…)}") from None


def _name_of(name: object) -> str:
    if isinstance(name, str):
        return name
    raise TypeError


def _bytes_of(value: object) -> bytes | None:
    if value is None:
        return None
    if isinstance(value, str):
        return value.encode()
    if isinstance(value, bytes):
        return bytes(value)  # Topics take plain bytes only, and no subclass such as numpy's.
    raise TypeError


def _timestamp_ms_of(given: Any) -> int:
    if isinstance(given, np.datetime64) and not np.isnat(given):
        given = int(given.astype("datetime64[ms]").astype(np.int64))
    elif isinstance(given, datetime) and given.tzinfo is not None:
        given = timestamp_of(given)
    if isinstance(given, (int, np.integer)) and not isinstance(given, bool) and given >= 0:
        return int(given)
    raise _wrong(
        "timestamp",
        "milliseconds since 1970 as an int, an aware datetime or a datetime64 in UTC",
        given,
        "return int(1000 * …) for seconds, or a datetime with a time zone",
    )


def _wrong(name: str, expected: str, given: object, advice: str) -> FunctionResultError:
    return FunctionResultError(
        f"{name}: expected the function to return {expected}, given {shortened(given)} ({type(given).__name__}); "
        f"{advice}"
    )
