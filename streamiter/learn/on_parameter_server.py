"""Models that are trained on a parameter server: linear models and k-means.

The weights of a linear model are a row of a matrix of the server, with the optimizer's slots below them; the optimizer
runs on the server. The centroids of k-means have one column for each cluster; workers add points to sums and counts,
and an update function, which runs on the server, turns sums and counts into centroids.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Final, Literal, NamedTuple, Unpack

import numpy as np
import numpy.typing as npt

from streamiter.errors import ConfigurationError, GraphError, ModelError
from streamiter.flow.flow import all_or_nothing, check_stream
from streamiter.flow.graph_checks import check_user_function
from streamiter.flow.options import check_step_options
from streamiter.flow.stream import Stream
from streamiter.learn.clusters.centroids import as_columns, checked_decay, initial_centroids, nearest, scoring_of
from streamiter.learn.estimators import examples_of
from streamiter.learn.gradients.linear import gradient_and_loss, targets_from_signs
from streamiter.learn.losses import LinearLoss, LogLoss, SquaredLoss
from streamiter.learn.rows import (
    CheckedExamples,
    Examples,
    Extract,
    RowsRecord,
    checked_examples,
    holds,
    row_vector,
    with_named_columns,
)
from streamiter.learn.server_training import (
    Computed,
    Learner,
    ParameterServerTraining,
    ServerOptions,
    ServerTraining,
    count_of,
)
from streamiter.operators.definitions import Definition, settings_in_words
from streamiter.parameter_server.calls import Call
from streamiter.parameter_server.client import Client
from streamiter.parameter_server.consistency import Consistency
from streamiter.parameter_server.matrix import DType, Matrix
from streamiter.parameter_server.optimizers import FTRL, Optimizer, checked_optimizer
from streamiter.parameter_server.psf.function import UpdateFunction
from streamiter.parameter_server.psf.optimize import Optimize
from streamiter.parameter_server.server import ParameterServer
from streamiter.parameter_server.storage.block import Block
from streamiter.values.numbers import Floats, Indices, one_of
from streamiter.values.records import Batch
from streamiter.values.sparse_rows import SparseRows


class LinearMiniBatch(RowsRecord):
    """A mini-batch of a linear model, as plain data; its rows contain the needed columns only."""

    columns: Indices | None
    """The columns of the matrix that the rows need; None: all."""


def prepared_examples(examples: CheckedExamples, *, intercept: bool) -> LinearMiniBatch:
    """Return examples as a mini-batch, which is plain data: it is prepared once, and used in every pass.

    For sparse rows the mini-batch names the columns that occur, in ascending order, and the rows contain only these
    columns. Only these columns are pulled and pushed. The column of the intercept is the column after the features.

    >>> rows = SparseRows.from_rows([([7, 2], [1.0, 3.0]), ([7], [2.0])], width=1_000_000)
    >>> mini_batch = prepared_examples(CheckedExamples(rows, np.array([0.0, 1.0])), intercept=True)
    >>> mini_batch["columns"].tolist(), SparseRows(**mini_batch["rows"]).to_dense().tolist()
    ([2, 7, 1000000], [[3.0, 1.0], [0.0, 2.0]])
    """
    rows, columns = examples.rows, None
    if isinstance(rows, SparseRows):
        behind = np.int64(rows.width)
        rows, columns = with_named_columns(rows)
        if intercept:
            columns = np.append(columns, behind)
    record = CheckedExamples(rows, examples.targets, examples.weights).to_record()
    return {**record, "columns": columns}


LabelForm = Literal["0/1", "-1/1"]
"""The targets of logistic regression: 0 and 1, or -1 and 1."""

_WEIGHTS: Final = 0
"""The row of the weights, the first of the rows that an optimizer works on."""


@dataclass(frozen=True)
class LinearLearner(Learner[LinearMiniBatch, Floats, Floats]):
    """A linear model whose weights are on a parameter server.

    The matrix has a column for each feature, then a column for the intercept. Its rows are the weights, the optimizer's
    slots and the gradient. With BSP the gradients of all workers are summed up, and the optimizer makes a step with the
    sum when all workers have clocked. Otherwise each mini-batch makes a step when it is pushed.
    """

    matrix: str
    features: int
    """The number of features."""
    intercept: bool
    """Whether the model has an intercept."""
    loss: LinearLoss
    """The loss that is minimized."""
    labels: LabelForm
    """The targets that are given to logistic regression."""
    optimizer: Optimizer
    """The update rule that runs on the server."""
    consistency: Consistency
    dtype: DType
    """The dtype of the matrix."""
    rows_in_step: int
    """The rows of one mini-batch of all workers together: with BSP the gradient of a step is the mean over them."""

    metric = "loss"

    @property
    def columns(self) -> int:
        """The number of columns of the matrix."""
        return self.features + self.intercept

    def definition(self) -> Definition:
        return {
            **super().definition(),
            **{name: getattr(self, name) for name in ("features", "intercept", "labels", "dtype")},
            "loss": settings_in_words(self.loss),
            "optimizer": self.optimizer.name,
        }

    @cached_property
    def _optimize(self) -> Optimize:
        """The update function; columns that a mini-batch does not name are not changed."""
        return Optimize(self.matrix, self.optimizer, sparse=True)

    async def create(self, client: Client) -> None:
        await client.create_matrix(
            self.matrix,
            rows=self._optimize.rows_needed(self.optimizer),
            columns=self.columns,
            dtype=self.dtype,
            consistency=self.consistency,
            on_clock=self._optimize if self.is_in_step else None,
        )

    async def pull(self, client: Client, mini_batch: LinearMiniBatch) -> Floats:
        pulled = await client.get(self.matrix, row=_WEIGHTS, columns=mini_batch["columns"])
        return np.asarray(pulled, dtype=np.float64)

    def compute(self, mini_batch: LinearMiniBatch, pulled: Floats) -> Computed[Floats]:
        coefficients, intercept = (pulled[:-1], float(pulled[-1])) if self.intercept else (pulled, 0.0)
        with np.errstate(over="ignore", invalid="ignore"):
            found, loss = gradient_and_loss(self.loss, CheckedExamples.from_record(mini_batch), coefficients, intercept)
        gradient = np.append(found.total, found.intercept) if self.intercept else found.total
        if not holds(np.isfinite(gradient)):
            raise ModelError(
                f"matrix {self.matrix!r}: expected weights that lead to finite gradients, given weights "
                f"up to {np.abs(pulled).max():g}; lower the learning rate, or scale the features"
            )
        if not found.weight:
            return Computed(None, 0.0, 0)
        return Computed(gradient / (self.rows_in_step if self.is_in_step else found.weight), loss, found.records)

    async def push(self, client: Client, mini_batch: LinearMiniBatch, contribution: Floats) -> Sequence[Call[None]]:
        added = await client.start_add(
            self.matrix,
            row=self._optimize.gradient_row(),
            columns=mini_batch["columns"],
            values=contribution,
            update=None if self.is_in_step else self._optimize,
        )
        return [added]

    async def settle(self, client: Client) -> None:
        await client.get(self.matrix, row=_WEIGHTS, columns=[0])

    async def parameters(self, client: Client) -> dict[str, object]:
        row = np.asarray(await client.get(self.matrix, row=_WEIGHTS), dtype=np.float64)
        intercept = float(row[-1]) if self.intercept else 0.0
        return {"weights": row[: self.features].copy(), "intercept": intercept, "link": self.loss.link}

    # ---- examples

    def checked(self, owner: str, examples: Examples) -> CheckedExamples:
        """Return checked examples. Raises ``BadRows`` for rows that the model cannot learn from."""
        return checked_examples(owner, examples, self.features, functools.partial(self._targets, owner))

    def _targets(self, owner: str, given: npt.ArrayLike, length: int) -> Floats:
        targets = row_vector(owner, "targets", given, length)
        if isinstance(self.loss, LogLoss) and self.labels == "-1/1":
            return targets_from_signs(owner, targets)
        self.loss.check_targets(owner, targets)
        return targets


_LINEAR: Final = "train_on_parameter_server"

_LOSSES: Final = ("log", "squared")


@all_or_nothing
def train_on_parameter_server(
    examples: Stream,
    server: ParameterServer,
    *,
    features: int,
    consistency: Consistency,
    matrix: str = "w",
    optimizer: Optimizer | None = None,
    loss: Literal["log", "squared"] = "log",
    labels: LabelForm = "0/1",
    intercept: bool = True,
    extract: Extract | None = None,
    batch: int = 100,
    epochs: int = 1,
    **options: Unpack[ServerOptions],
) -> ParameterServerTraining:
    """Train a linear model whose weights are on a parameter server: logistic, or with ``"squared"`` linear regression.

    Each of the ``workers`` has a part of the examples, and reads it ``epochs`` times in mini-batches of ``batch`` rows.
    ``consistency`` says which workers wait:

    - ``BSP()``: one step for one mini-batch of each worker, with the mean of their gradients (a mini-batch that is
      shorter or missing counts less). Timing and the number of shards change at most the last digits of the result.
    - ``ASP()``: a step for every mini-batch, with the mean of its rows' gradients; no worker waits.
    - ``SSP(staleness=s)``: the same, but no worker is more than s mini-batches ahead of the slowest one.

    ``matrix`` is created with ``features`` columns and one for the intercept (l1 and l2 of the ``optimizer`` act on the
    intercept, too). The optimizer runs on the server, and changes only weights whose features occur; it is
    ``FTRL(alpha=0.3, beta=0.1)`` unless given. ``extract(records)`` returns the :class:`Examples` of a list of records;
    the records of libsvm and dummy files need no ``extract``. ``labels`` says which targets are given: ``"0/1"`` or
    ``"-1/1"``.

    While the flow runs, no other step may use the server. The matrix stays on the server when the flow ends: another
    flow with the same settings continues from it. With one epoch the stream may be endless. The other ``options`` are
    :class:`~streamiter.learn.server_training.ServerOptions`. Raises GraphError for options that cannot be used. A job
    without examples fails.

    >>> import numpy as np
    >>> from streamiter import Flow
    >>> from streamiter.learn import Examples
    >>> from streamiter.parameter_server import BSP, ParameterServer
    >>> flow = Flow("parity")
    >>> rows = flow.from_items(np.array([[0.0, 1.0], [1.0, 0.0]] * 4))
    >>> training = train_on_parameter_server(
    ...     rows, ParameterServer(shards=2), features=2, consistency=BSP(), workers=2, batch=2, epochs=20,
    ...     extract=lambda records: Examples(np.array(records), np.array(records)[:, 0]),
    ... )
    >>> models = training.models.collect()
    >>> flow.run().state, [model.parameters["weights"].round().tolist() for model in models.items]
    ('finished', [[2.0, -2.0]])
    """
    check_stream(_LINEAR, examples, "examples")
    _check_kinds(loss, labels, extract)
    check_step_options(_LINEAR, options, ServerOptions)
    training = ServerTraining(_LINEAR, examples, server, consistency, options, batch=batch, epochs=epochs)
    learner = LinearLearner(
        matrix=matrix,
        features=count_of(_LINEAR, "features", features),
        intercept=bool(intercept),
        loss=LogLoss() if loss == "log" else SquaredLoss(),
        labels=labels,
        optimizer=_optimizer(optimizer),
        consistency=consistency,
        dtype=training.dtype,
        rows_in_step=training.batch * training.workers,
    )

    def mini_batch(records: Batch) -> LinearMiniBatch | None:
        examples = learner.checked(_LINEAR, examples_of(_LINEAR, records, extract, learner.features))
        return prepared_examples(examples, intercept=learner.intercept) if len(examples) else None

    return training.steps(learner, mini_batch)


def _optimizer(given: Optimizer | None) -> Optimizer:
    if given is None:
        return FTRL(alpha=0.3, beta=0.1)  # The default of LogisticRegression.
    try:
        return checked_optimizer(_LINEAR, given)
    except ConfigurationError as error:
        raise GraphError(str(error)) from None


def _check_kinds(loss: object, labels: object, extract: object) -> None:
    if loss not in _LOSSES:
        raise GraphError(f'{_LINEAR}(loss=): expected "log" or "squared", given {loss!r}; choose one of them')
    one_of(f"{_LINEAR}(labels=)", labels, "0/1", "-1/1", error=GraphError)
    if extract is not None:
        expected = "a function that makes Examples of records"
        check_user_function(extract, f"{_LINEAR}(extract=)", ["records"], expected=expected)


class CentroidRows(NamedTuple):
    """The numbers of the rows of the matrix. A column is a cluster, so that a block of columns has whole clusters.

    >>> CentroidRows.of(coordinates=2)
    CentroidRows(centroids=range(0, 2), weights=2, sums=range(3, 5), counts=5, gathered=range(3, 6), every=range(0, 6))
    """

    centroids: range
    """The centroids, a row for each coordinate."""
    weights: int
    """The weight of each centroid: the number of its points; older points count less."""
    sums: range
    """The sums of the points since the last move, a row for each coordinate."""
    counts: int
    """The number of the points in the sums."""
    gathered: range
    """Sums and counts, the rows that workers add to."""
    every: range

    @staticmethod
    def of(coordinates: int) -> CentroidRows:
        """Return the rows for points with this number of coordinates."""
        first, last = coordinates + 1, 2 * coordinates + 1
        gathered = range(first, last + 1)
        return CentroidRows(range(coordinates), coordinates, gathered[:-1], last, gathered, range(last + 1))


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
        return CentroidRows.of(self.coordinates).every

    def check(self, matrix: Matrix) -> None:
        if matrix.sparse or matrix.dtype == "int64":
            kind = "a sparse one" if matrix.sparse else f"one of {matrix.dtype}"
            raise ConfigurationError(
                f"MoveCentroids on matrix {matrix.name!r}: expected a dense matrix of float64 or float32, given {kind}"
            )

    def partition_update(self, block: Block, part: object) -> None:
        rows = CentroidRows.of(self.coordinates)
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
class CentroidLearner(Learner[Floats, Floats, Floats]):
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
        return CentroidRows.of(self.initial.shape[1])

    def definition(self) -> Definition:
        clusters, coordinates = self.initial.shape
        return {**super().definition(), "clusters": clusters, "coordinates": coordinates, "dtype": self.dtype}

    def _move(self) -> MoveCentroids:
        return MoveCentroids(self.matrix, self.initial.shape[1], self.decay)

    async def create(self, client: Client) -> None:
        start = np.zeros((len(self._rows.every), len(self.initial)))
        start[: self.initial.shape[1]] = self.initial.T
        await client.create_matrix(
            self.matrix,
            rows=len(self._rows.every),
            columns=len(self.initial),
            dtype=self.dtype,
            consistency=self.consistency,
            init=start,
            on_clock=self._move() if self.is_in_step else None,
        )

    async def pull(self, client: Client, mini_batch: Floats) -> Floats:
        pulled = await client.get(self.matrix, rows=self._rows.centroids)
        return np.asarray(pulled, dtype=np.float64).T

    def compute(self, mini_batch: Floats, pulled: Floats) -> Computed[Floats]:
        """``mini_batch``: a column for each point, and ones as the last row."""
        labels = nearest(scoring_of(pulled), mini_batch)
        is_nearest = (labels == np.arange(len(pulled))[:, np.newaxis]).astype(np.float64)
        distances = np.square(mini_batch[:-1] - pulled[labels].T)
        return Computed(mini_batch @ is_nearest.T, float(distances.sum()), mini_batch.shape[1])

    async def push(self, client: Client, mini_batch: Floats, contribution: Floats) -> Sequence[Call[None]]:
        update = None if self.is_in_step else self._move()
        return [await client.start_add(self.matrix, rows=self._rows.gathered, values=contribution, update=update)]

    async def settle(self, client: Client) -> None:
        await client.get(self.matrix, row=self._rows.weights, columns=[0])

    async def parameters(self, client: Client) -> dict[str, object]:
        rows = self._rows
        pulled = np.asarray(await client.get(self.matrix, rows=range(rows.weights + 1)), dtype=np.float64)
        return {"centroids": pulled[: rows.weights].T.copy(), "weights": pulled[rows.weights].copy()}


_K_MEANS: Final = "k_means_on_parameter_server"


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
    **options: Unpack[ServerOptions],
) -> ParameterServerTraining:
    """k-means with the centroids on a parameter server; ``initial`` are the initial centroids, a row for each.

    A point is a record: an array or list of its coordinates. Each worker has a part of the points, and reads it
    ``epochs`` times in mini-batches of ``batch`` points (None: all points of the part). It adds each point to the sum
    and the count of the nearest centroid; on the server they become centroids: with ``BSP()`` from all workers
    together, otherwise from each worker when they arrive. :class:`MoveCentroids` describes the move.

    The parameters of a version are ``centroids`` (clusters, coordinates) and ``weights``. Its metric is ``distance``,
    the mean squared distance of points to their centroid before the move. The other ``options`` are
    :class:`~streamiter.learn.server_training.ServerOptions`. Raises GraphError for options that cannot be used. A job
    without points fails.

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
    check_stream(_K_MEANS, points, "points", bounded=True)
    check_step_options(_K_MEANS, options, ServerOptions)
    batch = _all(points) if batch is None else batch
    training = ServerTraining(_K_MEANS, points, server, consistency, options, batch=batch, epochs=epochs)
    centroids = initial_centroids(_K_MEANS, initial)
    decay = checked_decay(_K_MEANS, decay, GraphError)
    learner = CentroidLearner(
        matrix=matrix, initial=centroids, decay=decay, consistency=consistency, dtype=training.dtype
    )

    def columns(records: Batch) -> Floats:
        return as_columns(records, centroids.shape[1], owner=_K_MEANS)

    return training.steps(learner, columns)


def _all(points: Stream) -> int:
    """Return a batch size that no stream reaches; GraphError for a stream that never ends."""
    if not points.is_bounded:
        raise GraphError(
            f"{_K_MEANS}(batch=): expected the number of points in a mini-batch of {points.name!r}, which never ends, "
            "given None, which takes all points; write batch=1000, and epochs=1"
        )
    return sys.maxsize
