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

import math
from collections.abc import Iterator
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from streamiter.errors import ModelError
from streamiter.learn.rows.examples import Floats, as_points

__all__ = [
    "Spread",
    "as_columns",
    "choose_centroids",
    "inertia_of",
    "joined",
    "largest_move",
    "moved",
    "nearest",
    "sample_of",
    "sample_size",
    "scoring_of",
    "spread_of",
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


Hashes = npt.NDArray[np.uint64]

# Of a cluster with a hundredth of the points some forty are in it. Choosing 10 of 4,096 × 10 takes 5 ms.
_SAMPLE_MIN: Final = 4096
_SAMPLE_FOR_EACH: Final = 16

# Measured: of 100 runs on 20 separated clusters none misses one. An attempt at 10 clusters takes 1 ms, at 256 some
# 40 ms and at 2,000 3 s, in which the job does nothing else; and of so many clusters one more or less is little.
_ATTEMPTS: Final = 4
_CLUSTERS_OF_ONE_ATTEMPT: Final = 257


def sample_size(clusters: int) -> int:
    """How many points are enough to choose that many centroids among.

    Centroids to begin with, chosen among the points: a sample of them, then k-means++.

    The sample is that of the lowest hashes. So it is the same in whatever order the points come and whoever has
    which of them, and the samples of parts make the sample of the whole.
    """
    return max(_SAMPLE_MIN, _SAMPLE_FOR_EACH * clusters)


def sample_of(points: Floats, size: int, seed: int) -> Floats:
    """At most ``size`` distinct points, those of the lowest hashes, in the order of these.

    >>> points = np.arange(20.0).reshape(10, 2)
    >>> parts = np.concatenate([sample_of(points[:5], 3, seed=1), sample_of(points[5:], 3, seed=1)])
    >>> bool((sample_of(parts, 3, seed=1) == sample_of(points[::-1], 3, seed=1)).all())
    True
    """
    _, first = np.unique(_hashes(points, seed), return_index=True)
    sample: Floats = points[first[:size]]
    return sample


def choose_centroids(sample: Floats, clusters: int, seed: int, *, owner: str = "k_means") -> Floats:
    """The best of some attempts by greedy k-means++: the one to which the points of the sample are nearest.

    Rounds never move a centroid from one group of well separated clusters to another, so what is missed here stays
    unseen: a single attempt missed one of 5 clusters in 1 of 100 runs, and one of 20 in 18.

    Raises ModelError for fewer points than clusters.
    """
    if len(sample) < clusters:
        raise ModelError(
            f"{owner}: expected at least {clusters} distinct points for {clusters} clusters, given {len(sample)}; "
            "ask for fewer clusters or give initial="
        )
    generator = np.random.default_rng(seed)
    points = _Points(sample)
    count = _ATTEMPTS if clusters < _CLUSTERS_OF_ONE_ATTEMPT else 1
    attempts = [_attempt(points, clusters, generator) for _ in range(count)]
    _, chosen = min(attempts, key=lambda attempt: attempt[0])
    return sample[chosen]


def _attempt(points: _Points, clusters: int, generator: np.random.Generator) -> tuple[float, list[int]]:
    """Greedy k-means++: the sum of squared distances that is left, and the numbers of the points.

    Each centroid is the best of 2 + log k points, which are drawn with a chance by their squared distance to those
    before. Source: Arthur and Vassilvitskii, "k-means++: the advantages of careful seeding" (2007), section 5.
    """
    draws = 2 + int(math.log(clusters))
    chosen = [int(generator.integers(len(points)))]
    [distances] = points.squared_distances(chosen)
    for _ in range(clusters - 1):
        reach = np.cumsum(distances)
        # Distances may be so small that their squares are 0: then any point not yet chosen will do.
        if reach[-1] > 0:
            drawn = np.searchsorted(reach, generator.random(draws) * reach[-1], side="right")
            candidates = np.minimum(drawn, len(points) - 1)
        else:
            candidates = np.setdiff1d(np.arange(len(points)), chosen)[:1]
        left = np.minimum(distances, points.squared_distances(candidates))
        best = int(left.sum(axis=1).argmin())
        chosen.append(int(candidates[best]))
        distances = left[best]
    return float(distances.sum()), chosen


class _Points:
    """Points between which many distances are asked for."""

    def __init__(self, points: Floats) -> None:
        # From their middle, for far from zero small differences would be lost in rounding.
        self._columns = np.ascontiguousarray((points - np.median(points, axis=0)).T)
        self._squares = np.einsum("ij,ij->j", self._columns, self._columns)

    def __len__(self) -> int:
        return len(self._squares)

    def squared_distances(self, numbers: npt.ArrayLike) -> Floats:
        """A row for each of these points, with its squared distance to each of all."""
        rows = np.asarray(numbers)
        distances: Floats = (-2.0 * self._columns[:, rows].T) @ self._columns
        distances += self._squares
        distances += self._squares[rows, np.newaxis]
        np.maximum(distances, 0.0, out=distances)
        distances[np.arange(len(rows)), rows] = 0.0
        return distances


def _hashes(points: Floats, seed: int) -> Hashes:
    """A hash of each point, by the finalizer of SplitMix64 after each coordinate."""
    # Adding 0 makes of −0, which equals it, the same bits.
    columns = np.ascontiguousarray((points + 0.0).T).view(np.uint64)
    start = np.random.default_rng(seed).integers(2**64, dtype=np.uint64)
    hashes: Hashes = np.full(len(points), start, dtype=np.uint64)
    for column in columns:
        hashes ^= column
        hashes += np.uint64(0x9E3779B97F4A7C15)
        hashes = (hashes ^ (hashes >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        hashes = (hashes ^ (hashes >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        hashes ^= hashes >> np.uint64(31)
    return hashes


Spread = dict[str, Any]
"""``count`` and ``mean`` of some points, and ``squares``: the sum of their squared distances to it."""


def spread_of(columns: Floats) -> Spread:
    """That of a block of points, as :func:`as_columns` gives it.

    How far points spread: what the squared distances to their centroids sum up to (the inertia) follows from it.

    The sum of the squared distances of all points to their mean, less that of the centroids, each counted for its
    points, to the same mean, is what is left between points and centroids. The first is the same in every round, so it
    is made once; that the second costs nothing is why nobody adds up distances.

    >>> from streamiter.learn.clustering.clusters import as_columns
    >>> points = as_columns([[0.0], [2.0], [9.0]])
    >>> spread = joined(spread_of(points[:, :1]), spread_of(points[:, 1:]))
    >>> round(inertia_of(spread, np.array([[1.0], [9.0]]), np.array([2, 1])), 12)
    2.0
    """
    coordinates = columns[:-1]
    mean = coordinates.mean(axis=1) if columns.shape[1] else np.zeros(len(coordinates))
    differences = coordinates - mean[:, np.newaxis]
    squares = float(np.einsum("ij,ij->", differences, differences))
    return {"count": columns.shape[1], "mean": mean, "squares": squares}


def joined(first: Spread, second: Spread) -> Spread:
    """That of the points of both."""
    count = first["count"] + second["count"]
    if not count:
        return first
    between = second["mean"] - first["mean"]
    share = second["count"] / count
    squares = first["squares"] + second["squares"] + first["count"] * share * float(between @ between)
    return {"count": count, "mean": first["mean"] + share * between, "squares": squares}


def inertia_of(spread: Spread, means: Floats, counts: npt.NDArray[Any]) -> float:
    """The sum of the squared distances of points to the mean of their cluster; ``counts`` is how many have which."""
    offsets = means - spread["mean"]
    between = float(counts @ np.einsum("ij,ij->i", offsets, offsets))
    return max(0.0, float(spread["squares"]) - between)
