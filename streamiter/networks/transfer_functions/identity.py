"""The transfer function that changes nothing."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from streamiter.networks.parameters import Array
from streamiter.networks.transfer_functions.transfer_function import Applied, TransferFunction

__all__ = ["Identity"]


@dataclass(frozen=True)
class Identity(TransferFunction):
    """x."""

    type_name: ClassVar[str] = "identity"

    def forward(self, values: Array, generator: np.random.Generator | None) -> Applied:
        return Applied(values, None)

    def backward(self, kept: None, gradient: Array) -> Array:
        return gradient
