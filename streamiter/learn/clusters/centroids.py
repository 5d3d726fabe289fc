"""Centroids: the arithmetic of k-means, the choice of initial centroids, and centroids that follow a stream.

The arithmetic finds the nearest centroid of each point, and sums up the points of each centroid. Initial centroids are
chosen among the points by k-means++. :class:`OnlineKMeans` learns from mini-batches and forgets old points.

The nearest of the centroids c to a point x has the largest c·x − |c|²/2, so the scores of all centroids for all points
are one matrix product. The scores are computed relative to the median of the centroids: far from zero, |c|² is large
compared with the distances between clusters, and the differences of scores would be lost in rounding.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from streamiter.errors import ConfigurationError, GraphError, ModelError, StreamiterError
from streamiter.learn.rows import as_points, row_hashes, row_weights
from streamiter.models.saved_objects import Savable
from streamiter.models.update import ModelSnapshot
from streamiter.operators.declared_state import COPIED, DeclaredState, declared
from streamiter.operators.definitions import Definition
from streamiter.values.numbers import Floats, Moments, plain_float, whole_number

# Measured for 10 clusters of 10 coordinates: with 2,048 points or more, calls cost little compared with the arithmetic;
# with 8,192 points or more, a chunk and its scores do not fit into the processor's cache.
_CHUNK_POINTS: Final = 4096
_CHUNK_POINTS_MIN: Final = 256
_SCORES_MAX: Final = 1 << 16


def initial_centroids(owner: str, initial: npt.ArrayLike, clusters: int | None = None) -> Floats:
    """Return a checked copy of the initial centroids. Raises GraphError, also for another number than ``clusters``."""
    try:
        centroids = as_points(f"{owner}(initial=)", initial)
    except ModelError as error:
        raise GraphError(str(error)) from None
    if clusters is not None and len(centroids) != clusters:
        raise GraphError(
            f"{owner}(initial=): expected {clusters} centroids for {clusters} clusters, given {len(centroids)}; "
            "give a row for each"
        )
    if not len(centroids):
        raise GraphError(f"{owner}(initial=): expected a row for each centroid, given none; give rows")
    return centroids.copy()


def checked_decay(owner: str, given: float, error: type[StreamiterError]) -> float:
    """Return the checked factor by which the weights of old points shrink."""
    decay = plain_float(given)
    if not 0.0 <= decay <= 1.0:
        raise error(
            f"{owner}(decay=): expected a number from 0 (only the latest mini-batch counts) to 1 (all points count "
            f"alike), given {given!r}"
        )
    return decay


def as_columns(given: object, width: int | None = None, *, owner: str = "k_means") -> Floats:
    """Return points in the form that the other functions take: a column for each point, and ones as the last row.

    >>> points = as_columns([[0.0, 0.0], [0.0, 2.0], [9.0, 9.0]])
    >>> centroids = np.array([[0.0, 0.5], [8.0, 8.0]])
    >>> sums_by_cluster(scoring_of(centroids), points).tolist()  # the last number of each is the count
    [[0.0, 2.0, 2.0], [9.0, 9.0, 1.0]]
    """
    points = as_points(owner, given, width)
    columns = np.ones((points.shape[1] + 1, len(points)))
    columns[:-1] = points.T
    return columns


def scoring_of(centroids: Floats) -> Floats:
    """Return a matrix whose product with the columns of points is the score of each centroid (row) for each point."""
    middle = np.median(centroids, axis=0)  # A single centroid that is far away would shift the mean.
    scoring = np.empty((len(centroids), centroids.shape[1] + 1))
    scoring[:, :-1] = centroids - middle
    scoring[:, -1] = -0.5 * np.einsum("ij,ij->i", scoring[:, :-1], centroids + middle)
    return scoring


def nearest(scoring: Floats, columns: Floats) -> npt.NDArray[np.intp]:
    """Return the number of the nearest centroid of each point; the first one of equally near centroids."""
    labels = [(scoring @ chunk).argmax(axis=0) for chunk in _chunks(columns, len(scoring))]
    return np.concatenate(labels) if labels else np.zeros(0, dtype=np.intp)


def sums_by_cluster(scoring: Floats, columns: Floats) -> Floats:
    """Return, for each centroid, the sum of the points nearest to the centroid, then the number of these points."""
    total = np.zeros(scoring.shape)
    for chunk in _chunks(columns, len(scoring)):
        scores = scoring @ chunk
        # Comparing with the best score is four times quicker than argmax and an indicator matrix.
        is_nearest = (scores == np.maximum.reduce(scores, axis=0)).astype(np.float64)
        sums = is_nearest @ chunk.T
        if sums[:, -1].sum() != chunk.shape[1]:  # Some point has several best centroids.
            labels = scores.argmax(axis=0)
            sums = (labels == np.arange(len(scoring))[:, np.newaxis]).astype(np.float64) @ chunk.T
        total += sums
    return total


def _chunks(columns: Floats, clusters: int) -> Iterator[Floats]:
    """Return the points in chunks of some thousand points."""
    size = min(_CHUNK_POINTS, max(_CHUNK_POINTS_MIN, _SCORES_MAX // clusters))
    return (columns[:, start : start + size] for start in range(0, columns.shape[1], size))


def moved(centroids: Floats, sums: Floats) -> Floats:
    """Return the mean of the points of each centroid; a centroid without points does not move."""
    counts = sums[:, -1:]
    return np.where(counts > 0, sums[:, :-1] / np.maximum(counts, 1), centroids)


def largest_move(before: Floats, after: Floats) -> float:
    """Return the distance of the furthest move of a centroid."""
    return float(np.sqrt(np.square(after - before).sum(axis=1).max()))


# The sample contains about forty points of a cluster that has one percent of all points. Choosing 10 of 4,096 points of
# 10 coordinates takes 5 ms.
_SAMPLE_MIN: Final = 4096
_SAMPLE_FOR_EACH: Final = 16

# Measured: none of 100 runs on 20 separated clusters misses a cluster. An attempt takes 1 ms for 10 clusters, about 40
# ms for 256, and 3 s for 2,000. The job does nothing else during this time, and with this many clusters a missed
# cluster matters little: for many clusters there is one attempt only.
_ATTEMPTS: Final = 4
_CLUSTERS_OF_ONE_ATTEMPT: Final = 257


def sample_size(clusters: int) -> int:
    """Return the size of the sample to choose ``clusters`` centroids from."""
    return max(_SAMPLE_MIN, _SAMPLE_FOR_EACH * clusters)


def sample_of(points: Floats, size: int, seed: int) -> Floats:
    """Return at most ``size`` distinct points: the points with the lowest hashes, in the order of their hashes.

    So the sample depends neither on the order of the points nor on their division among subtasks. The samples of all
    parts, joined and sampled again, are the sample of all points.

    >>> points = np.arange(20.0).reshape(10, 2)
    >>> parts = np.concatenate([sample_of(points[:5], 3, seed=1), sample_of(points[5:], 3, seed=1)])
    >>> bool((sample_of(parts, 3, seed=1) == sample_of(points[::-1], 3, seed=1)).all())
    True
    """
    start = np.random.default_rng(seed).integers(2**64, dtype=np.uint64)
    _, first = np.unique(row_hashes(points, start), return_index=True)
    return points[first[:size]]


def choose_centroids(sample: Floats, clusters: int, seed: int, *, owner: str = "k_means") -> Floats:
    """Return the best centroids of several attempts by greedy k-means++: the centroids nearest to the sample.

    Rounds never move a centroid from one group of well separated clusters to another, so a cluster that is missed here
    is never found. A single attempt missed one of 5 clusters in 1 of 100 runs, and one of 20 clusters in 18 of 100
    runs.

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
    """Choose points by greedy k-means++; return the remaining sum of squared distances, and the points' numbers.

    Each of the k centroids is the best of 2 + log k candidates. A candidate is drawn with a probability proportional to
    its squared distance from the centroids chosen before. Source: Arthur and Vassilvitskii, "k-means++: the advantages
    of careful seeding" (2007), section 5.
    """
    draws = 2 + int(math.log(clusters))
    chosen = [int(generator.integers(len(points)))]
    [distances] = points.squared_distances(chosen)
    for _ in range(clusters - 1):
        reach = np.cumsum(distances)
        # If the distances are so small that their squares are 0, take any point that is not chosen yet.
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
    """Points, prepared for many computations of distances between them."""

    def __init__(self, points: Floats) -> None:
        # Subtract the median: far from zero, small differences would be lost in rounding.
        self._columns = np.ascontiguousarray((points - np.median(points, axis=0)).T)
        self._squares = np.einsum("ij,ij->j", self._columns, self._columns)

    def __len__(self) -> int:
        return len(self._squares)

    def squared_distances(self, numbers: npt.ArrayLike) -> Floats:
        """Return a row for each of these points, with its squared distances to all points."""
        rows = np.asarray(numbers)
        distances: Floats = (-2.0 * self._columns[:, rows].T) @ self._columns
        distances += self._squares
        distances += self._squares[rows, np.newaxis]
        np.maximum(distances, 0.0, out=distances)
        distances[np.arange(len(rows)), rows] = 0.0
        return distances


def spread_of(columns: Floats) -> Moments:
    """Return the moments of a block of points; :func:`as_columns` makes the block.

    The *inertia*, the sum of the squared distances between points and centroids, is computed from the moments: it is
    the sum of their ``squares`` minus the squared distances of the centroids to the mean of all points, each multiplied
    by the number of its points. The moments are the same in every round, so they are computed once, and no round adds
    up distances.

    >>> points = as_columns([[0.0], [2.0], [9.0]])
    >>> spread = spread_of(points[:, :1]).plus(spread_of(points[:, 1:]))
    >>> round(inertia_of(spread, np.array([[1.0], [9.0]]), np.array([2, 1])), 12)
    2.0
    """
    return Moments.of(columns[:-1].T)


def inertia_of(spread: Moments, means: Floats, counts: npt.NDArray[np.int64]) -> float:
    """Return the sum of the squared distances of points to the mean of their cluster, which has ``counts`` points."""
    offsets = means - spread.mean
    between = float(counts @ np.einsum("ij,ij->i", offsets, offsets))
    return max(0.0, float(spread.squares.sum()) - between)


def offsets_by_cluster(centroids: Floats, points: Floats) -> tuple[Floats, float]:
    """Return for each centroid the sum of the offsets of its points, and their number; then the sum of all squares.

    >>> offsets_by_cluster(np.array([[0.0], [10.0]]), np.array([[1.0], [9.0], [8.0]]))
    (array([[ 1.,  1.],
           [-3.,  2.]]), 6.0)
    """
    labels = nearest(scoring_of(centroids), as_columns(points))
    offsets = points - centroids[labels]
    sums = np.zeros((len(centroids), centroids.shape[1] + 1))
    np.add.at(sums[:, :-1], labels, offsets)
    sums[:, -1] = np.bincount(labels, minlength=len(centroids))
    return sums, float(np.square(offsets).sum())


class OnlineKMeans(DeclaredState, Savable):
    """Centroids with weights, which learn from mini-batches of points and forget old points.

    With each mini-batch the weight w of a centroid becomes w·decay + n, where n is the number of points that are
    nearest to it, and the centroid moves towards their mean by n/w of the way. With ``decay=1`` all points so far count
    the same, with 0 only the latest mini-batch counts.

    ``initial`` centroids have the weights ``weights`` (0 unless given). Without ``initial`` they are chosen by
    k-means++ among the points of the first mini-batch.

    Use a model in one task only. A :class:`~streamiter.errors.ModelError` leaves the model unchanged; if single points
    are at fault, it is a ``BadRows`` with their positions.

    >>> model = OnlineKMeans(2, decay=0.5, initial=[[0.0, 0.0], [10.0, 0.0]], weights=[2, 2])
    >>> model.learn([[1.0, 1.0], [9.0, 1.0]])
    >>> model.parameters()["centroids"].tolist(), model.parameters()["weights"].tolist()
    ([[0.5, 0.5], [9.5, 0.5]], [2.0, 2.0])
    """

    _centroids: Floats | None = declared(None, form=COPIED)
    _weights: Floats = declared(form=COPIED)
    _records = declared(0)
    _version = declared(0)
    _distance: float | None = declared(None)

    def __init__(
        self,
        clusters: int,
        *,
        decay: float = 1.0,
        initial: npt.ArrayLike | None = None,
        weights: npt.ArrayLike | None = None,
        seed: int = 0,
    ) -> None:
        if initial is None and weights is not None:
            raise ConfigurationError(
                "OnlineKMeans(weights=): expected initial centroids for these weights, given none; give initial= too"
            )
        self._clusters = whole_number("OnlineKMeans(clusters=)", clusters, 1)
        self._decay = checked_decay("OnlineKMeans", decay, ConfigurationError)
        self._seed = whole_number("OnlineKMeans(seed=)", seed, 0)
        self._weights = np.zeros(clusters)
        if initial is not None:
            self.start_from({"centroids": initial, "weights": np.zeros(clusters) if weights is None else weights})

    @property
    def version(self) -> int:
        """The number of mini-batches so far."""
        return self._version

    def parameters(self) -> dict[str, Any]:
        """Return copies of ``centroids`` and ``weights``. Raises ModelError while the model has no centroids."""
        if self._centroids is None:
            raise ModelError(
                "OnlineKMeans: expected a model with centroids, given one that has learned from no points; learn first"
            )
        return {"centroids": self._centroids.copy(), "weights": self._weights.copy()}

    def to_update(self) -> ModelSnapshot:
        """Return the model to publish: the parameters, the number of points, and a metric, the mean ``distance``.

        The distance is the mean squared distance of the latest mini-batch to the nearest centroids before they moved.
        """
        metrics = {} if self._distance is None else {"distance": self._distance}
        return ModelSnapshot(self.parameters(), records=self._records, metrics=metrics)

    def start_from(self, parameters: Mapping[str, Any] | npt.ArrayLike) -> None:
        """Continue from the :meth:`parameters` of another model, or from bare centroids, which have the weight 0."""
        if not isinstance(parameters, Mapping):
            parameters = {"centroids": parameters}
        if "centroids" not in parameters:
            raise ModelError(
                f"OnlineKMeans: expected parameters with centroids, given {', '.join(parameters) or 'none'}; "
                "these belong to another kind of model; give the parameters of an OnlineKMeans"
            )
        centroids = as_points("OnlineKMeans (initial centroids)", parameters["centroids"])
        if len(centroids) != self._clusters:
            raise ModelError(
                f"OnlineKMeans: expected {self._clusters} initial centroids, given {len(centroids)}; give a row "
                "for each"
            )
        weights = parameters.get("weights", np.zeros(self._clusters))
        self._weights = row_weights("OnlineKMeans (initial centroids)", weights, self._clusters).copy()
        self._centroids = centroids.copy()

    def check(self, points: npt.ArrayLike) -> Floats:
        """Return the points as a matrix. Raises ModelError for points that the model cannot learn from."""
        width = None if self._centroids is None else self._centroids.shape[1]
        return as_points("OnlineKMeans", points, width)

    def learn(self, points: npt.ArrayLike) -> None:
        """Learn from one mini-batch, a row for each point."""
        rows = self.check(points)
        if not len(rows):
            return
        centroids = self._centroids
        if centroids is None:
            sample = sample_of(rows, sample_size(self._clusters), self._seed)
            centroids = choose_centroids(sample, self._clusters, self._seed, owner="OnlineKMeans")
        sums, squares = offsets_by_cluster(centroids, rows)
        self._move(centroids, sums, squares)

    def _move(self, centroids: Floats, sums: Floats, squares: float) -> None:
        """Move the centroids by the sums of :func:`offsets_by_cluster`."""
        counts = sums[:, -1]
        weights = self._weights * self._decay + counts
        # The sum of the offsets is n times the offset of the mean, so this is n/w of the way to the mean.
        self._centroids = centroids + sums[:, :-1] / np.where(counts > 0, weights, 1.0)[:, np.newaxis]
        self._weights = weights
        points = int(counts.sum())
        self._distance = squares / points
        self._records += points
        self._version += 1

    def definition(self) -> Definition:
        """Return the settings on which the meaning of the state depends."""
        return {"model": "OnlineKMeans", "clusters": self._clusters}
