"""How parameters begin: each from a stream of its own, so that neither their order nor the dtype changes them."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Mapping
from typing import Final

import numpy as np
import numpy.typing as npt

from streamiter.networks.parameters import Array, Parameter
from streamiter.numbers import whole_number

__all__ = ["initial_values"]

# Of Angel's RandomNormal, with a mean of 0.
_ANGEL_DEVIATION: Final = 1e-4


def initial_values(
    parameter: Parameter, *, seed: int, way: str = "xavier", dtype: npt.DTypeLike = "float32"
) -> Array:
    """The whole array a parameter begins with, of its shape.

    ``way`` is "xavier" (Glorot and Bengio 2010): uniform in ±√(6/(fan_in + fan_out)), or "angel": normal with a
    standard deviation of 1e-4, from which layers behind layers learn next to nothing. Biases begin with zeros in
    both. The numbers are drawn in float64 from a stream that ``seed`` and the parameter's name give; float32 has the
    same, rounded.

    >>> from streamiter.optimizers import SGD
    >>> weight = Parameter("wide.weight", (2, 1), True, SGD(), "weight", fan_in=2, fan_out=1)
    >>> values = initial_values(weight, seed=7)
    >>> values.shape, values.dtype.name, bool(abs(values).max() <= 2**0.5)
    ((2, 1), 'float32', True)
    """
    if parameter.initial == "zero":
        return np.zeros(parameter.shape, dtype=dtype)
    draw = _WAYS[way]
    values: Array = draw(_stream(seed, parameter.name), parameter).astype(dtype, copy=False)
    return values


def _stream(seed: int, name: str) -> np.random.Generator:
    """Python's own hash of a text is another in each process."""
    digest = hashlib.sha256(name.encode()).digest()
    words = [int.from_bytes(digest[start : start + 4], "little") for start in range(0, len(digest), 4)]
    return np.random.Generator(np.random.PCG64([whole_number("seed", seed, 0), *words]))


def _xavier(stream: np.random.Generator, parameter: Parameter) -> npt.NDArray[np.float64]:
    limit = math.sqrt(6.0 / (parameter.fan_in + parameter.fan_out))
    return stream.uniform(-limit, limit, parameter.shape)


def _angel(stream: np.random.Generator, parameter: Parameter) -> npt.NDArray[np.float64]:
    return stream.normal(0.0, _ANGEL_DEVIATION, parameter.shape)


_WAYS: Final[Mapping[str, Callable[[np.random.Generator, Parameter], npt.NDArray[np.float64]]]] = {
    "xavier": _xavier,
    "angel": _angel,
}
