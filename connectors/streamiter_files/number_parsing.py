"""Numbers in text, many at a time: exactly what ``int`` and ``float`` give for each of them.

>>> text = np.frombuffer(b"12 -0.5 1e-3 x", dtype=np.uint8)
>>> parse_floats(text, np.array([0, 3, 8]), np.array([2, 7, 12])).tolist()
[12.0, -0.5, 0.001]
"""

from __future__ import annotations

import re
from typing import Final

import numpy as np
import numpy.typing as npt

__all__ = [
    "Integers",
    "NotANumber",
    "Numbers",
    "Text",
    "float_of",
    "integer_of",
    "parse_floats",
    "parse_integers",
]

Text = npt.NDArray[np.uint8]
Integers = npt.NDArray[np.int64]
Numbers = npt.NDArray[np.float64]
Flags = npt.NDArray[np.bool_]

# Every whole number of 18 digits fits into 64 bits.
_INTEGER_DIGITS: Final = 18

# A number of up to 15 digits and its power of ten (up to 10^22) are exact in a double, so that one division
# gives the nearest double (Clinger, How to read floating point numbers accurately, 1990).
_EXACT_DIGITS: Final = 15
_DECIMAL_LENGTH: Final = _EXACT_DIGITS + len("-.")

_FLOAT: Final = re.compile(rb"[+-]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]+)?")
_MINUS, _PLUS, _DOT, _ZERO = b"-+.0"


class NotANumber(ValueError):
    """A token is not the number it should be."""


def integer_of(token: bytes) -> int:
    """One whole number without sign, or ``NotANumber``."""
    if not (token.isdigit() and len(token) <= _INTEGER_DIGITS):
        raise NotANumber(f"expected a whole number, given {token[:40]!r}")
    return int(token)


def float_of(token: bytes) -> float:
    """One finite number, or ``NotANumber``."""
    if not _FLOAT.fullmatch(token) or not np.isfinite(number := float(token)):
        raise NotANumber(f"expected a finite number, given {token[:40]!r}")
    return number


def parse_integers(text: Text, starts: Integers, ends: Integers) -> Integers:
    """The whole numbers between ``starts`` and ``ends``; raises ``NotANumber`` if any is none."""
    numbers, are_integers = _integers(text, starts, ends - starts)
    if not are_integers.all():
        raise NotANumber("expected whole numbers")
    return numbers


def parse_floats(text: Text, starts: Integers, ends: Integers) -> Numbers:
    """The finite numbers between ``starts`` and ``ends``; raises ``NotANumber`` if any is none."""
    lengths = ends - starts
    integers, are_done = _integers(text, starts, np.where(lengths <= _EXACT_DIGITS, lengths, 0))
    numbers = integers.astype(np.float64)
    for parse in (_decimals, _any_floats):
        left = np.flatnonzero(~are_done)
        if left.size:
            numbers[left], are_done[left] = parse(text, starts[left], lengths[left])
    return numbers


def _integers(text: Text, starts: Integers, lengths: Integers) -> tuple[Integers, Flags]:
    numbers = np.zeros(len(starts), dtype=np.int64)
    are_integers = np.zeros(len(starts), dtype=np.bool_)
    counts = np.bincount(np.clip(lengths, 0, _INTEGER_DIGITS + 1), minlength=_INTEGER_DIGITS + 2)
    for length in np.flatnonzero(counts[1:-1]) + 1:
        which = np.flatnonzero(lengths == length) if counts[length] < len(starts) else slice(None)
        numbers[which], are_integers[which] = _integers_of_length(text, starts[which], int(length))
    return numbers, are_integers


def _integers_of_length(text: Text, starts: Integers, length: int) -> tuple[Integers, Flags]:
    numbers = np.zeros(len(starts), dtype=np.int64)
    are_integers = np.ones(len(starts), dtype=np.bool_)
    for place in range(length):
        digits = text[starts + place] - np.uint8(_ZERO)  # wraps around: what is no digit is above 9
        are_integers &= digits < 10
        numbers = numbers * 10 + digits
    return numbers, are_integers


def _decimals(text: Text, starts: Integers, lengths: Integers) -> tuple[Numbers, Flags]:
    """Digits with at most a sign and a point, of exact length; what is another number is told as not done."""
    mantissas = np.zeros(len(starts), dtype=np.int64)
    digits_seen, decimals = np.zeros_like(mantissas), np.zeros_like(mantissas)
    are_good = (lengths > 0) & (lengths <= _DECIMAL_LENGTH)
    behind_point = np.zeros(len(starts), dtype=np.bool_)
    negative = text[starts] == _MINUS
    signed = negative | (text[starts] == _PLUS)
    for place in range(min(_DECIMAL_LENGTH, int(lengths.max()))):
        inside = place < lengths
        characters = text[np.where(inside, starts + place, 0)]
        digits = characters - np.uint8(_ZERO)
        are_digits = inside & (digits < 10)
        are_points = inside & (characters == _DOT) & ~behind_point
        are_good &= ~inside | are_digits | are_points | (signed if place == 0 else False)
        mantissas = np.where(are_digits, mantissas * 10 + digits, mantissas)
        digits_seen += are_digits
        decimals += are_digits & behind_point
        behind_point |= are_points
    are_good &= (digits_seen >= 1) & (digits_seen <= _EXACT_DIGITS)
    magnitudes = mantissas / np.power(10.0, decimals)
    return np.where(negative, -magnitudes, magnitudes), are_good


def _any_floats(text: Text, starts: Integers, lengths: Integers) -> tuple[Numbers, Flags]:
    spans = zip(starts.tolist(), lengths.tolist(), strict=True)
    numbers = [float_of(text[start : start + length].tobytes()) for start, length in spans]
    return np.array(numbers), np.ones(len(numbers), dtype=np.bool_)
