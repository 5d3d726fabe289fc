"""Columns of text turned into columns of a type."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from streamiter.errors import ConfigurationError
from streamiter.numbers import has_plain_digits

__all__ = ["ColumnType"]

# Of a field, in a message.
_SHOWN_CHARACTERS: Final = 40

_TRUTH: Final[Mapping[str, bool]] = MappingProxyType({"true": True, "1": True, "false": False, "0": False})


class ColumnType:
    """The type of one column: text, or a numpy type of truth values, whole numbers or floats.

    >>> ColumnType("age", "int64").convert(["7", "42"])
    array([ 7, 42])
    >>> ColumnType("x", float, missing=["NA"]).convert(["0.5", "NA"])
    array([0.5, nan])
    >>> ColumnType("age", int).convert(["seven"])
    Traceback (most recent call last):
    ...
    ValueError: column 'age': expected int64, given 'seven'
    """

    def __init__(self, name: str, dtype: npt.DTypeLike, missing: Collection[str] = ()) -> None:
        self.name = name
        self._dtype = np.dtype(dtype)
        self._missing = frozenset(missing)
        if self._dtype.kind not in "fiubU":
            raise ConfigurationError(
                f"Csv: expected as type of column {name!r} str, bool, or a numpy type of integers or floats, "
                f"given {dtype!r}"
            )

    @property
    def is_text(self) -> bool:
        """Whether the fields stay as they are."""
        return self._dtype.kind == "U"

    def convert(self, fields: Sequence[str]) -> npt.NDArray[Any]:
        """The column; raises ``ValueError`` naming a field that is not of the type."""
        if self.is_text:
            return np.array(fields, dtype=np.str_)
        try:
            return self._convert(fields)
        except (ValueError, KeyError, OverflowError, FloatingPointError):
            shown = "" if len(fields) > 1 else f", given {_shortened(fields[0])}"
            raise ValueError(f"column {self.name!r}: expected {self._dtype}{shown}") from None

    def _convert(self, fields: Sequence[str]) -> npt.NDArray[Any]:
        if self._dtype.kind == "b":
            return np.array([_TRUTH[field.lower()] for field in fields], dtype=np.bool_)
        return self._floats(fields) if self._dtype.kind == "f" else self._integers(fields)

    def _floats(self, fields: Sequence[str]) -> npt.NDArray[Any]:
        missing = self._missing
        if missing:
            fields = ["nan" if field in missing else field for field in fields]
        _check_plain(fields)
        numbers = np.array(list(map(float, fields)))
        for index in np.flatnonzero(np.isinf(numbers)).tolist():
            if "inf" not in fields[index].lower():  # a number too large for a float
                raise OverflowError
        with np.errstate(over="raise"):
            return numbers.astype(self._dtype)

    def _integers(self, fields: Sequence[str]) -> npt.NDArray[Any]:
        _check_plain(fields)
        numbers = list(map(int, fields))
        limits = np.iinfo(self._dtype)
        if numbers and (min(numbers) < limits.min or max(numbers) > limits.max):
            raise OverflowError
        return np.array(numbers, dtype=self._dtype)


def _check_plain(fields: Sequence[str]) -> None:
    """Raise ``ValueError`` for underscores, and digits and spaces of other scripts: Python takes them in numbers."""
    if not has_plain_digits("".join(fields)):
        raise ValueError


def _shortened(field: str) -> str:
    if len(field) <= _SHOWN_CHARACTERS:
        return repr(field)
    return f"{field[:_SHOWN_CHARACTERS] + '…'!r} ({len(field):,} characters)"
