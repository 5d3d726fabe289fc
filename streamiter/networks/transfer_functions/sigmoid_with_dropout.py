"""The logistic function, then dropout."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from streamiter.networks.parameters import Array
from streamiter.networks.transfer_functions.dropout import Dropout
from streamiter.networks.transfer_functions.sigmoid import Sigmoid
from streamiter.networks.transfer_functions.transfer_function import Applied, TransferFunction
from streamiter.numbers import fraction

__all__ = ["SigmoidWithDropout"]


@dataclass(frozen=True)
class SigmoidWithDropout(TransferFunction):
    """dropout(sigmoid(x)); in prediction sigmoid(x).

    >>> SigmoidWithDropout(0.5).forward(np.zeros((1, 2)), None).output.tolist()
    [[0.5, 0.5]]
    """

    type_name: ClassVar[str] = "sigmoidwithdropout"
    draws: ClassVar[bool] = True
    proba: float = 0.5

    def __post_init__(self) -> None:
        fraction("sigmoidwithdropout(proba=)", self.proba)

    def forward(self, values: Array, generator: np.random.Generator | None) -> Applied:
        inner = Sigmoid().forward(values, generator)
        if generator is None:
            return Applied(inner.output, (inner.kept, None))
        # Dropout writes to what it is given; the way back needs the sigmoid itself.
        outer = Dropout(self.proba).forward(inner.output.copy(), generator)
        return Applied(outer.output, (inner.kept, outer.kept))

    def backward(self, kept: Any, gradient: Array) -> Array:
        of_inner, of_outer = kept
        return Sigmoid().backward(of_inner, Dropout(self.proba).backward(of_outer, gradient))
