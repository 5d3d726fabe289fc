"""Centroids that learn from mini-batches and forget old ones."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from streamiter.errors import ConfigurationError, GraphError, ModelError
from streamiter.flow.flow import all_or_nothing, check_stream, step_names
from streamiter.flow.stream import Stream, connect
from streamiter.learn.clustering.clusters import (
    as_columns,
    choose_centroids,
    nearest,
    sample_of,
    sample_size,
    scoring_of,
)
from streamiter.learn.rows.examples import Floats, as_points, blaming_rows, of_good_rows, row_weights
from streamiter.models.update import ModelSnapshot
from streamiter.numbers import plain_float, whole_number
from streamiter.operators.operator import Operator
from streamiter.operators.output import Output
from streamiter.operators.rejection import RejectionPolicy
from streamiter.records import Batch
from streamiter.topics.topic import Topic

__all__ = [
    "OnlineKMeans",
    "online_k_means",
]


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
        lambda: _Learn(make()),
        name=label("centroids"),
        parallelism=1,
        on_error=on_error,
        dead_letter=dead_letter,
    )


class _Learn(Operator):
    """Takes over the centroids to begin with, then learns from each mini-batch and emits what came of it."""

    def __init__(self, model: OnlineKMeans) -> None:
        self._model = model
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
            self._model.start_from(parameters)

    def input_ended(self, name: str, out: Output) -> None:
        self._is_started = True

    def process_points(self, mini_batch: Batch, out: Output) -> None:
        update = of_good_rows(
            lambda rows: blaming_rows(self._learned, rows, self._model.check), mini_batch, out
        )
        if update is not None:
            out.emit(update)

    def _learned(self, mini_batch: Any) -> ModelSnapshot:
        self._model.learn(mini_batch)
        return self._model.to_update()

    def snapshot(self) -> dict[str, Any]:
        return {"model": self._model.state(), "is started": self._is_started}

    def restore(self, state: dict[str, Any]) -> None:
        self._model.restore(state["model"])
        self._is_started = state["is started"]
