"""Records of equal keys side by side, and running reductions over them, in numpy."""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import numpy.typing as npt

__all__ = ["Groups", "accumulate_segments"]

Array = npt.NDArray[Any]
Indices = npt.NDArray[np.intp]

# numpy sorts integers of one and two bytes stably by radix, ten times faster than wider ones.
_RADIX_TYPES: Final = ((1 << 8, np.uint8), (1 << 16, np.uint16))

# One call of accumulate for a segment costs about 1.5 µs, one step over all of them about 10 µs and 5 ns
# for each value: up to this length, and with more segments than that, steps are faster.
_SHORT_SEGMENT: Final = 128


class Groups:
    """The records of a batch (at least one), grouped by key; within a group they keep their order.

    ``order`` takes records to their groups, group i being ``order[starts[i] : starts[i] + counts[i]]``, all
    with the key ``keys[i]``.

    >>> groups = Groups(np.array([7, 5, 7]))
    >>> groups.keys, groups.order, groups.starts, groups.counts
    (array([5, 7]), array([1, 0, 2]), array([0, 1]), array([1, 2]))
    """

    __slots__ = ("counts", "keys", "order", "starts")

    def __init__(self, keys: Array) -> None:
        codes = _codes(keys)
        self.order: Indices = np.argsort(codes, kind="stable")
        ordered = codes[self.order]
        borders = np.flatnonzero(ordered[1:] != ordered[:-1]) + 1
        self.starts: Indices = np.concatenate([[0], borders])
        self.counts: Indices = np.diff(self.starts, append=len(keys))
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


def accumulate_segments(ufunc: np.ufunc, values: Array, starts: Indices, counts: Indices) -> None:
    """``ufunc.accumulate``, in place, over each segment ``values[start : start + count]`` on its own.

    Each segment is gone through from its first value to its last, so floats round as in a plain loop.

    >>> values = np.array([1, 2, 3, 4])
    >>> accumulate_segments(np.add, values, np.array([0, 2]), np.array([2, 2]))
    >>> values
    array([1, 3, 3, 7])
    """
    if len(counts) <= _SHORT_SEGMENT:
        _accumulate_each(ufunc, values, starts, counts)
        return
    short = counts <= _SHORT_SEGMENT
    _accumulate_each(ufunc, values, starts[~short], counts[~short])
    _accumulate_in_steps(ufunc, values, starts[short], counts[short])


def _accumulate_each(ufunc: np.ufunc, values: Array, starts: Indices, counts: Indices) -> None:
    accumulate, dtype = ufunc.accumulate, values.dtype
    for start, stop in zip(starts.tolist(), (starts + counts).tolist(), strict=True):
        segment = values[start:stop]
        accumulate(segment, 0, dtype, segment)


def _accumulate_in_steps(ufunc: np.ufunc, values: Array, starts: Indices, counts: Indices) -> None:
    """Step r does the r-th value of all segments that have one."""
    longest_first = np.argsort(-counts, kind="stable")
    at, ascending_counts = starts[longest_first], counts[longest_first][::-1]
    for rank in range(1, int(counts.max(initial=0))):
        longer = len(counts) - np.searchsorted(ascending_counts, rank, side="right")
        at = at[:longer] + 1
        values[at] = ufunc(values[at - 1], values[at])
