"""What k-means can be told."""

from __future__ import annotations

import numpy.typing as npt

from streamiter.errors import GraphError, ModelError
from streamiter.iteration.config import IterationConfig, OperatorLifeCycle
from streamiter.learn.rows.checks import Floats
from streamiter.learn.rows.points import as_points
from streamiter.numbers import plain_float, whole_number

__all__ = ["KMeansOptions"]


class KMeansOptions:
    """The options of :func:`~streamiter.learn.clustering.k_means.k_means`, checked.

    Raises GraphError for those that cannot be.
    """

    def __init__(
        self,
        *,
        clusters: int,
        rounds: int,
        initial: npt.ArrayLike | None = None,
        seed: int = 0,
        tolerance: float | None = None,
        config: IterationConfig | None = None,
    ) -> None:
        self.clusters = whole_number("k_means(clusters=)", clusters, 1, error=GraphError)
        self.rounds = whole_number("k_means(rounds=)", rounds, 1, error=GraphError)
        self.seed = whole_number("k_means(seed=)", seed, 0, error=GraphError)
        if tolerance is not None and not plain_float(tolerance) >= 0:
            raise GraphError(
                f"k_means(tolerance=): expected a distance of 0 or more, given {tolerance!r}; "
                "leave it out for all rounds"
            )
        self.tolerance = tolerance
        if config is not None and config.operator_life_cycle is not OperatorLifeCycle.ALL_ROUND:
            raise GraphError(
                "k_means(config=): expected operators that live for all rounds, given OperatorLifeCycle.PER_ROUND; "
                "leave operator_life_cycle out"
            )
        self.config = config
        self.centroids = None if initial is None else _initial_centroids(initial, self.clusters)
        """Those to begin with; None where they are to be chosen."""

    @property
    def passes(self) -> int:
        """How often the points are gone through at most: once more where the first centroids are to be chosen."""
        return self.rounds if self.centroids is not None else self.rounds + 1


def _initial_centroids(initial: npt.ArrayLike, clusters: int) -> Floats:
    try:
        centroids = as_points("k_means(initial=)", initial)
    except ModelError as error:
        raise GraphError(str(error)) from None
    if len(centroids) != clusters:
        raise GraphError(
            f"k_means(initial=): expected {clusters} centroids for {clusters} clusters, given {len(centroids)}; "
            "give a row for each"
        )
    return centroids.copy()
