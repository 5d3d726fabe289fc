"""k-means as an object: fit, predict."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from streamiter.errors import ModelError
from streamiter.flow.flow import Flow
from streamiter.flow.graph_checks import check_parallelism
from streamiter.iteration.config import IterationConfig
from streamiter.learn.clustering.clusters import as_columns, nearest, scoring_of
from streamiter.learn.clustering.k_means import cluster
from streamiter.learn.clustering.options import KMeansOptions
from streamiter.learn.estimators.running import run_offline
from streamiter.learn.estimators.sources import no_path, read_topic, refuse_options_of_topics
from streamiter.learn.rows.checks import Floats
from streamiter.learn.rows.points import as_points
from streamiter.models.update import ModelSnapshot
from streamiter.records import Batch
from streamiter.topics.topic import Decoder, Topic

__all__ = ["KMeans"]


class KMeans:
    """Clusters around centroids, learned offline.

    It runs a flow of its own around :func:`~streamiter.learn.clustering.k_means.k_means`, whose options it takes.

    >>> points = [[0, 0], [0, 0.3], [0.3, 0], [9, 0], [9, 0.6], [9.6, 0]]
    >>> model = KMeans(clusters=2, rounds=2, initial=[[0, 0], [9, 0]]).fit(points)
    >>> model.centroids.round(3).tolist(), model.counts.tolist(), model.predict([[1, 1], [8, 1]]).tolist()
    ([[0.1, 0.1], [9.2, 0.2]], [3, 3], [0, 1])
    >>> round(model.inertia, 6)
    0.6
    """

    def __init__(
        self,
        *,
        clusters: int,
        rounds: int = 100,
        initial: npt.ArrayLike | None = None,
        seed: int = 0,
        tolerance: float | None = 0.0,
        config: IterationConfig | None = None,
    ) -> None:
        """Rounds end when no centroid moves further than ``tolerance`` any more; None makes all of them."""
        self._options = KMeansOptions(
            clusters=clusters, rounds=rounds, initial=initial, seed=seed, tolerance=tolerance, config=config
        )
        self._model: ModelSnapshot | None = None
        self._rounds_made = 0

    def fit(
        self,
        points: npt.ArrayLike | Topic,
        *,
        decode: Decoder | None = None,
        extract: Callable[[Any], Batch] | None = None,
        parallelism: int = 1,
        progress: bool | None = None,
    ) -> Self:
        """Learn the centroids of an array, a row for each point, or of what is in a topic now.

        Of a topic, ``decode`` says how its values are read, and ``extract(batch)`` gives the points of a batch, where
        they are not its records. The work is done by ``parallelism`` subtasks. A second fit begins anew.

        On a terminal a bar shows the rounds (``progress`` True or False: in any case, never). Ctrl-C ends it with the
        round under way, and the model is what was learned so far.

        Raises GraphError for options that cannot be and JobFailed for data without clusters; then the model is the
        one of the fit before.
        """
        title = "KMeans.fit"
        check_parallelism(parallelism, step=title)
        flow = Flow(title, parallelism)
        if isinstance(points, Topic):
            records = read_topic(flow, points, decode, parallelism=parallelism)
            stream = records if extract is None else records.map_batch(extract)
        else:
            refuse_options_of_topics(title, decode=decode, extract=extract)
            stream = flow.from_items(self._checked(title, points))
        clustering = cluster(stream, self._options)
        fitted = clustering.model.collect()
        rounds = clustering.models.map(lambda model: model.metrics["inertia"]).collect()
        run_offline(
            flow,
            title=title,
            rounds=self._options.rounds,
            first_round=self._options.passes - self._options.rounds,
            progress=progress,
            describe=lambda: f"inertia {rounds.items[-1]:.6g}" if rounds.items else "",
        )
        [self._model] = fitted.items
        self._rounds_made = len(rounds.items)
        return self

    def _checked(self, title: str, points: Any) -> Floats:
        if isinstance(points, str):
            raise no_path(title, points)
        checked = as_points(title, points)
        initial = self._options.centroids
        if not len(checked):
            raise ModelError(f"{title}: expected points to find clusters of, given none")
        if initial is not None and checked.shape[1] != initial.shape[1]:
            raise ModelError(
                f"{title}: expected points of {initial.shape[1]} numbers, as those in initial=, given points of "
                f"{checked.shape[1]}; give both the same columns"
            )
        return checked

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
    def inertia(self) -> float:
        """The sum of the squared distances between the points and their centroids: the lower the better, of as many.

        Each point is counted for the centroid nearest to it in the last round, where that moved to; where it stayed,
        as it does when rounds end by a ``tolerance`` of 0, that is the nearest one. As exact as the sum of the squared
        distances to the mean of all points, which is larger.
        """
        return self._fitted().metrics.get("inertia", math.nan)

    def parameters(self) -> dict[str, Any]:
        """``centroids`` and ``counts``, as plain data of its own. Raises ModelError before there are any."""
        return {"centroids": self.centroids.copy(), "counts": self.counts.copy()}

    @property
    def rounds_made(self) -> int:
        """How often the centroids moved; 0 before the first fit."""
        return self._rounds_made

    def _fitted(self) -> ModelSnapshot:
        if self._model is None:
            raise ModelError("KMeans: expected to be fitted first, given no points so far; call fit(points)")
        return self._model
