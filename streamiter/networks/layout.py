"""Where the parameters of a network lie on the parameter server.

All parameters of one optimizer lie side by side in one row of one matrix; those by feature in a matrix of their own,
the numbers of a feature next to each other, so that a mini-batch names what it needs with a few ranges.

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

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise

import numpy as np
import numpy.typing as npt

from streamiter.networks.parameters import Array, Parameter
from streamiter.optimizers import Optimizer

__all__ = ["Layout", "layouts"]


@dataclass(frozen=True, eq=False)
class Layout:
    """The parameters of one matrix: which columns are whose."""

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


def layouts(parameters: Iterable[Parameter], name: str) -> list[Layout]:
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


def _layout(group: Sequence[Parameter], number: int, name: str) -> Layout:
    first = group[0]
    by_feature = first.by_feature
    return Layout(
        matrix=f"{name}.{'features' if by_feature else 'layers'}.{number}",
        optimizer=first.optimizer,
        by_feature=by_feature,
        names=tuple(parameter.name for parameter in group),
        shapes=tuple(parameter.shape[1:] if by_feature else parameter.shape for parameter in group),
        features=first.shape[0] if by_feature else 1,
    )
