"""Settings of psfs: made plain and checked where the psf is written, so that the error points at that line."""

from __future__ import annotations

import math
from collections.abc import Iterable
from copy import copy
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from streamiter.errors import ConfigurationError, OutOfRange, ParameterServerError
from streamiter.numbers import is_number, not_negative, plain_float, positive, whole_number
from streamiter.parameter_server.matrix import Matrix
from streamiter.parameter_server.psf.function import PartitionFunction

__all__ = [
    "ComparedByContent",
    "check_columns",
    "check_fits_dtype",
    "check_fractions_fit",
    "check_width",
    "set_columns",
    "set_finite",
    "set_not_negative",
    "set_numbers",
    "set_positive",
    "set_rows",
    "set_seed",
    "set_values",
    "where",
]

_LARGEST_SEED = 2**64 - 1
"""A seed is one word of the generator's key."""


class ComparedByContent:
    """What has arrays among its settings: they are compared number by number."""

    matrix: str

    def __eq__(self, other: object) -> bool:
        if type(other) is not type(self):
            return NotImplemented
        mine, others = vars(self), vars(other)
        return all(
            value is others[field] or np.array_equal(value, others[field]) for field, value in mine.items()
        )

    def __hash__(self) -> int:
        return hash((type(self), self.matrix))

    def without_arrays(self) -> Self:
        """The same, but for arrays: of these each block has its part already."""
        made = copy(self)
        for field, value in vars(self).items():
            if isinstance(value, np.ndarray):
                object.__setattr__(made, field, value[:0])
        return made


def where(function: PartitionFunction, matrix: Matrix) -> str:
    """How errors begin: which psf, on which matrix."""
    return f"psf.{function.name} on matrix {matrix.name!r}"


def _set(function: PartitionFunction, field: str, value: Any) -> None:
    object.__setattr__(function, field, value)


def _option(function: PartitionFunction, field: str) -> str:
    return f"psf.{function.name}({field}=)"


def set_rows(function: PartitionFunction, *fields: str) -> None:
    """Rows become plain ints; whether the matrix has them is checked when the psf is used."""
    for field in fields:
        row = whole_number(_option(function, field), getattr(function, field), 0, error=OutOfRange)
        _set(function, field, row)


def set_numbers(function: PartitionFunction, *fields: str) -> None:
    """Numbers become plain ints or floats. NaN and infinities are allowed."""
    for field in fields:
        value = getattr(function, field)
        if not is_number(value) or isinstance(value, bool):
            raise ConfigurationError(f"{_option(function, field)}: expected a number, given {value!r}")
        is_whole = isinstance(value, (int, np.integer))
        if is_whole and math.isinf(plain_float(value)):
            raise ConfigurationError(
                f"{_option(function, field)}: expected a number up to 1.8e308, as a float64 holds, given one of "
                f"{int(value).bit_length():,} bits"
            )
        _set(function, field, int(value) if is_whole else float(value))


def set_finite(function: PartitionFunction, *fields: str) -> None:
    """Numbers become floats that are finite."""
    for field in fields:
        value = plain_float(getattr(function, field))
        if not math.isfinite(value):
            raise ConfigurationError(
                f"{_option(function, field)}: expected a finite number, given {getattr(function, field)!r}"
            )
        _set(function, field, value)


def set_not_negative(function: PartitionFunction, *fields: str) -> None:
    """Numbers become floats, finite and 0 or more."""
    for field in fields:
        _set(function, field, not_negative(_option(function, field), getattr(function, field)))


def set_positive(function: PartitionFunction, *fields: str) -> None:
    """Numbers become floats, finite and above 0."""
    for field in fields:
        _set(function, field, positive(_option(function, field), getattr(function, field)))


def set_seed(function: PartitionFunction, field: str) -> None:
    """A seed becomes a plain int."""
    seed = whole_number(_option(function, field), getattr(function, field), 0, _LARGEST_SEED)
    _set(function, field, seed)


def set_values(function: PartitionFunction, field: str) -> None:
    """An array of numbers becomes a copy that nobody changes."""
    given = getattr(function, field)
    try:
        values = np.array(given)
    except ValueError:
        values = np.array(given, dtype=object)
    if values.ndim != 1 or values.dtype.kind not in "iuf":
        raise ConfigurationError(
            f"{_option(function, field)}: expected a one-dimensional array of numbers, given {_shape(values)}"
        )
    values.setflags(write=False)
    _set(function, field, values)


def set_columns(function: PartitionFunction, field: str, values_field: str | None = None) -> None:
    """Column numbers become an int64 array that nobody changes, as long as the values that belong to them."""
    given = getattr(function, field)
    columns = np.array(given) if np.size(given) else np.empty(0, np.int64)
    if columns.ndim != 1 or columns.dtype.kind not in "iu":
        raise ConfigurationError(
            f"{_option(function, field)}: expected a one-dimensional array of whole numbers, given {_shape(columns)}"
        )
    if values_field is not None and len(columns) != len(getattr(function, values_field)):
        raise ConfigurationError(
            f"psf.{function.name}: expected as many {values_field} as {field}, "
            f"given {len(getattr(function, values_field))} {values_field} and {len(columns)} {field}"
        )
    columns = columns.astype(np.int64, copy=False)
    columns.setflags(write=False)
    _set(function, field, columns)


def _shape(values: npt.NDArray[Any]) -> str:
    return f"{values.dtype} of shape {values.shape}"


def check_fractions_fit(function: PartitionFunction, matrix: Matrix) -> None:
    """Raise if the matrix holds whole numbers only."""
    if matrix.dtype == "int64":
        raise ParameterServerError(
            f"{where(function, matrix)}: expected a matrix of float32 or float64, for its results are fractions; "
            f"given int64"
        )


def check_fits_dtype(function: PartitionFunction, matrix: Matrix, fields: Iterable[str]) -> None:
    """Raise if a number, several, or an array among the settings cannot be held by a matrix of whole numbers."""
    if matrix.dtype != "int64":
        return
    for field in fields:
        value = getattr(function, field)
        if isinstance(value, np.ndarray):
            if np.can_cast(value.dtype, np.int64):
                continue
            given = str(value.dtype)
        else:
            # Compared as Python does, exactly: 2.0 ** 63 is one too many.
            numbers = value if isinstance(value, tuple) else (value,)
            others = [
                number
                for number in numbers
                if not (math.isfinite(number) and number == int(number) and -(2**63) <= number < 2**63)
            ]
            if not others:
                continue
            given = repr(others[0])
        raise ParameterServerError(
            f"{where(function, matrix)}, {field}=: expected whole numbers of 64 bits, as in the matrix, given {given}"
        )


def check_width(function: PartitionFunction, matrix: Matrix, field: str) -> None:
    """Raise unless an array is as long as a row."""
    length = len(getattr(function, field))
    if length != matrix.columns:
        raise ParameterServerError(
            f"{where(function, matrix)}, {field}=: expected {matrix.columns} numbers, one for each column, "
            f"given {length}"
        )


def check_columns(function: PartitionFunction, matrix: Matrix, columns: npt.NDArray[np.int64]) -> None:
    """Raise OutOfRange for the first column that the matrix does not have."""
    outside = (columns < 0) | (columns >= matrix.columns)
    if outside.any():
        raise OutOfRange(
            f"{where(function, matrix)}: expected columns from 0 to {matrix.columns - 1}, "
            f"given column {columns[outside.argmax()]}"
        )
