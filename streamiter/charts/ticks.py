"""Round numbers for the axes of a chart."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

__all__ = ["tick_labels", "ticks"]

# Numbers at a distance that people count in.
_STEPS: Final = (1, 2, 2.5, 5, 10)
_INTERVALS: Final = 5
"""About so many; up to twice as many come of rounding."""


def ticks(values: Sequence[float], *, whole: bool = False) -> list[float]:
    """Round numbers around all values, at equal distances; values that are all alike are in the middle.

    They are ``whole`` numbers where the values count something, such as epochs.

    >>> ticks([0.31, 0.49]), ticks([3])
    ([0.3, 0.35, 0.4, 0.45, 0.5], [2.0, 2.5, 3.0, 3.5, 4.0])
    >>> ticks([1, 4], whole=True), ticks([3], whole=True)
    ([1.0, 2.0, 3.0, 4.0], [2.0, 3.0, 4.0])
    """
    lowest, highest = min(values), max(values)
    if highest - lowest <= 1e-9 * max(abs(lowest), abs(highest)):
        margin = abs(lowest) / 3 or 1.0
        lowest, highest = lowest - margin, highest + margin
    rough = (highest - lowest) / _INTERVALS
    power = 10.0 ** math.floor(math.log10(rough))
    steps = (factor * power for factor in _STEPS if factor * power >= rough * 0.999)
    step = next((each for each in steps if not whole or each.is_integer()), 1.0)
    first, last = math.floor(lowest / step + 1e-9), math.ceil(highest / step - 1e-9)
    return [round(number * step, 12) for number in range(first, last + 1)]


def tick_labels(numbers: Sequence[float]) -> list[str]:
    """All with as many digits as the finest of them needs.

    >>> tick_labels([0.0, 0.25, 0.5])
    ['0.00', '0.25', '0.50']
    """
    digits = next(digits for digits in range(13) if all(_is_whole(number * 10**digits) for number in numbers))
    return [f"{number:.{digits}f}" for number in numbers]


def _is_whole(number: float) -> bool:
    """But for rounding."""
    return abs(number - round(number)) < 1e-6
