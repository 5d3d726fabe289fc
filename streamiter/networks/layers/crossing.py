"""Layers that multiply pairs of vectors of their input, such as the vectors of an embedding.

``count`` vectors have ``pairs(count)`` pairs i < j, which are ordered by i and then by j.
"""

from __future__ import annotations

import abc
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, ClassVar, Self

import numpy as np

from streamiter.networks.layers.layer import Layer, LayerSettings, as_configured, only_input, vectors_of
from streamiter.networks.parameters import Array

if TYPE_CHECKING:
    from streamiter.networks.mini_batches import PlaceHolder


def pairs(count: int) -> int:
    """Return the number of pairs i < j of ``count`` vectors.

    >>> pairs(13)
    78
    """
    return count * (count - 1) // 2


def pairs_by_first(count: int) -> Iterator[tuple[int, slice, slice]]:
    """Yield each i, the vectors j of its pairs, and the place of these pairs among all.

    >>> [(first, others.start, at.start, at.stop) for first, others, at in pairs_by_first(4)]
    [(0, 1, 0, 3), (1, 2, 3, 5), (2, 3, 5, 6)]
    """
    start = 0
    for first in range(count - 1):
        stop = start + count - 1 - first
        yield first, slice(first + 1, count), slice(start, stop)
        start = stop


class Crossing(Layer):
    """The base of layers that cross the vectors of one input; a type implements ``_cross`` and ``_uncross``."""

    def __init__(self, name: str, output_dim: int, source: Layer) -> None:
        super().__init__(name, output_dim, [source])
        count, self._width = vectors_of(name, source)
        dim, formula = self.dim_of(count, self._width)
        self.output_dim = as_configured(name, output_dim, dim, formula)

    @classmethod
    def from_settings(
        cls, settings: LayerSettings, inputs: Sequence[Layer], place_holder: PlaceHolder
    ) -> Self:
        source = only_input(settings.name, inputs)
        return cls(settings.name, settings.output_dim, source)

    @staticmethod
    @abc.abstractmethod
    def dim_of(count: int, width: int) -> tuple[int, str]:
        """Return the output dimension for ``count`` vectors of this width, and its formula for messages."""

    @abc.abstractmethod
    def _cross(self, vectors: Array) -> Array:
        """Return the output for vectors of shape (rows, vectors, width); its first axis is the rows."""

    @abc.abstractmethod
    def _uncross(self, vectors: Array, gradient: Array) -> Array:
        """Return the gradient by the vectors from the gradient by the output."""

    def _forward(self, inputs: list[Array]) -> Array:
        return self._cross(self._vectors(inputs[0])).reshape(len(inputs[0]), self.output_dim)

    def _backward(self, gradient: Array) -> list[Array]:
        source = self.inputs[0].output
        return [self._uncross(self._vectors(source), gradient).reshape(source.shape)]

    def _vectors(self, values: Array) -> Array:
        """Return the values as vectors: (rows, vectors, width)."""
        return values.reshape(len(values), -1, self._width)


def sum_of_vectors(vectors: Array) -> Array:
    """Return the sum of the vectors (rows, vectors, width) of each row; several times faster than ``sum(axis=1)``."""
    total: Array = np.einsum("nkw->nw", vectors)
    return total


class BiInnerCross(Crossing):
    """The inner product u_i·u_j of each pair i < j: (0, 1), (0, 2), …, (1, 2), … (Qu et al., 2016)."""

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


class BiInnerSumCross(Crossing):
    """The second order of a factorization machine: the sum of all inner products, ½(‖Σu‖² − Σ‖u‖²) (Rendle, 2010)."""

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


class BiInteractionCross(Crossing):
    """The second order of a neural factorization machine: the vector ½((Σu)² − Σu²) (He and Chua, 2017)."""

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


class BiInteractionCrossTiled(Crossing):
    """The product u_i ∘ u_j of each pair i < j, number by number; attention weights them (Xiao et al., 2017)."""

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


class BiOuterCross(Crossing):
    """The outer product u_i ⊗ u_j of each pair i < j; each matrix is written row by row (Qu et al., 2016)."""

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
