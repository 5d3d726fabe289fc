"""The sum of several layers."""

from __future__ import annotations

from typing import ClassVar

from streamiter.networks.layers.joining import Joining
from streamiter.networks.parameters import Array

__all__ = ["SumPooling"]


class SumPooling(Joining):
    """x₁ + x₂ + …, all of one dimension."""

    type_name: ClassVar[str] = "sumpooling"

    def _forward(self, inputs: list[Array]) -> Array:
        total: Array = inputs[0] + inputs[1]
        for values in inputs[2:]:
            total += values
        return total

    def _backward(self, gradient: Array) -> list[Array]:
        return [gradient] * len(self.inputs)
