"""The update function of k-means: sums and counts become centroids."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from streamiter.errors import ConfigurationError
from streamiter.parameter_server.matrix import Matrix
from streamiter.parameter_server.psf.function import UpdateFunction
from streamiter.parameter_server.storage.block import Block

__all__ = ["CentroidRows", "MoveCentroids"]


@dataclass(frozen=True)
class CentroidRows:
    """Which rows of the matrix are what. A column is a cluster, so that a block of columns has all of its clusters.

    >>> rows = CentroidRows(coordinates=2)
    >>> rows.centroids, rows.weights, rows.sums, rows.counts
    (range(0, 2), 2, range(3, 5), 5)
    """

    coordinates: int

    @property
    def centroids(self) -> range:
        """A row for each coordinate."""
        return range(self.coordinates)

    @property
    def weights(self) -> int:
        """How many points each centroid stands for, older ones counted less."""
        return self.coordinates

    @property
    def sums(self) -> range:
        """Of the points that came since the last move, a row for each coordinate."""
        return range(self.coordinates + 1, 2 * self.coordinates + 1)

    @property
    def counts(self) -> int:
        """How many these were."""
        return 2 * self.coordinates + 1

    @property
    def gathered(self) -> range:
        """Sums and counts: what workers add to."""
        return range(self.sums.start, self.counts + 1)

    def __len__(self) -> int:
        return self.counts + 1


@dataclass(frozen=True)
class MoveCentroids(UpdateFunction):
    """Move each centroid to the mean of its points, and begin to gather anew.

    The weight w of a centroid becomes ``w·decay + n``, where n new points are nearest to it, and it moves to
    ``(w·decay·centroid + sum)/(w·decay + n)``: with a decay of 0 to the mean of the new points (Lloyd), with 1 to that
    of all points ever seen. One without new points stays where it is.

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
