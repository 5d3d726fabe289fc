"""The inner product of each pair of vectors."""

from __future__ import annotations

from typing import ClassVar

import numpy as np

from streamiter.networks.layers.crossing import Crossing
from streamiter.networks.layers.pairs import pairs, pairs_by_first
from streamiter.networks.parameters import Array

__all__ = ["BiInnerCross"]


class BiInnerCross(Crossing):
    """u_i·u_j for all i < j, row by row of the triangle: (0, 1), (0, 2), …, (1, 2), … (Qu et al., 2016)."""

    type_name: ClassVar[str] = "biinnercross"

    @staticmethod
    def dim_of(count: int, width: int) -> tuple[int, str]:
        return pairs(count), f"the pairs of {count} vectors"

    def _cross(self, vectors: Array) -> Array:
        products = np.empty((len(vectors), self.output_dim), dtype=vectors.dtype)
        for first, others, at in pairs_by_first(vectors.shape[1]):
            np.einsum("nw,nkw->nk", vectors[:, first], vectors[:, others], out=products[:, at])
        return products

    def _uncross(self, vectors: Array, gradient: Array) -> Array:
        gradients = np.zeros_like(vectors)
        for first, others, at in pairs_by_first(vectors.shape[1]):
            by_pair = gradient[:, at]
            gradients[:, first] += np.einsum("nk,nkw->nw", by_pair, vectors[:, others])
            gradients[:, others] += by_pair[:, :, None] * vectors[:, first, None, :]
        return gradients
