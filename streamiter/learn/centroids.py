"""Centroids."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from streamiter.errors import ConfigurationError, GraphError, ModelError
from streamiter.flow.flow import all_or_nothing, check_stream, step_names
from streamiter.flow.stream import Stream, connect
from streamiter.learn.rows import as_points, row_weights
from streamiter.learn.training import LearnMiniBatches
from streamiter.models.update import ModelSnapshot
from streamiter.numbers import Floats, plain_float, whole_number
from streamiter.operators.output import Output
from streamiter.operators.rejection import RejectionPolicy
from streamiter.records import Batch
from streamiter.topics.topic import Topic

__all__ = [
    "OnlineKMeans",
    "Spread",
    "as_columns",
    "choose_centroids",
    "inertia_of",
    "joined",
    "largest_move",
    "moved",
    "nearest",
    "online_k_means",
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
    """Points as the other functions want them: a column for each, and ones as the last row.

    The arithmetic of k-means: which centroid is nearest, and what the points of each sum up to.

    The nearest of the centroids c to a point x is that of the largest c·x − |c|²/2, so all of them for all points
    are one matrix product. Both are taken from the middle of the centroids: far from zero, where |c|² is large and
    the clusters are small beside it, the difference would otherwise be lost in rounding.

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

    >>> from streamiter.learn.centroids import as_columns
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


class OnlineKMeans:
    """Centroids with weights, which learn from mini-batches of points.

    With each mini-batch the weight w of a centroid becomes w·decay + n, where n of the points are nearest to it, and
    it moves towards their mean by n/w of the way. With ``decay=1`` all points ever seen count alike, with 0 only the
    latest mini-batch.

    ``initial`` centroids have the weights ``weights`` (0 unless given). Without them they are chosen by k-means++
    among the points of the first mini-batch.

    Belongs to one task. A :class:`~streamiter.errors.ModelError` leaves it as it was; where single points are at fault
    it is a ``BadRows`` that names them.

    >>> model = OnlineKMeans(2, decay=0.5, initial=[[0.0, 0.0], [10.0, 0.0]], weights=[2, 2])
    >>> model.learn([[1.0, 1.0], [9.0, 1.0]])
    >>> model.parameters()["centroids"].tolist(), model.parameters()["weights"].tolist()
    ([[0.5, 0.5], [9.5, 0.5]], [2.0, 2.0])

    Centroids that learn from mini-batches and forget old ones.
    """

    def __init__(
        self,
        clusters: int,
        *,
        decay: float = 1.0,
        initial: npt.ArrayLike | None = None,
        weights: npt.ArrayLike | None = None,
        seed: int = 0,
    ) -> None:
        if not 0.0 <= plain_float(decay) <= 1.0:
            raise ConfigurationError(
                f"OnlineKMeans(decay=): expected a number from 0 (only the latest mini-batch counts) to 1 (all count "
                f"alike), given {decay!r}"
            )
        if initial is None and weights is not None:
            raise ConfigurationError(
                "OnlineKMeans(weights=): expected them with initial centroids, given without; give initial= too"
            )
        self._clusters = whole_number("OnlineKMeans(clusters=)", clusters, 1)
        self._decay = float(decay)
        self._seed = whole_number("OnlineKMeans(seed=)", seed, 0)
        self._centroids: Floats | None = None
        self._weights = np.zeros(clusters)
        self._records = self._version = 0
        self._distance: float | None = None
        if initial is not None:
            self.start_from(
                {"centroids": initial, "weights": np.zeros(clusters) if weights is None else weights}
            )

    @property
    def version(self) -> int:
        """Grows by 1 with each mini-batch; 0 before the first."""
        return self._version

    def parameters(self) -> dict[str, Any]:
        """``centroids`` and ``weights``, as plain data of its own. Raises ModelError before there are any."""
        if self._centroids is None:
            raise ModelError(
                "OnlineKMeans: expected centroids, given no points to choose them among so far; learn first"
            )
        return {"centroids": self._centroids.copy(), "weights": self._weights.copy()}

    def to_update(self) -> ModelSnapshot:
        """What is published: the parameters, all points so far, and the mean squared ``distance`` of the latest.

        The distance is that to the nearest centroid before it learned from these points.
        """
        metrics = {} if self._distance is None else {"distance": self._distance}
        return ModelSnapshot(self.parameters(), records=self._records, metrics=metrics)

    def start_from(self, parameters: Mapping[str, Any] | npt.ArrayLike) -> None:
        """Go on from the :meth:`parameters` of another, or from bare centroids, which then weigh nothing."""
        if not isinstance(parameters, Mapping):
            parameters = {"centroids": parameters}
        if "centroids" not in parameters:
            raise ModelError(
                f"OnlineKMeans: expected parameters with centroids, given {', '.join(parameters) or 'none'}; "
                "they are those of another model"
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
        """The points as a matrix; raises ModelError for what could not be learned from."""
        width = None if self._centroids is None else self._centroids.shape[1]
        return as_points("OnlineKMeans", points, width)

    def learn(self, points: npt.ArrayLike) -> None:
        """One mini-batch: a row for each point."""
        rows = self.check(points)
        if not len(rows):
            return
        centroids = self._centroids
        if centroids is None:
            sample = sample_of(rows, sample_size(self._clusters), self._seed)
            centroids = choose_centroids(sample, self._clusters, self._seed, owner="OnlineKMeans")
        labels = nearest(scoring_of(centroids), as_columns(rows))
        offsets = rows - centroids[labels]
        counts = np.bincount(labels, minlength=self._clusters).astype(np.float64)
        weights = self._weights * self._decay + counts
        # The sum of the offsets is n times that of the mean, so this is n/w of the way to it.
        sums = np.zeros_like(centroids)
        np.add.at(sums, labels, offsets)
        self._centroids = centroids + sums / np.where(counts > 0, weights, 1.0)[:, np.newaxis]
        self._weights = weights
        self._distance = float(np.square(offsets).sum(axis=1).mean())
        self._records += len(rows)
        self._version += 1

    def state(self) -> dict[str, Any]:
        """All that it has learned, as plain data of its own."""
        return {
            "centroids": None if self._centroids is None else self._centroids.copy(),
            "weights": self._weights.copy(),
            "records": self._records,
            "version": self._version,
            "distance": self._distance,
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from a :meth:`state`."""
        self._centroids = None if state["centroids"] is None else state["centroids"].copy()
        self._weights = state["weights"].copy()
        self._records, self._version = state["records"], state["version"]
        self._distance = state["distance"]


@all_or_nothing
def online_k_means(
    points: Stream,
    *,
    clusters: int,
    decay: float = 1.0,
    mini_batch: int = 1000,
    timeout_s: float | None = None,
    initial: Stream | npt.ArrayLike | None = None,
    weights: npt.ArrayLike | None = None,
    seed: int = 0,
    on_error: RejectionPolicy = "fail",
    dead_letter: Topic | None = None,
    name: str | None = None,
) -> Stream:
    """Centroids that follow a stream: a ``ModelSnapshot`` for each mini-batch, for ``publish_model``.

    What a mini-batch of ``mini_batch`` points changes is told by :class:`OnlineKMeans`. Fewer than that are learned
    from at the end of the input and ``timeout_s`` seconds after the first of them. All of it happens in one subtask;
    where several bring the points, which of them meet in a mini-batch depends on who is faster.

    ``initial`` are the centroids to begin with and ``weights`` what they weigh; or a stream of one record that holds
    both, such as ``flow.from_source(initial_model(…))``; its None stands for none. Without any they are chosen
    among the points of the first mini-batch. Records that are no points follow ``on_error`` or go to ``dead_letter``.

    >>> from streamiter import Flow
    >>> flow = Flow("follow")
    >>> points = flow.from_items([[1.0], [9.0], [1.0], [9.0]])
    >>> models = online_k_means(points, clusters=2, decay=0.5, mini_batch=2, initial=[[0.0], [10.0]], weights=[2, 2])
    >>> versions = models.collect()
    >>> flow.run().state, [model.parameters["centroids"].ravel().tolist() for model in versions.items]
    ('finished', [[0.5, 9.5], [0.75, 9.25]])

    k-means on a stream: centroids that follow the points and forget old ones, a version for each mini-batch.
    """
    check_stream("online_k_means", points, "points")
    flow = points.flow
    label = step_names(flow, name)
    given = None if isinstance(initial, Stream) else initial
    try:
        OnlineKMeans(clusters, decay=decay, initial=given, weights=weights, seed=seed)
    except ModelError as error:
        raise GraphError(f"online_k_means(initial=): {error}") from None
    except ConfigurationError as error:
        raise GraphError(f"online_k_means: {error}") from None

    def make() -> OnlineKMeans:
        return OnlineKMeans(clusters, decay=decay, initial=given, weights=weights, seed=seed)

    start = (
        initial if isinstance(initial, Stream) else flow.from_items([], name=label("start"), parallelism=1)
    )
    mini_batches = points.batch(mini_batch, timeout_s, parallelism=1, name=label("mini-batches"))
    return connect(start=start, points=mini_batches).process(
        lambda: _LearnFromStart(make()),
        name=label("centroids"),
        parallelism=1,
        on_error=on_error,
        dead_letter=dead_letter,
    )


class _LearnFromStart(LearnMiniBatches):
    """Takes over the initial centroids (input ``start``), then learns from each mini-batch (input ``points``)."""

    def __init__(self, model: OnlineKMeans) -> None:
        super().__init__(model)
        self._centroids = model
        self._is_started = False

    def wanted_inputs(self) -> tuple[str, ...] | None:
        """Nothing can be learned before it is known what from."""
        return None if self._is_started else ("start",)

    def process_start(self, parameters: Any, out: Output) -> None:
        if self._is_started:
            raise ConfigurationError(
                "online_k_means(initial=): expected a stream of one record, given a second; choose the one to "
                "start from"
            )
        self._is_started = True
        if parameters is not None:
            self._centroids.start_from(parameters)

    def input_ended(self, name: str, out: Output) -> None:
        self._is_started = True

    def process_points(self, mini_batch: Batch, out: Output) -> None:
        """Learn from a mini-batch."""
        self.process(mini_batch, out)

    def snapshot(self) -> dict[str, Any]:
        return {"model": super().snapshot(), "is started": self._is_started}

    def restore(self, state: dict[str, Any]) -> None:
        super().restore(state["model"])
        self._is_started = state["is started"]
