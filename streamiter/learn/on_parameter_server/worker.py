"""Workers on a parameter server, and the models they train.

For each mini-batch a :class:`ParameterServerWorker` pulls parameters from the server, computes, pushes the result, and
*clocks*: it says that its mini-batch is over. The consistency of the matrix decides who waits for whom. A
:class:`Learner` is the model: what to pull, compute and push. :class:`LinearLearner` is that of linear models.
"""

from __future__ import annotations

import abc
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple

import numpy as np

from streamiter.errors import ModelError
from streamiter.learn.linear import LinearLoss, LogLoss
from streamiter.learn.rows import (
    CheckedExamples,
    Examples,
    Rows,
    blaming_rows,
    checked_rows,
    dense_weighted_sum,
    dots,
    holds,
    of_good_rows,
    refuse_not_finite,
    refuse_rows,
    row_vector,
    row_weights,
)
from streamiter.numbers import Floats
from streamiter.operators.operator import Context, Operator
from streamiter.operators.output import Output
from streamiter.optimizers import Optimizer
from streamiter.parameter_server.consistency import BSP, Consistency
from streamiter.parameter_server.matrix import DType
from streamiter.parameter_server.psf.optimize import Optimize
from streamiter.records import Batch
from streamiter.sparse_rows import SparseRows

if TYPE_CHECKING:
    from streamiter.parameter_server.client import Client


class Computed(NamedTuple):
    """The result of one mini-batch."""

    contribution: Any
    """The numbers to push; None to push nothing."""
    loss: float
    """The sum of the losses of its records, with the parameters that were pulled."""
    records: int
    """The number of records that were learned from."""


class Learner(abc.ABC):
    """A model whose parameters are in a matrix: what is pulled, computed and pushed for a mini-batch.

    It holds settings only, and is shared by all workers.
    """

    matrix: str
    """The name of the matrix; its clock is the clock of the training."""

    metric: str
    """The name of the mean loss among the metrics of a version."""

    consistency: Consistency
    """The consistency of the matrix."""

    @property
    def is_in_step(self) -> bool:
        """Whether pushed numbers are applied together, with the clock of all workers (BSP)."""
        return isinstance(self.consistency, BSP)

    @abc.abstractmethod
    async def create(self, client: Client) -> None:
        """Create the matrix, unless another worker has created it."""

    @abc.abstractmethod
    async def pull(self, client: Client, mini_batch: Any) -> Any:
        """Return the parameters that this mini-batch needs."""

    @abc.abstractmethod
    def compute(self, mini_batch: Any, pulled: Any) -> Computed:
        """Return the numbers to push, and the loss. Raises ModelError if the arithmetic overflows."""

    @abc.abstractmethod
    async def push(self, client: Client, mini_batch: Any, contribution: Any) -> None:
        """Add the contribution to the parameters, at once or with the clock, as the consistency says."""

    async def clock(self, client: Client) -> None:
        """Clock every matrix of the model: this mini-batch is over."""
        await client.clock(self.matrix)

    @abc.abstractmethod
    async def settle(self, client: Client) -> None:
        """Return when the last push of this worker is applied; with BSP that is when all workers have clocked."""

    @abc.abstractmethod
    async def parameters(self, client: Client) -> dict[str, Any]:
        """Return all parameters, to publish a version of the model."""


MiniBatch = dict[str, Any]
"""``rows``, ``targets``, ``weights`` (or None), and the ``columns`` of the matrix that they need (None: all)."""


def prepared(examples: CheckedExamples, *, intercept: bool) -> MiniBatch:
    """Return examples as a mini-batch, which is plain data; it is prepared once and learned from in every pass.

    For sparse rows it names the columns that occur, in ascending order, and the rows contain only these columns: they
    are pulled and pushed. The column of the intercept is the one behind the features.

    >>> rows = SparseRows.from_rows([([7, 2], [1.0, 3.0]), ([7], [2.0])], width=1_000_000)
    >>> mini_batch = prepared(CheckedExamples(rows, np.array([0.0, 1.0])), intercept=True)
    >>> mini_batch["columns"].tolist(), rows_of(mini_batch).to_dense().tolist()
    ([2, 7, 1000000], [[3.0, 1.0], [0.0, 2.0]])
    """
    rows: Any = examples.rows
    columns = None
    if isinstance(rows, SparseRows):
        columns, places = np.unique(rows.indices, return_inverse=True)
        rows = {"indptr": rows.indptr, "indices": places, "values": rows.values, "width": len(columns)}
        columns = columns.astype(np.int64)
        if intercept:
            columns = np.append(columns, np.int64(examples.rows.width))  # type: ignore[union-attr]
    return {"rows": rows, "columns": columns, "targets": examples.targets, "weights": examples.weights}


def rows_of(mini_batch: MiniBatch) -> Rows:
    """Return the rows: dense, or sparse rows of the columns that occur."""
    rows = mini_batch["rows"]
    return SparseRows(**rows) if isinstance(rows, dict) else rows


class PrepareExamples(Operator):
    """Turns lists of records into mini-batches; rows that are no examples follow the policy of the step."""

    def __init__(self, checked: Callable[[Any], CheckedExamples], *, intercept: bool) -> None:
        self._checked = checked
        self._intercept = intercept

    def process(self, records: Batch, out: Output) -> None:
        examples = of_good_rows(lambda rows: blaming_rows(self._checked, rows, self._checked), records, out)
        if examples is not None and len(examples):
            out.emit(prepared(examples, intercept=self._intercept))


Labels = Literal["0/1", "-1/1"]
"""The targets of logistic regression: 0 and 1, or -1 and 1."""

_WEIGHTS: Final = 0
"""The row of the weights, the first of the rows that an optimizer works on."""


@dataclass(frozen=True)
class LinearLearner(Learner):
    """A linear model whose weights are on a parameter server.

    The matrix has a column for each feature, and one for the intercept behind them. Its rows are the weights, the
    optimizer's slots and the gradient. With BSP the gradients of all workers are summed up, and the optimizer makes a
    step with the sum when all workers have clocked. Otherwise each mini-batch makes a step when it is pushed.
    """

    matrix: str
    features: int
    """The number of features."""
    intercept: bool
    """Whether the model has an intercept."""
    loss: LinearLoss
    """The loss that is minimized."""
    labels: Labels
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

    async def pull(self, client: Client, mini_batch: MiniBatch) -> Floats:
        pulled = await client.get(self.matrix, row=_WEIGHTS, columns=mini_batch["columns"])
        return np.asarray(pulled, dtype=np.float64)

    def compute(self, mini_batch: MiniBatch, pulled: Floats) -> Computed:
        rows, targets, weights = rows_of(mini_batch), mini_batch["targets"], mini_batch["weights"]
        coefficients = pulled[: len(pulled) - self.intercept]
        with np.errstate(over="ignore", invalid="ignore"):
            margins = dots(rows, coefficients)
            if self.intercept:
                margins += pulled[-1]
            slopes = self.loss.predict(margins)
            loss = self.loss.total(slopes, targets, weights)
            slopes -= targets
            if weights is not None:
                slopes *= weights
            gradient = np.empty_like(pulled)
            gradient[: len(coefficients)] = dense_weighted_sum(rows, slopes)
            if self.intercept:
                gradient[-1] = slopes.sum()
        if not holds(np.isfinite(gradient)):
            raise ModelError(
                f"matrix {self.matrix!r}: expected weights that a finite gradient can be made with, given weights "
                f"up to {np.abs(pulled).max():g}; lower the learning rate, or scale the features"
            )
        weight = float(len(targets)) if weights is None else float(weights.sum())
        records = len(targets) if weights is None else int(np.count_nonzero(weights))
        if not weight:
            return Computed(None, 0.0, 0)
        return Computed(gradient / (self.rows_in_step if self.is_in_step else weight), loss, records)

    async def push(self, client: Client, mini_batch: MiniBatch, contribution: Floats) -> None:
        await client.add(
            self.matrix,
            row=self._optimize.gradient_row(),
            columns=mini_batch["columns"],
            values=contribution,
            update=None if self.is_in_step else self._optimize,
        )

    async def settle(self, client: Client) -> None:
        await client.get(self.matrix, row=_WEIGHTS, columns=[0])

    async def parameters(self, client: Client) -> dict[str, Any]:
        row = np.asarray(await client.get(self.matrix, row=_WEIGHTS), dtype=np.float64)
        intercept = float(row[-1]) if self.intercept else 0.0
        return {"weights": row[: self.features].copy(), "intercept": intercept, "link": self.loss.link}

    # ---- examples

    def checked(self, owner: str, examples: Examples) -> CheckedExamples:
        """Return checked examples; ``BadRows`` names rows that cannot be learned from."""
        rows = checked_rows(owner, examples.features, self.features)
        refuse_not_finite(owner, rows)
        targets = self._targets(owner, row_vector(owner, "targets", examples.targets, len(rows)))
        weights = None if examples.weights is None else row_weights(owner, examples.weights, len(rows))
        return CheckedExamples(rows, targets, weights)

    def _targets(self, owner: str, targets: Floats) -> Floats:
        if isinstance(self.loss, LogLoss) and self.labels == "-1/1":
            good = np.abs(targets) == 1.0
            if not holds(good):
                advice = 'for 0 and 1 leave labels="-1/1" out'
                raise refuse_rows(good, f"{owner}: expected targets −1 or 1", targets, advice)
            return (targets + 1.0) / 2.0
        self.loss.check_targets(owner, targets)
        return targets


class ServerWorkerOptions(NamedTuple):
    """The options that all workers of one training share."""

    learner: Learner
    """The model."""
    publish_every: int
    """The first worker sends the parameters of a version after every so many of its clocks."""


class ParameterServerWorker(Operator):
    """Trains on its mini-batches, and leaves the training after the last one, so that no worker waits for it.

    Derive a class from it and give that class as ``worker=``, to do more for each mini-batch than compute.
    """

    def __init__(self, options: ServerWorkerOptions) -> None:
        self.learner = options.learner
        self._publish_every = options.publish_every
        self._clocks = 0

    async def open(self, context: Context) -> None:
        self.context = context
        self.client: Client = context.parameter_server
        await self.learner.create(self.client)

    def wanted_inputs(self) -> None:
        """Read all inputs; the method makes the engine send what was emitted for a record before the next record."""
        return

    async def compute(self, mini_batch: Any, pulled: Any) -> Computed:
        """Return what to push for a mini-batch, computed with the parameters that were pulled for it."""
        return self.learner.compute(mini_batch, pulled)

    async def process(self, mini_batch: Any, out: Output) -> None:
        """Pull, compute, push and clock for one mini-batch."""
        clock = self.context.clock
        asked_s = clock.monotonic_s()
        pulled = await self.learner.pull(self.client, mini_batch)
        waited_s = clock.monotonic_s() - asked_s
        if self.context.subtask_index == 0 and self._clocks and self._clocks % self._publish_every == 0:
            # Here and not right after the clock: with BSP the pull would wait there for all other workers.
            out.emit({"parameters": await self.learner.parameters(self.client), "clock": self._clocks})
        computed = await self.compute(mini_batch, pulled)
        if computed.contribution is not None:
            await self.learner.push(self.client, mini_batch, computed.contribution)
        await self.learner.clock(self.client)
        self._clocks += 1
        out.emit(
            {
                "worker": self.context.subtask_index,
                "clock": self._clocks,
                "loss": computed.loss,
                "records": computed.records,
                "waited_s": waited_s,
            }
        )

    async def finish(self, out: Output) -> None:
        # The worker leaves when this returns. Until then its last push may wait for other workers.
        await self.learner.settle(self.client)
        out.emit({"worker": self.context.subtask_index, "ended": True})

    def snapshot(self) -> int:
        return self._clocks

    def restore(self, state: int) -> None:
        self._clocks = state
