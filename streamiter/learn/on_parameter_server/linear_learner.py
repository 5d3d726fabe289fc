"""Linear models whose weights lie on a parameter server."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, Final, Literal

import numpy as np

from streamiter.errors import ModelError
from streamiter.learn.linear.losses import LogLoss, Loss
from streamiter.learn.on_parameter_server.learner import Computed, Learner
from streamiter.learn.on_parameter_server.mini_batches import MiniBatch, rows_of
from streamiter.learn.rows.checks import Floats, holds, refuse_rows, row_vector, row_weights
from streamiter.learn.rows.examples import CheckedExamples, Examples
from streamiter.learn.rows.feature_rows import checked_rows, dense_weighted_sum, dots, refuse_not_finite
from streamiter.optimizers import Optimizer
from streamiter.parameter_server.consistency.settings import Consistency
from streamiter.parameter_server.matrix import DType
from streamiter.parameter_server.psf.optimize import Optimize

if TYPE_CHECKING:
    from streamiter.parameter_server.client import Client

__all__ = ["Labels", "LinearLearner"]

Labels = Literal["0/1", "-1/1"]

_WEIGHTS: Final = 0
"""The row of the weights: the first of those that an optimizer works on."""


@dataclass(frozen=True)
class LinearLearner(Learner):
    """Weights by column, the intercept behind them; rows: the weights, the optimizer's slots, the gradient.

    In step (BSP) the gradients of all workers are summed up, and the optimizer makes a step of them with the clock.
    Otherwise every mini-batch is a step of its own, made as it is pushed.
    """

    matrix: str
    features: int
    intercept: bool
    loss: Loss
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
