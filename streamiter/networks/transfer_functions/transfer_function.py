"""What all transfer functions have in common."""

from __future__ import annotations

import abc
from typing import Any, ClassVar, NamedTuple

import numpy as np

from streamiter.networks.parameters import Array

__all__ = ["Applied", "TransferFunction"]


class Applied(NamedTuple):
    """What came of it, and what the way back needs."""

    output: Array
    kept: Any


class TransferFunction(abc.ABC):
    """Settings only: it is shared by layers and workers, and the layer keeps what belongs to a mini-batch.

    >>> from streamiter.networks.transfer_functions.relu import Relu
    >>> applied = Relu().forward(np.array([[-1.0, 2.0]]), None)
    >>> applied.output.tolist(), Relu().backward(applied.kept, np.array([[5.0, 5.0]])).tolist()
    ([[0.0, 2.0]], [[0.0, 5.0]])
    """

    type_name: ClassVar[str]
    """As files have it, in lower case."""

    draws: ClassVar[bool] = False
    """Whether it draws from the generator in training."""

    @abc.abstractmethod
    def forward(self, values: Array, generator: np.random.Generator | None) -> Applied:
        """Of ``values`` (rows, n), which it may write to; ``generator``: None in prediction."""

    @abc.abstractmethod
    def backward(self, kept: Any, gradient: Array) -> Array:
        """The gradient by ``values``, of the one by the output, which is not changed."""
