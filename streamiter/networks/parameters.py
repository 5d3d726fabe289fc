"""What a network learns: arrays by name."""

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

__all__ = [
    "Array",
    "Parameter",
    "ParameterLayout",
    "Status",
    "initial_values",
    "layouts",
    "logistic",
]


Array = npt.NDArray[Any]
"""float32 or float64, as the network is."""

Initial = Literal["weight", "zero"]
"""How a parameter begins: as the network's way of initial values says for weights, or with zeros (biases)."""


@dataclass(eq=False)
class Parameter:
    """One array of one layer. ``values`` and ``gradient`` are those of the mini-batch at hand.

    ``shape`` is the whole shape. Where it is ``by_feature``, the first axis counts features, and ``values`` and
    ``gradient`` have one row for each of ``PlaceHolder.indices``, in that order.
    """

    name: str
    """``layer.weight``, ``layer.bias``."""
    shape: tuple[int, ...]
    by_feature: bool
    optimizer: Optimizer
    initial: Initial
    fan_in: int
    """Inputs of one output: features, or the dimension before."""
    fan_out: int
    values: Array | None = None
    gradient: Array | None = None

    @property
    def size(self) -> int:
        """Numbers in it."""
        return int(np.prod(self.shape))


class Status(enum.IntEnum):
    """One after the other; data that is fed sets it back to ``NULL``.

    >>> Status.FORWARD < Status.BACKWARD, str(Status.NULL)
    (True, 'Null')

    How far a layer is with its mini-batch.
    """

    NULL = 0
    """Nothing is computed of the mini-batch yet."""
    FORWARD = 1
    """The output is."""
    BACKWARD = 2
    """The gradients of what came in are, those of the parameters are not."""
    GRADIENT = 3
    """The gradients of the parameters are, too."""
    UPDATE = 4
    """The optimizer has made its step of them."""

    def __str__(self) -> str:
        return self.name.capitalize()


def logistic(values: Array) -> Array:
    """1/(1 + e^(−x)), in place; where e^(−x) overflows it is 0.

    >>> logistic(np.array([-1000.0, 0.0, 1000.0])).tolist()
    [0.0, 0.5, 1.0]

    The logistic function, for the sigmoid and for losses.
    """
    with np.errstate(over="ignore"):
        np.negative(values, out=values)
        np.exp(values, out=values)
        values += 1
        np.reciprocal(values, out=values)
    return values


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

    How parameters begin: each from a stream of its own, so that neither their order nor the dtype changes them.
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


@dataclass(frozen=True, eq=False)
class ParameterLayout:
    """The parameters of one matrix: which columns are whose.

    Where the parameters of a network lie on the parameter server.

    All parameters of one optimizer lie side by side in one row of one matrix; those by feature in a matrix of their
    own, the numbers of a feature next to each other, so that a mini-batch names what it needs with a few ranges.

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
    """By feature: without the first axis, which counts features."""
    features: int
    """How many there are; 1 where it is not by feature."""

    @cached_property
    def _ranges(self) -> list[slice]:
        ends = accumulate((math.prod(shape) for shape in self.shapes), initial=0)
        return [slice(begin, end) for begin, end in pairwise(ends)]

    @cached_property
    def width(self) -> int:
        """Columns of one feature; all where it is not by feature."""
        return sum(math.prod(shape) for shape in self.shapes)

    @property
    def columns(self) -> int:
        """Of the matrix."""
        return self.width * self.features

    def columns_of(self, indices: npt.NDArray[np.int64] | None) -> npt.NDArray[np.int64] | None:
        """The columns of some features, ascending; None: all."""
        if not self.by_feature or indices is None or len(indices) == self.features:
            return None
        if self.width == 1:
            return indices
        return (indices[:, np.newaxis] * self.width + np.arange(self.width)).reshape(-1)

    def arrays(self, row: Array, features: int) -> dict[str, Array]:
        """The parameters by name, of what was read of a row; those by feature of so many features. Views of it."""
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
        """The other way round."""
        if not self.by_feature:
            return np.concatenate([arrays[name].reshape(-1) for name in self.names])
        # Of no features numpy cannot tell how many numbers each has.
        tables = [
            arrays[name].reshape(features, math.prod(shape))
            for name, shape in zip(self.names, self.shapes, strict=True)
        ]
        return np.concatenate(tables, axis=1).reshape(-1)


def layouts(parameters: Iterable[Parameter], name: str) -> list[ParameterLayout]:
    """One for each optimizer and kind, in the order of the parameters; matrices are called after ``name``."""
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
