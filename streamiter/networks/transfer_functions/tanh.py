"""The hyperbolic tangent."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from streamiter.networks.parameters import Array
from streamiter.networks.transfer_functions.transfer_function import Applied, TransferFunction

__all__ = ["Tanh"]


@dataclass(frozen=True)
class Tanh(TransferFunction):
    """tanh(x).

    >>> Tanh().forward(np.array([[0.0, 1000.0]]), None).output.tolist()
    [[0.0, 1.0]]
    """

    type_name: ClassVar[str] = "tanh"

    def forward(self, values: Array, generator: np.random.Generator | None) -> Applied:
        np.tanh(values, out=values)
        return Applied(values, values)

    def backward(self, kept: Array, gradient: Array) -> Array:
        slopes: Array = kept * kept
        np.subtract(1, slopes, out=slopes)
        slopes *= gradient
        return slopes
