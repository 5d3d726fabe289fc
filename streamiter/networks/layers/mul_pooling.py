"""The product of several layers."""

from __future__ import annotations

from typing import ClassVar

from streamiter.networks.layers.joining import Joining
from streamiter.networks.layers.products import products_of_others
from streamiter.networks.parameters import Array

__all__ = ["MulPooling"]


class MulPooling(Joining):
    """x₁ ∘ x₂ ∘ …, number by number, all of one dimension."""

    type_name: ClassVar[str] = "mulpooling"

    def _forward(self, inputs: list[Array]) -> Array:
        product: Array = inputs[0] * inputs[1]
        for values in inputs[2:]:
            product *= values
        return product

    def _backward(self, gradient: Array) -> list[Array]:
        others = products_of_others([layer.output for layer in self.inputs])
        return [gradient * product for product in others]
