"""Update functions that fill rows with random numbers.

A random number depends on seed, row and column only, and not on how a row is cut into blocks. Philox (Salmon, Moraes,
Dror, Shaw, "Parallel random numbers: as easy as 1, 2, 3", 2011) is a function of a key, here (seed, row), and of a
counter; it gives four words of 64 bits for each value of the counter. A column has a fixed number of words: one for a
uniform number, two for a normal number (Box, Muller, "A note on the generation of random normal deviates", 1958).
numpy draws the words of a range of columns. For columns in any order its generator would have to be moved for each of
them (16 µs); ``_words_at`` computes the same words for many counters at once (0.2 µs).
"""

from __future__ import annotations

import abc
import math
from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass
from typing import ClassVar

import numpy as np
import numpy.typing as npt

from streamiter.errors import ConfigurationError
from streamiter.parameter_server.matrix import DrawnValues
from streamiter.parameter_server.psf.function import (
    Checked,
    Finite,
    NotNegative,
    Part,
    Positive,
    RowOrAll,
    Seed,
    UpdateFunction,
)
from streamiter.parameter_server.storage.block import Block, BlockColumns, Numbers

_WORDS_PER_COUNT = 4
_UNIT = 2.0**-53
"""A float has 53 bits of precision: the upper ones of a word."""


# The factors of a round of Philox, each with the summand of its key.
_ROUND = ((0xD2E7470EE14C6C93, 0x9E3779B97F4A7C15), (0xCA5A826395121157, 0xBB67AE8584CAA73B))
_ROUNDS = 10


def _words(seed: int, row: int, columns: range | BlockColumns, each: int) -> npt.NDArray[np.uint64]:
    """Return the words of columns of a row, the same number for each column, as whole numbers of 53 bits."""
    if isinstance(columns, range):
        counter, skipped = divmod(each * columns.start, _WORDS_PER_COUNT)
        key, start = np.array([seed, row], np.uint64), np.array([counter, 0, 0, 0], np.uint64)
        drawn = np.random.Philox(key=key, counter=start).random_raw(skipped + each * len(columns))[skipped:]
    else:
        drawn = _words_at(seed, row, (each * columns[:, np.newaxis] + np.arange(each)).reshape(-1))
    return drawn >> np.uint64(11)


def _words_at(seed: int, row: int, places: BlockColumns) -> npt.NDArray[np.uint64]:
    """Return the words at these places of a row, in any order."""
    counts = places // _WORDS_PER_COUNT
    is_first = np.ones(len(counts), np.bool_)
    np.not_equal(counts[1:], counts[:-1], out=is_first[1:])  # Neighbours share a value of the counter.
    # numpy counts before it draws.
    counter = counts[is_first].astype(np.uint64) + np.uint64(1)
    state = [counter, *np.zeros((3, len(counter)), np.uint64)]
    for number in range(_ROUNDS):
        first, second = (
            np.uint64((key + number * step) % 2**64) for key, (_, step) in zip((seed, row), _ROUND, strict=True)
        )
        (high, low), (other_high, other_low) = _product(state[0], _ROUND[0][0]), _product(state[2], _ROUND[1][0])
        state = [other_high ^ state[1] ^ first, other_low, high ^ state[3] ^ second, low]
    words: npt.NDArray[np.uint64] = np.stack(state, axis=1)[np.cumsum(is_first) - 1, places % _WORDS_PER_COUNT]
    return words


def _product(numbers: npt.NDArray[np.uint64], factor: int) -> tuple[npt.NDArray[np.uint64], npt.NDArray[np.uint64]]:
    """Return the upper and the lower 64 bits of the products."""
    half, lower = np.uint64(32), np.uint64(2**32 - 1)
    upper_factor, lower_factor = np.uint64(factor >> 32), np.uint64(factor & (2**32 - 1))
    upper_number, lower_number = numbers >> half, numbers & lower
    middle = upper_number * lower_factor + ((lower_number * lower_factor) >> half)
    other = lower_number * upper_factor + (middle & lower)
    return upper_number * upper_factor + (middle >> half) + (other >> half), numbers * np.uint64(factor)


def uniforms(seed: int, row: int, columns: range | BlockColumns) -> npt.NDArray[np.float64]:
    """Return a number in [0, 1) for each column.

    >>> uniforms(7, 0, range(0, 9))[5:].tolist() == uniforms(7, 0, range(5, 9)).tolist()
    True
    >>> uniforms(7, 0, np.array([8, 5])).tolist() == uniforms(7, 0, range(0, 9))[[8, 5]].tolist()
    True
    """
    return _words(seed, row, columns, 1).astype(np.float64) * _UNIT


def normals(seed: int, row: int, columns: range | BlockColumns) -> npt.NDArray[np.float64]:
    """Return a number of the standard normal distribution for each column."""
    words = _words(seed, row, columns, 2)
    # Contiguous copies: numpy's loops for arrays with gaps may differ in the last bit.
    first, second = words[0::2].astype(np.float64), words[1::2].astype(np.float64)
    # In (0, 1]: 0 has no logarithm.
    radius: npt.NDArray[np.float64] = np.sqrt(-2.0 * np.log((first + 1.0) * _UNIT))
    return radius * np.cos(second * (2.0 * np.pi * _UNIT))


_PIECE = 1 << 16
"""Columns drawn at a time: half a megabyte for each temporary array, which stays in the processor's cache."""


class _Random(Checked, UpdateFunction, DrawnValues, int64="refused"):
    """Random numbers for one row, or for all rows (``row=None``). Not for int64.

    A number depends on seed, row and column only. Two calls with the same seed draw the same numbers: give each call
    its own seed. A sparse row stores all columns afterwards. As ``default=`` of a sparse matrix it draws the same
    numbers for columns that are not stored, when they are read.
    """

    row: RowOrAll
    seed: Seed
    _standard: ClassVar[Callable[..., npt.NDArray[np.float64]]]
    """Draws numbers of the standard distribution: mean 0 and deviation 1, or from 0 to 1."""

    @property
    @abc.abstractmethod
    def scale_and_shift(self) -> tuple[float, float]:
        """The factor of the standard numbers, and the summand that is then added."""

    def partition_update(self, block: Block, part: Part) -> None:
        with np.errstate(all="ignore"):
            for row in block.rows if self.row is None else (self.row,):
                if block.is_sparse:
                    values = np.empty(len(block.columns), block.dtype)
                    self.draw(row, block.columns, values)
                    block.put(row, None, values)
                else:
                    self.draw(row, block.columns, block.dense_row(row))

    def draws(self, row: int) -> bool:
        return self.row is None or row == self.row

    def draw(self, row: int, columns: range | BlockColumns, out: Numbers) -> None:
        scale, shift = self.scale_and_shift
        for start in range(0, len(columns), _PIECE):
            piece = columns[start : start + _PIECE]
            out[start : start + _PIECE] = self._standard(self.seed, row, piece) * scale + shift


@dataclass(frozen=True)
class RandomNormal(_Random, standard=normals):
    """Row (``row=None``: each row) = normal numbers with this mean and standard deviation. Not for int64.

    >>> RandomNormal("w", row=0, mean=0.0, std=0.1, seed=7)
    RandomNormal(matrix='w', row=0, mean=0.0, std=0.1, seed=7)
    """

    row: RowOrAll
    mean: Finite
    std: NotNegative
    _: KW_ONLY
    seed: Seed

    @property
    def scale_and_shift(self) -> tuple[float, float]:
        return self.std, self.mean


@dataclass(frozen=True)
class RandomUniform(_Random, standard=uniforms):
    """Row (``row=None``: each row) = uniform numbers from ``low`` to ``high``. Not for int64.

    >>> RandomUniform("w", row=None, low=-1.0, high=1.0, seed=7)
    RandomUniform(matrix='w', row=None, low=-1.0, high=1.0, seed=7)
    """

    row: RowOrAll
    low: Finite
    high: Finite
    _: KW_ONLY
    seed: Seed

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.low > self.high:
            raise ConfigurationError(
                f"psf.RandomUniform: expected low ≤ high, given low={self.low!r} and high={self.high!r}"
            )

    @property
    def scale_and_shift(self) -> tuple[float, float]:
        return self.high - self.low, self.low


@dataclass(frozen=True)
class _Xavier(_Random):
    gain: NotNegative
    fan_in: Positive
    fan_out: Positive
    _: KW_ONLY
    seed: Seed
    row: RowOrAll = None

    @property
    def std(self) -> float:
        """The standard deviation of the numbers."""
        return self.gain * math.sqrt(2.0 / (self.fan_in + self.fan_out))


class XavierNormal(_Xavier, standard=normals):
    """Matrix, or ``row`` = normal numbers with mean 0 and deviation gain · √(2 / (fan_in + fan_out)). Not for int64.

    Glorot and Bengio 2010.

    >>> XavierNormal("w", gain=1.0, fan_in=30, fan_out=20, seed=7).std
    0.2
    """

    @property
    def scale_and_shift(self) -> tuple[float, float]:
        return self.std, 0.0


class XavierUniform(_Xavier, standard=uniforms):
    """Matrix, or ``row`` = uniform numbers from −√3 · d to √3 · d, with d the deviation of :class:`XavierNormal`."""

    @property
    def scale_and_shift(self) -> tuple[float, float]:
        bound = math.sqrt(3.0) * self.std
        return 2.0 * bound, -bound


@dataclass(frozen=True)
class KaimingNormal(_Random, standard=normals):
    """Matrix, or ``row`` = normal numbers with mean 0 and deviation gain · √(1 / fan_in). Not for int64.

    He, Zhang, Ren, Sun 2015.
    """

    gain: NotNegative
    fan_in: Positive
    _: KW_ONLY
    seed: Seed
    row: RowOrAll = None

    @property
    def scale_and_shift(self) -> tuple[float, float]:
        return self.gain * math.sqrt(1.0 / self.fan_in), 0.0
