"""A decision tree as arrays."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from streamiter.learn.rows.checks import Floats

__all__ = ["Nodes", "Tree"]

Nodes = npt.NDArray[np.intp]


@dataclass(frozen=True, slots=True)
class Tree:
    """Node 0 is the root. Rows up to the threshold go on at ``child``, the others at the node behind it.

    >>> tree = Tree(np.array([1, -1, -1]), np.array([2.5, 0, 0]), np.array([1, 0, 0]),
    ...             np.array([7, 4, 3]), np.array([[0.5], [0.0], [1.0]]))
    >>> tree.leaves_of(np.array([[9.0, 2.0], [9.0, 3.0]])).tolist(), tree.depth, tree.leaves
    ([1, 2], 1, 2)
    """

    feature: Nodes
    """Which feature each node is split by; -1 for a leaf."""
    threshold: Floats
    child: Nodes
    rows: Nodes
    """How many rows it has learned from that came to each node."""
    values: Floats
    """An array (nodes, values): the probability of each class, or the one value to predict."""

    def leaves_of(self, features: Floats) -> Nodes:
        """The leaf of each row of a matrix (rows, features)."""
        nodes = np.zeros(len(features), dtype=np.intp)
        rows = np.arange(len(features))
        while len(rows := rows[self.feature[nodes[rows]] >= 0]):
            at = nodes[rows]
            right = features[rows, self.feature[at]] > self.threshold[at]
            nodes[rows] = self.child[at] + right
        return nodes

    @property
    def depths(self) -> Nodes:
        """How far each node is from the root."""
        depths = np.zeros(len(self.feature), dtype=np.intp)
        for node in np.flatnonzero(self.feature >= 0):  # Children come behind their parents.
            child = self.child[node]
            depths[child : child + 2] = depths[node] + 1
        return depths

    @property
    def depth(self) -> int:
        """Splits between the root and the farthest leaf."""
        return int(self.depths.max())

    @property
    def leaves(self) -> int:
        """How many leaves there are."""
        return int(np.count_nonzero(self.feature < 0))

    def as_plain_data(self) -> dict[str, Any]:
        """Its arrays by name."""
        return {name: getattr(self, name) for name in self.__slots__}

    @classmethod
    def from_plain_data(cls, arrays: Mapping[str, Any]) -> Tree:
        """What :meth:`as_plain_data` gave."""
        return cls(*(arrays[name] for name in cls.__slots__))
