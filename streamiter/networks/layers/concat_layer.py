"""Several layers side by side."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import numpy as np

from streamiter.networks.layers.joining import Joining
from streamiter.networks.layers.layer import Layer
from streamiter.networks.parameters import Array

__all__ = ["ConcatLayer"]


class ConcatLayer(Joining):
    """[x₁ x₂ …], the outputs of the inputs one after the other."""

    type_name: ClassVar[str] = "concatlayer"
    least_inputs: ClassVar[int] = 1

    @staticmethod
    def dim_of(name: str, inputs: Sequence[Layer]) -> tuple[int, str]:
        return sum(layer.output_dim for layer in inputs), "the sum of those of its inputs"

    def _forward(self, inputs: list[Array]) -> Array:
        return np.concatenate(inputs, axis=1)

    def _backward(self, gradient: Array) -> list[Array]:
        bounds = np.cumsum([layer.output_dim for layer in self.inputs])[:-1]
        return np.split(gradient, bounds, axis=1)
