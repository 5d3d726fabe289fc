"""k-means by workers that share the centroids through a parameter server."""

from __future__ import annotations

import math
import sys
from typing import Any, Final

import numpy.typing as npt

from streamiter.errors import GraphError, ModelError
from streamiter.flow.algorithms import all_or_nothing, check_stream, step_names
from streamiter.flow.stream import Stream
from streamiter.learn.clustering.clusters import as_columns
from streamiter.learn.on_parameter_server.centroid_learner import CentroidLearner
from streamiter.learn.on_parameter_server.flow import REPEAT_MEMORY_BYTES, ParameterServerTraining, trained
from streamiter.learn.on_parameter_server.options import (
    check_bounded,
    check_consistency,
    check_dtype,
    check_server,
    check_worker,
    count_of,
)
from streamiter.learn.on_parameter_server.worker import ParameterServerWorker
from streamiter.learn.rows.checks import Floats
from streamiter.learn.rows.good_rows import blaming_rows, of_good_rows
from streamiter.learn.rows.points import as_points
from streamiter.numbers import plain_float
from streamiter.operators.operator import Operator
from streamiter.operators.output import Output
from streamiter.operators.rejection import RejectionPolicy
from streamiter.parameter_server.consistency.settings import Consistency
from streamiter.parameter_server.matrix import DType
from streamiter.parameter_server.server import ParameterServer
from streamiter.records import Batch
from streamiter.topics.topic import Topic

__all__ = ["k_means_on_parameter_server"]

_OWNER: Final = "k_means_on_parameter_server"


@all_or_nothing
def k_means_on_parameter_server(
    points: Stream,
    server: ParameterServer,
    *,
    initial: npt.ArrayLike,
    consistency: Consistency,
    matrix: str = "centroids",
    decay: float = 0.0,
    batch: int | None = None,
    epochs: int = 10,
    workers: int | None = None,
    publish_every: int | None = None,
    dtype: DType = "float64",
    worker: type[ParameterServerWorker] = ParameterServerWorker,
    memory_bytes: int = REPEAT_MEMORY_BYTES,
    on_error: RejectionPolicy = "fail",
    dead_letter: Topic | None = None,
    name: str | None = None,
) -> ParameterServerTraining:
    """k-means with the centroids on a parameter server; ``initial`` are those to begin with, a row for each.

    A point is a record: an array or list of its coordinates. Each of the ``workers`` (as many as ``points`` has
    subtasks, unless said otherwise) has a part of the points, and goes through it ``epochs`` times in mini-batches of
    ``batch`` points (None: all it has): it pulls the centroids, adds each point to the sum and the count of the
    nearest, and clocks. When its part has ended it leaves. Sums and counts become centroids on the server: under
    ``BSP()`` those of all workers together, otherwise each worker's as they come.

    A centroid with the weight w and n new points gets the weight w·decay + n, and moves to the mean of both. With all
    points in a mini-batch, BSP and a decay of 0 these are the rounds of :func:`~streamiter.learn.k_means`; with small
    mini-batches take a decay below 1, so that older points are forgotten slowly. One without points stays.

    The parameters of a version: ``centroids`` (clusters, coordinates) and ``weights``. Its metrics: ``distance``, the
    mean squared distance of points to their centroid before it moved. Other options as for
    :func:`~streamiter.learn.train_on_parameter_server`.

    Raises GraphError for what cannot run; a job without points fails.

    >>> from streamiter import Flow
    >>> from streamiter.parameter_server import BSP, ParameterServer
    >>> flow = Flow("two clusters")
    >>> points = flow.from_items([[0, 0], [0, 0.3], [0.3, 0], [9, 0], [9, 0.6], [9.6, 0]])
    >>> clustering = k_means_on_parameter_server(
    ...     points, ParameterServer(shards=2), initial=[[0, 0], [9, 0]], consistency=BSP(), workers=2, epochs=2
    ... )
    >>> models = clustering.models.collect()
    >>> flow.run().state, [model.parameters["centroids"].round(3).tolist() for model in models.items]
    ('finished', [[[0.1, 0.1], [9.2, 0.2]]])
    """
    check_stream(_OWNER, points, "points", bounded=True)
    check_server(_OWNER, server, points.flow)
    check_consistency(_OWNER, consistency)
    check_dtype(_OWNER, dtype)
    check_worker(_OWNER, worker)
    epochs = count_of(_OWNER, "epochs", epochs)
    workers = points.parallelism if workers is None else count_of(_OWNER, "workers", workers)
    memory_bytes = count_of(_OWNER, "memory_bytes", memory_bytes)
    batch = _all(points) if batch is None else count_of(_OWNER, "batch", batch)
    if publish_every is not None:
        publish_every = count_of(_OWNER, "publish_every", publish_every)
    check_bounded(_OWNER, points, epochs)
    centroids = _initial(initial)
    learner = CentroidLearner(
        matrix=matrix, initial=centroids, decay=_decay(decay), consistency=consistency, dtype=dtype
    )
    label = step_names(points.flow, name)
    mini_batches = points.batch(batch, parallelism=workers, name=label("mini-batches")).process(
        lambda: _Prepare(centroids.shape[1]),
        name=label("prepare"),
        on_error=on_error,
        dead_letter=dead_letter,
    )
    return trained(
        mini_batches,
        learner,
        server,
        owner=_OWNER,
        epochs=epochs,
        publish_every=publish_every,
        worker=worker,
        memory_bytes=memory_bytes,
        label=label,
    )


class _Prepare(Operator):
    """Makes columns of lists of points; records that are no points follow the policy of the step."""

    def __init__(self, coordinates: int) -> None:
        self._coordinates = coordinates

    def process(self, points: Batch, out: Output) -> None:
        columns = of_good_rows(lambda rows: blaming_rows(self._columns, rows, self._columns), points, out)
        if columns is not None:
            out.emit(columns)

    def _columns(self, points: Any) -> Floats:
        return as_columns(points, self._coordinates, owner=_OWNER)


def _all(points: Stream) -> int:
    """More than there are."""
    if not points.is_bounded:
        raise GraphError(
            f"{_OWNER}(batch=): expected how many points of {points.name!r}, which never ends, are a mini-batch, given "
            "None, which takes all; write batch=1000, and epochs=1"
        )
    return sys.maxsize


def _initial(given: npt.ArrayLike) -> Floats:
    try:
        centroids = as_points(f"{_OWNER}(initial=)", given)
    except ModelError as error:
        raise GraphError(str(error)) from None
    if not len(centroids):
        raise GraphError(f"{_OWNER}(initial=): expected a row for each centroid, given none")
    return centroids.copy()


def _decay(given: Any) -> float:
    decay = plain_float(given)
    if not 0.0 <= decay <= 1.0 or math.isnan(decay):
        raise GraphError(
            f"{_OWNER}(decay=): expected a number from 0 (only the newest points count) to 1 (all count alike), given "
            f"{given!r}"
        )
    return decay
