"""The arithmetic of k-means: which centroid is nearest, and what the points of each sum up to.

The nearest of the centroids c to a point x is that of the largest c·x − |c|²/2, so all of them for all points
are one matrix product. Both are taken from the middle of the centroids: far from zero, where |c|² is large and
the clusters are small beside it, the difference would otherwise be lost in rounding.

>>> points = as_columns([[0.0, 0.0], [0.0, 2.0], [9.0, 9.0]])
>>> centroids = np.array([[0.0, 0.5], [8.0, 8.0]])
>>> sums_by_cluster(scoring_of(centroids), points).tolist()  # the last number of each is the count
[[0.0, 2.0, 2.0], [9.0, 9.0, 1.0]]
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from streamiter.learn.rows.checks import Floats
from streamiter.learn.rows.points import as_points

__all__ = [
    "as_columns",
    "largest_move",
    "moved",
    "nearest",
    "scoring_of",
    "sums_by_cluster",
]

# Measured for 10 clusters of 10 coordinates: from 2,048 points on the calls cost little beside the arithmetic,
# and from 8,192 on a chunk and its scores do not fit the processor's cache.
_CHUNK_POINTS: Final = 4096
_CHUNK_POINTS_MIN: Final = 256
_SCORES_MAX: Final = 1 << 16


def as_columns(given: Any, width: int | None = None, *, owner: str = "k_means") -> Floats:
    """Points as the other functions want them: a column for each, and ones as the last row."""
    points = as_points(owner, given, width)
    columns = np.ones((points.shape[1] + 1, len(points)))
    columns[:-1] = points.T
    return columns


def scoring_of(centroids: Floats) -> Floats:
    """The matrix that, times the columns of points, gives the score of each centroid (row) for each point (column)."""
    middle = np.median(centroids, axis=0)  # the mean would be led away by one that is far out
    scoring = np.empty((len(centroids), centroids.shape[1] + 1))
    scoring[:, :-1] = centroids - middle
    scoring[:, -1] = -0.5 * np.einsum("ij,ij->i", scoring[:, :-1], centroids + middle)
    return scoring


def nearest(scoring: Floats, columns: Floats) -> npt.NDArray[np.intp]:
    """The number of the nearest centroid of each point; the first one where several are."""
    labels = [(scoring @ chunk).argmax(axis=0) for chunk in _chunks(columns, len(scoring))]
    return np.concatenate(labels) if labels else np.zeros(0, dtype=np.intp)


def sums_by_cluster(scoring: Floats, columns: Floats) -> Floats:
    """For each centroid the sum of the points that it is nearest to, and their number behind it."""
    total = np.zeros(scoring.shape)
    for chunk in _chunks(columns, len(scoring)):
        scores = scoring @ chunk
        # Comparing with the best is four times quicker than argmax and what one would make of it.
        is_nearest = (scores == np.maximum.reduce(scores, axis=0)).astype(np.float64)
        sums = is_nearest @ chunk.T
        if sums[:, -1].sum() != chunk.shape[1]:  # A point has several best ones.
            labels = scores.argmax(axis=0)
            sums = (labels == np.arange(len(scoring))[:, np.newaxis]).astype(np.float64) @ chunk.T
        total += sums
    return total


def _chunks(columns: Floats, clusters: int) -> Iterator[Floats]:
    """Some thousand points at a time."""
    size = min(_CHUNK_POINTS, max(_CHUNK_POINTS_MIN, _SCORES_MAX // clusters))
    return (columns[:, start : start + size] for start in range(0, columns.shape[1], size))


def moved(centroids: Floats, sums: Floats) -> Floats:
    """The means of the points of each centroid; one without points stays where it is."""
    counts = sums[:, -1:]
    means: Floats = np.where(counts > 0, sums[:, :-1] / np.maximum(counts, 1), centroids)
    return means


def largest_move(before: Floats, after: Floats) -> float:
    """How far the centroid that moved furthest has moved."""
    return float(np.sqrt(np.square(after - before).sum(axis=1).max()))
