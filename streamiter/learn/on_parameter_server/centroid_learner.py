"""k-means whose centroids lie on a parameter server."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from streamiter.learn.clustering.clusters import nearest, scoring_of
from streamiter.learn.on_parameter_server.learner import Computed, Learner
from streamiter.learn.on_parameter_server.move_centroids import CentroidRows, MoveCentroids
from streamiter.learn.rows.checks import Floats
from streamiter.parameter_server.consistency.settings import Consistency
from streamiter.parameter_server.matrix import DType

if TYPE_CHECKING:
    from streamiter.parameter_server.client import Client

__all__ = ["CentroidLearner"]


@dataclass(frozen=True, eq=False)
class CentroidLearner(Learner):
    """Rows of centroids, sums and counts, a column for each cluster.

    In step (BSP) the sums of all workers move the centroids with the clock; otherwise each worker's as they are pushed.
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
