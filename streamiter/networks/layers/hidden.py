"""Layers that compute with the outputs of other layers: fully connected, pooling, concatenation, cross.

Some of them multiply pairs of vectors, such as the vectors of an embedding: ``count`` vectors have ``pairs(count)``
pairs i < j, which are ordered by i and then by j.
"""

from __future__ import annotations

import abc
from collections.abc import Iterator, Sequence
from typing import ClassVar

import numpy as np

from streamiter.networks.data import PlaceHolder
from streamiter.networks.layers.inputs import column_sums
from streamiter.networks.layers.layer import Layer
from streamiter.networks.settings import LayerConfiguration
from streamiter.values.numbers import Array


def products_of_others(factors: Sequence[Array]) -> list[Array]:
    """Return for each of two or more factors the product of the others; without division, so a factor may be 0.

    >>> import numpy as np
    >>> [product.tolist() for product in products_of_others([np.array([2.0]), np.array([0.0]), np.array([5.0])])]
    [[0.0], [10.0], [0.0]]
    """
    before = [factors[0]]
    for factor in factors[1:-1]:
        before.append(before[-1] * factor)
    others = [before[-1]]
    behind = factors[-1]
    for at in range(len(factors) - 2, 0, -1):
        others.append(before[at - 1] * behind)
        behind = behind * factors[at]
    others.append(behind)
    return others[::-1]


class FCLayer(Layer):
    """The fully connected layer: σ(xW + b)."""

    def __init__(self, settings: LayerConfiguration, inputs: Sequence[Layer], place_holder: PlaceHolder) -> None:
        super().__init__(settings, inputs, place_holder)
        # With ``weightdim`` the input and the output are as many vectors, each with these widths.
        outputs = settings.weight_dim or self.output_dim
        self._width = inputs[0].output_dim * outputs // self.output_dim
        self._add_weight_and_bias((self._width, outputs), outputs, self._width, outputs)

    def _forward(self, inputs: list[Array]) -> Array:
        values = inputs[0].reshape(-1, self._width) @ self._value(self._weight)
        values += self._value(self._bias)
        return self._transferred(values.reshape(-1, self.output_dim))

    def _backward(self, gradient: Array) -> list[Array]:
        inner = self._transferred_back(gradient)
        self._inner = inner.reshape(-1, self._weight.shape[1])
        by_vector = self._inner @ self._value(self._weight).T
        return [by_vector.reshape(len(gradient), -1)]

    def _gradients(self) -> None:
        self._weight.gradient = self.inputs[0].output.reshape(-1, self._width).T @ self._inner
        self._bias.gradient = column_sums(self._inner)


class ParamSharedFC(FCLayer):
    """A fully connected layer with the same weights for each vector u of its input: σ of all uW + b in one row.

    With ``weightdim`` 1 and a softmax the outputs are the attention weights of an attention factorization machine
    (Xiao et al., 2017). The input has ``outputdim / weightdim`` vectors.
    """


class SumPooling(Layer):
    """The sum x₁ + x₂ + … of inputs of one dimension."""

    def _forward(self, inputs: list[Array]) -> Array:
        total: Array = inputs[0] + inputs[1]
        for values in inputs[2:]:
            total += values
        return total

    def _backward(self, gradient: Array) -> list[Array]:
        return [gradient] * len(self.inputs)


class MulPooling(Layer):
    """The product x₁ ∘ x₂ ∘ …, number by number, of inputs of one dimension."""

    def _forward(self, inputs: list[Array]) -> Array:
        product: Array = inputs[0] * inputs[1]
        for values in inputs[2:]:
            product *= values
        return product

    def _backward(self, gradient: Array) -> list[Array]:
        others = products_of_others([layer.output for layer in self.inputs])
        return [gradient * product for product in others]


class DotPooling(MulPooling):
    """The sum over the row of the product of the inputs, Σ (x₁ ∘ x₂ ∘ …): the inner product of two inputs."""

    def _forward(self, inputs: list[Array]) -> Array:
        dots: Array = super()._forward(inputs).sum(axis=1, keepdims=True)
        return dots


class WeightedSumLayer(Layer):
    """The weighted sum Σ a_p·v_p: the first input is a weight for each vector of the second, as in attention."""

    def _forward(self, inputs: list[Array]) -> Array:
        weights, vectors = inputs
        sums: Array = np.matmul(weights[:, None, :], self._vectors(vectors))
        return sums[:, 0]

    def _backward(self, gradient: Array) -> list[Array]:
        weights, vectors = (layer.output for layer in self.inputs)
        by_weights = np.matmul(self._vectors(vectors), gradient[:, :, None])[:, :, 0]
        by_vectors: Array = weights[:, :, None] * gradient[:, None, :]
        return [by_weights, by_vectors.reshape(vectors.shape)]

    def _vectors(self, values: Array) -> Array:
        """Return the values as vectors: (rows, vectors, width)."""
        return values.reshape(len(values), -1, self.output_dim)


class ConcatLayer(Layer):
    """The inputs side by side: [x₁ x₂ …]."""

    def _forward(self, inputs: list[Array]) -> Array:
        return np.concatenate(inputs, axis=1)

    def _backward(self, gradient: Array) -> list[Array]:
        bounds = np.cumsum([layer.output_dim for layer in self.inputs])[:-1]
        return np.split(gradient, bounds, axis=1)


class CrossLayer(Layer):
    """The cross layer of a deep and cross network: x₀·(xᵀw) + b + x (Wang et al., 2017).

    The inputs are x₀ and x in this order; they may be the same layer.
    """

    def __init__(self, settings: LayerConfiguration, inputs: Sequence[Layer], place_holder: PlaceHolder) -> None:
        super().__init__(settings, inputs, place_holder)
        # Each output depends on all numbers of x, through the one number xᵀw.
        self._add_weight_and_bias((self.output_dim,), self.output_dim, self.output_dim, 1)

    def _forward(self, inputs: list[Array]) -> Array:
        first, last = inputs
        self._dots = (last @ self._value(self._weight))[:, None]
        values: Array = first * self._dots
        values += self._value(self._bias)
        values += last
        return values

    def _backward(self, gradient: Array) -> list[Array]:
        self._gradient = gradient
        self._by_dots = np.einsum("nd,nd->n", gradient, self.inputs[0].output)
        by_last: Array = self._by_dots[:, None] * self._value(self._weight)
        by_last += gradient
        return [gradient * self._dots, by_last]

    def _gradients(self) -> None:
        self._weight.gradient = self._by_dots @ self.inputs[1].output
        self._bias.gradient = column_sums(self._gradient)


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
    """The base of layers that cross the vectors of one input; a family implements ``_cross`` and ``_uncross``."""

    def __init__(self, settings: LayerConfiguration, inputs: Sequence[Layer], place_holder: PlaceHolder) -> None:
        super().__init__(settings, inputs, place_holder)
        self._width = inputs[0].vector_width or 1

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


class SumCross(Crossing):
    """The base of layers with half of (Σu)² − Σu²; ``product`` has the axes of a square: none is the inner product."""

    product: ClassVar[str]

    def _cross(self, vectors: Array) -> Array:
        self._sum = sum_of_vectors(vectors)
        products: Array = np.einsum(f"nw,nw->n{self.product}", self._sum, self._sum)
        products -= np.einsum(f"nkw,nkw->n{self.product}", vectors, vectors)
        products *= 0.5
        return products

    def _uncross(self, vectors: Array, gradient: Array) -> Array:
        others: Array = np.repeat(self._sum[:, None, :], vectors.shape[1], axis=1)
        others -= vectors
        others *= gradient[:, None, :]
        return others


class BiInnerSumCross(SumCross):
    """The second order of a factorization machine: the sum of all inner products, ½(‖Σu‖² − Σ‖u‖²) (Rendle, 2010)."""

    product = ""


class BiInteractionCross(SumCross):
    """The second order of a neural factorization machine: the vector ½((Σu)² − Σu²) (He and Chua, 2017)."""

    product = "w"


class PairCross(Crossing):
    """The base of layers with a product of each pair i < j, in the order (0, 1), (0, 2), …, (1, 2), …

    ``axes`` are the axes of u_i, of u_j and of their product, as ``einsum`` names them.
    """

    axes: ClassVar[tuple[str, str, str]]

    def _cross(self, vectors: Array) -> Array:
        (one, other, product), count = self.axes, vectors.shape[1]
        products = np.empty(self._shape(vectors), vectors.dtype)
        for first, others, at in pairs_by_first(count):
            formula = f"n{one},nk{other}->nk{product}"
            np.einsum(formula, vectors[:, first], vectors[:, others], out=products[:, at])
        return products

    def _uncross(self, vectors: Array, gradient: Array) -> Array:
        (one, other, product), count = self.axes, vectors.shape[1]
        by_pair, gradients = gradient.reshape(self._shape(vectors)), np.zeros_like(vectors)
        for first, others, at in pairs_by_first(count):
            gradients[:, first] += np.einsum(f"nk{product},nk{other}->n{one}", by_pair[:, at], vectors[:, others])
            gradients[:, others] += np.einsum(f"nk{product},n{one}->nk{other}", by_pair[:, at], vectors[:, first])
        return gradients

    def _shape(self, vectors: Array) -> tuple[int, ...]:
        rows, count, width = vectors.shape
        return rows, pairs(count), *[width] * len(self.axes[2])


class BiInnerCross(PairCross):
    """The inner product u_i·u_j of each pair (Qu et al., 2016)."""

    axes = "w", "w", ""


class BiInteractionCrossTiled(PairCross):
    """The product u_i ∘ u_j of each pair, number by number; attention weights them (Xiao et al., 2017)."""

    axes = "w", "w", "w"


class BiOuterCross(PairCross):
    """The outer product u_i ⊗ u_j of each pair; each matrix is written row by row (Qu et al., 2016)."""

    axes = "a", "b", "ab"
