"""Update functions that fill rows with random numbers.

A random number depends on seed, row and column only, and not on how a row is cut into blocks. Philox (Salmon, Moraes,
Dror, Shaw, "Parallel random numbers: as easy as 1, 2, 3", 2011) is a function of a key, here (seed, row), and of a
counter; it gives four words of 64 bits for each value of the counter. A column has a fixed number of words: one for a
uniform number, two for a normal number (Box, Muller, "A note on the generation of random normal deviates", 1958).
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
from streamiter.parameter_server.matrix import Matrix
from streamiter.parameter_server.psf.function import (
    Checked,
    Finite,
    NotNegative,
    Part,
    Positive,
    RowOrAll,
    Seed,
    UpdateFunction,
    check_fractions_fit,
)
from streamiter.parameter_server.storage.block import Block, Numbers

_WORDS_PER_COUNT = 4
_UNIT = 2.0**-53
"""A float has 53 bits of precision: the upper ones of a word."""


def _words(seed: int, row: int, first: int, count: int) -> npt.NDArray[np.uint64]:
    """Return words ``first`` to ``first + count`` of a row, as whole numbers of 53 bits."""
    counter, skipped = divmod(first, _WORDS_PER_COUNT)
    generator = np.random.Philox(key=np.array([seed, row], np.uint64), counter=np.array([counter, 0, 0, 0], np.uint64))
    words: npt.NDArray[np.uint64] = generator.random_raw(skipped + count)[skipped:]
    return words >> np.uint64(11)


def uniforms(seed: int, row: int, columns: range) -> npt.NDArray[np.float64]:
    """Return a number in [0, 1) for each column.

    >>> uniforms(7, 0, range(0, 9))[5:].tolist() == uniforms(7, 0, range(5, 9)).tolist()
    True
    """
    return _words(seed, row, columns.start, len(columns)).astype(np.float64) * _UNIT


def normals(seed: int, row: int, columns: range) -> npt.NDArray[np.float64]:
    """Return a number of the standard normal distribution for each column."""
    words = _words(seed, row, 2 * columns.start, 2 * len(columns))
    # Contiguous copies: numpy's loops for arrays with gaps may differ in the last bit.
    first, second = words[0::2].astype(np.float64), words[1::2].astype(np.float64)
    # In (0, 1]: 0 has no logarithm.
    radius: npt.NDArray[np.float64] = np.sqrt(-2.0 * np.log((first + 1.0) * _UNIT))
    return radius * np.cos(second * (2.0 * np.pi * _UNIT))


_PIECE = 1 << 16
"""Columns drawn at a time: half a megabyte for each temporary array, which stays in the processor's cache."""


class _Random(Checked, UpdateFunction):
    """Random numbers for one row, or for all rows (``row=None``). Not for int64.

    A number depends on seed, row and column only. Two calls with the same seed draw the same numbers: give each call
    its own seed. A sparse row stores all columns afterwards.
    """

    row: RowOrAll
    seed: Seed
    standard: ClassVar[Callable[[int, int, range], npt.NDArray[np.float64]]]
    """Draws numbers of the standard distribution: mean 0 and deviation 1, or from 0 to 1."""

    @property
    @abc.abstractmethod
    def scale_and_shift(self) -> tuple[float, float]:
        """The factor of the standard numbers, and the summand that is then added."""

    def check(self, matrix: Matrix) -> None:
        check_fractions_fit(self, matrix)

    def partition_update(self, block: Block, part: Part) -> None:
        del part
        with np.errstate(all="ignore"):
            for row in block.rows if self.row is None else (self.row,):
                if block.is_sparse:
                    values = np.empty(len(block.columns), block.dtype)
                    self._draw(row, block.columns, values)
                    block.put(row, None, values)
                else:
                    self._draw(row, block.columns, block.dense_row(row))

    def _draw(self, row: int, columns: range, out: Numbers) -> None:
        scale, shift = self.scale_and_shift
        for start in range(0, len(columns), _PIECE):
            piece = columns[start : start + _PIECE]
            out[start : start + _PIECE] = type(self).standard(self.seed, row, piece) * scale + shift


@dataclass(frozen=True)
class RandomNormal(_Random):
    """Row (``row=None``: each row) = normal numbers with this mean and standard deviation. Not for int64.

    >>> RandomNormal("w", row=0, mean=0.0, std=0.1, seed=7)
    RandomNormal(matrix='w', row=0, mean=0.0, std=0.1, seed=7)
    """

    matrix: str
    row: RowOrAll
    mean: Finite
    std: NotNegative
    _: KW_ONLY
    seed: Seed

    standard = normals

    @property
    def scale_and_shift(self) -> tuple[float, float]:
        return self.std, self.mean


@dataclass(frozen=True)
class RandomUniform(_Random):
    """Row (``row=None``: each row) = uniform numbers from ``low`` to ``high``. Not for int64.

    >>> RandomUniform("w", row=None, low=-1.0, high=1.0, seed=7)
    RandomUniform(matrix='w', row=None, low=-1.0, high=1.0, seed=7)
    """

    matrix: str
    row: RowOrAll
    low: Finite
    high: Finite
    _: KW_ONLY
    seed: Seed

    standard = uniforms

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
    matrix: str
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


class XavierNormal(_Xavier):
    """Matrix, or ``row`` = normal numbers with mean 0 and deviation gain · √(2 / (fan_in + fan_out)). Not for int64.

    Glorot and Bengio 2010.

    >>> XavierNormal("w", gain=1.0, fan_in=30, fan_out=20, seed=7).std
    0.2
    """

    standard = normals

    @property
    def scale_and_shift(self) -> tuple[float, float]:
        return self.std, 0.0


class XavierUniform(_Xavier):
    """Matrix, or ``row`` = uniform numbers from −√3 · d to √3 · d, with d the deviation of :class:`XavierNormal`."""

    standard = uniforms

    @property
    def scale_and_shift(self) -> tuple[float, float]:
        bound = math.sqrt(3.0) * self.std
        return 2.0 * bound, -bound


@dataclass(frozen=True)
class KaimingNormal(_Random):
    """Matrix, or ``row`` = normal numbers with mean 0 and deviation gain · √(1 / fan_in). Not for int64.

    He, Zhang, Ren, Sun 2015.
    """

    matrix: str
    gain: NotNegative
    fan_in: Positive
    _: KW_ONLY
    seed: Seed
    row: RowOrAll = None

    standard = normals

    @property
    def scale_and_shift(self) -> tuple[float, float]:
        return self.gain * math.sqrt(1.0 / self.fan_in), 0.0
