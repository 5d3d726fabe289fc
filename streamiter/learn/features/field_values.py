"""What hashing makes of the values of a field: texts to hash, numbers, or a refusal."""

from __future__ import annotations

import math
from array import array
from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np

from streamiter.errors import ModelError
from streamiter.learn.rows.checks import BadRows, Floats
from streamiter.numbers import has_plain_digits
from streamiter.records import Columns
from streamiter.tables import columns_of_table

__all__ = [
    "all_categorical",
    "as_number",
    "as_numbers",
    "as_text",
    "bad_values",
    "column_of",
    "records_with_fields",
]


def records_with_fields(given: Any) -> Columns | Sequence[Mapping[str, Any]]:
    """What is given as records: a table as ``Columns``. Raises ModelError for what has no records."""
    if isinstance(given, (Columns, list)):
        return given
    if isinstance(given, Mapping):
        raise ModelError(
            "FeatureHasher: expected records, given a mapping; write […] for one record, or Columns(…) for named "
            "arrays"
        )
    if isinstance(given, (str, bytes)):
        raise ModelError(f"FeatureHasher: expected records with fields, given the text {given!r:.100}")
    table = columns_of_table("FeatureHasher", given, ModelError)
    return given if table is None else table


_TEXTS: Final = frozenset((str, bytes, np.str_, np.bytes_))


def column_of(records: Columns | Sequence[Mapping[str, Any]], field: str) -> Sequence[Any]:
    """The values of a field, as plain Python objects."""
    if isinstance(records, Columns):
        if field not in records:
            raise ModelError(f"FeatureHasher: expected a field {field!r}, given {', '.join(records.names)}")
        column: list[Any] = records[field].tolist()
        return column
    try:
        return [record[field] for record in records]
    except (TypeError, IndexError):
        bad = [row for row, record in enumerate(records) if not _has_fields(record)]
        if not bad:
            raise
        raise BadRows(
            bad,
            f"FeatureHasher: expected records with fields, given {type(records[bad[0]]).__name__} in row {bad[0]}",
        ) from None
    except KeyError:
        bad = [row for row, record in enumerate(records) if field not in record]
        given = ", ".join(records[bad[0]])
        raise BadRows(
            bad, f"FeatureHasher: expected a field {field!r} (None where it has no value), given {given}"
        ) from None


def _has_fields(record: Any) -> bool:
    return isinstance(record, (Mapping, np.void))


def as_numbers(values: Sequence[Any]) -> Floats:
    """The values as floats, NaN for those that are missing, infinity for what is no number."""
    try:
        return np.frombuffer(
            array("d", values)
        )  # takes no texts, of which numpy takes more than as_number does
    except (TypeError, OverflowError):
        pass
    try:
        if _TEXTS.isdisjoint(map(type, values)):
            numbers = np.array(values, dtype=np.float64)
            if numbers.ndim == 1:  # lists in place of numbers make a matrix
                return numbers
    except (TypeError, ValueError, OverflowError):
        pass
    return np.array([as_number(value) for value in values])


def as_number(value: Any) -> float:
    """The value, infinity for what is no number.

    A text is one where plain digits spell it: Python takes digits of other scripts and underscores, too.
    """
    if isinstance(value, bytes):
        value = value.decode(errors="replace")
    if isinstance(value, str) and not has_plain_digits(value):
        return math.inf
    try:
        return math.nan if value is None else float(value)
    except (TypeError, ValueError, OverflowError):
        return math.inf


def as_text(value: Any) -> str | None:
    """What is hashed for a value, or None for no value. Values that are equal have the same text.

    NULs at a text's end do not count: columns of numpy cannot hold them, and dicts must give the same.
    """
    if isinstance(value, str):
        return value.rstrip("\0")
    if isinstance(value, (int, np.integer, np.bool_)):
        return str(int(value))
    if isinstance(value, (float, np.floating)):
        number = float(value)
        if math.isnan(number):
            return None
        return str(int(number)) if number.is_integer() else repr(number)
    if value is None:
        return None
    if isinstance(value, bytes):
        return value.decode("utf-8", "surrogateescape").rstrip("\0")
    raise TypeError


def _is_categorical(value: Any) -> bool:
    return value is None or isinstance(value, (str, int, float, bytes, np.integer, np.floating, np.bool_))


def all_categorical(values: Sequence[Any]) -> bool:
    return all(map(_is_categorical, values))


def bad_values(field: str, values: Sequence[Any]) -> BadRows:
    bad = [row for row, value in enumerate(values) if not _is_categorical(value)]
    return BadRows(
        bad,
        f"FeatureHasher: expected text, numbers or None in the categorical field {field!r}, "
        f"given {type(values[bad[0]]).__name__}",
    )
