"""The hyperbolic tangent, then dropout."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from streamiter.networks.parameters import Array
from streamiter.networks.transfer_functions.dropout import Dropout
from streamiter.networks.transfer_functions.tanh import Tanh
from streamiter.networks.transfer_functions.transfer_function import Applied, TransferFunction
from streamiter.numbers import fraction

__all__ = ["TanhWithDropout"]


@dataclass(frozen=True)
class TanhWithDropout(TransferFunction):
    """dropout(tanh(x)); in prediction tanh(x).

    >>> TanhWithDropout(0.5).forward(np.zeros((1, 2)), None).output.tolist()
    [[0.0, 0.0]]
    """

    type_name: ClassVar[str] = "tanhwithdropout"
    draws: ClassVar[bool] = True
    proba: float = 0.5

    def __post_init__(self) -> None:
        fraction("tanhwithdropout(proba=)", self.proba)

    def forward(self, values: Array, generator: np.random.Generator | None) -> Applied:
        inner = Tanh().forward(values, generator)
        if generator is None:
            return Applied(inner.output, (inner.kept, None))
        # Dropout writes to what it is given; the way back needs the tanh itself.
        outer = Dropout(self.proba).forward(inner.output.copy(), generator)
        return Applied(outer.output, (inner.kept, outer.kept))

    def backward(self, kept: Any, gradient: Array) -> Array:
        of_inner, of_outer = kept
        return Tanh().backward(of_inner, Dropout(self.proba).backward(of_outer, gradient))
