"""The sum over the row of the product of several layers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar

from streamiter.networks.layers.checks import as_configured, same_dims
from streamiter.networks.layers.layer import Layer
from streamiter.networks.layers.products import products_of_others
from streamiter.networks.parameters import Array

if TYPE_CHECKING:
    from streamiter.networks.layers.settings import LayerSettings
    from streamiter.networks.place_holder import PlaceHolder

__all__ = ["DotPooling"]


class DotPooling(Layer):
    """Σ (x₁ ∘ x₂ ∘ …) over the row: of two inputs their inner product."""

    type_name: ClassVar[str] = "dotpooling"
    least_inputs: ClassVar[int] = 2
    most_inputs: ClassVar[int | None] = None

    @classmethod
    def from_settings(
        cls, settings: LayerSettings, inputs: Sequence[Layer], place_holder: PlaceHolder
    ) -> DotPooling:
        same_dims(settings.name, list(inputs))
        dim = as_configured(settings.name, settings.output_dim, 1, "the sum over the row")
        return cls(settings.name, dim, inputs)

    def _forward(self, inputs: list[Array]) -> Array:
        product: Array = inputs[0] * inputs[1]
        for values in inputs[2:]:
            product *= values
        dots: Array = product.sum(axis=1, keepdims=True)
        return dots

    def _backward(self, gradient: Array) -> list[Array]:
        others = products_of_others([layer.output for layer in self.inputs])
        return [gradient * product for product in others]
