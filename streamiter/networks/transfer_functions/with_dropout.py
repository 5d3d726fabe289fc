"""What transfer functions have in common that end with dropout."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from streamiter.networks.parameters import Array
from streamiter.networks.transfer_functions.dropout import Dropout
from streamiter.networks.transfer_functions.transfer_function import Applied, TransferFunction
from streamiter.numbers import fraction

__all__ = ["WithDropout"]


@dataclass(frozen=True)
class WithDropout(TransferFunction):
    """Dropout of another one, ``inner``; in prediction that one alone."""

    inner: ClassVar[TransferFunction]
    draws: ClassVar[bool] = True
    proba: float = 0.5

    def __post_init__(self) -> None:
        fraction(f"{self.type_name}(proba=)", self.proba)

    def forward(self, values: Array, generator: np.random.Generator | None) -> Applied:
        inner = self.inner.forward(values, generator)
        if generator is None:
            return Applied(inner.output, (inner.kept, None))
        # Dropout writes to what it is given; the way back needs the output of the inner one itself.
        outer = Dropout(self.proba).forward(inner.output.copy(), generator)
        return Applied(outer.output, (inner.kept, outer.kept))

    def backward(self, kept: Any, gradient: Array) -> Array:
        of_inner, of_outer = kept
        return self.inner.backward(of_inner, Dropout(self.proba).backward(of_outer, gradient))
