"""Update functions that draw random numbers."""

from __future__ import annotations

import abc
import math
from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from streamiter.errors import ConfigurationError
from streamiter.parameter_server.matrix import Matrix
from streamiter.parameter_server.psf.function import (
    UpdateFunction,
    check_fractions_fit,
    set_finite,
    set_not_negative,
    set_positive,
    set_rows,
    set_seed,
)
from streamiter.parameter_server.storage.block import Block, Numbers

__all__ = [
    "KaimingNormal",
    "RandomNormal",
    "RandomUniform",
    "XavierNormal",
    "XavierUniform",
    "normals",
    "uniforms",
]


_WORDS_PER_COUNT = 4
_UNIT = 2.0**-53
"""A float has 53 bits of precision: the upper ones of a word."""


def _words(seed: int, row: int, first: int, count: int) -> npt.NDArray[np.uint64]:
    """Words ``first`` to ``first + count`` of the row, as whole numbers of 53 bits."""
    counter, skipped = divmod(first, _WORDS_PER_COUNT)
    generator = np.random.Philox(
        key=np.array([seed, row], np.uint64), counter=np.array([counter, 0, 0, 0], np.uint64)
    )
    words: npt.NDArray[np.uint64] = generator.random_raw(skipped + count)[skipped:]
    return words >> np.uint64(11)


def uniforms(seed: int, row: int, columns: range) -> npt.NDArray[np.float64]:
    """A number in [0, 1) for each column.

    >>> uniforms(7, 0, range(0, 9))[5:].tolist() == uniforms(7, 0, range(5, 9)).tolist()
    True

    Random numbers that depend on seed, row and column, and on nothing else: not on how a row is cut into blocks.

    Philox (Salmon, Moraes, Dror, Shaw, "Parallel random numbers: as easy as 1, 2, 3", 2011) is a function of a key,
    here (seed, row), and of a counter, which gives four words of 64 bits for each. A column has a fixed number of them:
    one for a uniform number, two for a normal one (Box, Muller, "A note on the generation of random normal deviates",
    1958).
    """
    return _words(seed, row, columns.start, len(columns)).astype(np.float64) * _UNIT


def normals(seed: int, row: int, columns: range) -> npt.NDArray[np.float64]:
    """A number of the standard normal distribution for each column."""
    words = _words(seed, row, 2 * columns.start, 2 * len(columns))
    # Contiguous, both: numpy's loops for arrays with gaps may differ in the last bit.
    first, second = words[0::2].astype(np.float64), words[1::2].astype(np.float64)
    # In (0, 1]: of 0 there is no logarithm.
    radius: npt.NDArray[np.float64] = np.sqrt(-2.0 * np.log((first + 1.0) * _UNIT))
    return radius * np.cos(second * (2.0 * np.pi * _UNIT))


_PIECE = 1 << 16
"""Columns drawn at a time: half a megabyte for each array in between, which stays in the cache."""


class Random(UpdateFunction):
    """Random numbers for one row, or for all (``row=None``).

    A number depends on seed, row and column only; see :mod:`~streamiter.parameter_server.psf.random`. So two
    calls with one seed are not independent of each other: give each its own. A sparse row holds all columns afterwards.
    Not for int64.
    """

    row: int | None
    seed: int
    standard: ClassVar[Callable[[int, int, range], npt.NDArray[np.float64]]]
    """Numbers of the standard distribution: of mean 0 and deviation 1, or from 0 to 1."""

    def __post_init__(self) -> None:
        if self.row is not None:
            set_rows(self, "row")
        set_seed(self, "seed")

    @property
    @abc.abstractmethod
    def scale_and_shift(self) -> tuple[float, float]:
        """What standard numbers are multiplied by, and what is then added."""

    def rows(self, matrix: Matrix) -> Sequence[int]:
        return () if self.row is None else (self.row,)

    def check(self, matrix: Matrix) -> None:
        check_fractions_fit(self, matrix)

    def partition_update(self, block: Block, part: Any) -> None:
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
class RandomNormal(Random):
    """Normal numbers of this mean and standard deviation.

    >>> RandomNormal("w", row=0, mean=0.0, std=0.1, seed=7)
    RandomNormal(matrix='w', row=0, mean=0.0, std=0.1, seed=7)

    Rows, or a whole matrix, of random numbers; the same numbers for the same seed, however the matrix is cut.
    """

    matrix: str
    row: int | None
    mean: float
    std: float
    _: KW_ONLY
    seed: int

    standard = normals

    def __post_init__(self) -> None:
        super().__post_init__()
        set_finite(self, "mean")
        set_not_negative(self, "std")

    @property
    def scale_and_shift(self) -> tuple[float, float]:
        return self.std, self.mean


@dataclass(frozen=True)
class RandomUniform(Random):
    """Numbers from ``low`` up to ``high``, all as likely.

    >>> RandomUniform("w", row=None, low=-1.0, high=1.0, seed=7)
    RandomUniform(matrix='w', row=None, low=-1.0, high=1.0, seed=7)
    """

    matrix: str
    row: int | None
    low: float
    high: float
    _: KW_ONLY
    seed: int

    standard = uniforms

    def __post_init__(self) -> None:
        super().__post_init__()
        set_finite(self, "low", "high")
        if self.low > self.high:
            raise ConfigurationError(
                f"psf.RandomUniform: expected low ≤ high, given low={self.low!r} and high={self.high!r}"
            )

    @property
    def scale_and_shift(self) -> tuple[float, float]:
        return self.high - self.low, self.low


@dataclass(frozen=True)
class _Xavier(Random):
    matrix: str
    gain: float
    fan_in: float
    fan_out: float
    _: KW_ONLY
    seed: int
    row: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        set_not_negative(self, "gain")
        set_positive(self, "fan_in", "fan_out")

    @property
    def std(self) -> float:
        """Of the numbers drawn."""
        return self.gain * math.sqrt(2.0 / (self.fan_in + self.fan_out))


class XavierNormal(_Xavier):
    """Normal numbers, mean 0, deviation gain · √(2 / (fan_in + fan_out)) (Glorot and Bengio 2010).

    For the whole matrix, unless ``row`` is given.

    >>> XavierNormal("w", gain=1.0, fan_in=30, fan_out=20, seed=7).std
    0.2
    """

    standard = normals

    @property
    def scale_and_shift(self) -> tuple[float, float]:
        return self.std, 0.0


class XavierUniform(_Xavier):
    """Uniform numbers of the same deviation as :class:`XavierNormal`'s: from −√3 times it to √3 times it."""

    standard = uniforms

    @property
    def scale_and_shift(self) -> tuple[float, float]:
        bound = math.sqrt(3.0) * self.std
        return 2.0 * bound, -bound


@dataclass(frozen=True)
class KaimingNormal(Random):
    """Normal numbers, mean 0, deviation gain · √(1 / fan_in) (He, Zhang, Ren, Sun 2015).

    For the whole matrix, unless ``row`` is given.
    """

    matrix: str
    gain: float
    fan_in: float
    _: KW_ONLY
    seed: int
    row: int | None = None

    standard = normals

    def __post_init__(self) -> None:
        super().__post_init__()
        set_not_negative(self, "gain")
        set_positive(self, "fan_in")

    @property
    def scale_and_shift(self) -> tuple[float, float]:
        return self.gain * math.sqrt(1.0 / self.fan_in), 0.0
