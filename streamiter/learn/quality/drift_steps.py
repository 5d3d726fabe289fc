"""The steps of the drift detectors, one for each value; ``streamiter.learn.quality.drift`` describes the detectors.

ADWIN's window is a histogram of buckets. A bucket of level k holds ``2**k`` values, and a level has at most five
buckets, the oldest first; a higher level is older. So the window of n values takes about 5·log2(n/5) buckets.

=============================  =======================================================================================
``buckets[level, place, 4]``   the sum of the values of a bucket, their sum of squared deviations, smallest and largest
``lengths[level]``             the number of buckets of a level
``test[6]``                    of Page–Hinkley: the number and the sum of the values, the cumulative deviation and its
                               minimum, and number and sum of the values up to that minimum
=============================  =======================================================================================

This module needs Numba to be fast, see ``streamiter.values.helpers.compiled``, and is imported when the first detector
is made.
"""

from __future__ import annotations

from typing import Final

import numpy as np

from streamiter.values.helpers.compiled import compiled
from streamiter.values.numbers import Floats, Indices

# More buckets in a level find the place of a change more exactly, and cost time; the paper's authors took five.
BUCKETS: Final = 5
# 5 · 2**47 values come in 22 years, at a million values a second.
LEVELS: Final = 48
# A mean of fewer values says too little: a part of the window has at least this many values.
_PART_MIN: Final = 5

_SUM: Final = 0
_SQUARES: Final = 1
_LOWEST: Final = 2
_HIGHEST: Final = 3


@compiled
def _drop_first(count: int, level: int, buckets: Floats, lengths: Indices) -> None:
    """Drop the first buckets of a level."""
    for place in range(count, lengths[level]):
        for number in range(buckets.shape[2]):  # A copy of all numbers together would make an array.
            buckets[level, place - count, number] = buckets[level, place, number]
    lengths[level] -= count


@compiled
def _add_bucket(value: float, buckets: Floats, lengths: Indices) -> None:
    """Add a value as the newest bucket; where a level has too many buckets, its two oldest become one, a level up."""
    newest = buckets[0, lengths[0]]
    newest[_SUM] = newest[_LOWEST] = newest[_HIGHEST] = value
    newest[_SQUARES] = 0.0
    lengths[0] += 1
    for level in range(LEVELS - 1):
        if lengths[level] <= BUCKETS:
            return
        size, first, second = 2.0**level, buckets[level, 0], buckets[level, 1]
        joined = buckets[level + 1, lengths[level + 1]]
        difference = (first[_SUM] - second[_SUM]) / size
        joined[_SUM] = first[_SUM] + second[_SUM]
        joined[_SQUARES] = first[_SQUARES] + second[_SQUARES] + size / 2.0 * difference * difference
        joined[_LOWEST] = min(first[_LOWEST], second[_LOWEST])
        joined[_HIGHEST] = max(first[_HIGHEST], second[_HIGHEST])
        _drop_first(2, level, buckets, lengths)
        lengths[level + 1] += 1


@compiled
def whole_window(buckets: Floats, lengths: Indices) -> tuple[float, float, float, float]:
    """Return the number of values in the window, their sum, variance and range."""
    count = total = squares = 0.0
    lowest, highest = np.inf, -np.inf
    for level in range(LEVELS):
        size = 2.0**level
        for place in range(lengths[level]):
            bucket = buckets[level, place]
            if count > 0.0:
                difference = total / count - bucket[_SUM] / size
                squares += count * size / (count + size) * difference * difference
            count += size
            total += bucket[_SUM]
            squares += bucket[_SQUARES]
            lowest, highest = min(lowest, bucket[_LOWEST]), max(highest, bucket[_HIGHEST])
    return count, total, squares / max(count, 1.0), highest - lowest


@compiled
def _best_cut(confidence: float, buckets: Floats, lengths: Indices, means: Floats) -> float:
    """Find the older and the newer part of the window whose means differ most; put these into ``means``.

    Return the number of values of the older part; 0 where chance explains the difference of all parts.
    """
    count, total, variance, width = whole_window(buckets, lengths)
    if count < 2.0 * _PART_MIN or width == 0.0:
        return 0.0
    surprise = np.log(2.0 * np.log(count) / confidence)
    older = older_sum = best = 0.0
    largest = 1.0
    for level in range(LEVELS - 1, -1, -1):
        for place in range(lengths[level]):
            older += 2.0**level
            older_sum += buckets[level, place, _SUM]
            newer = count - older
            if older >= _PART_MIN and newer >= _PART_MIN:
                inverse = 1.0 / (older - _PART_MIN + 1.0) + 1.0 / (newer - _PART_MIN + 1.0)
                bound = np.sqrt(2.0 * inverse * variance * surprise) + 2.0 / 3.0 * width * inverse * surprise
                old_mean, new_mean = older_sum / older, (total - older_sum) / newer
                if abs(old_mean - new_mean) > largest * bound:
                    largest = abs(old_mean - new_mean) / bound
                    means[0], means[1], best = old_mean, new_mean, older
    return best


@compiled
def _drop_oldest(count: float, buckets: Floats, lengths: Indices) -> None:
    """Drop the oldest buckets, of ``count`` values together."""
    for level in range(LEVELS - 1, -1, -1):
        size = 2.0**level
        while count >= size and lengths[level]:
            _drop_first(1, level, buckets, lengths)
            count -= size


@compiled
def adwin(
    values: Floats, confidence: float, check_every: int, seen: int, buckets: Floats, lengths: Indices, changes: Floats
) -> int:
    """Add values; put position, old and new mean of each change into ``changes``, and return the number of changes.

    ``seen`` is the number of values before these; the window is checked at each multiple of ``check_every``.
    """
    found = 0
    for position in range(len(values)):
        _add_bucket(values[position], buckets, lengths)
        if (seen + position + 1) % check_every == 0:
            older = _best_cut(confidence, buckets, lengths, changes[found, 1:])
            if older > 0.0:
                changes[found, 0] = position
                found += 1
                _drop_oldest(older, buckets, lengths)
    return found


@compiled
def page_hinkley(
    values: Floats, threshold: float, allowance: float, memory: float, rows_min: int, test: Floats, changes: Floats
) -> int:
    """Add values; put position, old and new mean of each rise into ``changes``, and return the number of rises."""
    found = 0
    for position in range(len(values)):
        value = values[position]
        test[0] += 1.0
        test[1] += value
        test[2] = memory * test[2] + value - test[1] / test[0] - allowance
        if test[0] == 1.0 or test[2] < test[3]:
            test[3], test[4], test[5] = test[2], test[0], test[1]
        if test[0] >= rows_min and test[2] - test[3] > threshold:
            changes[found, 0] = position
            changes[found, 1] = test[5] / test[4]
            changes[found, 2] = (test[1] - test[5]) / (test[0] - test[4])
            found += 1
            test[:] = 0.0
    return found


@compiled
def losses_of_numbers(predictions: Floats, targets: Floats, scale: Floats, losses: Floats) -> None:
    """Put squared errors, as shares of the variance of all targets so far, into ``losses``; at most 1.

    ``scale`` has the number of the targets before these, their mean and their sum of squared deviations.
    """
    for row in range(len(targets)):
        difference = targets[row] - scale[1]
        scale[0] += 1.0
        scale[1] += difference / scale[0]
        scale[2] += difference * (targets[row] - scale[1])
        error = predictions[row] - targets[row]
        square = error * error * scale[0]
        losses[row] = min(square / scale[2], 1.0) if scale[2] > 0.0 else 0.0
