"""Transfer functions of networks; ``TRANSFER_FUNCTIONS`` has them by name."""

from __future__ import annotations

import abc
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, ClassVar, Final, NamedTuple

import numpy as np

from streamiter.networks.parameters import Array, logistic
from streamiter.numbers import fraction

__all__ = [
    "TRANSFER_FUNCTIONS",
    "Dropout",
    "IdentityFunction",
    "TransferFunction",
]


class Applied(NamedTuple):
    """What came of it, and what the way back needs."""

    output: Array
    kept: Any


class TransferFunction(abc.ABC):
    """Settings only: it is shared by layers and workers, and the layer keeps what belongs to a mini-batch.

    >>> from streamiter.networks.transfer_functions import Relu
    >>> applied = Relu().forward(np.array([[-1.0, 2.0]]), None)
    >>> applied.output.tolist(), Relu().backward(applied.kept, np.array([[5.0, 5.0]])).tolist()
    ([[0.0, 2.0]], [[0.0, 5.0]])

    What all transfer functions have in common.
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


@dataclass(frozen=True)
class WithDropout(TransferFunction):
    """Dropout of another one, ``inner``; in prediction that one alone.

    What transfer functions have in common that end with dropout.
    """

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


@dataclass(frozen=True)
class IdentityFunction(TransferFunction):
    """x.

    The transfer function that changes nothing.
    """

    type_name: ClassVar[str] = "identity"

    def forward(self, values: Array, generator: np.random.Generator | None) -> Applied:
        return Applied(values, None)

    def backward(self, kept: None, gradient: Array) -> Array:
        return gradient


@dataclass(frozen=True)
class Relu(TransferFunction):
    """max(0, x); at 0 its slope is 0.

    The rectified linear unit.
    """

    type_name: ClassVar[str] = "relu"

    def forward(self, values: Array, generator: np.random.Generator | None) -> Applied:
        np.maximum(values, 0, out=values)
        return Applied(values, values)

    def backward(self, kept: Array, gradient: Array) -> Array:
        slopes: Array = gradient * (kept > 0)
        return slopes


@dataclass(frozen=True)
class Sigmoid(TransferFunction):
    """1/(1 + e^(−x)).

    >>> Sigmoid().forward(np.array([[0.0, 1000.0]]), None).output.tolist()
    [[0.5, 1.0]]

    The logistic function.
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


@dataclass(frozen=True)
class Tanh(TransferFunction):
    """tanh(x).

    >>> Tanh().forward(np.array([[0.0, 1000.0]]), None).output.tolist()
    [[0.0, 1.0]]

    The hyperbolic tangent.
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


@dataclass(frozen=True)
class Softmax(TransferFunction):
    """e^x / Σ e^x over the row; the row's largest x is taken off first, so that nothing overflows.

    >>> Softmax().forward(np.array([[1000.0, 1000.0]]), None).output.tolist()
    [[0.5, 0.5]]

    Shares of a row.
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


@dataclass(frozen=True)
class Dropout(TransferFunction):
    """In training each x is 0 with probability ``proba``, the others are x/(1 − proba); in prediction x.

    So the expectation is x, and prediction scales nothing (Srivastava et al., 2014, in its inverted form).

    >>> values = np.ones((1, 4))
    >>> Dropout(0.5).forward(values.copy(), np.random.default_rng(0)).output.tolist()
    [[2.0, 0.0, 0.0, 0.0]]
    >>> Dropout(0.5).forward(values.copy(), None).output.tolist()
    [[1.0, 1.0, 1.0, 1.0]]

    Leaving numbers out by chance.
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


@dataclass(frozen=True)
class SigmoidWithDropout(WithDropout):
    """dropout(sigmoid(x)); in prediction sigmoid(x).

    >>> import numpy as np
    >>> SigmoidWithDropout(0.5).forward(np.zeros((1, 2)), None).output.tolist()
    [[0.5, 0.5]]

    The logistic function, then dropout.
    """

    type_name: ClassVar[str] = "sigmoidwithdropout"
    inner: ClassVar[TransferFunction] = Sigmoid()


@dataclass(frozen=True)
class TanhWithDropout(WithDropout):
    """dropout(tanh(x)); in prediction tanh(x).

    >>> import numpy as np
    >>> TanhWithDropout(0.5).forward(np.zeros((1, 2)), None).output.tolist()
    [[0.0, 0.0]]

    The hyperbolic tangent, then dropout.
    """

    type_name: ClassVar[str] = "tanhwithdropout"
    inner: ClassVar[TransferFunction] = Tanh()


_ALL: Final[tuple[type[TransferFunction], ...]] = (
    IdentityFunction,
    Sigmoid,
    Relu,
    Tanh,
    Softmax,
    Dropout,
    SigmoidWithDropout,
    TanhWithDropout,
)

TRANSFER_FUNCTIONS: Final[Mapping[str, type[TransferFunction]]] = MappingProxyType(
    {known.type_name: known for known in _ALL}
)
"""By their names in files, in lower case."""
