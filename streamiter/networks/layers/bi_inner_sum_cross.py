"""The second order of a factorization machine, as one number."""

from __future__ import annotations

from typing import ClassVar

import numpy as np

from streamiter.networks.layers.crossing import Crossing, sum_of_vectors
from streamiter.networks.parameters import Array

__all__ = ["BiInnerSumCross"]


class BiInnerSumCross(Crossing):
    """½(‖Σu‖² − Σ‖u‖²), u the vectors of the input: the sum of all their inner products (Rendle, 2010)."""

    type_name: ClassVar[str] = "biinnersumcross"

    @staticmethod
    def dim_of(count: int, width: int) -> tuple[int, str]:
        return 1, "the sum of all inner products"

    def _cross(self, vectors: Array) -> Array:
        self._sum = sum_of_vectors(vectors)
        products: Array = np.einsum("nw,nw->n", self._sum, self._sum)
        products -= np.einsum("nkw,nkw->n", vectors, vectors)
        products *= 0.5
        return products

    def _uncross(self, vectors: Array, gradient: Array) -> Array:
        others: Array = np.repeat(self._sum[:, None, :], vectors.shape[1], axis=1)
        others -= vectors
        others *= gradient[:, :, None]
        return others
