"""A vector for each feature that is there, one after the other."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from streamiter.errors import ConfigurationError
from streamiter.learn.rows.checks import BadRows
from streamiter.networks.layers.checks import required_optimizer
from streamiter.networks.layers.layer import Layer
from streamiter.networks.layers.sparse_products import sums_by_feature
from streamiter.networks.parameters import Array, Parameter

if TYPE_CHECKING:
    from streamiter.networks.layers.settings import LayerSettings
    from streamiter.networks.place_holder import PlaceHolder
    from streamiter.optimizers import Optimizer
    from streamiter.sparse_rows import Indices

__all__ = ["Embedding"]


class Embedding(Layer):
    """v_i·x_i of each feature of the row that is there, in the order of the features.

    The output is (rows, fields × factors): each row must have as many features as there are fields. Of dense rows that
    are as wide as that all features are taken, otherwise those that are not 0.
    """

    type_name: ClassVar[str] = "embedding"
    least_inputs: ClassVar[int] = 0
    most_inputs: ClassVar[int | None] = 0

    def __init__(
        self, name: str, output_dim: int, factors: int, place_holder: PlaceHolder, optimizer: Optimizer
    ) -> None:
        if output_dim < 1 or output_dim % factors:
            raise ConfigurationError(
                f"layer {name!r}: expected outputdim as a multiple of numfactors ({factors}), "
                f"given {output_dim}; outputdim is fields × numfactors"
            )
        super().__init__(name, output_dim)
        self.vector_width = factors
        self._fields = output_dim // factors
        self._place_holder = place_holder
        self._weight = Parameter(
            f"{name}.weight",
            (place_holder.feature_dimension, factors),
            True,
            optimizer,
            "weight",
            # All that goes in, and all that comes out, as of any layer. A cross adds up products of all vectors of a
            # row, and is steep where they are large: with the factors alone as what comes out, DeepFM as published
            # (momentum, a rate of 0.5) diverged in 4 of 80 runs on census, with all of it in none.
            place_holder.feature_dimension,
            output_dim,
        )
        self.parameters = [self._weight]

    @classmethod
    def from_settings(
        cls, settings: LayerSettings, inputs: Sequence[Layer], place_holder: PlaceHolder
    ) -> Embedding:
        if settings.factors is None:
            raise ConfigurationError(
                f"layer {settings.name!r}: expected the key 'numfactors', given none; set it"
            )
        return cls(
            settings.name,
            settings.output_dim,
            settings.factors,
            place_holder,
            required_optimizer(settings),
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
        """Row by row the places of the features that are there, and their values (None: all 1)."""
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
            f"numfactors {self.vector_width}), given {counts[bad[0]]}; change outputdim, or the rows",
        )
