"""A weighted sum of vectors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from streamiter.errors import ConfigurationError
from streamiter.networks.layers.checks import as_configured
from streamiter.networks.layers.layer import Layer
from streamiter.networks.parameters import Array

if TYPE_CHECKING:
    from streamiter.networks.layers.settings import LayerSettings
    from streamiter.networks.place_holder import PlaceHolder

__all__ = ["WeightedSumLayer"]


class WeightedSumLayer(Layer):
    """Σ a_p·v_p; the first input gives a weight for each vector of the second: what attention makes of its vectors."""

    type_name: ClassVar[str] = "weightedsumlayer"
    least_inputs: ClassVar[int] = 2
    most_inputs: ClassVar[int | None] = 2

    @classmethod
    def from_settings(
        cls, settings: LayerSettings, inputs: Sequence[Layer], place_holder: PlaceHolder
    ) -> WeightedSumLayer:
        if len(inputs) != 2:
            return cls(settings.name, settings.output_dim, inputs)  # which refuses them
        weights, vectors = inputs
        width, rest = divmod(vectors.output_dim, weights.output_dim)
        if rest or vectors.vector_width not in (None, width):
            raise ConfigurationError(
                f"layer {settings.name!r}: expected a weight for each vector of {vectors.name!r} (outputdim "
                f"{vectors.output_dim}), given {weights.output_dim} of {weights.name!r}; its inputs are the weights, "
                "then the vectors"
            )
        dim = as_configured(settings.name, settings.output_dim, width, "the width of one vector")
        return cls(settings.name, dim, inputs)

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
        """(rows, vectors, width)"""
        return values.reshape(len(values), -1, self.output_dim)
