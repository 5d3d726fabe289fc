"""Distances of the features to centres."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

import numpy as np

from streamiter.networks.layers.input_layer import InputLayer
from streamiter.networks.layers.sparse_products import column_sums, squares_of_rows, times, transposed_times
from streamiter.networks.parameters import Array, Parameter

if TYPE_CHECKING:
    from streamiter.optimizers import Optimizer

__all__ = ["KMeansInputLayer"]


class KMeansInputLayer(InputLayer):
    """σ(‖x − c_k‖²) for each of ``output_dim`` centres c_k; ``kmeansloss`` takes the nearest one.

    A centre is far from a row for all its numbers, those of features that are not in the mini-batch, too. So all of its
    numbers are needed, and learned from, with every mini-batch. A step moves the nearest centres towards their rows
    (Sculley, 2010).
    """

    type_name: ClassVar[str] = "kmeansinputlayer"

    def _begin(self, features: int, optimizer: Optimizer) -> list[Parameter]:
        outputs = self.output_dim
        self._centres = Parameter(
            f"{self.name}.centres", (features, outputs), False, optimizer, "weight", features, outputs
        )
        return [self._centres]

    def _forward(self, inputs: list[Array]) -> Array:
        centres, place_holder = self._value(self._centres), self._place_holder
        if place_holder.is_sparse:
            distances = times(place_holder, centres[place_holder.indices])
        else:
            distances = place_holder.dense_rows @ centres
        distances *= -2
        distances += np.einsum("fk,fk->k", centres, centres)
        distances += squares_of_rows(place_holder)[:, None]
        # Squares that almost cancel out may leave less than nothing.
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
