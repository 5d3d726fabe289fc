"""Transfer functions of layers, in ``TRANSFER_FUNCTIONS`` by their names in configuration files.

A transfer function is applied to each output of a layer; ``backward`` turns the gradient by its output into the one by
its input.
"""

from __future__ import annotations

import abc
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, ClassVar, Final, NamedTuple

import numpy as np

from streamiter.networks.parameters import Array, logistic
from streamiter.numbers import fraction


class Applied(NamedTuple):
    """The output, and the array that ``backward`` needs."""

    output: Array
    kept: Any


class TransferFunction(abc.ABC):
    """A transfer function with its settings. Layers and workers share it; a layer keeps the state of a mini-batch.

    >>> from streamiter.networks.transfer_functions import Relu
    >>> applied = Relu().forward(np.array([[-1.0, 2.0]]), None)
    >>> applied.output.tolist(), Relu().backward(applied.kept, np.array([[5.0, 5.0]])).tolist()
    ([[0.0, 2.0]], [[0.0, 5.0]])
    """

    type_name: ClassVar[str]
    """The name in configuration files, in lower case."""

    draws: ClassVar[bool] = False
    """Whether the function draws from the generator in training."""

    @abc.abstractmethod
    def forward(self, values: Array, generator: np.random.Generator | None) -> Applied:
        """Apply the function to ``values`` (rows, n), which may be overwritten; ``generator`` is None in prediction."""

    @abc.abstractmethod
    def backward(self, kept: Any, gradient: Array) -> Array:
        """Return the gradient by the values from the gradient by the output, which is not changed."""


@dataclass(frozen=True)
class WithDropout(TransferFunction):
    """Another transfer function, ``inner``, and then dropout; in prediction the other function alone."""

    inner: ClassVar[TransferFunction]
    draws: ClassVar[bool] = True
    proba: float = 0.5

    def __post_init__(self) -> None:
        fraction(f"{self.type_name}(proba=)", self.proba)

    def forward(self, values: Array, generator: np.random.Generator | None) -> Applied:
        inner = self.inner.forward(values, generator)
        if generator is None:
            return Applied(inner.output, (inner.kept, None))
        # Dropout overwrites its input; ``backward`` needs the output of the inner function itself.
        outer = Dropout(self.proba).forward(inner.output.copy(), generator)
        return Applied(outer.output, (inner.kept, outer.kept))

    def backward(self, kept: Any, gradient: Array) -> Array:
        of_inner, of_outer = kept
        return self.inner.backward(of_inner, Dropout(self.proba).backward(of_outer, gradient))


@dataclass(frozen=True)
class IdentityFunction(TransferFunction):
    """The identity: x."""

    type_name: ClassVar[str] = "identity"

    def forward(self, values: Array, generator: np.random.Generator | None) -> Applied:
        return Applied(values, None)

    def backward(self, kept: None, gradient: Array) -> Array:
        return gradient


@dataclass(frozen=True)
class Relu(TransferFunction):
    """The rectified linear unit: max(0, x); its slope at 0 is 0."""

    type_name: ClassVar[str] = "relu"

    def forward(self, values: Array, generator: np.random.Generator | None) -> Applied:
        np.maximum(values, 0, out=values)
        return Applied(values, values)

    def backward(self, kept: Array, gradient: Array) -> Array:
        slopes: Array = gradient * (kept > 0)
        return slopes


@dataclass(frozen=True)
class Sigmoid(TransferFunction):
    """The logistic function: 1/(1 + e^(−x)).

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


@dataclass(frozen=True)
class Tanh(TransferFunction):
    """The hyperbolic tangent: tanh(x).

    >>> Tanh().forward(np.array([[0.0, 1000.0]]), None).output.tolist()
    [[0.0, 1.0]]
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
    """Shares of a row: e^x / Σ e^x. The largest x of the row is subtracted first, so that nothing overflows.

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


@dataclass(frozen=True)
class Dropout(TransferFunction):
    """In training each x becomes 0 with probability ``proba``, else x/(1 − proba); in prediction it stays x.

    So the expectation is x, and prediction scales nothing (Srivastava et al., 2014, in the inverted form).

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
        """Return a factor for each number: 0 for a dropped one, 1/(1 − proba) for the others."""
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
    """

    type_name: ClassVar[str] = "sigmoidwithdropout"
    inner: ClassVar[TransferFunction] = Sigmoid()


@dataclass(frozen=True)
class TanhWithDropout(WithDropout):
    """dropout(tanh(x)); in prediction tanh(x).

    >>> import numpy as np
    >>> TanhWithDropout(0.5).forward(np.zeros((1, 2)), None).output.tolist()
    [[0.0, 0.0]]
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
"""The transfer functions by their names in configuration files, in lower case."""
