"""k-means on a stream: ``online_k_means``, in one subtask, or with workers and an owner.

Without workers, one operator learns from each mini-batch. With workers, training is synchronous, as in
``train_online``: in an epoch, each worker sums up the offsets of its points from the centroids, the owner adds the sums
of all workers and moves the centroids, and these go back to the workers on the variable stream.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from streamiter.errors import ConfigurationError, GraphError, ModelError
from streamiter.flow.flow import all_or_nothing, check_stream, connect, step_names
from streamiter.flow.stream import Stream
from streamiter.iteration.api import iterate_unbounded_streams
from streamiter.iteration.config import IterationBodyResult, IterationConfig
from streamiter.iteration.stamping import epochs_every
from streamiter.learn.clusters.centroids import OnlineKMeans, offsets_by_cluster
from streamiter.learn.gradients.gradient import Gradient
from streamiter.learn.gradients.training import EpochSteps, GradientSum, LearnMiniBatches, MakeModel, ParameterOwner
from streamiter.learn.model_owner import MODELS, OneStart, OwnerOptions
from streamiter.learn.online.gradient_workers import OnlineWorker, OnlineWorkerOptions
from streamiter.learn.rows import Refusals, blaming_rows, of_good_rows
from streamiter.operators.declared_state import declared
from streamiter.operators.output import Output, RejectionPolicy
from streamiter.topics.topic import Topic
from streamiter.values.numbers import whole_number
from streamiter.values.records import Batch
from streamiter.values.times import Seconds


@all_or_nothing
def online_k_means(
    points: Stream,
    *,
    clusters: int,
    decay: float = 1.0,
    mini_batch: int = 1000,
    timeout_s: Seconds | None = None,
    initial: Stream | npt.ArrayLike | None = None,
    weights: npt.ArrayLike | None = None,
    seed: int = 0,
    on_error: RejectionPolicy = "fail",
    dead_letter: Topic | None = None,
    workers: int | None = None,
    name: str | None = None,
) -> Stream:
    """k-means on a stream: emits a ``ModelSnapshot`` for each mini-batch, for ``publish_model``.

    The centroids follow the points and forget old ones; :class:`OnlineKMeans` describes how a mini-batch of
    ``mini_batch`` points changes them. A mini-batch is shorter at the end of the input, and if ``timeout_s`` seconds
    have passed since its first point. One subtask does all the work. If several subtasks send the points, their speed
    decides which points are in a mini-batch.

    With ``workers``, this number of subtasks find the nearest centroid of each point, and an owner moves the centroids
    by the sums of all workers; then the workers continue with the moved centroids. A mini-batch has ``mini_batch``
    points of each subtask of ``points``, whatever their speed, and ``timeout_s`` cannot be used. Any number of workers
    gives the same centroids, except for the last bits of the sums; if one subtask sends the points, so does training
    without workers. Initial centroids must be given.

    ``initial`` are the initial centroids, and ``weights`` their weights. ``initial`` may also be a stream of one record
    that contains both, such as ``flow.from_source(initial_model(…))``; None means no centroids. Without initial
    centroids they are chosen among the points of the first mini-batch. Records that are no points follow ``on_error``
    or go to ``dead_letter``.

    >>> from streamiter import Flow
    >>> flow = Flow("follow")
    >>> points = flow.from_items([[1.0], [9.0], [1.0], [9.0]])
    >>> models = online_k_means(points, clusters=2, decay=0.5, mini_batch=2, initial=[[0.0], [10.0]], weights=[2, 2])
    >>> versions = models.collect()
    >>> flow.run().state, [model.parameters["centroids"].ravel().tolist() for model in versions.items]
    ('finished', [[0.5, 9.5], [0.75, 9.25]])
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

    if workers is not None:
        shared = partial(_SharedCentroids, clusters, decay=decay)
        if timeout_s is not None:
            raise GraphError(
                "online_k_means(timeout_s=): expected no time-out together with workers=, because all workers wait for "
                f"each other's points, given {timeout_s!r}; choose a smaller mini_batch="
            )
        if initial is None:
            raise GraphError(
                "online_k_means(workers=): expected initial= with it, because no worker knows all points, given none; "
                "give centroids, such as those of a KMeans that is fitted to some points"
            )
        if not isinstance(initial, Stream):
            begin = {"centroids": np.asarray(given), "weights": np.zeros(clusters) if weights is None else weights}
            initial = flow.from_items([begin], parallelism=1, name=label("start"))
        policy: Refusals = {"on_error": on_error, "dead_letter": dead_letter}
        return _with_workers(points, initial, shared, workers, mini_batch, policy, label, name)

    def make() -> OnlineKMeans:
        return OnlineKMeans(clusters, decay=decay, initial=given, weights=weights, seed=seed)

    start = initial if isinstance(initial, Stream) else flow.from_items([], name=label("start"), parallelism=1)
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

    _is_started = declared(False)

    def __init__(self, model: OnlineKMeans) -> None:
        super().__init__(model)
        self._centroids = model

    def wanted_inputs(self) -> tuple[str, ...] | None:
        """Read the start before any points."""
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


# ---- with workers


class _SharedCentroids(OnlineKMeans):
    """Centroids that an owner and workers share. The sums of a worker travel as a gradient."""

    @property
    def records(self) -> int:
        """The number of points so far."""
        return self._records

    def count(self, records: int) -> None:
        """Count points that another model has learned from."""
        self._records += records

    def parameters(self, *, state: bool = True) -> dict[str, Any]:
        """Return copies of the centroids and their weights, which are the whole ``state``; before the start nothing."""
        return {} if self._centroids is None else super().parameters()

    def follow(self, parameters: Mapping[str, Any] | npt.ArrayLike) -> None:
        """Take over the centroids of the owner, if it has any."""
        if not isinstance(parameters, Mapping) or "centroids" in parameters:
            self.start_from(parameters)

    def learned(self) -> dict[str, Any]:
        """Return the state."""
        return self.state()

    def sums_of(self, points: npt.ArrayLike) -> GradientSum:
        """Return the sums of some points, for :meth:`apply`."""
        if self._centroids is None:
            raise ModelError(
                "online_k_means(workers=): expected initial centroids, given None in the stream initial=; give "
                "initial_model(…, default=centroids)"
            )
        rows = self.check(points)
        sums, squares = offsets_by_cluster(self._centroids, rows)
        return GradientSum(Gradient(sums.ravel(), 0.0, float(len(rows)), len(rows), sums.size), squares)

    def apply(self, gradient: Gradient) -> None:
        """Move the centroids by the sum of :meth:`sums_of` of all workers."""
        assert self._centroids is not None
        self._move(self._centroids, gradient.to_dense().reshape(self._clusters, -1), 0.0)


class _CentroidsWorker(OnlineWorker):
    """Sums up the offsets of its points from the centroids."""

    _model: _SharedCentroids  # type: ignore[assignment]

    def process_examples(self, mini_batch: Batch, out: Output) -> None:
        """Report the sums of the good points."""
        sums = of_good_rows(lambda rows: blaming_rows(self._model.sums_of, rows, self._model.check), mini_batch, out)
        if sums is not None:
            self.report_sum(sums, out)


class _CentroidsOwner(ParameterOwner):
    """Moves the centroids at the end of each epoch, and publishes them."""

    learner = "OnlineKMeans"

    def metrics(self, parameters: Any) -> dict[str, float]:
        """Return the mean squared distance of the points to the nearest centroids before they moved."""
        return {"distance": self._loss / self._weight} if self._weight else {}


def _with_workers(
    points: Stream,
    initial: Stream,
    make_model: Callable[[], _SharedCentroids],
    workers: int,
    mini_batch: int,
    policy: Refusals,
    label: Callable[[str], str],
    name: str | None,
) -> Stream:
    """Add the loop of workers and owner; return the versions."""
    workers = whole_number("online_k_means(workers=)", workers, 1, error=GraphError)
    make = cast(MakeModel, make_model)
    start = initial.process(lambda: OneStart(None, "online_k_means"), name=label("initial"), parallelism=1)
    data = epochs_every(points, records=mini_batch, name=label("epochs"))

    def body(variables: list[Stream], data: list[Stream]) -> IterationBodyResult:
        mini_batches = data[0].batch(mini_batch, parallelism=workers, name=label("mini-batches"))
        sums = connect(model=variables[0].broadcast(), examples=mini_batches).process(
            lambda: _CentroidsWorker(OnlineWorkerOptions(make, None, synchronous=True)), name=label("nearest"), **policy
        )
        moved = connect(start=variables[0], gradients=sums.rebalance()).process(
            lambda: _CentroidsOwner(make, EpochSteps(), OwnerOptions(in_epochs=True)),
            name=label("centroids"),
            parallelism=1,
        )
        return IterationBodyResult(feedback_variable_streams=[moved], output_streams=[moved.side_output(MODELS)])

    config = IterationConfig(max_epochs_ahead=0, name=name)
    [models] = iterate_unbounded_streams([start], [data], body, config)
    return models
