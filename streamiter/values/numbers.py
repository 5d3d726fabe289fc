"""Numbers: checks of settings that are numbers, the names for arrays of numbers, and means and deviations of columns.

A check returns the setting as a plain Python number, or raises an error that names the option.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from typing import Any, Final, NamedTuple, TypeGuard

import numpy as np
import numpy.typing as npt

from streamiter.errors import ConfigurationError, StreamiterError

Array = npt.NDArray[Any]
"""An array of any type."""

Bytes = npt.NDArray[np.uint8]
"""An array of bytes."""

Floats = npt.NDArray[np.float64]
"""An array of floats."""

Float32s = npt.NDArray[np.float32]
"""An array of floats of 32 bits."""

Integers = npt.NDArray[np.int64]
"""An array of integers."""

Indices = npt.NDArray[np.intp]
"""An array of positions in another array."""

Truths = npt.NDArray[np.bool_]
"""An array of truth values."""

NUMBERS: Final[tuple[type[Any], ...]] = (int, float, np.integer, np.floating, np.bool_)
"""The types of numbers and truth values in a row."""

ROUNDING: Final = 1e-14
"""Rounding leaves a constant column a deviation of this part of its mean, or less."""

# Every whole number with at most this many digits fits into 64 bits.
_DIGITS: Final = 18


def sigmoid(score: Floats) -> Floats:
    """Return the probability of each score."""
    # exp overflows for numbers above 709; for negative numbers it only becomes 0.
    small = np.exp(-np.abs(score))
    return np.where(score >= 0, 1.0, small) / (1.0 + small)


def one_of(
    option: str,
    value: object,
    *choices: object,
    error: type[StreamiterError] = ConfigurationError,
    remedy: str = "choose one of them",
) -> None:
    """Raise an error for a value that an option does not have.

    >>> one_of("train(mode=)", "fast", "slow", None)
    Traceback (most recent call last):
    streamiter.errors.ConfigurationError: train(mode=): expected "slow" or None, given 'fast'; choose one of them
    """
    if value not in choices:
        *first, last = [f'"{choice}"' if isinstance(choice, str) else str(choice) for choice in choices]
        raise error(f"{option}: expected {', '.join(first)} or {last}, given {value!r}; {remedy}")


def whole_number(
    option: str,
    value: object,
    least: int,
    most: int | None = None,
    *,
    error: type[StreamiterError] = ConfigurationError,
    remedy: str | None = None,
) -> int:
    """Return the value as a plain int; 18.0 and True are refused, too, for they are most likely mistakes.

    ``remedy`` is the advice in the error, if the bounds do not explain enough.

    >>> whole_number("train(rounds=)", np.int32(5), 1)
    5
    """
    if isinstance(value, (int, np.integer)) and not isinstance(value, bool):
        number = int(value)
        if least <= number and (most is None or number <= most):
            return number
    bounds = f"of at least {least}" if most is None else f"from {least} to {most:,}"
    to_do = "" if remedy is None else f"; {remedy}"
    raise error(f"{option}: expected a whole number {bounds}, given {value!r}{to_do}")


def positive(option: str, value: object) -> float:
    """Return the value as a plain float; refuse a value that is not a finite number above 0."""
    return checked_number(option, value, "a number above 0", lambda number: 0.0 < number < math.inf)


def not_negative(option: str, value: object) -> float:
    """Return the value as a plain float; refuse a value that is not a finite number of 0 or more."""
    return checked_number(option, value, "a number of 0 or more", lambda number: 0.0 <= number < math.inf)


def fraction(option: str, value: object) -> float:
    """Return the value as a plain float; refuse a value that is not from 0 to below 1."""
    return checked_number(option, value, "a number from 0 to below 1", lambda number: 0.0 <= number < 1.0)


def checked_number(option: str, value: object, expected: str, is_good: Callable[[float], bool]) -> float:
    """Return the value as a plain float; refuse a value that is not as ``expected``."""
    number = plain_float(value)
    if not is_good(number):
        raise ConfigurationError(f"{option}: expected {expected}, given {value!r}")
    return number


def check_memory(
    where: str, size_bytes: int, remedy: str, *, error: type[StreamiterError] = ConfigurationError
) -> None:
    """Raise an error for arrays that are larger than the memory of the machine: the system may grant it, and then end
    the process.
    """
    memory_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if size_bytes > memory_bytes:
        raise error(
            f"{where}: expected numbers that fit into the memory of {memory_bytes / 2**30:,.0f} GiB, given "
            f"{size_bytes / 2**30:,.0f} GiB; {remedy}"
        )


def is_number(value: object) -> TypeGuard[float | np.number[Any]]:
    """Whether the value is a single number, of Python or of numpy."""
    return isinstance(value, (int, float, np.integer, np.floating))


def plain_scalar(value: Any) -> Any:
    """Return a scalar of numpy as the same value of Python; any other value as it is.

    >>> plain_scalar(np.int64(3)), plain_scalar("x")
    (3, 'x')
    """
    return value.item() if isinstance(value, np.generic) else value


def plain_float(value: object) -> float:
    """Return the number as a float: infinity for an int that is too large, NaN for a value that is no number."""
    try:
        return float(value) if is_number(value) else math.nan
    except OverflowError:
        return math.inf


def has_plain_digits(text: str) -> bool:
    """Whether a text has no digits of other scripts and no underscores; Python's ``int`` and ``float`` accept both.

    >>> has_plain_digits("-1.5e3"), has_plain_digits("１８"), has_plain_digits("1_8")
    (True, False, False)
    """
    return text.isascii() and "_" not in text


def whole_number_in(text: str) -> int | None:
    """Return the whole number without sign that plain digits spell; None for any other text.

    Python's ``int`` accepts digits of all scripts and underscores, and raises a different error for a long text.

    >>> whole_number_in("18"), whole_number_in("１８"), whole_number_in("1_8"), whole_number_in("1" * 5000)
    (18, None, None, None)
    """
    return int(text) if text.isascii() and text.isdecimal() and len(text) <= _DIGITS else None


class Moments(NamedTuple):
    """The number of some rows, and for each column the mean and the sum of the squared distances to the mean.

    >>> first, second = Moments.of(np.array([[1.0], [3.0]])), Moments.of(np.array([[8.0]]))
    >>> first.plus(second).mean.tolist(), first.deviation().round(3).tolist()
    ([4.0], [1.414])
    """

    records: int
    mean: Floats
    squares: Floats

    @staticmethod
    def of(rows: Floats) -> Moments:
        """Return the moments of the rows of a matrix."""
        mean = rows.mean(axis=0) if len(rows) else np.zeros(rows.shape[1])
        return Moments(len(rows), mean, np.square(rows - mean).sum(axis=0))

    def plus(self, other: Moments) -> Moments:
        """Return the moments of all rows.

        Source: Chan, Golub and LeVeque, "Updating formulae and a pairwise algorithm for computing sample variances"
        (1979).
        """
        if not (self.records and other.records):
            return self if self.records else other
        records = self.records + other.records
        difference = other.mean - self.mean
        return Moments(
            records,
            self.mean + difference * (other.records / records),
            self.squares + other.squares + np.square(difference) * (self.records * other.records / records),
        )

    def deviation(self) -> Floats:
        """Return the sample deviation of each column; 0 for a constant column and after a single row."""
        deviation: Floats = np.sqrt(self.squares / max(self.records - 1, 1))
        deviation[deviation <= ROUNDING * np.abs(self.mean)] = 0.0
        return deviation


def standardized(numbers: Floats, mean: Floats, deviation: Floats) -> Floats:
    """Return numbers as multiples of the deviation from the mean; 0 in columns without a deviation.

    >>> standardized(np.array([[5.0, 7.0], [np.nan, 7.0]]), np.array([3.0, 7.0]), np.array([2.0, 0.0])).tolist()
    [[1.0, 0.0], [nan, 0.0]]
    """
    result: Floats = (numbers - mean) / np.where(deviation > 0.0, deviation, np.inf) + 0.0  # No −0.
    return result
