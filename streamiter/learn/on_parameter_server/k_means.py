"""k-means on a parameter server: ``k_means_on_parameter_server``.

The centroids are in a matrix of the server, one column for each cluster. Workers add points to sums and counts, and an
update function, which runs on the server, turns sums and counts into centroids.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import numpy.typing as npt

from streamiter.errors import ConfigurationError, GraphError, ModelError
from streamiter.flow.flow import all_or_nothing, check_stream, step_names
from streamiter.flow.stream import Stream
from streamiter.learn.centroids import as_columns, nearest, scoring_of
from streamiter.learn.on_parameter_server.training import (
    REPEAT_MEMORY_BYTES,
    ParameterServerTraining,
    check_bounded,
    check_consistency,
    check_dtype,
    check_server,
    check_worker,
    count_of,
    trained,
)
from streamiter.learn.on_parameter_server.worker import Computed, Learner, ParameterServerWorker
from streamiter.learn.rows import as_points, blaming_rows, of_good_rows
from streamiter.numbers import Floats, plain_float
from streamiter.operators.operator import Operator
from streamiter.operators.output import Output, RejectionPolicy
from streamiter.parameter_server.consistency import Consistency
from streamiter.parameter_server.matrix import DType, Matrix
from streamiter.parameter_server.psf.function import UpdateFunction
from streamiter.parameter_server.server import ParameterServer
from streamiter.parameter_server.storage.block import Block
from streamiter.records import Batch
from streamiter.topics.topic import Topic

if TYPE_CHECKING:
    from streamiter.parameter_server.client import Client


@dataclass(frozen=True)
class CentroidRows:
    """The numbers of the rows of the matrix. A column is a cluster, so that a block of columns has whole clusters.

    >>> rows = CentroidRows(coordinates=2)
    >>> rows.centroids, rows.weights, rows.sums, rows.counts
    (range(0, 2), 2, range(3, 5), 5)
    """

    coordinates: int

    @property
    def centroids(self) -> range:
        """The centroids, a row for each coordinate."""
        return range(self.coordinates)

    @property
    def weights(self) -> int:
        """The number of points that each centroid stands for; older points count less."""
        return self.coordinates

    @property
    def sums(self) -> range:
        """The sums of the points since the last move, a row for each coordinate."""
        return range(self.coordinates + 1, 2 * self.coordinates + 1)

    @property
    def counts(self) -> int:
        """The number of these points."""
        return 2 * self.coordinates + 1

    @property
    def gathered(self) -> range:
        """Sums and counts, the rows that workers add to."""
        return range(self.sums.start, self.counts + 1)

    def __len__(self) -> int:
        return self.counts + 1


@dataclass(frozen=True)
class MoveCentroids(UpdateFunction):
    """Moves each centroid to the mean of its points, then sets sums and counts to 0.

    The weight w of a centroid becomes ``w·decay + n``, where n is the number of new points that are nearest to it, and
    the centroid moves to ``(w·decay·centroid + sum)/(w·decay + n)``: with a decay of 0 to the mean of the new points
    (Lloyd), with 1 to the mean of all points so far. A centroid without new points does not move.

    >>> MoveCentroids("centroids", coordinates=2, decay=0.0)
    MoveCentroids(matrix='centroids', coordinates=2, decay=0.0)
    """

    matrix: str
    coordinates: int
    decay: float = 0.0

    def rows(self, matrix: Matrix) -> Sequence[int]:
        return range(len(CentroidRows(self.coordinates)))

    def check(self, matrix: Matrix) -> None:
        if matrix.sparse or matrix.dtype == "int64":
            kind = "a sparse one" if matrix.sparse else f"one of {matrix.dtype}"
            raise ConfigurationError(
                f"MoveCentroids on matrix {matrix.name!r}: expected a dense matrix of float64 or float32, given {kind}"
            )

    def partition_update(self, block: Block, part: Any) -> None:
        rows = CentroidRows(self.coordinates)
        weights, counts = block.dense_row(rows.weights), block.dense_row(rows.counts)
        weights *= self.decay
        has_points = counts > 0
        total = weights + counts
        for centroid_row, sum_row in zip(rows.centroids, rows.sums, strict=True):
            centroids, sums = block.dense_row(centroid_row), block.dense_row(sum_row)
            np.divide(weights * centroids + sums, total, out=centroids, where=has_points)
            sums[:] = 0
        weights[:] = total
        counts[:] = 0


@dataclass(frozen=True, eq=False)
class CentroidLearner(Learner):
    """k-means whose centroids are on a parameter server, in the rows of :class:`CentroidRows`.

    With BSP the sums of all workers move the centroids with the clock; otherwise the sums of each worker move them when
    they are pushed.
    """

    matrix: str
    initial: Floats
    """(clusters, coordinates)"""
    decay: float
    consistency: Consistency
    dtype: DType

    metric = "distance"

    @property
    def _rows(self) -> CentroidRows:
        return CentroidRows(self.initial.shape[1])

    def _move(self) -> MoveCentroids:
        return MoveCentroids(self.matrix, self.initial.shape[1], self.decay)

    async def create(self, client: Client) -> None:
        start = np.zeros((len(self._rows), len(self.initial)))
        start[: self.initial.shape[1]] = self.initial.T
        await client.create_matrix(
            self.matrix,
            rows=len(self._rows),
            columns=len(self.initial),
            dtype=self.dtype,
            consistency=self.consistency,
            init=start,
            on_clock=self._move() if self.is_in_step else None,
        )

    async def pull(self, client: Client, mini_batch: Floats) -> Floats:
        pulled = await client.get(self.matrix, rows=self._rows.centroids)
        return np.asarray(pulled, dtype=np.float64).T

    def compute(self, mini_batch: Floats, pulled: Floats) -> Computed:
        """``mini_batch``: a column for each point, and ones as the last row."""
        labels = nearest(scoring_of(pulled), mini_batch)
        is_nearest = (labels == np.arange(len(pulled))[:, np.newaxis]).astype(np.float64)
        distances = np.square(mini_batch[:-1] - pulled[labels].T)
        return Computed(mini_batch @ is_nearest.T, float(distances.sum()), mini_batch.shape[1])

    async def push(self, client: Client, mini_batch: Floats, contribution: Floats) -> None:
        update = None if self.is_in_step else self._move()
        await client.add(self.matrix, rows=self._rows.gathered, values=contribution, update=update)

    async def settle(self, client: Client) -> None:
        await client.get(self.matrix, row=self._rows.weights, columns=[0])

    async def parameters(self, client: Client) -> dict[str, Any]:
        rows = self._rows
        pulled = np.asarray(await client.get(self.matrix, rows=range(rows.weights + 1)), dtype=np.float64)
        return {"centroids": pulled[: rows.weights].T.copy(), "weights": pulled[rows.weights].copy()}


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
    """k-means with the centroids on a parameter server; ``initial`` are the initial centroids, a row for each.

    A point is a record: an array or list of its coordinates. Each of the ``workers`` (unless given, as many as
    ``points`` has subtasks) has a part of the points, and reads it ``epochs`` times in mini-batches of ``batch``
    points (None: all points of the part). For each mini-batch it pulls the centroids, adds each point to the sum and
    the count of the nearest centroid, and clocks; after the last one it leaves. On the server sums and counts become
    centroids: with ``BSP()`` those of all workers together, otherwise those of each worker when they arrive.

    A centroid with the weight w and n new points gets the weight w·decay + n, and moves to the mean of both. With all
    points in one mini-batch, BSP and a decay of 0 this is a round of :func:`~streamiter.learn.k_means`. With small
    mini-batches take a decay below 1, so that older points are forgotten slowly. A centroid without points does not
    move.

    The parameters of a version are ``centroids`` (clusters, coordinates) and ``weights``. Its metric is ``distance``,
    the mean squared distance of points to their centroid before it moved. The other options are those of
    :func:`~streamiter.learn.train_on_parameter_server`.

    Raises GraphError for options that cannot be used. A job without points fails.

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
        lambda: _PreparePoints(centroids.shape[1]),
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


class _PreparePoints(Operator):
    """Turns lists of points into columns of numbers; records that are no points follow the policy of the step."""

    def __init__(self, coordinates: int) -> None:
        self._coordinates = coordinates

    def process(self, points: Batch, out: Output) -> None:
        columns = of_good_rows(lambda rows: blaming_rows(self._columns, rows, self._columns), points, out)
        if columns is not None:
            out.emit(columns)

    def _columns(self, points: Any) -> Floats:
        return as_columns(points, self._coordinates, owner=_OWNER)


def _all(points: Stream) -> int:
    """Return a batch size that no stream reaches; GraphError for a stream that never ends."""
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


def _decay(given: object) -> float:
    decay = plain_float(given)
    if not 0.0 <= decay <= 1.0 or math.isnan(decay):
        raise GraphError(
            f"{_OWNER}(decay=): expected a number from 0 (only the newest points count) to 1 (all count alike), given "
            f"{given!r}"
        )
    return decay
