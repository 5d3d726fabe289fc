"""Random numbers that depend on seed, row and column, and on nothing else: not on how a row is cut into blocks.

Philox (Salmon, Moraes, Dror, Shaw, "Parallel random numbers: as easy as 1, 2, 3", 2011) is a function of a key, here
(seed, row), and of a counter, which gives four words of 64 bits for each. A column has a fixed number of them: one for
a uniform number, two for a normal one (Box, Muller, "A note on the generation of random normal deviates", 1958).
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

__all__ = ["normals", "uniforms"]

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
