"""The parameters of a network: arrays by name, their initial values, and their place on the parameter server.

Here is also the state of a layer (``Status``): layers and training both use it.
"""

from __future__ import annotations

import enum
import hashlib
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise
from typing import Any, Final, Literal

import numpy as np
import numpy.typing as npt

from streamiter.numbers import whole_number
from streamiter.optimizers import Optimizer

Array = npt.NDArray[Any]
"""An array of float32 or float64, the dtype of the network."""

Initial = Literal["weight", "zero"]
"""The initial values of a parameter: drawn for weights, zeros for biases."""


@dataclass(eq=False)
class Parameter:
    """One array of one layer. ``values`` and ``gradient`` belong to the current mini-batch.

    ``shape`` is the whole shape. The first axis of a parameter ``by_feature`` counts features; its ``values`` and
    ``gradient`` have one row for each feature of the mini-batch, in the order of ``PlaceHolder.indices``.
    """

    name: str
    """The name of the layer and of the array: ``layer.weight``, ``layer.bias``."""
    shape: tuple[int, ...]
    by_feature: bool
    optimizer: Optimizer
    initial: Initial
    fan_in: int
    """The number of inputs of one output."""
    fan_out: int
    values: Array | None = None
    gradient: Array | None = None

    @property
    def size(self) -> int:
        """Return the number of numbers in the array."""
        return int(np.prod(self.shape))


class Status(enum.IntEnum):
    """The progress of a layer with its mini-batch; a new mini-batch sets it to ``NULL``.

    >>> Status.FORWARD < Status.BACKWARD, str(Status.NULL)
    (True, 'Null')
    """

    NULL = 0
    """Nothing is computed yet."""
    FORWARD = 1
    """The output is computed."""
    BACKWARD = 2
    """The gradients of the inputs are computed."""
    GRADIENT = 3
    """The gradients of the parameters are computed, too."""
    UPDATE = 4
    """The optimizer has made its step."""

    def __str__(self) -> str:
        return self.name.capitalize()


def logistic(values: Array) -> Array:
    """Compute the logistic function 1/(1 + e^(−x)) in place; if e^(−x) overflows it is 0.

    >>> logistic(np.array([-1000.0, 0.0, 1000.0])).tolist()
    [0.0, 0.5, 1.0]
    """
    with np.errstate(over="ignore"):
        np.negative(values, out=values)
        np.exp(values, out=values)
        values += 1
        np.reciprocal(values, out=values)
    return values


# The standard deviation of Angel's RandomNormal, whose mean is 0.
_ANGEL_DEVIATION: Final = 1e-4


def initial_values(
    parameter: Parameter, *, seed: int, way: str = "xavier", dtype: npt.DTypeLike = "float32"
) -> Array:
    """Return the initial array of a parameter, in its whole shape.

    ``way`` is "xavier" (Glorot and Bengio 2010): uniform in ±√(6/(fan_in + fan_out)); or "angel": normal with a
    standard deviation of 1e-4, with which deep networks learn almost nothing. Biases are zeros in both. The numbers
    are drawn in float64 from a random stream of the parameter's own, which depends on ``seed`` and its name; so neither
    the order of the parameters nor the dtype changes them. float32 has the same numbers, rounded.

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
    """Return the random stream of a name; Python's own hash of a text differs between processes."""
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


@dataclass(frozen=True, eq=False)
class ParameterLayout:
    """The columns of the parameters in a matrix of the parameter server.

    All parameters of one optimizer are in one row of one matrix. Parameters by feature have a matrix of their own,
    where all numbers of a feature are adjacent; so a mini-batch needs a few ranges of columns.

    >>> from streamiter.optimizers import SGD
    >>> from streamiter.networks.parameters import Parameter
    >>> weight = Parameter("wide.weight", (3, 1), True, SGD(0.1), "weight", 2, 1)
    >>> factors = Parameter("embedding.weight", (3, 2), True, SGD(0.1), "weight", 2, 4)
    >>> [layout] = layouts([weight, factors], "network")
    >>> layout.matrix, layout.columns, layout.columns_of(np.array([0, 2])).tolist()
    ('network.features.0', 9, [0, 1, 2, 6, 7, 8])
    >>> {name: array.tolist() for name, array in layout.arrays(np.arange(6.0), features=2).items()}
    {'wide.weight': [[0.0], [3.0]], 'embedding.weight': [[1.0, 2.0], [4.0, 5.0]]}
    """

    matrix: str
    optimizer: Optimizer
    by_feature: bool
    names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    """The shape of each parameter; without the first axis for parameters by feature."""
    features: int
    """The number of features; 1 for parameters that are not by feature."""

    @cached_property
    def _ranges(self) -> list[slice]:
        ends = accumulate((math.prod(shape) for shape in self.shapes), initial=0)
        return [slice(begin, end) for begin, end in pairwise(ends)]

    @cached_property
    def width(self) -> int:
        """Return the number of columns of one feature; all columns for parameters that are not by feature."""
        return sum(math.prod(shape) for shape in self.shapes)

    @property
    def columns(self) -> int:
        """Return the number of columns of the matrix."""
        return self.width * self.features

    def columns_of(self, indices: npt.NDArray[np.int64] | None) -> npt.NDArray[np.int64] | None:
        """Return the columns of some features in ascending order; None: all columns."""
        if not self.by_feature or indices is None or len(indices) == self.features:
            return None
        if self.width == 1:
            return indices
        return (indices[:, np.newaxis] * self.width + np.arange(self.width)).reshape(-1)

    def arrays(self, row: Array, features: int) -> dict[str, Array]:
        """Return the parameters by name as views of a row; parameters by feature have ``features`` rows."""
        if not self.by_feature:
            shaped = zip(self.names, self._ranges, self.shapes, strict=True)
            return {name: row[part].reshape(shape) for name, part, shape in shaped}
        table = row.reshape(features, self.width)
        if len(self.names) == 1:
            return {self.names[0]: table.reshape(features, *self.shapes[0])}
        return {
            name: np.ascontiguousarray(table[:, part]).reshape(features, *shape)
            for name, part, shape in zip(self.names, self._ranges, self.shapes, strict=True)
        }

    def row_of(self, arrays: Mapping[str, Array], features: int) -> Array:
        """Return the row of the given arrays; the inverse of ``arrays``."""
        if not self.by_feature:
            return np.concatenate([arrays[name].reshape(-1) for name in self.names])
        # With no features numpy cannot compute the number of numbers for each.
        tables = [
            arrays[name].reshape(features, math.prod(shape))
            for name, shape in zip(self.names, self.shapes, strict=True)
        ]
        return np.concatenate(tables, axis=1).reshape(-1)


def layouts(parameters: Iterable[Parameter], name: str) -> list[ParameterLayout]:
    """Return a layout for each optimizer and kind of parameter; names of matrices begin with ``name``."""
    groups: list[list[Parameter]] = []
    for parameter in parameters:
        group = next((group for group in groups if _are_alike(group[0], parameter)), None)
        if group is None:
            groups.append([parameter])
        else:
            group.append(parameter)
    return [_layout(group, number, name) for number, group in enumerate(groups)]


def _are_alike(one: Parameter, other: Parameter) -> bool:
    return one.by_feature == other.by_feature and one.optimizer == other.optimizer


def _layout(group: Sequence[Parameter], number: int, name: str) -> ParameterLayout:
    first = group[0]
    by_feature = first.by_feature
    return ParameterLayout(
        matrix=f"{name}.{'features' if by_feature else 'layers'}.{number}",
        optimizer=first.optimizer,
        by_feature=by_feature,
        names=tuple(parameter.name for parameter in group),
        shapes=tuple(parameter.shape[1:] if by_feature else parameter.shape for parameter in group),
        features=first.shape[0] if by_feature else 1,
    )
