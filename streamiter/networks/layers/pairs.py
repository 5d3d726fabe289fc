"""Pairs of vectors, row by row of the triangle."""

from __future__ import annotations

from collections.abc import Iterator

__all__ = ["pairs", "pairs_by_first"]


def pairs(count: int) -> int:
    """How many pairs i < j there are of ``count`` vectors.

    >>> pairs(13)
    78
    """
    return count * (count - 1) // 2


def pairs_by_first(count: int) -> Iterator[tuple[int, slice, slice]]:
    """For each i: which j it is paired with, and where these pairs stand among all.

    >>> [(first, others.start, at.start, at.stop) for first, others, at in pairs_by_first(4)]
    [(0, 1, 0, 3), (1, 2, 3, 5), (2, 3, 5, 6)]
    """
    start = 0
    for first in range(count - 1):
        stop = start + count - 1 - first
        yield first, slice(first + 1, count), slice(start, stop)
        start = stop
