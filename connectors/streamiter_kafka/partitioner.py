"""Which partition a key goes to: as the Java client's default partitioner has it.

So a topic may be written from here and from elsewhere, and equal keys still meet in one partition.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np
import numpy.typing as npt

__all__ = ["murmur2", "partitions_of_keys"]

# From org.apache.kafka.common.utils.Utils.murmur2.
_SEED: Final = 0x9747B28C
_M: Final = 0x5BD1E995
_R: Final = 24
_32_BITS: Final = 0xFFFFFFFF
_POSITIVE: Final = 0x7FFFFFFF

# Below this, arranging keys for numpy takes longer than hashing them one by one.
_FEW_KEYS: Final = 8

Words = npt.NDArray[np.uint32]


def partitions_of_keys(keys: Sequence[bytes], partitions: int) -> list[int]:
    """The partition of each key.

    >>> partitions_of_keys([b"21", b"foobar", b"21"], 10)
    [0, 6, 0]
    """
    if partitions == 1:
        return [0] * len(keys)
    if len(keys) < _FEW_KEYS:
        return [(murmur2(key) & _POSITIVE) % partitions for key in keys]
    hashes = _murmur2_of_many(keys)
    positive = (hashes & np.uint32(_POSITIVE)) % np.uint32(partitions)
    result: list[int] = positive.tolist()
    return result


def murmur2(key: bytes) -> int:
    """MurmurHash2 of ``key``, as an unsigned number of 32 bits.

    >>> murmur2(b"21") - 2**32
    -973932308
    """
    value = _SEED ^ len(key)
    whole = len(key) - len(key) % 4
    for start in range(0, whole, 4):
        word = int.from_bytes(key[start : start + 4], "little") * _M & _32_BITS
        word = (word ^ word >> _R) * _M & _32_BITS
        value = (value * _M & _32_BITS) ^ word
    if whole < len(key):
        value = (value ^ int.from_bytes(key[whole:], "little")) * _M & _32_BITS
    value = (value ^ value >> 13) * _M & _32_BITS
    return value ^ value >> 15


def _murmur2_of_many(keys: Sequence[bytes]) -> Words:
    """All keys of one length at a time, each step for all of them together."""
    hashes = np.empty(len(keys), np.uint32)
    lengths = np.fromiter(map(len, keys), np.intp, len(keys))
    for length in np.unique(lengths).tolist():
        where = np.flatnonzero(lengths == length)
        hashes[where] = _murmur2_of_length([keys[index] for index in where.tolist()], length)
    return hashes


def _murmur2_of_length(keys: Sequence[bytes], length: int) -> Words:
    m, words = np.uint32(_M), _words(keys, length)
    value = np.full(len(keys), _SEED ^ length, np.uint32)
    for column in range(length // 4):
        word = words[:, column] * m
        value = (value * m) ^ ((word ^ (word >> np.uint32(_R))) * m)
    if length % 4:
        value = (value ^ words[:, -1]) * m
    value = (value ^ (value >> np.uint32(13))) * m
    result: Words = value ^ (value >> np.uint32(15))
    return result


def _words(keys: Sequence[bytes], length: int) -> Words:
    """The keys as rows of little-endian numbers, the last filled up with zeros."""
    padded = np.zeros((len(keys), -(-length // 4) * 4), np.uint8)
    padded[:, :length] = np.frombuffer(b"".join(keys), np.uint8).reshape(len(keys), length)
    return padded.view("<u4").astype(np.uint32, copy=False)
