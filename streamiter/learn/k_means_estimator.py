"""k-means as an object: fit, predict."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from streamiter.errors import GraphError, ModelError
from streamiter.flow.flow import Flow
from streamiter.flow.stream import Stream
from streamiter.iteration.config import IterationConfig
from streamiter.learn.checks import Floats
from streamiter.learn.clusters import as_columns, as_points, nearest, scoring_of
from streamiter.learn.k_means import checked_initial, cluster
from streamiter.learn.offline import run_offline
from streamiter.models.update import ModelSnapshot
from streamiter.records import Batch
from streamiter.topics.topic import Decoder, Topic

__all__ = ["KMeans"]


class KMeans:
    """Clusters around centroids, learned offline.

    It runs a flow of its own around :func:`~streamiter.learn.k_means.k_means`, whose options it takes, with
    ``parallelism`` subtasks. ``fit`` shows its rounds on stderr (``progress``: None means on a terminal only), and
    Ctrl-C ends it with the round under way: the model is then what was learned so far.

    >>> points = [[0, 0], [0, 0.3], [0.3, 0], [9, 0], [9, 0.6], [9.6, 0]]
    >>> model = KMeans(clusters=2, rounds=2, initial=[[0, 0], [9, 0]]).fit(points)
    >>> model.centroids.round(3).tolist(), model.counts.tolist(), model.predict([[1, 1], [8, 1]]).tolist()
    ([[0.1, 0.1], [9.2, 0.2]], [3, 3], [0, 1])
    """

    def __init__(
        self,
        *,
        clusters: int,
        rounds: int = 100,
        initial: npt.ArrayLike | None = None,
        seed: int = 0,
        tolerance: float | None = 0.0,
        parallelism: int = 1,
        config: IterationConfig | None = None,
        progress: bool | None = None,
    ) -> None:
        """Rounds end when no centroid moves further than ``tolerance`` any more; None makes all of them."""
        checked_initial(clusters, rounds, initial, seed, tolerance, config)
        self._options: dict[str, Any] = {
            "clusters": clusters,
            "rounds": rounds,
            "initial": initial,
            "seed": seed,
            "tolerance": tolerance,
            "config": config,
        }
        self._parallelism = parallelism
        self._progress = progress
        self._model: ModelSnapshot | None = None
        self._rounds_made = 0

    def fit(
        self,
        points: npt.ArrayLike | Topic,
        *,
        decode: Decoder | None = None,
        features: Callable[[Batch], Batch] | None = None,
    ) -> Self:
        """Learn the centroids of an array, a row for each point, or of what is in a topic now.

        ``decode`` says how the topic's values are read; of its batches ``features(batch)`` gives the points, where
        they are not their records. A second fit begins anew. Raises GraphError for options that cannot be and
        JobFailed for data without clusters; then the model is the one of the fit before.
        """
        flow = Flow("k-means", self._parallelism)
        clustering = cluster(_stream_of(flow, points, decode, features), **self._options)
        fitted = clustering.model.collect()
        moves = clustering.models.map(lambda model: model.metrics["move"]).collect()
        first_pass = self._options["initial"] is None
        run_offline(
            flow,
            title="k-means",
            rounds=self._options["rounds"] + first_pass,
            progress=self._progress,
            describe=lambda: f"moved {moves.items[-1]:.3g}" if moves.items else "",
        )
        [self._model] = fitted.items
        self._rounds_made = len(moves.items)
        return self

    def predict(self, points: npt.ArrayLike) -> npt.NDArray[np.intp]:
        """The number of the nearest centroid of each point (row); of several the first."""
        centroids = self.centroids
        columns = as_columns(points, centroids.shape[1], owner="KMeans.predict")
        return nearest(scoring_of(centroids), columns)

    @property
    def centroids(self) -> Floats:
        """A row for each cluster."""
        centroids: Floats = self._fitted().parameters["centroids"]
        return centroids

    @property
    def counts(self) -> npt.NDArray[np.int64]:
        """How many points were nearest to each centroid in the last round, before it moved."""
        counts: npt.NDArray[np.int64] = self._fitted().parameters["counts"]
        return counts

    @property
    def rounds_made(self) -> int:
        """How often the centroids moved; 0 before the first fit."""
        return self._rounds_made

    def _fitted(self) -> ModelSnapshot:
        if self._model is None:
            raise ModelError("KMeans: expected to be fitted first, given no points so far; call fit(points)")
        return self._model


def _stream_of(
    flow: Flow,
    points: npt.ArrayLike | Topic,
    decode: Decoder | None,
    features: Callable[[Batch], Batch] | None,
) -> Stream:
    if isinstance(points, Topic):
        records = flow.source(points, decode=decode, stop="latest")
        return records if features is None else records.map_batch(features)
    for option, given in (("decode", decode), ("features", features)):
        if given is not None:
            raise GraphError(
                f"KMeans.fit({option}=): expected it with a topic only, given it with an array; give the points as "
                "rows of numbers"
            )
    return flow.from_items(as_points("KMeans.fit", points))
