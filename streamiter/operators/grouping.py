"""Records of equal keys side by side, and running reductions over them, in numpy."""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import numpy.typing as npt

__all__ = ["Groups", "segmented_accumulate"]

Array = npt.NDArray[Any]
Indices = npt.NDArray[np.intp]

# numpy sorts integers of one and two bytes stably by radix, ten times faster than wider ones.
_RADIX_TYPES: Final = ((1 << 8, np.uint8), (1 << 16, np.uint16))

# One call of accumulate for a group costs about 1.5 µs, one step over all groups about 10 µs and 5 ns for
# each record: below this length, and with more groups than that, steps are faster.
_SHORT_GROUP: Final = 128


class Groups:
    """The records of a batch, grouped by key; within a group they keep their order.

    ``order`` takes records to their groups, group i being ``order[starts[i] : starts[i] + counts[i]]``, all
    with the key ``keys[i]``.

    >>> groups = Groups(np.array([7, 5, 7]))
    >>> groups.keys, groups.order, groups.starts, groups.counts
    (array([5, 7]), array([1, 0, 2]), array([0, 1]), array([1, 2]))
    """

    __slots__ = ("counts", "keys", "order", "starts")

    def __init__(self, keys: Array) -> None:
        codes = _codes(keys)
        counts = np.bincount(codes)
        self.order: Indices = np.argsort(codes, kind="stable")
        self.counts: Indices = counts[counts > 0]
        self.starts: Indices = np.cumsum(self.counts) - self.counts
        self.keys: Array = keys[self.order[self.starts]]

    def __getitem__(self, group: int) -> Indices:
        """Indices of the records of a group."""
        start = self.starts[group]
        return self.order[start : start + self.counts[group]]


def _codes(keys: Array) -> Array:
    """A number for each key, equal where the keys are, in as few bytes as it needs."""
    if keys.dtype.kind in "iu":
        lowest, highest = int(keys.min()), int(keys.max())
        for bound, small in _RADIX_TYPES:
            if lowest >= 0 and highest < bound:
                return keys.astype(small, copy=False)
            if highest - lowest < bound:
                # Wraps around where the difference does not fit the keys' own type, which is undone here.
                differences: Array = keys - keys.dtype.type(lowest)
                return differences.astype(small)
    codes: Array
    distinct, codes = np.unique(keys, return_inverse=True)
    for bound, small in _RADIX_TYPES:
        if len(distinct) <= bound:
            return codes.astype(small)
    return codes


def segmented_accumulate(ufunc: np.ufunc, values: Array, starts: Indices, counts: Indices) -> Array:
    """``ufunc.accumulate`` over each segment ``values[start : start + count]`` on its own, dtype kept.

    Each segment is gone through from its first value to its last, so floats round as in a plain loop.

    >>> segmented_accumulate(np.add, np.array([1, 2, 3, 4]), np.array([0, 2]), np.array([2, 2]))
    array([1, 3, 3, 7])
    """
    accumulated = np.empty_like(values)
    if len(counts) <= _SHORT_GROUP:
        _accumulate_each(ufunc, values, accumulated, starts, counts)
        return accumulated
    short = counts <= _SHORT_GROUP
    _accumulate_each(ufunc, values, accumulated, starts[~short], counts[~short])
    _accumulate_in_steps(ufunc, values, accumulated, starts[short], counts[short])
    return accumulated


def _accumulate_each(
    ufunc: np.ufunc, values: Array, accumulated: Array, starts: Indices, counts: Indices
) -> None:
    accumulate, dtype = ufunc.accumulate, values.dtype
    for start, stop in zip(starts.tolist(), (starts + counts).tolist(), strict=True):
        accumulate(values[start:stop], 0, dtype, accumulated[start:stop])


def _accumulate_in_steps(
    ufunc: np.ufunc, values: Array, accumulated: Array, starts: Indices, counts: Indices
) -> None:
    """Step r does the r-th value of all segments that have one."""
    longest_first = np.argsort(-counts, kind="stable")
    at, ascending_counts = starts[longest_first], counts[longest_first][::-1]
    accumulated[at] = values[at]
    for rank in range(1, int(counts.max(initial=0))):
        at = at[: len(counts) - np.searchsorted(ascending_counts, rank, side="right")] + 1
        accumulated[at] = ufunc(accumulated[at - 1], values[at])
