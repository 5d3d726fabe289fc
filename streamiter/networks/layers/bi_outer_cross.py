"""The outer product of each pair of vectors."""

from __future__ import annotations

from typing import ClassVar

import numpy as np

from streamiter.networks.layers.crossing import Crossing
from streamiter.networks.layers.pairs import pairs, pairs_by_first
from streamiter.networks.parameters import Array

__all__ = ["BiOuterCross"]


class BiOuterCross(Crossing):
    """u_i ⊗ u_j for all i < j, the matrices row by row, one after the other (Qu et al., 2016)."""

    type_name: ClassVar[str] = "bioutercross"

    @staticmethod
    def dim_of(count: int, width: int) -> tuple[int, str]:
        return pairs(count) * width**2, f"{width} × {width} for each of the pairs of {count} vectors"

    def _cross(self, vectors: Array) -> Array:
        count, width = vectors.shape[1:]
        products = np.empty((len(vectors), pairs(count), width, width), dtype=vectors.dtype)
        for first, others, at in pairs_by_first(count):
            np.multiply(vectors[:, first, None, :, None], vectors[:, others, None, :], out=products[:, at])
        return products

    def _uncross(self, vectors: Array, gradient: Array) -> Array:
        count, width = vectors.shape[1:]
        by_pair = gradient.reshape(len(vectors), pairs(count), width, width)
        gradients = np.zeros_like(vectors)
        for first, others, at in pairs_by_first(count):
            gradients[:, first] += np.einsum("nkab,nkb->na", by_pair[:, at], vectors[:, others])
            gradients[:, others] += np.einsum("nkab,na->nkb", by_pair[:, at], vectors[:, first])
        return gradients
