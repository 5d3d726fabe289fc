"""The sum over the row of the product of several layers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from streamiter.networks.layers.checks import same_dims
from streamiter.networks.layers.layer import Layer
from streamiter.networks.layers.mul_pooling import MulPooling
from streamiter.networks.parameters import Array

__all__ = ["DotPooling"]


class DotPooling(MulPooling):
    """Σ (x₁ ∘ x₂ ∘ …) over the row: of two inputs their inner product."""

    type_name: ClassVar[str] = "dotpooling"

    def __init__(self, name: str, output_dim: int, inputs: Sequence[Layer]) -> None:
        super().__init__(name, output_dim, inputs)
        self.vector_width = None

    @staticmethod
    def dim_of(name: str, inputs: Sequence[Layer]) -> tuple[int, str]:
        same_dims(name, inputs)
        return 1, "the sum over the row"

    def _forward(self, inputs: list[Array]) -> Array:
        dots: Array = super()._forward(inputs).sum(axis=1, keepdims=True)
        return dots
