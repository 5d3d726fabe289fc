"""Going through a batch one by one, to name every value that is at fault."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Final, TypeVar

import msgspec
import numpy as np

from streamiter.errors import DecodeError, EncodeError, TopicError
from streamiter.records import Batch, Columns
from streamiter.tables import rows_of_table

__all__ = ["BAD_INPUT", "NO_VALUE", "decode_each", "encode_each", "reason_of", "rows_to_encode"]

Given = TypeVar("Given")
Made = TypeVar("Made")

NO_VALUE: Final = "no value (tombstone)"

# What json, text and conversion functions raise for input they cannot take. Anything else is a bug and
# must not be taken for bad input.
BAD_INPUT: Final = (msgspec.MsgspecError, ValueError, TypeError, OverflowError, RecursionError)


def decode_each(values: Iterable[Given], decode: Callable[[Given], Made]) -> list[Made]:
    """``decode`` of every value.

    Raises :class:`~streamiter.errors.DecodeError` with all values that it refused.

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
    """The batch, or the rows of a table; raises TopicError for a table that cannot become rows."""
    rows = (
        None if isinstance(batch, (list, Columns, np.ndarray)) else rows_of_table("encode", batch, TopicError)
    )
    given: Batch = batch if rows is None else rows
    return given


def encode_each(records: Iterable[Given], encode: Callable[[Given], Made]) -> list[Made]:
    """The same for encoding, with :class:`~streamiter.errors.EncodeError`."""
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
    """A short reason: the first line of the message."""
    text: Any = str(error) or type(error).__name__
    return str(text).splitlines()[0][:200]
