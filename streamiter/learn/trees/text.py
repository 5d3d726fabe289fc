"""A decision tree as text."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Final

from streamiter.learn.trees.tree import Tree

__all__ = ["tree_lines"]

_INDENT: Final = "│   "


def tree_lines(
    tree: Tree, feature_names: Sequence[str] | None, describe_leaf: Callable[[int], str]
) -> Iterator[str]:
    """A line for each branch; behind it the leaf, or its branches below it.

    >>> import numpy as np
    >>> tree = Tree(np.array([1, -1, -1]), np.array([2.5, 0, 0]), np.array([1, 0, 0]),
    ...             np.array([7, 4, 3]), np.array([[0.5], [0.0], [1.0]]))
    >>> for line in tree_lines(tree, ["length", "width"], lambda leaf: f"leaf {leaf}"):
    ...     print(line)
    width ≤ 2.5: leaf 1
    width > 2.5: leaf 2
    """
    if tree.feature[0] < 0:
        yield describe_leaf(0)
        return
    waiting = list(reversed(_branches(tree, 0, 0)))
    while waiting:
        node, sign, parent, indent = waiting.pop()
        feature = tree.feature[parent]
        name = f"x[{feature}]" if feature_names is None else feature_names[feature]
        branch = f"{_INDENT * indent}{name} {sign} {tree.threshold[parent]:.6g}"
        if tree.feature[node] < 0:
            yield f"{branch}: {describe_leaf(node)}"
        else:
            yield branch
            waiting.extend(reversed(_branches(tree, node, indent + 1)))


def _branches(tree: Tree, node: int, indent: int) -> list[tuple[int, str, int, int]]:
    child = int(tree.child[node])
    return [(child, "≤", node, indent), (child + 1, ">", node, indent)]
