"""The second order of a neural factorization machine, as a vector."""

from __future__ import annotations

from typing import ClassVar

import numpy as np

from streamiter.networks.layers.crossing import Crossing, sum_of_vectors
from streamiter.networks.parameters import Array

__all__ = ["BiInteractionCross"]


class BiInteractionCross(Crossing):
    """½((Σu)² − Σu²), number by number, u the vectors of the input (He and Chua, 2017)."""

    type_name: ClassVar[str] = "biinteractioncross"

    @staticmethod
    def dim_of(count: int, width: int) -> tuple[int, str]:
        return width, "the width of one vector"

    def _cross(self, vectors: Array) -> Array:
        self._sum = sum_of_vectors(vectors)
        products: Array = self._sum * self._sum
        products -= np.einsum("nkw,nkw->nw", vectors, vectors)
        products *= 0.5
        return products

    def _uncross(self, vectors: Array, gradient: Array) -> Array:
        others: Array = self._sum[:, None, :] - vectors
        others *= gradient[:, None, :]
        return others
