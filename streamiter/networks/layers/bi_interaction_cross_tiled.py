"""The product, number by number, of each pair of vectors."""

from __future__ import annotations

from typing import ClassVar

import numpy as np

from streamiter.networks.layers.crossing import Crossing
from streamiter.networks.layers.layer import Layer
from streamiter.networks.layers.pairs import pairs, pairs_by_first
from streamiter.networks.parameters import Array

__all__ = ["BiInteractionCrossTiled"]


class BiInteractionCrossTiled(Crossing):
    """u_i ∘ u_j, number by number, for all i < j, one after the other: what attention weighs (Xiao et al., 2017)."""

    type_name: ClassVar[str] = "biinteractioncrosstiled"

    def __init__(self, name: str, output_dim: int, source: Layer) -> None:
        super().__init__(name, output_dim, source)
        self.vector_width = self._width

    @staticmethod
    def dim_of(count: int, width: int) -> tuple[int, str]:
        return pairs(count) * width, f"{width} for each of the pairs of {count} vectors"

    def _cross(self, vectors: Array) -> Array:
        count, width = vectors.shape[1:]
        products = np.empty((len(vectors), pairs(count), width), dtype=vectors.dtype)
        for first, others, at in pairs_by_first(count):
            np.multiply(vectors[:, first, None, :], vectors[:, others], out=products[:, at])
        return products

    def _uncross(self, vectors: Array, gradient: Array) -> Array:
        count, width = vectors.shape[1:]
        by_pair = gradient.reshape(len(vectors), pairs(count), width)
        gradients = np.zeros_like(vectors)
        for first, others, at in pairs_by_first(count):
            gradients[:, first] += np.einsum("nkw,nkw->nw", by_pair[:, at], vectors[:, others])
            gradients[:, others] += by_pair[:, at] * vectors[:, first, None, :]
        return gradients
