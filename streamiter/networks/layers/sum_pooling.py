"""The sum of several layers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar

from streamiter.networks.layers.checks import as_configured, common_vector_width, same_dims
from streamiter.networks.layers.layer import Layer
from streamiter.networks.parameters import Array

if TYPE_CHECKING:
    from streamiter.networks.layers.settings import LayerSettings
    from streamiter.networks.place_holder import PlaceHolder

__all__ = ["SumPooling"]


class SumPooling(Layer):
    """x₁ + x₂ + …, all of one dimension."""

    type_name: ClassVar[str] = "sumpooling"
    least_inputs: ClassVar[int] = 2
    most_inputs: ClassVar[int | None] = None

    def __init__(self, name: str, output_dim: int, inputs: Sequence[Layer]) -> None:
        super().__init__(name, output_dim, inputs)
        self.vector_width = common_vector_width(inputs)

    @classmethod
    def from_settings(
        cls, settings: LayerSettings, inputs: Sequence[Layer], place_holder: PlaceHolder
    ) -> SumPooling:
        dim = same_dims(settings.name, list(inputs))
        dim = as_configured(settings.name, settings.output_dim, dim, "that of its inputs")
        return cls(settings.name, dim, inputs)

    def _forward(self, inputs: list[Array]) -> Array:
        total: Array = inputs[0] + inputs[1]
        for values in inputs[2:]:
            total += values
        return total

    def _backward(self, gradient: Array) -> list[Array]:
        return [gradient] * len(self.inputs)
