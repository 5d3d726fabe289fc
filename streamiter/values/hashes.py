"""The hashes of names, texts and numbers, which are the same on all machines.

The hash of a text is its place among the features of a model. Arrays of texts are hashed by compiled code.
"""

from __future__ import annotations

from functools import cache
from typing import Final

import numpy as np
import numpy.typing as npt

from streamiter.values.field_kinds import BLANKS
from streamiter.values.helpers.compiled import compiled
from streamiter.values.numbers import Array

# Names and texts are hashed with 64 bits FNV-1a (Fowler, Noll, Vo), whose low bits are then mixed as in MurmurHash3
# (Appleby). Both are short enough to be compiled, and differ in no version of Python.
_FNV_START: Final = 0xCBF29CE484222325
_FNV_PRIME: Final = 0x100000001B3
_MIX: Final = 0xFF51AFD7ED558CCD
_ALL_BITS: Final = (1 << 64) - 1
# No byte of UTF-8 is 0xFF or 0xFE: these separate a field from its text, and mark a missing value.
_TEXT_FOLLOWS: Final = b"\xff"
_IS_MISSING: Final = b"\xfe"


def hash_of(data: bytes) -> int:
    """Return the 64-bit hash of these bytes.

    >>> hex(hash_of(b""))
    '0xecba3df2c3383c52'
    """
    value = _FNV_START
    for byte in data:
        value = ((value ^ byte) * _FNV_PRIME) & _ALL_BITS
    value ^= value >> 33
    value = (value * _MIX) & _ALL_BITS
    return value ^ (value >> 33)


_PRIME_64: Final = np.uint64(_FNV_PRIME)
_MIX_64: Final = np.uint64(_MIX)
_SHIFT_64: Final = np.uint64(33)


def mixed_hashes(hashes: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """Return the hashes mixed as by :func:`hash_of`: all of their bits have influence on the low ones."""
    hashes = (hashes ^ (hashes >> _SHIFT_64)) * _MIX_64
    return hashes ^ (hashes >> _SHIFT_64)


# 2^64 divided by the golden ratio, as in SplitMix64.
_SPREAD: Final = np.uint64(0x9E3779B97F4A7C15)


def drawn_hashes(numbers: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """Return a hash of each number that is as good as drawn; it is the same on all machines."""
    # Mixed twice, small numbers that follow each other would still be alike.
    return mixed_hashes(mixed_hashes(mixed_hashes(numbers * _SPREAD)))


_BLANK_KEYS: Final = tuple(int.from_bytes(text.encode()) for text in sorted(BLANKS) if text[:1] > "9")


def _hash_texts(
    characters: npt.NDArray[np.uint32],
    start: np.uint64,
    hashes: npt.NDArray[np.uint64],
    may_be_read: npt.NDArray[np.bool_],
) -> None:
    """Compute :func:`hash_of` for the UTF-8 of each row of characters, from the unmixed hash of the bytes before it.

    ``may_be_read`` tells which texts :func:`~streamiter.values.field_kinds.read_text` may find to be a number or a
    time, or blank.
    """
    for row in range(len(characters)):
        length = characters.shape[1]
        while length and characters[row, length - 1] == 0:
            length -= 1
        # Spaces, + - . and digits have codes up to 57, as have few other characters.
        first = characters[row, 0] if length else np.uint32(0)
        may_be_read[row] = first <= 57
        if not may_be_read[row] and length <= 4:
            key = 0
            for column in range(length):
                key = key * 256 + (characters[row, column] | 32)  # In small letters.
            for blank in _BLANK_KEYS:
                if key == blank:
                    may_be_read[row] = True
        value = start
        for column in range(length):
            character = characters[row, column]
            size = 1 + (character >= 0x80) + (character >= 0x800) + (character >= 0x10000)
            for index in range(size):
                byte = character
                if size > 1:
                    lead = (0xFF00 >> size) & 0xFF if index == 0 else 0x80
                    byte = lead | ((character >> (6 * (size - 1 - index))) & 0x3F)
                value = (value ^ np.uint64(byte)) * _PRIME_64
        value = (value ^ (value >> _SHIFT_64)) * _MIX_64
        hashes[row] = value ^ (value >> _SHIFT_64)


_compiled_hashing: Final = cache(lambda: compiled(_hash_texts))


def place_of_text(field: str, text: str, bits: int) -> int:
    """Return the place of a text of a field."""
    data = field.encode("utf-8", "surrogatepass") + _TEXT_FOLLOWS + text.encode("utf-8", "surrogatepass")
    return hash_of(data) & ((1 << bits) - 1)


def place_of_missing(field: str, bits: int) -> int:
    """Return the place of the feature that says that the value of a field is missing."""
    return hash_of(field.encode("utf-8", "surrogatepass") + _IS_MISSING) & ((1 << bits) - 1)


def hashes_of_texts(field: str, texts: Array) -> tuple[npt.NDArray[np.uint64], npt.NDArray[np.bool_]]:
    """Return the hashes of an array of texts of a field, and which of them may be numbers, times or blank."""
    start = _FNV_START
    for byte in field.encode("utf-8", "surrogatepass") + _TEXT_FOLLOWS:
        start = ((start ^ byte) * _FNV_PRIME) & _ALL_BITS
    characters = np.ascontiguousarray(texts, texts.dtype.newbyteorder("=")).view(np.uint32)
    hashes, may_be_read = np.empty(len(texts), np.uint64), np.empty(len(texts), np.bool_)
    _compiled_hashing()(characters.reshape(len(texts), -1), np.uint64(start), hashes, may_be_read)
    return hashes, may_be_read
