"""Leaving numbers out by chance."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from streamiter.networks.parameters import Array
from streamiter.networks.transfer_functions.transfer_function import Applied, TransferFunction
from streamiter.numbers import fraction

__all__ = ["Dropout"]


@dataclass(frozen=True)
class Dropout(TransferFunction):
    """In training each x is 0 with probability ``proba``, the others are x/(1 − proba); in prediction x.

    So the expectation is x, and prediction scales nothing (Srivastava et al., 2014, in its inverted form).

    >>> values = np.ones((1, 4))
    >>> Dropout(0.5).forward(values.copy(), np.random.default_rng(0)).output.tolist()
    [[2.0, 0.0, 0.0, 0.0]]
    >>> Dropout(0.5).forward(values.copy(), None).output.tolist()
    [[1.0, 1.0, 1.0, 1.0]]
    """

    type_name: ClassVar[str] = "dropout"
    draws: ClassVar[bool] = True
    proba: float = 0.5

    def __post_init__(self) -> None:
        fraction("dropout(proba=)", self.proba)

    def forward(self, values: Array, generator: np.random.Generator | None) -> Applied:
        if generator is None:
            return Applied(values, None)
        scales = self._scales(values, generator)
        values *= scales
        return Applied(values, scales)

    def backward(self, kept: Array | None, gradient: Array) -> Array:
        if kept is None:
            return gradient
        slopes: Array = gradient * kept
        return slopes

    def _scales(self, values: Array, generator: np.random.Generator) -> Array:
        """0 for what is left out, 1/(1 − proba) for the others."""
        scales: Array = np.empty_like(values)
        generator.random(out=scales, dtype=scales.dtype.type)
        stays = scales >= self.proba
        np.multiply(stays, scales.dtype.type(1.0 / (1.0 - self.proba)), out=scales)
        return scales
