"""Shares of a row."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from streamiter.networks.parameters import Array
from streamiter.networks.transfer_functions.transfer_function import Applied, TransferFunction

__all__ = ["Softmax"]


@dataclass(frozen=True)
class Softmax(TransferFunction):
    """e^x / Σ e^x over the row; the row's largest x is taken off first, so that nothing overflows.

    >>> Softmax().forward(np.array([[1000.0, 1000.0]]), None).output.tolist()
    [[0.5, 0.5]]
    """

    type_name: ClassVar[str] = "softmax"

    def forward(self, values: Array, generator: np.random.Generator | None) -> Applied:
        values -= values.max(axis=1, keepdims=True)
        np.exp(values, out=values)
        values /= values.sum(axis=1, keepdims=True)
        return Applied(values, values)

    def backward(self, kept: Array, gradient: Array) -> Array:
        slopes: Array = gradient - np.einsum("ij,ij->i", gradient, kept)[:, None]
        slopes *= kept
        return slopes
