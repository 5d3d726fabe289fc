"""Centroids to begin with, chosen among the points: a sample of them, then k-means++.

The sample is that of the lowest hashes. So it is the same in whatever order the points come and whoever has
which of them, and the samples of parts make the sample of the whole.
"""

from __future__ import annotations

import math
from typing import Final

import numpy as np
import numpy.typing as npt

from streamiter.errors import ModelError
from streamiter.learn.rows.checks import Floats

__all__ = ["choose_centroids", "sample_of", "sample_size"]

Hashes = npt.NDArray[np.uint64]

# Of a cluster with a hundredth of the points some forty are in it. Choosing 10 of 4,096 × 10 takes 5 ms.
_SAMPLE_MIN: Final = 4096
_SAMPLE_FOR_EACH: Final = 16

# Measured: of 100 runs on 20 separated clusters none misses one. An attempt at 10 clusters takes 1 ms, at 256 some
# 40 ms and at 2,000 3 s, in which the job does nothing else; and of so many clusters one more or less is little.
_ATTEMPTS: Final = 4
_CLUSTERS_OF_ONE_ATTEMPT: Final = 257


def sample_size(clusters: int) -> int:
    """How many points are enough to choose that many centroids among."""
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
