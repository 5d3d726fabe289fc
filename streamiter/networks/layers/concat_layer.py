"""Several layers side by side."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from streamiter.networks.layers.checks import as_configured, common_vector_width
from streamiter.networks.layers.layer import Layer
from streamiter.networks.parameters import Array

if TYPE_CHECKING:
    from streamiter.networks.layers.settings import LayerSettings
    from streamiter.networks.place_holder import PlaceHolder

__all__ = ["ConcatLayer"]


class ConcatLayer(Layer):
    """[x₁ x₂ …], the outputs of the inputs one after the other."""

    type_name: ClassVar[str] = "concatlayer"
    least_inputs: ClassVar[int] = 1
    most_inputs: ClassVar[int | None] = None

    def __init__(self, name: str, output_dim: int, inputs: Sequence[Layer]) -> None:
        super().__init__(name, output_dim, inputs)
        self.vector_width = common_vector_width(inputs)

    @classmethod
    def from_settings(
        cls, settings: LayerSettings, inputs: Sequence[Layer], place_holder: PlaceHolder
    ) -> ConcatLayer:
        dim = sum(layer.output_dim for layer in inputs)
        dim = as_configured(settings.name, settings.output_dim, dim, "the sum of those of its inputs")
        return cls(settings.name, dim, inputs)

    def _forward(self, inputs: list[Array]) -> Array:
        return np.concatenate(inputs, axis=1)

    def _backward(self, gradient: Array) -> list[Array]:
        bounds = np.cumsum([layer.output_dim for layer in self.inputs])[:-1]
        return np.split(gradient, bounds, axis=1)
