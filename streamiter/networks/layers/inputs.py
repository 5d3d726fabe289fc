"""Layers that compute with the features of a mini-batch, and products of sparse rows with dense matrices.

These layers have no inputs. They read the mini-batch from the place holder, and most of their parameters have one row
for each feature.
"""

from __future__ import annotations

import abc
from collections.abc import Sequence

import numpy as np

from streamiter.learn.rows import BadRows
from streamiter.networks.data import PlaceHolder
from streamiter.networks.layers.layer import Layer
from streamiter.networks.settings import LayerConfiguration
from streamiter.values.numbers import Array, Indices


def column_sums(values: Array) -> Array:
    """Return the sum over the rows; as a product it is several times faster than ``sum(axis=0)``."""
    return np.ones(len(values), dtype=values.dtype) @ values


def times(place_holder: PlaceHolder, weights: Array) -> Array:
    """Return X·W of shape (rows, n), for W of shape (features in the mini-batch, n)."""
    rows, values = place_holder.sparse_rows, place_holder.values
    width = weights.shape[1]
    gathered: Array = weights.take(rows.indices, axis=0)
    if values is not None:
        gathered *= values[:, None]
    count = place_holder.features_per_row
    if count:
        by_row = gathered.reshape(len(rows), count, width)
        return by_row.sum(axis=1) if width > 1 else by_row[:, :, 0] @ np.ones((count, 1), dtype=weights.dtype)
    product = np.zeros((len(rows), width), dtype=weights.dtype)
    filled = np.flatnonzero(np.diff(rows.indptr))
    if not len(filled):
        return product
    if width == 1:  # one dimension is several times faster
        product[filled, 0] = np.add.reduceat(gathered[:, 0], rows.indptr[filled])
    else:
        product[filled] = np.add.reduceat(gathered, rows.indptr[filled], axis=0)
    return product


def transposed_times(place_holder: PlaceHolder, gradient: Array) -> Array:
    """Return Xᵀ·G of shape (features in the mini-batch, n), for G of shape (rows, n)."""
    rows, values = place_holder.sparse_rows, place_holder.values
    by_value: Array = gradient.take(rows.row_of_value, axis=0)
    if values is not None:
        by_value *= values[:, None]
    return sums_by_feature(rows.indices, by_value, rows.width)


def sums_by_feature(indices: Indices, by_value: Array, features: int) -> Array:
    """Return for each feature the sum of its rows in ``by_value`` (values, n): (features, n)."""
    sums = np.empty((features, by_value.shape[1]), dtype=by_value.dtype)
    for column in range(by_value.shape[1]):
        sums[:, column] = np.bincount(indices, weights=by_value[:, column], minlength=features)
    return sums


def squares_of_rows(place_holder: PlaceHolder) -> Array:
    """Return ‖x‖² of each row, dense or sparse: (rows,)."""
    if not place_holder.is_sparse:
        dense = place_holder.dense_rows
        return np.einsum("nf,nf->n", dense, dense)  # type: ignore[no-any-return]
    rows, values = place_holder.sparse_rows, place_holder.values
    if values is None:
        return np.diff(rows.indptr).astype(place_holder.dtype)
    return np.bincount(rows.row_of_value, weights=values * values, minlength=len(rows)).astype(place_holder.dtype)


class InputLayer(Layer):
    """The base of layers that read the features of the mini-batch and have no inputs; a type implements ``_begin``."""

    def __init__(self, settings: LayerConfiguration, inputs: Sequence[Layer], place_holder: PlaceHolder) -> None:
        super().__init__(settings, inputs, place_holder)
        self._begin(place_holder.feature_dimension)

    @abc.abstractmethod
    def _begin(self, features: int) -> None:
        """Make the parameters for this number of features."""

    def _backward(self, gradient: Array) -> list[Array]:
        self._inner = self._transferred_back(gradient)
        return []


class SimpleInputLayer(InputLayer):
    """σ(XW + b) for the features X; of W only the rows of features in the mini-batch are used."""

    def _begin(self, features: int) -> None:
        outputs = self.output_dim
        self._add_weight_and_bias((features, outputs), outputs, features, outputs, by_feature=True)

    def _forward(self, inputs: list[Array]) -> Array:
        weight = self._value(self._weight)
        if self._place_holder.is_sparse:
            values = times(self._place_holder, weight)
        else:
            values = self._place_holder.dense_rows @ weight
        values += self._value(self._bias)
        return self._transferred(values)

    def _gradients(self) -> None:
        if self._place_holder.is_sparse:
            self._weight.gradient = transposed_times(self._place_holder, self._inner)
        else:
            self._weight.gradient = self._place_holder.dense_rows.T @ self._inner
        self._bias.gradient = column_sums(self._inner)


class KMeansInputLayer(InputLayer):
    """σ(‖x − c_k‖²) for each of ``output_dim`` centres c_k; ``kmeansloss`` takes the nearest one.

    The distance depends on all numbers of a centre, also for features that are not in the mini-batch. So each
    mini-batch needs and changes all of them. A step moves the nearest centres towards their rows (Sculley, 2010).
    """

    def _begin(self, features: int) -> None:
        outputs = self.output_dim
        self._centres = self._parameter("centres", (features, outputs), features, outputs)

    def _forward(self, inputs: list[Array]) -> Array:
        centres, place_holder = self._value(self._centres), self._place_holder
        if place_holder.is_sparse:
            distances = times(place_holder, centres[place_holder.indices])
        else:
            distances = place_holder.dense_rows @ centres
        distances *= -2
        distances += np.einsum("fk,fk->k", centres, centres)
        distances += squares_of_rows(place_holder)[:, None]
        # Squares that almost cancel out may leave a negative number.
        np.maximum(distances, 0, out=distances)
        return self._transferred(distances)

    def _gradients(self) -> None:
        inner, place_holder = self._inner, self._place_holder
        # Σ over rows of g·2(c − x).
        by_centre: Array = self._value(self._centres) * column_sums(inner)
        if place_holder.is_sparse:
            by_centre[place_holder.indices] -= transposed_times(place_holder, inner)
        else:
            by_centre -= place_holder.dense_rows.T @ inner
        by_centre *= 2
        self._centres.gradient = by_centre


class Embedding(Layer):
    """The vectors v_i·x_i of the features of a row, in the order of the features.

    The output has the shape (rows, fields × factors), so each row must have as many features as fields. A dense row of
    that width has all its features; a wider one has those that are not 0.
    """

    def __init__(self, settings: LayerConfiguration, inputs: Sequence[Layer], place_holder: PlaceHolder) -> None:
        super().__init__(settings, inputs, place_holder)
        assert settings.num_factors is not None
        features = place_holder.feature_dimension
        self._fields = self.output_dim // settings.num_factors
        # All inputs and all outputs count, as in any layer. A cross adds up products of all vectors of a row, and is
        # steep if they are large: with the factors alone as outputs, the published DeepFM (momentum, a rate of 0.5)
        # diverged in 4 of 80 runs on census; with all outputs it diverged in none.
        self._weight = self._parameter(
            "weight", (features, settings.num_factors), features, self.output_dim, by_feature=True
        )

    def _forward(self, inputs: list[Array]) -> Array:
        self._at, self._values = self._places()
        vectors: Array = self._value(self._weight).take(self._at, axis=0)
        if self._values is not None:
            vectors *= self._values[:, None]
        return vectors.reshape(self._place_holder.batch_size, self.output_dim)

    def _backward(self, gradient: Array) -> list[Array]:
        self._gradient = gradient
        return []

    def _gradients(self) -> None:
        by_value = self._gradient.reshape(len(self._at), -1)
        if self._values is not None:
            by_value = by_value * self._values[:, None]
        self._weight.gradient = sums_by_feature(self._at, by_value, len(self._place_holder.indices))

    def _places(self) -> tuple[Indices, Array | None]:
        """Return for each row the places of its features, and their values (None: all 1)."""
        place_holder = self._place_holder
        if place_holder.is_sparse:
            if place_holder.features_per_row != self._fields and place_holder.batch_size:
                self._refuse(np.diff(place_holder.sparse_rows.indptr))
            return place_holder.sparse_rows.indices, place_holder.values
        dense = place_holder.dense_rows
        if dense.shape[1] == self._fields:
            return np.tile(np.arange(self._fields), len(dense)), dense.reshape(-1)
        there = dense != 0
        counts = np.count_nonzero(there, axis=1)
        if np.count_nonzero(counts == self._fields) != len(dense):
            self._refuse(counts)
        return np.nonzero(there)[1], dense[there]

    def _refuse(self, counts: Indices) -> None:
        bad = np.flatnonzero(counts != self._fields)
        raise BadRows(
            bad,
            f"layer {self.name!r}: expected {self._fields} features in each row (outputdim {self.output_dim} / "
            f"numfactors {self.output_dim // self._fields}), given {counts[bad[0]]}; change outputdim, or the rows",
        )
