"""Centroids to begin with, chosen among the points: a sample of them, then k-means++.

The sample is that of the lowest hashes. So it is the same in whatever order the points come and whoever has
which of them, and the samples of parts make the sample of the whole.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt

from streamiter.errors import ModelError
from streamiter.learn.rows.checks import Floats

__all__ = ["choose_centroids", "sample_of", "sample_size"]

Hashes = npt.NDArray[np.uint64]

_SAMPLE_MIN: Final = 1024
_SAMPLE_FOR_EACH: Final = 16


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
    """k-means++: each centroid is a point drawn with a chance by its squared distance to those before.

    Source: Arthur and Vassilvitskii, "k-means++: the advantages of careful seeding" (2007).
    Raises ModelError for fewer points than clusters.
    """
    if len(sample) < clusters:
        raise ModelError(
            f"{owner}: expected at least {clusters} distinct points for {clusters} clusters, given {len(sample)}; "
            "ask for fewer clusters or give initial="
        )
    generator = np.random.default_rng(seed)
    chosen = [int(generator.integers(len(sample)))]
    distances = _squared_distances(sample, chosen[0])
    for _ in range(clusters - 1):
        reach = np.cumsum(distances)
        # Distances may be so small that their squares are 0: then any point not yet chosen will do.
        if reach[-1] > 0:
            following = int(np.searchsorted(reach, generator.random() * reach[-1], side="right"))
        else:
            following = int(np.setdiff1d(np.arange(len(sample)), chosen)[0])
        chosen.append(min(following, len(sample) - 1))
        distances = np.minimum(distances, _squared_distances(sample, chosen[-1]))
    return sample[chosen]


def _squared_distances(points: Floats, number: int) -> Floats:
    distances: Floats = np.square(points - points[number]).sum(axis=1)
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
