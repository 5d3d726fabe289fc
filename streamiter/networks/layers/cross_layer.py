"""The cross layer of a deep and cross network."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from streamiter.networks.layers.checks import as_configured, required_optimizer, same_dims
from streamiter.networks.layers.layer import Layer
from streamiter.networks.layers.sparse_products import column_sums
from streamiter.networks.parameters import Array, Parameter

if TYPE_CHECKING:
    from streamiter.networks.layers.settings import LayerSettings
    from streamiter.networks.place_holder import PlaceHolder
    from streamiter.optimizers import Optimizer

__all__ = ["CrossLayer"]


class CrossLayer(Layer):
    """x₀·(xᵀw) + b + x, the inputs x₀ and x in this order; they may be the same layer (Wang et al., 2017)."""

    type_name: ClassVar[str] = "crosslayer"
    least_inputs: ClassVar[int] = 2
    most_inputs: ClassVar[int | None] = 2

    def __init__(self, name: str, output_dim: int, inputs: Sequence[Layer], optimizer: Optimizer) -> None:
        super().__init__(name, output_dim, inputs)
        # One output has all numbers of x as inputs, by way of the one number xᵀw.
        self._weight = Parameter(f"{name}.weight", (output_dim,), False, optimizer, "weight", output_dim, 1)
        self._bias = Parameter(f"{name}.bias", (output_dim,), False, optimizer, "zero", output_dim, 1)
        self.parameters = [self._weight, self._bias]

    @classmethod
    def from_settings(
        cls, settings: LayerSettings, inputs: Sequence[Layer], place_holder: PlaceHolder
    ) -> CrossLayer:
        dim = same_dims(settings.name, inputs)
        dim = as_configured(settings.name, settings.output_dim, dim, "that of its inputs")
        return cls(settings.name, dim, inputs, required_optimizer(settings))

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
