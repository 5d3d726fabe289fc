"""What a worker is told of the model it trains."""

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
from streamiter.parameter_server.consistency.models import BSP, Consistency
from streamiter.parameter_server.matrix import DType
from streamiter.parameter_server.psf.optimize import Optimize
from streamiter.records import Batch
from streamiter.sparse_rows import SparseRows

if TYPE_CHECKING:
    from streamiter.parameter_server.client import Client

__all__ = [
    "Computed",
    "Labels",
    "Learner",
    "LinearLearner",
    "ParameterServerWorker",
    "PrepareExamples",
    "ServerWorkerOptions",
]


class Computed(NamedTuple):
    """What came of one mini-batch."""

    contribution: Any
    """To be pushed; None: nothing."""
    loss: float
    """The sum over its records, with the parameters that were pulled."""
    records: int
    """How many it has learned from."""


class Learner(abc.ABC):
    """A model whose parameters lie in a matrix: what is pulled for a mini-batch, computed of it, and pushed.

    It holds settings only, and is shared by all workers.
    """

    matrix: str
    """The name of the matrix, whose clock is the training's."""

    metric: str
    """The name of its mean loss, among the metrics of a version."""

    consistency: Consistency

    @property
    def is_in_step(self) -> bool:
        """Whether what is pushed is applied with the clock of all workers."""
        return isinstance(self.consistency, BSP)

    @abc.abstractmethod
    async def create(self, client: Client) -> None:
        """Make the matrix, unless another worker has."""

    @abc.abstractmethod
    async def pull(self, client: Client, mini_batch: Any) -> Any:
        """The parameters that this mini-batch needs."""

    @abc.abstractmethod
    def compute(self, mini_batch: Any, pulled: Any) -> Computed:
        """What is to be pushed, and the loss. Raises ModelError where the arithmetic breaks down."""

    @abc.abstractmethod
    async def push(self, client: Client, mini_batch: Any, contribution: Any) -> None:
        """Have it added to the parameters, at once or with the clock, as the consistency says."""

    async def clock(self, client: Client) -> None:
        """Say that this mini-batch is over: of every matrix there is."""
        await client.clock(self.matrix)

    @abc.abstractmethod
    async def settle(self, client: Client) -> None:
        """Return when the last clock of this worker is over as far as the consistency has it: in step, for all."""

    @abc.abstractmethod
    async def parameters(self, client: Client) -> dict[str, Any]:
        """All that a consumer needs, for a version of the model."""


MiniBatch = dict[str, Any]
"""``rows``, ``targets``, ``weights`` (or None), and ``columns`` of the matrix (None: all of them)."""


def prepared(examples: CheckedExamples, *, intercept: bool) -> MiniBatch:
    """Examples as a mini-batch; the column of the intercept is the one behind the features.

    Mini-batches of examples with the columns they need, prepared once and learned from in every pass.

    A mini-batch is plain data. Of sparse rows it names the columns that are there, ascending, and its rows count these
    columns only: that is what is pulled and pushed.

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
    """The rows: dense, or sparse rows of the columns that are there."""
    rows = mini_batch["rows"]
    return SparseRows(**rows) if isinstance(rows, dict) else rows


class PrepareExamples(Operator):
    """Makes mini-batches of lists of records; rows that are no examples follow the policy of the step."""

    def __init__(self, checked: Callable[[Any], CheckedExamples], *, intercept: bool) -> None:
        self._checked = checked
        self._intercept = intercept

    def process(self, records: Batch, out: Output) -> None:
        examples = of_good_rows(lambda rows: blaming_rows(self._checked, rows, self._checked), records, out)
        if examples is not None and len(examples):
            out.emit(prepared(examples, intercept=self._intercept))


Labels = Literal["0/1", "-1/1"]

_WEIGHTS: Final = 0
"""The row of the weights: the first of those that an optimizer works on."""


@dataclass(frozen=True)
class LinearLearner(Learner):
    """Weights by column, the intercept behind them; rows: the weights, the optimizer's slots, the gradient.

    In step (BSP) the gradients of all workers are summed up, and the optimizer makes a step of them with the clock.
    Otherwise every mini-batch is a step of its own, made as it is pushed.

    Linear models whose weights lie on a parameter server.
    """

    matrix: str
    features: int
    intercept: bool
    loss: LinearLoss
    labels: Labels
    optimizer: Optimizer
    consistency: Consistency
    dtype: DType
    rows_in_step: int
    """Rows of a mini-batch of all workers together, which the gradient of a step in BSP is the mean of."""

    metric = "loss"

    @property
    def columns(self) -> int:
        """Of the matrix."""
        return self.features + self.intercept

    @cached_property
    def _optimize(self) -> Optimize:
        """Of what a mini-batch does not name, nothing changes."""
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
        """Examples that can be learned from; ``BadRows`` names the others."""
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
    """What every worker of one training is given.

    The worker: for each mini-batch pull, compute, push, clock.
    """

    learner: Learner
    publish_every: int
    """The first worker gives the parameters for a version after every so many of its clocks."""


class ParameterServerWorker(Operator):
    """Trains on the mini-batches that come to it, and leaves when there are no more, so that nobody waits for it.

    Derive from it, and give the class as ``worker=``, where more is to happen for a mini-batch than to compute.
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
        """All there is; but asked record by record, so that what is told of each goes on before the next."""
        return

    async def compute(self, mini_batch: Any, pulled: Any) -> Computed:
        """What to push of a mini-batch, with the parameters pulled for it."""
        return self.learner.compute(mini_batch, pulled)

    async def process(self, mini_batch: Any, out: Output) -> None:
        """One clock."""
        clock = self.context.clock
        asked_s = clock.monotonic_s()
        pulled = await self.learner.pull(self.client, mini_batch)
        waited_s = clock.monotonic_s() - asked_s
        if self.context.subtask_index == 0 and self._clocks and self._clocks % self._publish_every == 0:
            # Now rather than right after the clock: there, where all go in step, it would have to wait for the others.
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
        # It leaves when this returns. What it has added may still wait for the others.
        await self.learner.settle(self.client)
        out.emit({"worker": self.context.subtask_index, "ended": True})

    def snapshot(self) -> int:
        return self._clocks

    def restore(self, state: int) -> None:
        self._clocks = state
