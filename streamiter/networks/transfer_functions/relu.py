"""The rectified linear unit."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from streamiter.networks.parameters import Array
from streamiter.networks.transfer_functions.transfer_function import Applied, TransferFunction

__all__ = ["Relu"]


@dataclass(frozen=True)
class Relu(TransferFunction):
    """max(0, x); at 0 its slope is 0."""

    type_name: ClassVar[str] = "relu"

    def forward(self, values: Array, generator: np.random.Generator | None) -> Applied:
        np.maximum(values, 0, out=values)
        return Applied(values, values)

    def backward(self, kept: Array, gradient: Array) -> Array:
        slopes: Array = gradient * (kept > 0)
        return slopes
