"""The logistic function."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from streamiter.networks.logistic import logistic
from streamiter.networks.parameters import Array
from streamiter.networks.transfer_functions.transfer_function import Applied, TransferFunction

__all__ = ["Sigmoid"]


@dataclass(frozen=True)
class Sigmoid(TransferFunction):
    """1/(1 + e^(−x)).

    >>> Sigmoid().forward(np.array([[0.0, 1000.0]]), None).output.tolist()
    [[0.5, 1.0]]
    """

    type_name: ClassVar[str] = "sigmoid"

    def forward(self, values: Array, generator: np.random.Generator | None) -> Applied:
        logistic(values)
        return Applied(values, values)

    def backward(self, kept: Array, gradient: Array) -> Array:
        slopes: Array = 1 - kept
        slopes *= kept
        slopes *= gradient
        return slopes
